"""Arena: pre-allocated slots of encoded chunks in one buffer (I7), with the table of their contents.

A slot is one page for a record's header, then slabs. A save encodes into a slot and writes from it; a load reads into
a slot and decodes from it; afterwards the slot may cache its chunk. The same class serves pinned host memory and device
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.arena.slot_table import Content, SlotTable
from kvtier.format.geometry import PAGE_BYTES, padded
from kvtier.kernels.launch import to_device

# Cached tensor views for each slot. To make one, torch takes the interpreter lock twice, and a busy engine is slow to
# give it back.
VIEWS_A_SLOT = 4


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

    def grow(self, n_ready: int) -> None:
        assert n_ready <= self.n_slots
        super().grow(n_ready)

    def address(self, slot: int) -> int:
        return self._address + slot * self.slot_bytes

    def put_headers(self, slots: Sequence[int], pages: Sequence[bytes]) -> list[int]:
        """Copy one header page of 4096 bytes into each slot of an arena in host memory. Return the slots' addresses."""
        addresses = []
        for slot, page in zip(slots, pages, strict=True):
            start = slot * self.slot_bytes
            assert len(page) == PAGE_BYTES
            self._bytes[start : start + PAGE_BYTES] = page  # a torch copy would release the GIL each time
            addresses.append(self._address + start)
        return addresses

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
