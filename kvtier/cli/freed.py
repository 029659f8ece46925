"""Space that is free after an eviction, and processes of this node that hold some of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtier.storage.filesystem import FreeSpace
from kvtier.storage.segments import KEPT_OPEN

SHOW_TIMEOUT_S = 10.0  # longest wait for the space of evicted files to show, seconds
POLL_S = 0.2  # interval between two looks at the disk, seconds
DELETED = " (deleted)"  # ends the link of an open file without a name in /proc/PID/fd


def free_bytes(folder: Path) -> int:
    return FreeSpace.of(os.statvfs(folder)).n_bytes


def wait_until_free(folder: Path, before_bytes: int, n_bytes: int, clock: Callable[[], float] = time.monotonic) -> int:
    """Return how much of `n_bytes` became free since the disk of `folder` had `before_bytes`. Waits at most
    SHOW_TIMEOUT_S: engines close the files of evicted sets within seconds, and some file systems free late."""
    ends_s = clock() + SHOW_TIMEOUT_S
    while True:
        freed_bytes = min(n_bytes, max(0, free_bytes(folder) - before_bytes))
        if freed_bytes >= n_bytes or clock() >= ends_s:
            return freed_bytes
        time.sleep(POLL_S)


def holders(folder: Path, proc: Path = Path("/proc")) -> list[str]:
    """Return "name (pid N)" of each process of this node, readable by this user, that has an unlinked file of `folder`
    open."""
    below = f"{folder.resolve()}/"
    found = []
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            links = [link for entry in os.scandir(process / "fd") if (link := _link(entry.path)).startswith(below)]
            if any(link.endswith(DELETED) or KEPT_OPEN.fullmatch(os.path.basename(link)) for link in links):
                found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name})")
    return sorted(found)


def _link(path: str) -> str:
    """Return the target of a link, "" for a descriptor closed just now."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
