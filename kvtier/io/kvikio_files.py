"""Files open in KvikIO: each is opened and registered once. Objects that KvikIO fails to release are never freed."""

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

OPEN_FILES_MAX = 512  # unused files kept open, where RLIMIT_NOFILE allows
UNUSED_S = 30.0  # time since the last read after which a file is closed, seconds
FDS_PER_FILE = 2  # descriptors that KvikIO opens for a file: one with O_DIRECT, one without

# Exceptions that Cython makes of C++ ones, beside OSError.
FAULTS = (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError, LookupError, SystemError)

# Objects never freed: readers whose reads hang (KvikIO's threads hold bare pointers to their files and buffers), and
# objects that KvikIO failed to release and may still use.
left_behind: list[object] = []


class Returns:
    """Release of the objects that KvikIO opened or pinned for one reader."""

    def __init__(self) -> None:
        self._has_complained = False

    def give(self, what: object, free: Callable[[], object]) -> bool:
        """Call `free`. If it fails, keep `what` for the process's lifetime, warn once, and return False."""
        try:
            free()
        except (OSError, *FAULTS) as fault:
            left_behind.append(what)
            if not self._has_complained:
                log.warning("KvikIO cannot release a file or buffer (%s): it stays open until the process ends", fault)
            self._has_complained = True
            return False
        return True


class OpenFile:
    def __init__(self, handle: Any, used_s: float) -> None:
        self.handle = handle
        self.users = 0  # operations that are not done
        self.used_s = used_s
        self.fds: set[int] = set()  # the caller's descriptors of it


class OpenFiles:
    """Open files of one reader, by device and inode. `lock` is the reader's; it guards the users' counts."""

    def __init__(self, kvikio: ModuleType, returns: Returns, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._kvikio = kvikio
        self._returns = returns
        self._lock = lock
        self._clock = clock
        self._files: dict[tuple[int, ...], OpenFile] = {}
        self._most_unused = most_open(OPEN_FILES_MAX * FDS_PER_FILE) // FDS_PER_FILE
        self._checked_s = clock()

    def open(self, fd: int) -> OpenFile:
        """Return the file behind the caller's descriptor, and count one user of it.

        The key is the inode number, which an open file keeps, and not the path, which may name another file by now.
        Raises TierUnavailable when it cannot be opened.
        """
        try:
            key = _key(fd)
            file = self._use(key, fd, None)
            if file is None:
                made = OpenFile(self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r"), self._clock())
                file = self._use(key, fd, made) or made
                if file is not made:  # another thread opened it at the same time
                    self._returns.give(made, made.handle.close)
            return file
        except (OSError, *FAULTS) as fault:
            raise TierUnavailable(f"KvikIO cannot open a segment: {fault}") from fault

    def release(self, file: OpenFile) -> None:
        """Count one user less. Under the lock."""
        file.users -= 1
        file.used_s = self._clock()

    def reopen(self, fd: int) -> None:
        """Make the next `open` of this file open it anew: an open handle may return bytes older than another node's
        write."""
        try:
            key = _key(fd)
        except OSError:
            return
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                self._files[*key, id(file)] = file  # no `open` finds it
                file.fds.clear()  # closed when it is unused

    def forget(self, fd: int) -> None:
        """Record that the caller closes its descriptor `fd`. `close_unused` closes a file without descriptors: an open
        one would keep the space of an evicted segment."""
        with self._lock:
            for file in self._files.values():
                file.fds.discard(fd)

    def close_unused(self, interval_s: float) -> None:
        """Close files that the caller has closed, and those that are long unused, at most once per `interval_s`."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._checked_s < interval_s:
                return
            self._checked_s = now_s
            unused = [(key, file) for key, file in self._files.items() if file.users == 0]
        unused.sort(key=lambda item: item[1].used_s)
        excess = len(unused) - self._most_unused
        for position, (key, file) in enumerate(unused):
            if position < excess or now_s - file.used_s > UNUSED_S or not file.fds:
                self._close(key, file)

    def close_all(self) -> None:
        """Close all files. None may have a user."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            self._returns.give(file, file.handle.close)

    def _use(self, key: tuple[int, int], fd: int, made: OpenFile | None) -> OpenFile | None:
        """Count a user of the file under `key`, which is `made` if none is open. Return None if there is neither."""
        with self._lock:
            file = self._files.get(key, made)
            if file is not None:
                self._files[key] = file
                file.users += 1
                file.fds.add(fd)
                file.used_s = self._clock()
            return file

    def _close(self, key: tuple[int, ...], file: OpenFile) -> None:
        with self._lock:
            if file.users or self._files.get(key) is not file:
                return
            del self._files[key]
        self._returns.give(file, file.handle.close)


def _key(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def load_kvikio() -> ModuleType:
    """Import KvikIO. Raises TierUnavailable with the fix when it is not installed."""
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
