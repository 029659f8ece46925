"""The byte formats: segments, records, and the values of both index kinds."""

import struct
import zlib
from contextlib import suppress
from pathlib import Path

from kvtier.errors import Corrupt
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader, SegmentHeader
from kvtier.index import entry, values
from kvtier.index.base import Location, SetInfo
from kvtier.storage.segments import parse_segment_name, segment_name

SPACE = bytes(range(16))
WHOLE = Extent(0, 4, 0, 8)
HALF = Extent(0, 4, 4, 4)
SEGMENT = SegmentHeader(SPACE, 7, 1, 15, 9 * PAGE_BYTES, WHOLE, PAGE_BYTES, 1_700_000_000_000, "tenant-ü")
RECORD = RecordHeader(b"k" * 16, b"p" * 16, SPACE, PAGE_BYTES, 256, 3, WHOLE, 7, tuple(range(8)))
AT = Location(7, 1, 3, PAGE_BYTES, WHOLE, tuple(range(8)))
INFO = SetInfo(7, SPACE, "an-engine-12-abcdef", 1 << 30, 1.5, 2.5, tenant="ü", uses=3)


def with_crc(data: bytes) -> bytes:
    """The page with the CRC that it should have: what only its CRC refuses says nothing of what comes after that."""
    page = bytearray(data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    page[12:16] = bytes(4)
    struct.pack_into("<I", page, 12, zlib.crc32(page))
    return bytes(page)


def segment_header(data: bytes, _: Path) -> None:
    for page in (data, with_crc(data)):
        try:
            header = SegmentHeader.unpack(page)
        except Corrupt:
            continue
        assert SegmentHeader.unpack(header.pack()) == header
        assert header.file_bytes >= header.slot_offset(0) >= PAGE_BYTES


def record_header(data: bytes, _: Path) -> None:
    for page in (data, with_crc(data)):
        try:
            header = RecordHeader.unpack(page)
        except Corrupt:
            continue
        assert RecordHeader.unpack(header.pack()) == header
        assert len(header.checksums) == header.extent.n_heads


def index_entry(data: bytes, _: Path) -> None:
    """What is taken is what `pack` writes, to the byte; changes of it are such values again."""
    entry.is_complete(data)
    try:
        locations = entry.unpack(data)
    except Corrupt:
        assert entry.add(data, AT, WHOLE) == entry.add(None, AT, WHOLE)
        assert entry.remove(data, (7, 1, 3)) == (b"" if data else None)
        assert entry.locations_of(data) == []
        with suppress(Corrupt):
            entry.first_set(data)
        return
    assert entry.locations_of(data) == locations
    assert entry.first_set(data) == locations[0].set_id
    head = struct.unpack_from("<4H", data, 1)
    assert entry.pack(locations, Extent(*head)) == data
    for value in (entry.add(data, AT, WHOLE), entry.remove(data, entry.place(locations[-1]))):
        if value:
            entry.unpack(value)


def index_set(data: bytes, _: Path) -> None:
    info = values.unpack_set(7, data)
    assert values.unpack_set(7, values.pack_set(info)) is not None


def index_note(data: bytes, _: Path) -> None:
    value, _ = values.unpack_note(data)
    assert data.endswith(value)
    values.has_expired(data, 5.0)


def file_name(data: bytes, _: Path) -> None:
    name = data.decode("utf-8", "surrogateescape")
    parsed = parse_segment_name(name)
    assert parsed is None or segment_name(*parsed) == name


SEEDS = {
    "segment_header": [
        SEGMENT.pack(),
        SegmentHeader(SPACE, 2**64 - 1, 9999, 1, 2 * PAGE_BYTES, Extent(9, 1, 3, 1), PAGE_BYTES, 0).pack(),
    ],
    "record_header": [RECORD.pack()],
    "index_entry": [
        entry.pack([AT], WHOLE),
        entry.pack([AT._replace(extent=HALF, checksums=(1, 2, 3, 4))], WHOLE),
        entry.pack([Location(n, 0, n, PAGE_BYTES, Extent(n, 1, 0, 8), AT.checksums) for n in range(4)], WHOLE),
    ],
    "index_set": [values.pack_set(INFO), values.pack_set(SetInfo(1, SPACE, "", 1, 0.0, 0.0))],
    "index_note": [values.pack_note(b"value", None), values.pack_note(b"", 5.0)],
    "file_name": [b"00000000000000ff-0001-00.kvseg", b"1a20056a031145bc-9999-00.kvseg"],
}
