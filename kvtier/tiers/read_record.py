"""Reading one record of a segment as a whole, a piece at a time: for what looks at files beside the load path."""

from __future__ import annotations

import os

from kvtier.checksum import slab_seed
from kvtier.errors import Corrupt, TierUnavailable
from kvtier.geometry import PAGE_BYTES
from kvtier.index.base import Location
from kvtier.io.native import checksum
from kvtier.io.ring import AlignedBuffer
from kvtier.record import record_bytes
from kvtier.tiers.descriptors import OpenSegment
from kvtier.tiers.segments import SegmentFiles

PIECE_BYTES = 4 << 20
RECORD_BYTES_MAX = 4 << 30
"""One of 256 tokens of the largest models takes 1 GiB; a file with holes may claim any size, and is not read."""
_PAIR_BYTES = 8


def is_as_summed(files: SegmentFiles, key: bytes, location: Location) -> bool:
    """Whether the slabs at `location` have its checksums under the chunk's key. False where the segment is gone, or has
    no such record; True also where it can't be read for now, or is larger than any record: that tells nothing."""
    try:
        segment = files.lease(location.set_id, location.rank)
    except TierUnavailable:
        return True
    except Corrupt:
        return False
    if segment is None:
        return False
    try:
        return _is_as_summed(segment, key, location)
    except OSError:
        return True
    finally:
        segment.release()


def _is_as_summed(segment: OpenSegment, key: bytes, location: Location) -> bool:
    header, extent = segment.header, location.extent
    if not header.has_slot(location.slot, extent, location.slab_bytes):
        return False
    if record_bytes(extent, header.slab_bytes) > RECORD_BYTES_MAX:
        return True
    buffer = AlignedBuffer(min(PIECE_BYTES, header.slab_bytes))
    start = header.slot_offset(location.slot) + PAGE_BYTES
    for number, expected in enumerate(location.checksums):
        seed = slab_seed(key, extent.first_head + number, extent.first_layer)
        if _sum(segment.fd, start + number * header.slab_bytes, header.slab_bytes, seed, buffer) != expected:
            return False
    return True


def _sum(fd: int, start: int, n_bytes: int, seed: int, buffer: AlignedBuffer) -> int | None:
    """The checksum of a slab; None where the file ends before it."""
    total = 0
    for done in range(0, n_bytes, buffer.n_bytes):
        piece = min(buffer.n_bytes, n_bytes - done)
        if not _read_fully(fd, buffer.view[:piece], start + done):
            return None
        total += checksum(buffer.address, piece, seed, done // _PAIR_BYTES)
    return total % (1 << 64)


def _read_fully(fd: int, view: memoryview, offset: int) -> bool:
    """False where the file ends before. A read may give less than it was asked for, and the rest when asked again."""
    while view:
        n_read = os.preadv(fd, [view], offset)
        if n_read == 0:
            return False
        view, offset = view[n_read:], offset + n_read
    return True
