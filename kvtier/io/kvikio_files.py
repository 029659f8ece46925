"""What KvikIO opens and pins, and takes back: files are opened and registered once, and what it does not take back is
kept for good."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvtier.errors import TierUnavailable
from kvtier.runtime.file_descriptors import most_open

log = logging.getLogger("kvtier")

OPEN_FILES_MAX = 64  # unused files kept open, where RLIMIT_NOFILE allows
UNUSED_S = 30.0  # age of the last read from which on a file is closed, seconds
FDS_PER_FILE = 2  # descriptors that KvikIO opens for a file: one with O_DIRECT, one without

FAULTS = (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError, LookupError, SystemError)
"""What Cython makes of C++ exceptions, beside OSError."""

left_behind: list[object] = []
"""Never to be freed: readers whose reads hang, for KvikIO's threads hold bare pointers to their files and buffers; and
what KvikIO failed to take back, for who knows what it still does with that."""


class Returns:
    """Gives back what KvikIO opened or pinned, for one reader."""

    def __init__(self) -> None:
        self._has_complained = False

    def give(self, what: object, free: Callable[[], object]) -> bool:
        """False: KvikIO does not take it, so it is kept for good. That is said once."""
        try:
            free()
        except (OSError, *FAULTS) as fault:
            left_behind.append(what)
            if not self._has_complained:
                log.warning("KvikIO does not take back what it opened or pinned (%s): it stays until the end", fault)
            self._has_complained = True
            return False
        return True


class OpenFile:
    """A file open in KvikIO. users: operations that are not done. fds: the caller's descriptors of it."""

    def __init__(self, handle: Any, used_s: float) -> None:
        self.handle = handle
        self.users = 0
        self.used_s = used_s
        self.fds: set[int] = set()


class OpenFiles:
    """lock: the reader's, under which users are counted."""

    def __init__(self, kvikio: ModuleType, returns: Returns, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._kvikio = kvikio
        self._returns = returns
        self._lock = lock
        self._clock = clock
        self._files: dict[tuple[int, ...], OpenFile] = {}
        self._most_unused = most_open(OPEN_FILES_MAX * FDS_PER_FILE) // FDS_PER_FILE
        self._swept_s = clock()

    def open(self, fd: int) -> OpenFile:
        """The file behind the caller's descriptor, whatever its name leads to by now. Counts one user of it.

        A file that is open keeps its number, so the number finds the right one among the open files. Raises
        TierUnavailable when it cannot be opened.
        """
        try:
            found = os.fstat(fd)
            key = (found.st_dev, found.st_ino)
            file = self._take(key, fd)
            if file is None:
                made = OpenFile(self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r"), self._clock())
                file = self._keep(key, made, fd)
                if file is not made:
                    self._returns.give(made, made.handle.close)
            return file
        except (OSError, *FAULTS) as fault:
            raise TierUnavailable(f"KvikIO cannot open a segment: {fault}") from fault

    def release(self, file: OpenFile) -> None:
        """One user less. Under the lock."""
        file.users -= 1
        file.used_s = self._clock()

    def reopen(self, fd: int) -> None:
        """Have the next `open` of this file open it anew: an open handle may show bytes from before another node
        wrote."""
        try:
            found = os.fstat(fd)
        except OSError:
            return
        key = (found.st_dev, found.st_ino)
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                self._files[*key, id(file)] = file  # no `open` finds it
                file.fds.clear()  # closed when it is unused

    def forget(self, fd: int) -> None:
        """Note that the caller closes its descriptor `fd`. `close_unused` closes a file that has none left: open, it
        would keep the space of a segment that was evicted."""
        with self._lock:
            for file in self._files.values():
                file.fds.discard(fd)

    def close_unused(self, interval_s: float) -> None:
        """Close files that the caller has closed, and those that are long unused.

        Does nothing when it was done less than `interval_s` ago.
        """
        now_s = self._clock()
        with self._lock:
            if now_s - self._swept_s < interval_s:
                return
            self._swept_s = now_s
            unused = [(key, file) for key, file in self._files.items() if file.users == 0]
        unused.sort(key=lambda item: item[1].used_s)
        excess = len(unused) - self._most_unused
        for position, (key, file) in enumerate(unused):
            if position < excess or now_s - file.used_s > UNUSED_S or not file.fds:
                self._close(key, file)

    def close_all(self) -> None:
        """When none has a user any more."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            self._returns.give(file, file.handle.close)

    def _take(self, key: tuple[int, int], fd: int) -> OpenFile | None:
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                file.users += 1
                file.fds.add(fd)
                file.used_s = self._clock()
            return file

    def _keep(self, key: tuple[int, int], made: OpenFile, fd: int) -> OpenFile:
        """Return `made`, or the file that another thread opened at the same time."""
        with self._lock:
            file = self._files.setdefault(key, made)
            file.users += 1
            file.fds.add(fd)
            return file

    def _close(self, key: tuple[int, ...], file: OpenFile) -> None:
        with self._lock:
            if file.users or self._files.get(key) is not file:
                return
            del self._files[key]
        self._returns.give(file, file.handle.close)


def load_kvikio() -> ModuleType:
    """The package. Raises TierUnavailable with the fix when it isn't there."""
    try:
        module = importlib.import_module("kvikio")
        for part in ("defaults", "cufile_driver"):
            importlib.import_module(f"kvikio.{part}")
    except (ImportError, OSError) as fault:
        raise TierUnavailable(
            f"KvikIO cannot be loaded ({fault}): `pip install kvikio-cu13` (kvikio-cu12 for CUDA 12), or set io.engine "
            "to ring"
        ) from fault
    return module
