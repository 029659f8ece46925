"""Room on the disk: how many bytes a root's segment sets may take, by what the disk says and by what it refused. Pure.

statvfs does not know of quotas, of one full OST behind a sum, and on some file systems not yet of space that was just
freed. So a refused write, preallocation or create is a limit of its own, and evicted files count as room until their
space had time to show: to evict more in their place would empty the root.
"""

from collections import deque

LATE_S = 60.0  # longest time for the space of evicted files to show on most file systems, seconds
SETTLE_FIRST_S, SETTLE_MAX_S = 5.0, 60.0  # time after an eviction in which a refusal says nothing new, seconds
PROBE_INTERVAL_S = 60.0  # interval at which a limit that was learned from a refusal is raised, seconds


class Room:
    """Space of one root as one engine observes it. Times are seconds of any clock.

    reclaim_s: time in which the file system is known to free the space of removed files, seconds; 0: at once or soon.
    """

    def __init__(self, reclaim_s: float = 0.0) -> None:
        self._reclaim_s = reclaim_s
        self._awaited: tuple[float, int] | None = None  # where that takes minutes: until when, and for which free bytes
        self._before = (0, 0)  # bytes of all sets at the last look; the room when no eviction was late
        self._late: deque[tuple[float, int]] = deque()  # (time, bytes) of evictions whose space may not show yet
        self._evicted_s = float("-inf")
        self._settle_s = SETTLE_FIRST_S
        self.limit_bytes: int | None = None  # room by the last refusal; None: nothing was refused
        self._refused_s = float("-inf")
        self._row_s: float | None = None  # first refusal since the last one that was news; None: saves worked since
        self._raise_s = 0.0
        self._step_bytes = 0
        self._disk_agreed = False  # statvfs said, too, that the disk is full

    def bytes_for_sets(self, now_s: float, set_bytes: int, free_bytes: int, need_bytes: int = 0) -> int:
        """Return how many bytes sets may take in all.

        Args:
            set_bytes: of all sets in the index that have files.
            free_bytes: by statvfs.
            need_bytes: of one set.
        """
        room_bytes = self._by_disk(now_s, set_bytes, free_bytes)
        if self.limit_bytes is None:
            return room_bytes
        if self._disk_agreed and free_bytes >= need_bytes:  # what statvfs says was the whole truth
            self.limit_bytes = None
            return room_bytes
        if now_s >= self._raise_s:
            self._step_bytes = max(need_bytes, 2 * self._step_bytes)
            self.limit_bytes += self._step_bytes
            self._raise_s = now_s + PROBE_INTERVAL_S
        return min(room_bytes, self.limit_bytes)

    def overbooked(self, n_bytes: int) -> None:
        """Note that so many bytes left the sum of all sets since the last look and had never been on the disk: no space
        is on its way for them."""
        set_bytes, known_bytes = self._before
        self._before = (set_bytes - n_bytes, known_bytes)

    def _by_disk(self, now_s: float, set_bytes: int, free_bytes: int) -> int:
        before_bytes, known_bytes = self._before
        if set_bytes < before_bytes:
            self._late.append((now_s, before_bytes - set_bytes))
            self._evicted_s = now_s
        room_bytes = set_bytes + free_bytes
        if room_bytes >= known_bytes:  # all of it shows
            self._late.clear()
        while self._late and not 0.0 <= now_s - self._late[0][0] < max(LATE_S, self._reclaim_s):
            self._late.popleft()
        if self._late:
            room_bytes = min(known_bytes, room_bytes + sum(n_bytes for _, n_bytes in self._late))
        else:
            known_bytes = room_bytes
        self._before = (set_bytes, known_bytes)
        return room_bytes

    def refused(self, now_s: float, set_bytes: int, free_bytes: int, need_bytes: int) -> bool:
        """Take it as the limit that there was no room for a set beside `set_bytes`. Return whether it is news: soon
        after an eviction it is not, because the space of what was evicted may still be on its way."""
        if self._row_s is None or not 0.0 <= now_s - self._refused_s < self._settle_s:
            self._row_s = now_s
        self._refused_s = now_s
        # Sets that are closed because their files found no room make the sum drop as evictions do, each time. So a row
        # of refusals is news in any case once it has lasted for as long as an eviction takes to show.
        is_settling = all(0.0 <= now_s - since_s < self._settle_s for since_s in (self._evicted_s, self._row_s))
        if is_settling or self.is_waiting(now_s, free_bytes):
            return False
        self._row_s = now_s
        if self._reclaim_s:
            self._awaited = now_s + self._reclaim_s, free_bytes + need_bytes
        self._settle_s = min(SETTLE_MAX_S, 2 * self._settle_s)
        self._evicted_s = now_s  # of what the caller evicts now
        self.limit_bytes = max(0, set_bytes - need_bytes)
        self._disk_agreed = free_bytes < need_bytes
        self._raise_s = now_s + PROBE_INTERVAL_S
        self._step_bytes = 0
        return True

    def is_waiting(self, now_s: float, free_bytes: int) -> bool:
        """Return whether the space of what was evicted after a refusal is on its way and does not show yet. No set is
        made then: saves that are refused use up its slots, and a further set would be evicted for the next one."""
        if self._awaited is not None:
            until_s, wanted_bytes = self._awaited
            if free_bytes >= wanted_bytes or not until_s - self._reclaim_s <= now_s < until_s:
                self._awaited = None
        return self._awaited is not None

    def worked(self, now_s: float, set_bytes: int, need_bytes: int) -> None:
        """Note that records were saved. Where nothing was refused for a while, there is room for what is written."""
        if now_s - self._refused_s < SETTLE_FIRST_S:  # it may have been a segment that was made before
            return
        self._settle_s = SETTLE_FIRST_S
        self._awaited = self._row_s = None
        if self.limit_bytes is not None and set_bytes > self.limit_bytes:
            self.limit_bytes = set_bytes + need_bytes
