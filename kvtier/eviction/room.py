"""Room on the disk: the bytes that a root's segment sets may take, by statvfs and by refused writes. Pure.

statvfs does not show quotas, or one full OST among others, and on some file systems it shows freed space late. So a
refused write, preallocation or create sets a limit of its own, and the space of evicted files counts as room until it
shows: otherwise more and more sets would be evicted in their place, until the root is empty.
"""

from collections import deque

LATE_S = 60.0  # longest time until statvfs shows the space of evicted files on most file systems, seconds
SETTLE_FIRST_S, SETTLE_MAX_S = 5.0, 60.0  # time after an eviction in which a refusal is no new information, seconds
PROBE_INTERVAL_S = 60.0  # interval at which a limit that was learned from a refusal is raised, seconds


class Room:
    """Space of one root as one engine observes it. Times are seconds of any clock.

    reclaim_s: time that the file system is known to take to free the space of removed files, seconds; 0: little.
    """

    def __init__(self, reclaim_s: float = 0.0) -> None:
        self._reclaim_s = reclaim_s
        # With reclaim_s, after an eviction: (deadline, free bytes to wait for).
        self._awaited: tuple[float, int] | None = None
        self._before = (0, 0)  # bytes of all sets at the last look; the room when no eviction was late
        self._late: deque[tuple[float, int]] = deque()  # (time, bytes) of evictions whose space may not show yet
        self._evicted_s = float("-inf")
        self._settle_s = SETTLE_FIRST_S
        self.limit_bytes: int | None = None  # room by the last refusal; None: nothing was refused
        self._refused_s = float("-inf")
        self._row_s: float | None = None  # first refusal since the last that counted; None: saves worked since
        self._raise_s = 0.0
        self._step_bytes = 0
        self._disk_agreed = False  # statvfs said, too, that the disk is full

    def bytes_for_sets(self, now_s: float, set_bytes: int, free_bytes: int, need_bytes: int = 0) -> int:
        """Return the limit of the size of all sets, in bytes.

        Args:
            set_bytes: of all sets in the index that have files.
            free_bytes: by statvfs.
            need_bytes: of one set.
        """
        room_bytes = self._by_disk(now_s, set_bytes, free_bytes)
        if self.limit_bytes is None:
            return room_bytes
        if self._disk_agreed and free_bytes >= need_bytes:  # statvfs had explained the refusal, and shows room now
            self.limit_bytes = None
            return room_bytes
        if now_s >= self._raise_s:
            self._step_bytes = max(need_bytes, 2 * self._step_bytes)
            self.limit_bytes += self._step_bytes
            self._raise_s = now_s + PROBE_INTERVAL_S
        return min(room_bytes, self.limit_bytes)

    def overbooked(self, n_bytes: int) -> None:
        """Note that the sum of all sets shrank by so many bytes that were never on the disk, so they free no space.
        Known room stays as it is while an eviction is late."""
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
        """Set the limit after a refusal: there was no room for a set beside `set_bytes`. Return False, and leave
        the limit, soon after an eviction of any engine, because the space of the evicted sets may not be free yet.
        Call `bytes_for_sets` just before: it notices such an eviction."""
        if self._row_s is None or not 0.0 <= now_s - self._refused_s < self._settle_s:
            self._row_s = now_s
        self._refused_s = now_s
        # Each set that is closed because its files found no room makes the sum drop as an eviction does. So a row of
        # refusals counts in any case once it has lasted for as long as an eviction takes to show.
        is_settling = all(0.0 <= now_s - since_s < self._settle_s for since_s in (self._evicted_s, self._row_s))
        if self._reclaim_s and self._late and not self.is_waiting(now_s, free_bytes):
            self._awaited = self._late[-1][0] + self._reclaim_s, free_bytes + need_bytes
        if is_settling or self.is_waiting(now_s, free_bytes):
            return False
        self._row_s = now_s
        if self._reclaim_s:
            self._awaited = now_s + self._reclaim_s, free_bytes + need_bytes
        self._settle_s = min(SETTLE_MAX_S, 2 * self._settle_s)
        self._evicted_s = now_s  # the caller evicts now
        self.limit_bytes = max(0, set_bytes - need_bytes)
        self._disk_agreed = free_bytes < need_bytes
        self._raise_s = now_s + PROBE_INTERVAL_S
        self._step_bytes = 0
        return True

    def is_waiting(self, now_s: float, free_bytes: int) -> bool:
        """Return True while the space of sets that were evicted after a refusal does not show yet. The caller makes no
        set then: refused saves would use up its slots, and another set would be evicted for the next one."""
        if self._awaited is not None:
            until_s, wanted_bytes = self._awaited
            if free_bytes >= wanted_bytes or not until_s - self._reclaim_s <= now_s < until_s:
                self._awaited = None
        return self._awaited is not None

    def worked(self, now_s: float, set_bytes: int, need_bytes: int) -> None:
        """Note that records were saved. Unless a save was refused lately, there is room for `set_bytes`."""
        if now_s - self._refused_s < SETTLE_FIRST_S:  # the records may be in a segment with reserved space
            return
        self._settle_s = SETTLE_FIRST_S
        self._row_s = None  # `_awaited` stays: files with reserved space may take records for longer
        if self.limit_bytes is not None and set_bytes > self.limit_bytes:
            self.limit_bytes = set_bytes + need_bytes
