"""Reading one record of a segment as a whole, a piece at a time: for what looks at files beside the load path."""

from __future__ import annotations

import os
from enum import Enum

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.checksum import slab_seed
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import record_bytes
from kvtier.index.base import Location
from kvtier.io.native import checksum
from kvtier.io.ring import AlignedBuffer
from kvtier.storage.open_segments import OpenSegment
from kvtier.storage.segments import SegmentFiles

PIECE_BYTES = 4 << 20
# Largest record that is read, bytes. One of 256 tokens of the largest models takes 1 GiB; a sparse file may claim any
# size.
RECORD_BYTES_MAX = 4 << 30
_PAIR_BYTES = 8


class RecordVerdict(Enum):
    """Result of reading a record's place. UNKNOWN: it cannot be read for now, or is larger than any record."""

    AS_SUMMED = 0
    OTHER = 1  # other bytes, or a file that is no such segment or ends before
    GONE = 2  # no such file
    UNKNOWN = 3


def judge(files: SegmentFiles, key: bytes, location: Location) -> RecordVerdict:
    """Read the slabs at `location`, through a descriptor that is opened now, and compare them with its checksums."""
    try:
        segment = files.lease_anew(location.set_id, location.part)
    except TierUnavailable:
        return RecordVerdict.UNKNOWN
    except Corrupt:
        return RecordVerdict.OTHER
    if segment is None:
        return RecordVerdict.GONE
    try:
        return _judge(segment, key, location)
    except OSError:
        return RecordVerdict.UNKNOWN
    finally:
        segment.release()


def _judge(segment: OpenSegment, key: bytes, location: Location) -> RecordVerdict:
    header, extent = segment.header, location.extent
    if header.offset_of(location.slot, extent, location.slab_bytes) is None:
        return RecordVerdict.OTHER
    if record_bytes(extent, header.slab_bytes) > RECORD_BYTES_MAX:
        return RecordVerdict.UNKNOWN
    buffer = AlignedBuffer(min(PIECE_BYTES, header.slab_bytes))
    start = header.slot_offset(location.slot) + PAGE_BYTES
    for number, expected in enumerate(location.checksums):
        seed = slab_seed(key, extent.first_head + number, extent.first_layer)
        if _sum(segment.fd, start + number * header.slab_bytes, header.slab_bytes, seed, buffer) != expected:
            return RecordVerdict.OTHER
    return RecordVerdict.AS_SUMMED


def _sum(fd: int, start: int, n_bytes: int, seed: int, buffer: AlignedBuffer) -> int | None:
    """Return the checksum of a slab; None where the file ends before it."""
    total = 0
    for done in range(0, n_bytes, buffer.n_bytes):
        piece = min(buffer.n_bytes, n_bytes - done)
        if not _read_fully(fd, buffer.view[:piece], start + done):
            return None
        total += checksum(buffer.address, piece, seed, done // _PAIR_BYTES)
    return total % (1 << 64)


def _read_fully(fd: int, view: memoryview, offset: int) -> bool:
    """Fill the buffer. Return False if the file ends before. A read may give less than it was asked for, and the
    rest when asked again."""
    while view:
        n_read = os.preadv(fd, [view], offset)
        if n_read == 0:
            return False
        view, offset = view[n_read:], offset + n_read
    return True
