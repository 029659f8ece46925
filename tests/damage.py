"""Damage to files."""

from __future__ import annotations

from pathlib import Path

from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import SegmentHeader


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change one byte in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def flip_slab(segment: Path, slot: int) -> None:
    """Change a byte in the first slab of a slot's record."""
    header = SegmentHeader.unpack(segment.read_bytes()[:PAGE_BYTES])
    flip(segment, header.slot_offset(slot) + PAGE_BYTES + 100)
