"""SetSupply: which segment set and slot the next saved chunk takes. Pure bookkeeping under one lock.

The scheduler's thread takes slots; the keeper's thread brings new sets and closes the full ones. Taking never waits:
when no set is ready, the chunk is not saved.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

SET_SETTLE_S = 60.0
"""A full set is closed when all its saves are answered, or after this long when an answer was lost."""


@dataclass(slots=True)
class _Set:
    """`returned`: slots that were taken but stayed blank; they are given out again first."""

    set_id: int
    taken: int = 0
    returned: list[int] = field(default_factory=list)
    pending: int = 0
    full_since_s: float = 0.0


class SetSupply:
    """One set is being filled; up to `spares_max` wait ready, for a long prompt may fill several in one step."""

    def __init__(self, slots: int, spares_max: int) -> None:
        self.slots = slots
        self._spares_max = spares_max
        self._lock = threading.Lock()
        self._current: _Set | None = None
        self._spares: deque[_Set] = deque()
        self._full: list[_Set] = []

    def take(self, now_s: float) -> tuple[int, int] | None:
        """(set id, slot) for one chunk, answered later with `answered`; None when no set is ready."""
        with self._lock:
            if self._current is None:
                if not self._spares:
                    return None
                self._current = self._spares.popleft()
            current = self._current
            slot = current.returned.pop() if current.returned else current.taken
            current.taken = max(current.taken, slot + 1)
            current.pending += 1
            if current.taken == self.slots and not current.returned:
                current.full_since_s = now_s
                self._full.append(current)
                self._current = None
            return current.set_id, slot

    def wants_set(self) -> bool:
        """True while another set is to be made ready: making one takes a moment.

        The last one is not asked for before half of the current set is gone, so that an engine that saves little
        holds little of the capacity.
        """
        with self._lock:
            current = self._current
            is_half_gone = current is None or (current.taken - len(current.returned)) * 2 >= self.slots
            return len(self._spares) < (self._spares_max if is_half_gone else self._spares_max - 1)

    @property
    def n_unused(self) -> int:
        """Sets of which no slot was taken."""
        with self._lock:
            return len(self._spares)

    def offer(self, set_id: int) -> None:
        """A new, registered set."""
        with self._lock:
            self._spares.append(_Set(set_id))

    def answered(self, set_id: int, slot: int, is_blank: bool) -> None:
        """One chunk of the set was saved, or will never be; `is_blank`: nothing was written into its slot."""
        with self._lock:
            for candidate in (self._current, *self._full):
                if candidate is not None and candidate.set_id == set_id:
                    candidate.pending -= 1
            if is_blank and self._current is not None and self._current.set_id == set_id:
                self._current.returned.append(slot)

    def take_settled(self, now_s: float) -> list[int]:
        """Full sets that get no further records, each given out once, to be closed."""
        with self._lock:
            settled = [s for s in self._full if s.pending <= 0 or now_s - s.full_since_s >= SET_SETTLE_S]
            self._full = [s for s in self._full if s not in settled]
            return [s.set_id for s in settled]

    def forget_all_but(self, ours: Collection[int]) -> list[int]:
        """Gives nothing more of the other sets: others have taken them over, or they are lost. Returns their ids."""
        with self._lock:
            sets = [s for s in (self._current, *self._spares, *self._full) if s is not None]
            lost = [s.set_id for s in sets if s.set_id not in ours]
            if self._current is not None and self._current.set_id in lost:
                self._current = None
            self._spares = deque(s for s in self._spares if s.set_id not in lost)
            self._full = [s for s in self._full if s.set_id not in lost]
            return lost

    def abandon(self) -> tuple[list[int], list[int]]:
        """Forgets all sets; returns (ids of the used ones, ids of those of which no slot was taken)."""
        with self._lock:
            sets = [s for s in (self._current, *self._spares, *self._full) if s is not None]
            self._current = None
            self._spares.clear()
            self._full = []
            return [s.set_id for s in sets if s.taken], [s.set_id for s in sets if not s.taken]
