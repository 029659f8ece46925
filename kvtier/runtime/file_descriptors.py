"""File descriptors of this process: closing them, and freeing some when no further file may be opened.

Segments stay open between uses. They take a share of what RLIMIT_NOFILE allows at most; the limit itself is left as it
is, because the process belongs to the engine.
"""

import errno
import logging
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

log = logging.getLogger("kvtier")

T = TypeVar("T")

LIMIT_SHARE = 4  # pools of open files take at most 1 in so many descriptors of RLIMIT_NOFILE
OPEN_FILES_MIN = 8  # open files that a pool may keep under any limit
LOG_INTERVAL_S = 60.0  # least time between two log lines about failed closes, seconds

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Pool(Protocol):
    """Files that are kept open between uses."""

    def close_unused(self) -> None: ...


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_pools_lock = threading.Lock()
_logged_s = float("-inf")  # time of the last log line about a failed close


def register(pool: Pool) -> None:
    """Make `pool` close its unused files when the process may open no further one."""
    with _pools_lock:
        _pools.add(pool)


def most_open(wanted: int) -> int:
    """Return how many files a pool that wants `wanted` may keep open under this process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(OPEN_FILES_MIN, soft // LIMIT_SHARE))


def with_descriptors(open_it: Callable[[], T]) -> T:
    """Return what `open_it` returns. If no descriptor is left, close all unused files and call it once more.

    Raises OSError; its text names the process's limit of open files if that limit is the cause.
    """
    try:
        return open_it()
    except OSError as fault:
        if fault.errno not in NO_DESCRIPTOR:
            raise
    with _pools_lock:
        pools = list(_pools)
    for pool in pools:
        pool.close_unused()
    try:
        return open_it()
    except OSError as fault:
        if not (hint := limit_hint(fault)):
            raise
        raise OSError(fault.errno, f"{fault.strerror}{hint}", fault.filename) from None


def limit_hint(error: OSError) -> str:
    """Return a hint that names the limit of open files and how to raise it, if that limit caused the error; else ""."""
    if error.errno != errno.EMFILE:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f": this process may open {limit} files; raise the limit with `ulimit -n`"


def size_hint(error: Exception) -> str:
    """Return a hint that names the limit of a file's size and how to raise it, if that caused the error; else ""."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if not isinstance(error, OSError) or error.errno != errno.EFBIG or limit == resource.RLIM_INFINITY:
        return ""
    return f": this process may write files of {limit} bytes; raise the limit with `ulimit -f`"


def close_file(descriptor: int) -> None:
    """Close a descriptor whose data does not depend on the result of close(2). Never raises OSError.

    Linux frees the descriptor also where close fails: EBADFD, ENOTCONN, ENOENT, EBADF or EIO from network file
    systems whose server or client died.
    """
    global _logged_s
    try:
        os.close(descriptor)
    except OSError as fault:
        now_s = time.monotonic()
        if now_s - _logged_s >= LOG_INTERVAL_S:
            _logged_s = now_s
            log.warning(
                "closing a file failed: %s; it is closed all the same; further failed closes are not logged for %.0f s",
                fault,
                LOG_INTERVAL_S,
            )
