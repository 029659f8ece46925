"""The most that this process had of memory of its own, and of files that it had mapped, from /proc/self/status.

The kernel keeps the largest resident set alone (ru_maxrss), and in it pages of files on tmpfs that are mapped and
pinned. These are the file system's; eviction takes them away, so what is mapped at the end says nothing of the largest
set, and both must be looked at while they change.
"""

from __future__ import annotations

import threading
from pathlib import Path

SAMPLE_S = 0.01


def sizes() -> tuple[int, int]:
    """Resident bytes now: the process's own, and those of memory that it shares (mapped files on tmpfs)."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            found[name] = int(value.split()[0]) * 1024
    return found["RssAnon"] + found["RssFile"], found["RssShmem"]


class ResidentWatch:
    """Looks every SAMPLE_S from the start on, until closed."""

    def __init__(self) -> None:
        self.looks = 0
        self._own_max, self._mapped_max = 0, 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="resident-watch")
        self._thread.start()

    def look(self) -> tuple[int, int]:
        """The most so far, in bytes: of the process's own, and of mapped files."""
        with self._lock:
            own, mapped = sizes()
            self._own_max, self._mapped_max = max(self._own_max, own), max(self._mapped_max, mapped)
            self.looks += 1
            return self._own_max, self._mapped_max

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._closed.wait(SAMPLE_S):
            self.look()
