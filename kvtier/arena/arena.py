"""Arena: pre-allocated slots of encoded chunks in one buffer (I7), with the table of their contents.

A slot is one page for a record's header, then slabs. A save encodes into a slot and writes from it; a load reads into
a slot and decodes from it; afterwards the slot may cache its chunk. The same class serves pinned host memory and device
memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from kvtier.format.geometry import PAGE_BYTES, padded
from kvtier.kernels.launch import to_device

# Cached tensor views for each slot. To make one, torch takes the interpreter lock twice, and a busy engine is slow to
# give it back.
VIEWS_A_SLOT = 4

Content = TypeVar("Content")


@dataclass(slots=True)
class _Cached(Generic[Content]):
    slot: int
    content: Content
    leases: int = 0


class SlotTable(Generic[Content]):
    """States of slots, with LRU. Thread-safe. `Content`: facts that the caller keeps with a cached chunk.

    A slot is free, reserved (being filled), or cached (holds a chunk that can be found by its key). A cached slot with
    leases is being read and is never reused (I3). When no slot is free, the least recently used slot without a lease is
    taken.
    """

    def __init__(self, n_ready: int) -> None:
        self._lock = threading.Lock()
        self.n_ready = n_ready
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
        with self._lock:
            slots: list[int] = []
            while len(slots) < n_slots and (self._free or self._evict_one()):
                slots.append(self._free.pop())
            self._reserved.update(slots)
            return slots

    def claim(self, keys: Sequence[bytes]) -> list[tuple[int, Content | None]]:
        """Lease the slot of each key that is here, and reserve a slot for each other key. Stop at the first key for
        which no slot is free. Return (slot, content) of each key; the content of a reserved slot is None."""
        with self._lock:
            claimed: list[tuple[int, Content | None]] = []
            for key in keys:
                cached = self._cached.get(key)
                if cached is not None:
                    self._cached.move_to_end(key)
                    cached.leases += 1
                    claimed.append((cached.slot, cached.content))
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
            is_new = []
            for slot, key, content in filled:
                self._reserved.remove(slot)
                is_new.append(key not in self._cached)
                if is_new[-1]:
                    self._cached[key] = _Cached(slot, content)
                else:
                    self._free.append(slot)
            return is_new

    def commit_leased(self, slot: int, key: bytes, content: Content) -> tuple[bool, int, Content]:
        """Commit and lease in one step, so that no other thread takes the slot in between. Return (the result of
        `commit`, the slot that holds `key` now, its content)."""
        with self._lock:
            self._reserved.remove(slot)
            is_new = key not in self._cached
            if is_new:
                self._cached[key] = _Cached(slot, content)
            else:
                self._free.append(slot)
            cached = self._cached[key]
            self._cached.move_to_end(key)
            cached.leases += 1
            return is_new, cached.slot, cached.content

    def discard(self, *slots: int) -> None:
        """Give back reserved slots that were not filled."""
        with self._lock:
            for slot in slots:
                self._reserved.remove(slot)
                self._free.append(slot)

    def lease(self, key: bytes) -> tuple[int, Content] | None:
        return self.lease_each([key])[0]

    def lease_each(self, keys: Sequence[bytes]) -> list[tuple[int, Content] | None]:
        """Return the slot that holds each key, protected until `release`; None for those that are not here."""
        with self._lock:
            leased: list[tuple[int, Content] | None] = []
            for key in keys:
                cached = self._cached.get(key)
                if cached is not None:
                    self._cached.move_to_end(key)
                    cached.leases += 1
                leased.append(None if cached is None else (cached.slot, cached.content))
            return leased

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
            if cached is None:
                return
            if cached.leases:
                self._dropped[cached.slot] = cached
            else:
                self._free.append(cached.slot)

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached

    @property
    def used_slots(self) -> int:
        """Return the number of slots that hold a chunk."""
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


class Arena(SlotTable[Content]):
    """Slots of one buffer. Thread-safe.

    Args:
        buffer: (n_bytes,) uint8, its address a multiple of the page for direct I/O.
        n_ready: slots that can be used at once; further ones by `grow` (memory that is pinned in the background).
    """

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, n_ready: int | None = None) -> None:
        assert slot_bytes == padded(slot_bytes) and buffer.data_ptr() % PAGE_BYTES == 0
        self.slot_bytes = slot_bytes
        self.n_slots = buffer.numel() // slot_bytes
        self._buffer = buffer
        super().__init__(self.n_slots if n_ready is None else n_ready)
        self._views: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self._address = buffer.data_ptr()
        self.is_device = buffer.device.type != "cpu"  # the slots are in a GPU's memory
        self._bytes = memoryview(b"" if self.is_device else buffer.numpy())  # type: ignore[arg-type]

    def address(self, slot: int) -> int:
        return self._address + slot * self.slot_bytes

    def put_header(self, slot: int, page: bytes) -> int:
        """Copy a header page of 4096 bytes into a slot of an arena in host memory. Return the slot's address."""
        start = slot * self.slot_bytes
        assert len(page) == PAGE_BYTES
        self._bytes[start : start + PAGE_BYTES] = page  # a torch copy would release the interpreter lock
        return self._address + start

    def record(self, slot: int, n_bytes: int) -> torch.Tensor:
        """Return the first `n_bytes` of the slot's slabs, (n_bytes,) uint8."""
        start = slot * self.slot_bytes + PAGE_BYTES
        assert PAGE_BYTES + n_bytes <= self.slot_bytes
        return self._buffer[start : start + n_bytes]

    def slabs(self, slot: int, offset: int, n_slabs: int, slab_bytes: int) -> torch.Tensor:
        """Return (n_slabs, slab_bytes) uint8 from byte `offset` of the slot on."""
        place = (slot, offset, n_slabs, slab_bytes)
        view = self._views.get(place)
        if view is None:
            assert offset + n_slabs * slab_bytes <= self.slot_bytes
            start = slot * self.slot_bytes + offset
            view = self._buffer[start : start + n_slabs * slab_bytes].view(n_slabs, slab_bytes)
            if len(self._views) >= VIEWS_A_SLOT * self.n_slots:
                self._views.clear()
            self._views[place] = view
        return view

    def blank(self, slots: Sequence[int], n_slabs: int, slab_bytes: int, begin: int) -> None:
        """Zero bytes [begin, slab_bytes) of each slab of the slots: they may be left over from another request. At most
        one launch on torch's current stream."""
        if begin == slab_bytes:
            return
        slots_bytes = self._buffer[: self.n_slots * self.slot_bytes].view(self.n_slots, self.slot_bytes)
        records = slots_bytes[:, PAGE_BYTES : PAGE_BYTES + n_slabs * slab_bytes].view(self.n_slots, n_slabs, slab_bytes)
        places = to_device(np.array(slots, dtype=np.int64), self._buffer.device)
        records[:, :, begin:].index_fill_(0, places, 0)
