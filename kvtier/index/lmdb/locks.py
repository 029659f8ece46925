"""Locks with a deadline (I10): of threads and of processes."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Iterator

from kvtier.errors import IndexUnavailable

_POLL_MIN_S, _POLL_MAX_S = 20e-6, 2e-3  # interval between attempts, seconds; it doubles


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """Hold a lock of threads. Raises IndexUnavailable at the deadline."""
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise IndexUnavailable("the index is busy: another thread holds it")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def file_lock(descriptor: int, deadline: float) -> Iterator[None]:
    """Hold a lock of processes. Raises IndexUnavailable at the deadline."""
    # Polled: a POSIX lock has no wait with a deadline. Not `flock`: a forked child would hold it after its parent was
    # killed.
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
