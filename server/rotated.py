"""Values from files that may be replaced while the service runs: tokens, the certificate with its key."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from kvtier.errors import ConfigError

log = logging.getLogger("kvtier")

CHECK_INTERVAL_S = 1.0  # between two checks of the files, seconds

T = TypeVar("T")
_Stamp = tuple[int, int, int, int]


class Rotated(Generic[T]):
    """Value made by `read` from files, and made again after one of them changed. A file that cannot be used is logged,
    and the old value stays: a file that is being replaced must neither lock users out nor admit all clients.

    Called from one thread. read: raises ConfigError, at the first time too. what: its name in the log.
    """

    def __init__(
        self,
        what: str,
        files: Iterable[Path | None],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._files = [path for path in files if path is not None]
        self._read = read
        self._clock = clock
        self._stamps = self._look()
        self._looked_s = clock()
        self._value = read()

    def now(self) -> T:
        """Return the value; it may be CHECK_INTERVAL_S old."""
        if self._files and self._clock() - self._looked_s >= CHECK_INTERVAL_S:
            self._looked_s = self._clock()
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        try:
            self._value = self._read()
        except ConfigError as fault:
            log.warning("the new %s cannot be read, and the old ones stay in use: %s", self._what, fault)
        else:
            log.info("the %s were read again from %s", self._what, ", ".join(map(str, self._files)))

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._files]


def _stamp(path: Path) -> _Stamp | None:
    """Return the part of stat that changes with a file's content or rights; None if it is gone or unreachable."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns
