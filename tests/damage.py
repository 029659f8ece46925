"""Damage to files: of tests that choose where, and at random."""

import os
import random
from pathlib import Path

from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import SegmentHeader
from kvtier.index.base import Index
from kvtier.index.lmdb.index import LmdbIndex


def write(path: Path, offset: int, data: bytes) -> None:
    """Change bytes in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change one byte in place."""
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1) or b"\0"
    write(path, offset, bytes([byte[0] ^ bits]))


def header_of(segment: Path) -> SegmentHeader:
    with segment.open("rb") as file:
        return SegmentHeader.unpack(file.read(PAGE_BYTES))


def own_slots(header: SegmentHeader) -> range:
    """Return the slots of the set that are in this file."""
    return range(header.stripe, header.slots, header.stripes)


def record_of(segment: Path, slot: int) -> tuple[int, bytes]:
    """Return where a slot's record begins, and its header page and slabs."""
    header = header_of(segment)
    offset = header.slot_offset(slot)
    with segment.open("rb") as file:
        file.seek(offset)
        return offset, file.read(header.slot_bytes)


def flip_slab(segment: Path, slot: int) -> None:
    """Change a byte in the first slab of a slot's record."""
    flip(segment, header_of(segment).slot_offset(slot) + PAGE_BYTES + 100)


def damage_entry(index: Index, key: bytes) -> None:
    """Change the number of layers of the chunk in its entry of an embedded index."""
    assert isinstance(index, LmdbIndex)
    (value,) = index.find([key])
    assert value is not None
    index._shared.write(lambda view: view.put("entries", key, value[:3] + b"\0\0" + value[5:]))


class SegmentDamage:
    """Kinds of damage to segments, each at a random place. other: of two segments, the second."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def flip(self, path: Path, header: SegmentHeader, other: Path) -> None:
        offset = header.slot_offset(self._slot(header)) + PAGE_BYTES
        offset += self._rng.randrange(header.slot_bytes - PAGE_BYTES)
        flip(path, offset, 1 << self._rng.randrange(8))

    def zero_record(self, path: Path, header: SegmentHeader, other: Path) -> None:
        write(path, header.slot_offset(self._slot(header)), bytes(header.slot_bytes))

    def copy_record(self, path: Path, header: SegmentHeader, other: Path) -> None:
        """Put another chunk's record into a slot, whole, with its header: as if it had been written anew."""
        _, record = record_of(path, self._slot(header))
        write(path, header.slot_offset(self._slot(header)), record)

    def shorten(self, path: Path, header: SegmentHeader, other: Path) -> None:
        os.truncate(path, self._rng.randrange(PAGE_BYTES, max(PAGE_BYTES + 1, path.stat().st_size)))

    def unlink(self, path: Path, header: SegmentHeader, other: Path) -> None:
        path.unlink()

    def swap(self, path: Path, header: SegmentHeader, other: Path) -> None:
        """Put two segments under each other's names."""
        spare = path.with_suffix(".spare")
        path.rename(spare)
        try:
            if path != other:
                other.rename(path)
        finally:
            spare.rename(other)

    def _slot(self, header: SegmentHeader) -> int:
        return self._rng.randrange(header.slots)
