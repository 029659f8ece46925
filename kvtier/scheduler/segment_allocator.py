"""SlotAllocator: takes slots of segment sets for the chunks of one tenant. SlotAllocators: those of all tenants in use.
Pure bookkeeping under one lock.

The scheduler's thread takes slots; the keeper's thread adds new sets and closes full ones. Taking a slot never waits:
without a ready set, the chunk is not saved.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from kvtier.runtime.backoff import Backoff

SET_SETTLE_S = 60.0  # time after which a full set is closed although answers of its saves are missing, seconds
SET_COMES_S = 2.0  # longest wait of chunks for a new set, from the first chunk that found none, seconds
TENANT_IDLE_S = 120.0  # time without a chunk after which a tenant's open sets are closed, seconds


@dataclass(eq=False, slots=True)
class _Set:
    """A set in use. returned: slots that were taken but stayed blank; they are taken again before others."""

    set_id: int
    taken: int = 0
    returned: list[int] = field(default_factory=list)
    pending: int = 0
    full_since_s: float = 0.0


class SlotAllocator:
    """Allocator of one tenant. It fills one set and keeps up to `spares_max` sets ready, because a long prompt may fill
    several in one step. used_s: time at which a chunk was last planned. backoff: pause after a set could not be
    created. filled_s: receives the time of the last taken slot, by set."""

    def __init__(self, slots: int, spares_max: int, tenant: str = "", filled_s: dict[int, float] | None = None) -> None:
        self.slots = slots
        self.tenant = tenant
        self.used_s = 0.0
        self.backoff = Backoff()
        self._spares_max = spares_max
        self._lock = threading.Lock()
        self._sets: dict[int, _Set] = {}  # unsettled sets by id; those without a taken slot are ready
        self._current: _Set | None = None
        self._missed_s: float | None = None
        self._filled_s = {} if filled_s is None else filled_s

    def is_coming(self, now_s: float) -> bool:
        """Return True if no set is ready but one is expected within SET_COMES_S of the first such call: then chunks
        that can wait should wait."""
        with self._lock:
            if self._current is not None or self._ready() is not None:
                return False
            self._missed_s = now_s if self._missed_s is None else self._missed_s
            return now_s - self._missed_s < SET_COMES_S

    def take(self, now_s: float) -> tuple[int, int] | None:
        """Take a slot for one chunk: (set id, slot), to be passed to `answered` later. None when no set is ready."""
        with self._lock:
            current = self._current = self._current or self._ready()
            if current is None:
                return None
            slot = current.returned.pop() if current.returned else current.taken
            current.taken = max(current.taken, slot + 1)
            current.pending += 1
            self._filled_s[current.set_id] = now_s
            if self._is_full(current):
                current.full_since_s = now_s
                self._current = None
            return current.set_id, slot

    def _is_full(self, one: _Set) -> bool:
        return one.taken == self.slots and not one.returned

    def _ready(self) -> _Set | None:
        """Return the next set to fill: one with slots that were returned, or a new one."""
        reopened = (one for one in self._sets.values() if one.taken and not self._is_full(one))
        return next(reopened, None) or next(iter(self._spares()), None)

    def _spares(self) -> list[_Set]:
        return [one for one in self._sets.values() if not one.taken]

    def wants_set(self) -> bool:
        """Return True if another set should be made ready.

        The last spare set is wanted only once half of the current set is taken, so that an engine that saves little
        holds little of the capacity.
        """
        with self._lock:
            current = self._current
            is_half_taken = current is None or (current.taken - len(current.returned)) * 2 >= self.slots
            return len(self._spares()) < (self._spares_max if is_half_taken else self._spares_max - 1)

    @property
    def n_unused(self) -> int:
        """Count the sets of which no slot was taken."""
        with self._lock:
            return len(self._spares())

    @property
    def n_pending(self) -> int:
        """Count the chunks of unsettled sets that took a slot and have no answer yet."""
        with self._lock:
            return sum(one.pending for one in self._sets.values())

    def offer(self, set_id: int) -> None:
        """Add a new, registered set."""
        with self._lock:
            self._sets[set_id] = _Set(set_id)
            self._missed_s = None

    def answered(self, set_id: int, slot: int, is_blank: bool) -> None:
        """Note that a save into this slot has ended. is_blank: nothing was written, so the slot can be reused."""
        with self._lock:
            of = self._sets.get(set_id)
            if of is not None:
                of.pending -= 1
                if is_blank:
                    of.returned.append(slot)

    def take_settled(self, now_s: float) -> list[int]:
        """Forget the full sets that get no further records. Return their ids: the caller closes them."""
        with self._lock:
            full = [one for one in self._sets.values() if self._is_full(one)]
            settled = [one.set_id for one in full if one.pending <= 0 or now_s - one.full_since_s >= SET_SETTLE_S]
            for set_id in settled:
                del self._sets[set_id]
            return settled

    def set_ids(self) -> set[int]:
        """Return the ids of all sets that are not settled yet."""
        with self._lock:
            return set(self._sets)

    def bound_spares(self, spares_max: int) -> list[int]:
        """Keep at most `spares_max` sets ready from now on. Forget the surplus ones and return their ids."""
        with self._lock:
            self._spares_max = spares_max
            surplus = [one.set_id for one in self._spares()[spares_max:]]
            for set_id in surplus:
                del self._sets[set_id]
            return surplus

    def forget(self, lost: Collection[int]) -> int:
        """Stop using these sets, which the index lost or others took over. Return how many of them were in use."""
        with self._lock:
            if self._current is not None and self._current.set_id in lost:
                self._current = None
            return sum(self._sets.pop(set_id, None) is not None for set_id in lost)

    def abandon(self) -> tuple[list[int], list[int]]:
        """Forget all sets. Return (ids of those with a taken slot, ids of those without)."""
        with self._lock:
            sets, self._sets, self._current = list(self._sets.values()), {}, None
            return [one.set_id for one in sets if one.taken], [one.set_id for one in sets if not one.taken]


class SlotAllocators:
    """Allocators of one namespace: `common` for chunks without a tenant, and one for each tenant in use, because a set
    has chunks of one tenant only. The settings limit the number of tenants. Allocators of idle tenants are dropped."""

    def __init__(self, slots: int, spares_max: int) -> None:
        self.slots = slots
        self._filled_s: dict[int, float] = {}  # also of dropped allocators
        self.common = SlotAllocator(slots, spares_max, filled_s=self._filled_s)
        self._spares_max = max(1, spares_max // 4)
        self._lock = threading.Lock()
        self._by_tenant = {"": self.common}

    def of(self, tenant: str, now_s: float) -> SlotAllocator:
        """Return the allocator of a tenant ("": `common`), and mark it used."""
        with self._lock:
            allocator = self._by_tenant.get(tenant)
            if allocator is None:
                allocator = self._by_tenant[tenant] = SlotAllocator(
                    self.slots, self._spares_max, tenant, self._filled_s
                )
            allocator.used_s = now_s
            return allocator

    def all(self) -> list[SlotAllocator]:
        with self._lock:
            return list(self._by_tenant.values())

    def want_sets(self, now_s: float) -> bool:
        return any(allocator.wants_set() and not allocator.backoff.is_resting(now_s) for allocator in self.all())

    @property
    def n_unused(self) -> int:
        return sum(allocator.n_unused for allocator in self.all())

    def answered(self, tenant: str, set_id: int, slot: int, is_blank: bool) -> None:
        """Note that a save has ended: see SlotAllocator. Do nothing if the tenant's allocator was dropped since."""
        allocator = self._by_tenant.get(tenant)
        if allocator is not None:
            allocator.answered(set_id, slot, is_blank)

    def take_filled(self) -> list[tuple[int, float]]:
        """Return the sets of which slots were taken since the last call, with the time of the last one, seconds."""
        return [self._filled_s.popitem() for _ in range(len(self._filled_s))]  # other threads only add to it

    def take_settled(self, now_s: float) -> list[int]:
        settled = []
        for allocator in self.all():
            ids = allocator.take_settled(now_s)
            if ids:
                allocator.backoff.clear()  # once closed, these sets may be evicted to make room
            settled += ids
        return settled

    def set_ids(self) -> set[int]:
        return {set_id for allocator in self.all() for set_id in allocator.set_ids()}

    def forget(self, lost: Collection[int]) -> int:
        return sum(allocator.forget(lost) for allocator in self.all())

    def bound_spares(self, spares_max: int) -> list[int]:
        """Keep at most `spares_max` sets ready without a tenant, and a quarter of that for each tenant. Forget the
        surplus ones and return their ids."""
        with self._lock:
            self._spares_max = max(1, spares_max // 4)
        return [
            set_id
            for allocator in self.all()
            for set_id in allocator.bound_spares(self._spares_max if allocator.tenant else spares_max)
        ]

    def leave_idle(self, now_s: float) -> tuple[list[int], list[int], list[int]]:
        """Drop the allocators of tenants without a chunk for TENANT_IDLE_S, or SET_SETTLE_S longer if answers are
        missing. Return the ids of (used sets of tenants without missing answers, used sets of the others, unused sets).
        """
        with self._lock:
            idle = [
                allocator
                for allocator in self._by_tenant.values()
                if allocator.tenant
                and now_s - allocator.used_s >= TENANT_IDLE_S + (SET_SETTLE_S if allocator.n_pending else 0)
            ]
            for allocator in idle:
                del self._by_tenant[allocator.tenant]
        busy = {one.tenant for one in idle if one.n_pending}  # read once: an answer may come in between
        answered, unused = _abandoned([one for one in idle if one.tenant not in busy])
        others, unused_too = _abandoned([one for one in idle if one.tenant in busy])
        return answered, others, unused + unused_too

    def abandon(self) -> tuple[list[int], list[int]]:
        return _abandoned(self.all())


def _abandoned(allocators: list[SlotAllocator]) -> tuple[list[int], list[int]]:
    used: list[int] = []
    unused: list[int] = []
    for allocator in allocators:
        ids = allocator.abandon()
        used += ids[0]
        unused += ids[1]
    return used, unused
