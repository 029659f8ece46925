"""CapacityWatch: warnings about capacity_bytes in an engine's log, each one once."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress

from kvtier.errors import Corrupt
from kvtier.index.base import Index
from kvtier.runtime.units import exact, size
from kvtier.scheduler.engine_report import COUNT_MAX, NOTE_PREFIX, WorkerReport

log = logging.getLogger("kvtier")

# Interval between two comparisons with the reports of all engines (some KiB each), seconds; they end with the first
# engine whose capacity differs.
COMPARE_INTERVAL_S = 600.0


def beyond_the_disk(capacity_bytes: int, room_bytes: int) -> str:
    """Return a warning if the root's disk has no room for the capacity, else "".

    room_bytes: free bytes that the tier may use, and those of its segments.
    """
    if capacity_bytes <= room_bytes:
        return ""
    return (
        f"capacity_bytes ({exact(capacity_bytes)}) is more than the tier can have here ({size(room_bytes)}): it would "
        "fill the disk before it evicts; set it to less"
    )


class CapacityWatch:
    """Capacity checks of engine `owner`, run on its keeper's thread. free_bytes: free disk space for the tier."""

    def __init__(self, owner: str, capacity_bytes: int, index: Index, free_bytes: Callable[[], int]) -> None:
        self._owner = owner
        self._capacity_bytes = capacity_bytes
        self._index = index
        self._free_bytes = free_bytes
        self._knows_disk = False
        self._compare_s = 0.0

    def look(self, now_s: float) -> None:
        """Check the capacity; called at each renewal of the lease. Raises IndexUnavailable."""
        if not self._knows_disk and not self._index.was_reset:  # an index that must be rebuilt lists no segment
            self._look_at_disk()
        if now_s >= self._compare_s:
            self._compare(now_s)

    def _look_at_disk(self) -> None:
        used_bytes = self._index.counts().n_bytes
        self._knows_disk = True
        try:
            room_bytes = used_bytes + max(0, self._free_bytes())
        except OSError:  # the root is gone; failing saves log why
            return
        if fault := beyond_the_disk(self._capacity_bytes, room_bytes):
            log.warning("%s", fault)

    def _compare(self, now_s: float) -> None:
        self._compare_s = now_s + COMPARE_INTERVAL_S
        for note in self._index.notes(NOTE_PREFIX, now_s).values():
            with suppress(Corrupt):
                report = WorkerReport.read(note)
                other_bytes = report.capacity_bytes
                if other_bytes is None or report.owner == self._owner:  # None: an older release does not report it
                    continue
                if other_bytes != min(self._capacity_bytes, COUNT_MAX):
                    log.warning(
                        "capacity_bytes is %s here and %s at %r, on the same root: each evicts what is above its own, "
                        "so the least of them counts; set it alike for all engines of a root",
                        exact(self._capacity_bytes),
                        exact(other_bytes),
                        report.owner,
                    )
                    self._compare_s = math.inf
                    return
