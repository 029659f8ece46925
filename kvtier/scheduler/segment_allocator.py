"""SetSupply: allocator of slots in segment sets for saved chunks. Pure bookkeeping under one lock. Supplies: one
allocator for each tenant in use.

The scheduler's thread takes slots; the keeper's thread adds new sets and closes full ones. Taking a slot never waits:
without a ready set, the chunk is not saved.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from kvtier.runtime.backoff import Backoff

SET_SETTLE_S = 60.0  # time after which a full set is closed although answers of its saves are missing, seconds
SET_COMES_S = 2.0  # longest wait of chunks for a new set after the first one that found none, seconds
TENANT_IDLE_S = 120.0  # time without a chunk after which a tenant's open sets are closed, seconds


@dataclass(eq=False, slots=True)
class _Set:
    """A set in use. returned: slots that were taken but stayed blank; they are taken again before others."""

    set_id: int
    taken: int = 0
    returned: list[int] = field(default_factory=list)
    pending: int = 0
    full_since_s: float = 0.0


class SetSupply:
    """Allocator of one tenant: one set is being filled and up to `spares_max` are ready, for a long prompt may fill
    several in one step."""

    def __init__(self, slots: int, spares_max: int) -> None:
        self.slots = slots
        self._spares_max = spares_max
        self._lock = threading.Lock()
        self._current: _Set | None = None
        self._spares: deque[_Set] = deque()
        self._full: list[_Set] = []
        self._reopened: deque[_Set] = deque()  # full sets of which slots stayed blank
        self._missed_s: float | None = None

    def is_coming(self, now_s: float) -> bool:
        """Return True if no set is ready but one is expected within SET_COMES_S of the first such call, so that chunks
        which can wait should do so."""
        with self._lock:
            if self._current is not None or self._reopened or self._spares:
                return False
            self._missed_s = now_s if self._missed_s is None else self._missed_s
            return now_s - self._missed_s < SET_COMES_S

    def take(self, now_s: float) -> tuple[int, int] | None:
        """Take a slot for one chunk: (set id, slot), to be passed to `answered` later. None when no set is ready."""
        with self._lock:
            if self._current is None:
                ready = self._reopened or self._spares
                if not ready:
                    return None
                self._current = ready.popleft()
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
        """Count the sets of which no slot was taken."""
        with self._lock:
            return len(self._spares)

    @property
    def n_pending(self) -> int:
        """Count the chunks that took a slot and were not answered yet, of sets that are not settled."""
        with self._lock:
            return sum(s.pending for s in self._sets())

    def offer(self, set_id: int) -> None:
        """Add a new, registered set."""
        with self._lock:
            self._spares.append(_Set(set_id))
            self._missed_s = None

    def answered(self, set_id: int, slot: int, is_blank: bool) -> None:
        """Book that a chunk of the set was saved, or never will be; `is_blank`: nothing was written into its slot."""
        with self._lock:
            for candidate in (self._current, *self._reopened, *self._full):
                if candidate is None or candidate.set_id != set_id:
                    continue
                candidate.pending -= 1
                if is_blank:
                    candidate.returned.append(slot)
                    if candidate in self._full:
                        self._full.remove(candidate)
                        self._reopened.append(candidate)
                return

    def take_settled(self, now_s: float) -> list[int]:
        """Return the full sets that get no further records, each one once; the caller closes them."""
        with self._lock:
            settled = [s for s in self._full if s.pending <= 0 or now_s - s.full_since_s >= SET_SETTLE_S]
            self._full = [s for s in self._full if s not in settled]
            return [s.set_id for s in settled]

    def set_ids(self) -> set[int]:
        """Return the ids of all sets that are not settled yet."""
        with self._lock:
            return {s.set_id for s in self._sets()}

    def bound_spares(self, spares_max: int) -> list[int]:
        """Keep so many sets ready at most from now on; return the ids of those that are too many."""
        with self._lock:
            self._spares_max = spares_max
            return [self._spares.pop().set_id for _ in range(len(self._spares) - spares_max)]

    def forget(self, lost: Collection[int]) -> int:
        """Stop using these sets, which are lost or were taken over by others. Return how many of them were in use."""
        with self._lock:
            n_lost = sum(s.set_id in lost for s in self._sets())
            if self._current is not None and self._current.set_id in lost:
                self._current = None
            self._spares = deque(s for s in self._spares if s.set_id not in lost)
            self._reopened = deque(s for s in self._reopened if s.set_id not in lost)
            self._full = [s for s in self._full if s.set_id not in lost]
            return n_lost

    def abandon(self) -> tuple[list[int], list[int]]:
        """Forget all sets. Return (ids of those with a taken slot, ids of those without)."""
        with self._lock:
            sets = self._sets()
            self._current = None
            self._spares.clear()
            self._reopened.clear()
            self._full = []
            return [s.set_id for s in sets if s.taken], [s.set_id for s in sets if not s.taken]

    def _sets(self) -> list[_Set]:
        return [s for s in (self._current, *self._reopened, *self._spares, *self._full) if s is not None]


@dataclass(slots=True)
class Side:
    """Allocator of one tenant. room: back-off after no set could be created for it."""

    tenant: str
    supply: SetSupply
    used_s: float
    room: Backoff = field(default_factory=Backoff)


class Supplies:
    """Allocators of one namespace: one for chunks without a tenant, always there, and one for each tenant in use,
    since a set holds the chunks of one tenant only. There are at most as many tenants as labels in the settings, and
    idle ones give their sets back."""

    def __init__(self, slots: int, spares_max: int) -> None:
        self.slots = slots
        self.common = SetSupply(slots, spares_max)
        self._spares_max = max(1, spares_max // 4)
        self._lock = threading.Lock()
        self._sides = {"": Side("", self.common, 0.0)}

    def of(self, tenant: str, now_s: float) -> Side:
        """Return the supply of a tenant, and mark it used."""
        with self._lock:
            side = self._sides.get(tenant)
            if side is None:
                side = self._sides[tenant] = Side(tenant, SetSupply(self.slots, self._spares_max), now_s)
            side.used_s = now_s
            return side

    def sides(self) -> list[Side]:
        with self._lock:
            return list(self._sides.values())

    def want_sets(self, now_s: float) -> bool:
        return any(side.supply.wants_set() and not side.room.is_resting(now_s) for side in self.sides())

    @property
    def n_unused(self) -> int:
        """Count the sets of which no slot was taken."""
        return sum(side.supply.n_unused for side in self.sides())

    def answered(self, set_id: int, slot: int, is_blank: bool) -> None:
        """See SetSupply; a set is in one of them."""
        for side in self.sides():
            side.supply.answered(set_id, slot, is_blank)

    def take_settled(self, now_s: float) -> list[int]:
        settled = []
        for side in self.sides():
            of_side = side.supply.take_settled(now_s)
            if of_side:
                side.room.clear()  # once they are closed they may be what goes
            settled += of_side
        return settled

    def set_ids(self) -> set[int]:
        return {set_id for side in self.sides() for set_id in side.supply.set_ids()}

    def forget(self, lost: Collection[int]) -> int:
        return sum(side.supply.forget(lost) for side in self.sides())

    def bound_spares(self, spares_max: int) -> list[int]:
        """Keep so many sets ready at most, a quarter for each tenant; return the ids of those that are too many."""
        with self._lock:
            self._spares_max = max(1, spares_max // 4)
        return [
            set_id
            for side in self.sides()
            for set_id in side.supply.bound_spares(self._spares_max if side.tenant else spares_max)
        ]

    def leave_idle(self, now_s: float) -> tuple[list[int], list[int], list[int]]:
        """Drops the supplies of tenants that nothing was heard of for a while, those with saves on their way a while
        later: (used sets all of whose saves are answered, other used ones, unused ones)."""
        with self._lock:
            idle = [
                side
                for side in self._sides.values()
                if side.tenant and now_s - side.used_s >= TENANT_IDLE_S + (SET_SETTLE_S if side.supply.n_pending else 0)
            ]
            for side in idle:
                del self._sides[side.tenant]
        busy = {side.tenant for side in idle if side.supply.n_pending}  # read once: an answer may come in between
        answered, unused = _abandoned([side for side in idle if side.tenant not in busy])
        others, unused_too = _abandoned([side for side in idle if side.tenant in busy])
        return answered, others, unused + unused_too

    def abandon(self) -> tuple[list[int], list[int]]:
        """Forget all sets. Return (ids of those with a taken slot, ids of those without)."""
        return _abandoned(self.sides())


def _abandoned(sides: list[Side]) -> tuple[list[int], list[int]]:
    used: list[int] = []
    unused: list[int] = []
    for side in sides:
        of_side = side.supply.abandon()
        used += of_side[0]
        unused += of_side[1]
    return used, unused
