"""The index's value for one key: where the records of a chunk lie, as bytes. No index is opened here.

All integers are little-endian. The same bytes stand in LMDB and in Redis, and travel in load plans.

    offset size
         0    1  1: the records cover `whole` (the chunk may be loaded); 0: they do not yet
         1    8  whole: the extent that makes the chunk complete
         9    -  records, one after another to the end of the value, at least one:

             0    8  segment set id
             8    2  rank
            10    4  slot
            14    8  bytes of a slab
            22    8  extent of the record
            30  8*n  checksum of each slab, in head order; n = heads of the extent

    extent: first layer u16, layers u16, first head u16, heads u16

The first byte stands alone so that a lookup is one get and one comparison. Segments are never rewritten, so a place
(set, rank, slot) names a record for ever: two locations are the same if their places are.
"""

from __future__ import annotations

import struct

from kvtier.errors import Corrupt
from kvtier.format.geometry import PAGE_BYTES, Extent, covers
from kvtier.index.base import Location

Place = tuple[int, int, int]
"""(set id, rank, slot)"""

COMPLETE = 1
PARTIAL = 0
RECORDS_MAX = 512
"""Of a chunk: ranks of one engine that write a part of it, or of several. To see what more of them cover takes longer
than computing the chunk: time grows with their square, and 4,000 of an entry that somebody made up took a minute."""

_HEAD = struct.Struct("<B4H")
_RECORD = struct.Struct("<QHIQ4H")
_CHECKSUM_BYTES = 8


def is_complete(value: bytes) -> bool:
    """Whether the chunk may be loaded. Reads the first byte only."""
    return value[:1] == b"\x01"


def if_complete(value: bytes | None) -> bytes | None:
    """The value, if its chunk may be loaded."""
    return value if value is not None and is_complete(value) else None


def first_set(value: bytes) -> int:
    """Set id of the first record, without the cost of `unpack`. Raises Corrupt when there is none."""
    if len(value) < _HEAD.size + _RECORD.size:
        raise Corrupt(f"index entry: {len(value)} bytes hold no record")
    return int.from_bytes(value[_HEAD.size : _HEAD.size + 8], "little")


def pack(locations: list[Location], whole: Extent) -> bytes:
    """The value of a chunk whose records lie at `locations` (at least one)."""
    complete = covers((location.extent for location in locations), whole)
    head = _HEAD.pack(
        COMPLETE if complete else PARTIAL, whole.first_layer, whole.n_layers, whole.first_head, whole.n_heads
    )
    return head + b"".join(_pack_record(location) for location in locations)


def unpack(value: bytes) -> list[Location]:
    """The locations in `value`, in the order they were added. Raises Corrupt on anything `pack` does not write."""
    return _parse(value)[0]


def locations_of(value: bytes | None) -> list[Location]:
    """As `unpack`, but none where the entry is absent or damaged: nobody can load from it."""
    try:
        return unpack(value) if value else []
    except Corrupt:
        return []


def add(value: bytes | None, location: Location, whole: Extent) -> bytes | None:
    """The value with `location` in it, or None when it is refused. Adding what is there already changes nothing.

    Refused: a location whose place or whole extent others have already, one that lies outside of `whole`, one of an
    entry that was begun for another `whole`, and one beyond RECORDS_MAX. `value` is None when the key has no entry yet.
    Raises Corrupt when `value` is malformed.
    """
    locations, stored_whole = ([], whole) if value is None else _parse(value)
    if location in locations:
        return value
    if stored_whole != whole or not whole.contains(location.extent) or len(locations) == RECORDS_MAX:
        return None
    if place(location) in map(place, locations) or covers((other.extent for other in locations), location.extent):
        return None
    return pack([*locations, location], whole)


def remove(value: bytes, gone: Place) -> bytes | None:
    """The value without the record at `gone`: b"" when no record is left, None when it is not there.

    Raises Corrupt when `value` is malformed.
    """
    locations, whole = _parse(value)
    kept = [location for location in locations if place(location) != gone]
    if len(kept) == len(locations):
        return None
    return pack(kept, whole) if kept else b""


def place(location: Location) -> Place:
    """What names a record: set, rank, slot."""
    return location[:3]


def _pack_record(location: Location) -> bytes:
    e = location.extent
    assert len(location.checksums) == e.n_heads, "one checksum a head"
    head = _RECORD.pack(
        location.set_id,
        location.rank,
        location.slot,
        location.slab_bytes,
        e.first_layer,
        e.n_layers,
        e.first_head,
        e.n_heads,
    )
    return head + struct.pack(f"<{e.n_heads}Q", *location.checksums)


def _parse(value: bytes) -> tuple[list[Location], Extent]:
    if len(value) < _HEAD.size:
        raise Corrupt(f"index entry: {len(value)} bytes, its head has {_HEAD.size}")
    flag, first_layer, n_layers, first_head, n_heads = _HEAD.unpack_from(value)
    whole = Extent(first_layer, n_layers, first_head, n_heads)
    locations: list[Location] = []
    offset = _HEAD.size
    while offset < len(value):
        location, offset = _parse_record(value, offset)
        locations.append(location)
        if len(locations) > RECORDS_MAX:
            raise Corrupt(f"index entry: more than {RECORDS_MAX} records")
    if not locations or not whole.cells:
        raise Corrupt(f"index entry: {len(locations)} records of {whole}")
    if flag == COMPLETE and len(locations) == 1 and locations[0].extent == whole:
        return locations, whole  # nearly always: one rank wrote all; a load asks it of every chunk
    if not all(whole.contains(location.extent) for location in locations):
        raise Corrupt(f"index entry: a record lies outside of {whole}")
    if len({place(location) for location in locations}) < len(locations):
        raise Corrupt("index entry: a place stands in it twice")
    if flag != (COMPLETE if covers((location.extent for location in locations), whole) else PARTIAL):
        raise Corrupt(f"index entry: its first byte, {flag}, contradicts its records")
    return locations, whole


def _parse_record(value: bytes, offset: int) -> tuple[Location, int]:
    """The record at `offset` and the offset after it."""
    checksums_at = offset + _RECORD.size
    if checksums_at > len(value):
        raise Corrupt("index entry: it ends within a record")
    set_id, rank, slot, slab_bytes, first_layer, n_layers, first_head, n_heads = _RECORD.unpack_from(value, offset)
    end = checksums_at + n_heads * _CHECKSUM_BYTES
    if end > len(value):
        raise Corrupt("index entry: it ends within a record's checksums")
    if not n_layers or not n_heads:
        raise Corrupt("index entry: a record without layers or heads")
    if not slab_bytes or slab_bytes % PAGE_BYTES:
        raise Corrupt(f"index entry: a slab of {slab_bytes} bytes is not whole pages")
    checksums = struct.unpack_from(f"<{n_heads}Q", value, checksums_at)
    return Location(set_id, rank, slot, slab_bytes, Extent(first_layer, n_layers, first_head, n_heads), checksums), end
