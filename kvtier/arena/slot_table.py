"""SlotTable: table of an arena's slots and their chunks, with LRU. Bookkeeping under one lock: no bytes, no clock.

A slot is free, reserved (being filled), or cached (holds a chunk that can be found by its key). A cached slot with
leases is being read and is never reused (I3). When no slot is free, the least recently used slot without a lease is
taken.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content")


@dataclass(slots=True)
class _Cached(Generic[Content]):
    slot: int
    content: Content
    leases: int = 0


class SlotTable(Generic[Content]):
    """Bookkeeping of `n_ready` slots. `Content` is what the caller wants to know about a cached chunk. Thread-safe."""

    def __init__(self, n_ready: int) -> None:
        self.n_ready = n_ready
        self._lock = threading.Lock()
        self._free = list(range(n_ready - 1, -1, -1))
        self._reserved: set[int] = set()
        self._cached: OrderedDict[bytes, _Cached[Content]] = OrderedDict()  # least recently used first
        self._dropped: dict[int, _Cached[Content]] = {}  # no longer findable, but still leased

    def grow(self, n_ready: int) -> None:
        """Add free slots, up to `n_ready` in all."""
        with self._lock:
            self._free[:0] = range(n_ready - 1, self.n_ready - 1, -1)
            self.n_ready = n_ready

    def reserve(self) -> int | None:
        """Return a slot to fill, which the caller then owns; None if every slot is reserved or leased."""
        slots = self.reserve_some(1)
        return slots[0] if slots else None

    def reserve_some(self, n_slots: int) -> list[int]:
        """Return `n_slots` slots to fill, which the caller then owns; fewer if the others are reserved or leased."""
        slots: list[int] = []
        with self._lock:
            while len(slots) < n_slots and (self._free or self._evict_one()):
                slots.append(self._free.pop())
            self._reserved.update(slots)
        return slots

    def claim(self, keys: Sequence[bytes]) -> list[tuple[int, Content | None]]:
        """Lease the slot of each key that is here, and reserve a slot for each other key. Stop at the first key for
        which no slot is free. Return (slot, content) of each key; the content of a reserved slot is None."""
        claimed: list[tuple[int, Content | None]] = []
        with self._lock:
            for key in keys:
                leased = self._lease(key)
                if leased is not None:
                    claimed.append(leased)
                elif self._free or self._evict_one():
                    self._reserved.add(self._free[-1])
                    claimed.append((self._free.pop(), None))
                else:
                    break
        return claimed

    def commit(self, filled: Sequence[tuple[int, bytes, Content]]) -> list[bool]:
        """Make each reserved slot hold its key. Return for each whether it does: False if another slot holds the key
        already, and then the reserved slot is freed."""
        with self._lock:
            return [self._commit(*one) for one in filled]

    def commit_leased(self, slot: int, key: bytes, content: Content) -> tuple[bool, int, Content]:
        """Commit and lease in one step, so that no other thread takes the slot in between. Return (the result of
        `commit`, the slot that holds `key` now, its content)."""
        with self._lock:
            is_new, leased = self._commit(slot, key, content), self._lease(key)
        assert leased is not None
        return is_new, *leased

    def _commit(self, slot: int, key: bytes, content: Content) -> bool:
        self._reserved.remove(slot)
        is_new = key not in self._cached
        if is_new:
            self._cached[key] = _Cached(slot, content)
        else:
            self._free.append(slot)
        return is_new

    def discard(self, *slots: int) -> None:
        """Give reserved slots back unfilled."""
        with self._lock:
            for slot in slots:
                self._reserved.remove(slot)
                self._free.append(slot)

    def lease(self, key: bytes) -> tuple[int, Content] | None:
        """Return the slot that holds the key, protected until `release`; None if it is not here."""
        with self._lock:
            return self._lease(key)

    def lease_each(self, keys: Sequence[bytes]) -> list[tuple[int, Content] | None]:
        with self._lock:
            return [self._lease(key) for key in keys]

    def _lease(self, key: bytes) -> tuple[int, Content] | None:
        cached = self._cached.get(key)
        if cached is None:
            return None
        self._cached.move_to_end(key)
        cached.leases += 1
        return cached.slot, cached.content

    def release(self, slot: int, key: bytes) -> None:
        self.release_each([(slot, key)])

    def release_each(self, leases: Sequence[tuple[int, bytes]]) -> None:
        """End one lease of each slot."""
        with self._lock:
            for slot, key in leases:
                cached = self._dropped.get(slot) or self._cached[key]
                assert cached.slot == slot and cached.leases > 0
                cached.leases -= 1
                if slot in self._dropped and cached.leases == 0:
                    del self._dropped[slot]
                    self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Make `key` unfindable (its bytes are bad); the slot is free once its leases end."""
        with self._lock:
            cached = self._cached.pop(key, None)
            if cached is not None and cached.leases:
                self._dropped[cached.slot] = cached
            elif cached is not None:
                self._free.append(cached.slot)

    @property
    def used_slots(self) -> int:
        """Return the number of slots that hold a chunk."""
        with self._lock:
            return len(self._cached)

    @property
    def available(self) -> int:
        """Return how many `reserve` calls in a row would succeed now."""
        with self._lock:
            return len(self._free) + sum(1 for cached in self._cached.values() if cached.leases == 0)

    def check(self) -> None:
        """Assert that every slot is in exactly one state."""
        with self._lock:
            cached = [entry.slot for entry in self._cached.values()]
            slots = self._free + list(self._reserved) + cached + list(self._dropped)
            assert sorted(slots) == list(range(self.n_ready)), slots
            assert all(entry.leases >= 0 for entry in self._cached.values())
            assert all(entry.leases > 0 for entry in self._dropped.values())

    def _evict_one(self) -> bool:
        for key, cached in self._cached.items():
            if cached.leases == 0:
                del self._cached[key]
                self._free.append(cached.slot)
                return True
        return False
