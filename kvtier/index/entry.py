"""Index entry: the locations of a chunk's records as bytes.

All integers are little-endian. LMDB, Redis and load plans hold the same bytes.

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

The first byte alone says whether the chunk is complete, so that a lookup is one get and one comparison. Segments are
never rewritten, so a place (set, rank, slot) identifies a record permanently.
"""

import struct
from collections.abc import Iterable
from contextlib import suppress

from kvtier.errors import Corrupt
from kvtier.format.geometry import PAGE_BYTES, Extent, covers
from kvtier.index.base import Location

Place = tuple[int, int, int]  # (set id, rank, slot)

COMPLETE = 1
PARTIAL = 0
# Records of a chunk, one for each writing rank. The time of `covers` grows with their square: a forged entry with 4,000
# records took a minute.
RECORDS_MAX = 512

# Retracting this removes a damaged entry, and nothing else, because no set has the id 0.
NOWHERE = Location(0, 0, 0, 0, Extent(0, 0, 0, 0), ())

_HEAD = struct.Struct("<B4H")
_RECORD = struct.Struct("<QHIQ4H")
_CHECKSUM_BYTES = 8
FIRST_SET = slice(_HEAD.size, _HEAD.size + 8)  # the bytes of an entry that hold the set id of its first record


def is_complete(value: bytes) -> bool:
    """Return whether the chunk may be loaded. Reads the first byte only."""
    return value[:1] == b"\x01"


def complete_or_none(values: Iterable[bytes | None]) -> list[bytes | None]:
    """Return the values, with None for those whose chunks may not be loaded."""
    return [value if value is not None and value[:1] == b"\x01" else None for value in values]


def first_set(value: bytes) -> int:
    """Return the set id of the first record, without the cost of `unpack`. Raises Corrupt when there is none."""
    if len(value) < _HEAD.size + _RECORD.size:
        raise Corrupt(f"index entry: {len(value)} bytes hold no record")
    return int.from_bytes(value[FIRST_SET], "little")


def pack(locations: list[Location], whole: Extent) -> bytes:
    """Return the value of a chunk with records at `locations` (at least one)."""
    is_whole = len(locations) == 1 and locations[0].extent == whole  # the usual case: one rank wrote the whole chunk
    flag = COMPLETE if is_whole or covers((location.extent for location in locations), whole) else PARTIAL
    packed = [_HEAD.pack(flag, whole.first_layer, whole.n_layers, whole.first_head, whole.n_heads)]
    for set_id, rank, slot, slab_bytes, e, checksums in locations:
        assert len(checksums) == e.n_heads, "one checksum a head"
        packed.append(_RECORD.pack(set_id, rank, slot, slab_bytes, e.first_layer, e.n_layers, e.first_head, e.n_heads))
        packed.append(struct.pack(f"<{e.n_heads}Q", *checksums))
    return b"".join(packed)


def unpack(value: bytes) -> list[Location]:
    """Return the locations in the order they were added. Raises Corrupt for anything that `pack` does not write."""
    return parse(value)[0]


def locations_of(value: bytes | None) -> list[Location]:
    """Return the locations; none where the entry is absent or damaged, since no load can use it."""
    try:
        return unpack(value) if value else []
    except Corrupt:
        return []


def add(value: bytes | None, location: Location, whole: Extent) -> bytes | None:
    """Return the value with `location` in it, the same value if it is there already, or None when it is refused.

    Refused: a location whose place or whole extent others have already, one outside of `whole`, one of an entry that
    was begun for another `whole`, and one beyond RECORDS_MAX. value: None when the key has no entry yet. A damaged
    value, which no load can use, is replaced.
    """
    if value is None and location.extent == whole:  # the usual case: one rank writes the whole chunk
        return pack([location], whole)
    locations, stored_whole = list[Location](), whole
    if value is not None:
        with suppress(Corrupt):
            locations, stored_whole = parse(value)
    if location in locations:
        return value
    if stored_whole != whole or not whole.contains(location.extent) or len(locations) == RECORDS_MAX:
        return None
    if place(location) in map(place, locations) or covers((other.extent for other in locations), location.extent):
        return None
    return pack([*locations, location], whole)


def remove(value: bytes | None, gone: Place) -> bytes | None:
    """Return the value without the record at `gone`, b"" when no record is left, None when the record is not in it. A
    damaged value, which no load can use, becomes b""."""
    if not value:
        return None
    try:
        locations, whole = parse(value)
    except Corrupt:
        return b""
    kept = [location for location in locations if place(location) != gone]
    if len(kept) == len(locations):
        return None
    return pack(kept, whole) if kept else b""


def place(location: Location) -> Place:
    return location[:3]


def parse(value: bytes) -> tuple[list[Location], Extent]:
    """Return the locations in the order they were added, and the extent that makes the chunk complete. Raises Corrupt
    for anything that `pack` does not write."""
    n_bytes = len(value)
    if n_bytes < _HEAD.size:
        raise Corrupt(f"index entry: {n_bytes} bytes, its head has {_HEAD.size}")
    flag, first_layer, n_layers, first_head, n_heads = _HEAD.unpack_from(value)
    whole = Extent(first_layer, n_layers, first_head, n_heads)
    locations: list[Location] = []
    offset = _HEAD.size
    while offset < n_bytes:
        checksums_at = offset + _RECORD.size
        if checksums_at > n_bytes:
            raise Corrupt("index entry: it ends within a record")
        set_id, rank, slot, slab_bytes, l0, nl, h0, nh = _RECORD.unpack_from(value, offset)
        offset = checksums_at + nh * _CHECKSUM_BYTES
        if offset > n_bytes:
            raise Corrupt("index entry: it ends within a record's checksums")
        if not nl or not nh:
            raise Corrupt("index entry: a record without layers or heads")
        if not slab_bytes or slab_bytes % PAGE_BYTES:
            raise Corrupt(f"index entry: a slab of {slab_bytes} bytes is not whole pages")
        checksums = struct.unpack_from(f"<{nh}Q", value, checksums_at)
        locations.append(Location(set_id, rank, slot, slab_bytes, Extent(l0, nl, h0, nh), checksums))
        if len(locations) > RECORDS_MAX:
            raise Corrupt(f"index entry: more than {RECORDS_MAX} records")
    if not locations or not n_layers or not n_heads:
        raise Corrupt(f"index entry: {len(locations)} records of {whole}")
    if flag == COMPLETE and len(locations) == 1 and locations[0].extent == whole:
        return locations, whole  # fast path: one rank wrote all, as nearly always
    if not all(whole.contains(location.extent) for location in locations):
        raise Corrupt(f"index entry: a record is outside of {whole}")
    if len({place(location) for location in locations}) < len(locations):
        raise Corrupt("index entry: a place occurs twice")
    if flag != (COMPLETE if covers((location.extent for location in locations), whole) else PARTIAL):
        raise Corrupt(f"index entry: its first byte, {flag}, contradicts its records")
    return locations, whole
