"""Locks with a deadline (I10), within a process and between processes."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Iterator

from kvtier.errors import IndexUnavailable

_POLL_MIN_S, _POLL_MAX_S = 20e-6, 2e-3


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise IndexUnavailable("the index is busy: another thread holds it")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def file_lock(descriptor: int, deadline: float) -> Iterator[None]:
    """Excludes other processes. Polled, since a POSIX lock cannot be waited for with a deadline; not `flock`, which a
    forked child would go on holding for a parent that was killed."""
    pause_s = _POLL_MIN_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise IndexUnavailable("the index is busy: another process holds its writer lock") from None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _POLL_MAX_S)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
