"""On-disk format of segments and records: byte tables, packing and unpacking. No file I/O.

All integers are little-endian. Every header is one page (4096 bytes) whose CRC-32 (zlib's) is computed with the CRC
field zero. Unused bytes are zero.

A set has W files a rank, its stripes, because writes to one file exclude each other. Record slot s of a set is in
stripe s mod W, at place s div W. Bits 16 to 19 of the set id are W - 1; the bits above them are its time of creation,
Unix ms.

Segment file `<set>-<rank>-<stripe>.kvseg`: a header page, then record slots of `slot_bytes` each; the one at place p
starts at byte 4096 + p * slot_bytes.

    segment header              record header
    offset size                 offset size
         0    8  "KVTSEG01"          0    8  "KVTREC01"
         8    4  format version      8    4  format version
        12    4  CRC-32             12    4  CRC-32
        16   16  namespace id       16   16  key of the chunk
        32    8  segment set id     32   16  key of the chunk before it (namespace id for the first)
        40    4  rank               48   16  namespace id
        44    4  slots of the set   64    8  bytes of a slab
        48    8  slot_bytes         72    4  tokens
        56    8  extent             76    4  slot
        64    8  slab_bytes         80    8  extent
        72    8  created, unix ms   88    8  segment set id
        80   32  tenant's label    128  8*n  checksum of each slab, in head order (at most 496)
       112    4  stripe        128+8*n 16*n  signed namespaces: tag of each slab (at most 165 heads)

    extent: first layer u16, layers u16, first head u16, heads u16
    tags: kvtier.format.signing
    tenant's label: UTF-8, padded with zeros; blank for a set without a tenant

Record = header page, then one slab a head, in head order, each padded with zeros to whole pages: any run of heads is
one contiguous range. A record's header is written after its slabs: if the writer is killed, a valid header means a
complete record (after power loss the checksums decide). Segments are never rewritten.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import Corrupt
from kvtier.format.geometry import PAGE_BYTES, Extent

FORMAT_VERSION = 2
STRIPES_MAX = 16  # files of a set that one rank writes
SEGMENT_MAGIC = b"KVTSEG01"
RECORD_MAGIC = b"KVTREC01"
CHECKSUMS_OFFSET = 128
HEADS_PER_RECORD_MAX = (PAGE_BYTES - CHECKSUMS_OFFSET) // 8
TAG_BYTES = 16
HEADS_PER_SIGNED_RECORD_MAX = (PAGE_BYTES - CHECKSUMS_OFFSET) // (8 + TAG_BYTES)

_CRC_OFFSET = 12
_SEGMENT = struct.Struct("<8sII16sQIIQ4HQQ32sI")
_RECORD = struct.Struct("<8sII16s16s16sQII4HQ")


def new_set_id(created_ms: int, stripes: int, random_bits: int) -> int:
    """Return the id of a set with `stripes` files a rank; 16 random bits keep sets of one millisecond apart."""
    assert 1 <= stripes <= STRIPES_MAX and random_bits < 1 << 16
    return created_ms << 20 | (stripes - 1) << 16 | random_bits


def created_ms_of(set_id: int) -> int:
    """Return the time at which the set was made by the index's clock, Unix ms."""
    return set_id >> 20


def stripes_of(set_id: int) -> int:
    """Return the number of files that each rank has in a set."""
    return (set_id >> 16) % STRIPES_MAX + 1


def part_of(set_id: int, rank: int, slot: int) -> int:
    """Return the file of the set that holds a rank's record slot, as rank * 16 + stripe."""
    return rank * STRIPES_MAX + slot % ((set_id >> 16) % STRIPES_MAX + 1)  # `stripes_of` without a call


def parts_of(set_id: int, rank: int) -> range:
    """Return all files that a rank can have in the set."""
    return range(rank * STRIPES_MAX, rank * STRIPES_MAX + stripes_of(set_id))


def slot_start(set_id: int, slot: int, slot_bytes: int) -> int:
    """Return the byte of its file at which a record slot of the set starts."""
    return PAGE_BYTES + slot // ((set_id >> 16) % STRIPES_MAX + 1) * slot_bytes  # `stripes_of` without a call


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Header page of a segment file."""

    namespace: bytes
    set_id: int
    rank: int
    slots: int
    slot_bytes: int
    extent: Extent
    slab_bytes: int
    created_ms: int
    tenant: str = ""
    stripe: int = 0

    @property
    def part(self) -> int:
        return self.rank * STRIPES_MAX + self.stripe

    @property
    def stripes(self) -> int:
        return stripes_of(self.set_id)

    def slot_offset(self, slot: int) -> int:
        """Return the byte at which the record slot starts: one of this stripe, numbered within the set."""
        return slot_start(self.set_id, slot, self.slot_bytes)

    def bytes_up_to(self, slots: int) -> int:
        """Return the bytes of the file that the first `slots` slots of the set take."""
        return PAGE_BYTES + max(0, -(-(slots - self.stripe) // self.stripes)) * self.slot_bytes

    def offset_of(self, slot: int, extent: Extent, slab_bytes: int) -> int | None:
        """Return the byte at which the record in that slot starts. None where this file does not have the slot, or
        holds records of another extent or slab size."""
        place, stripe = divmod(slot, (self.set_id >> 16) % STRIPES_MAX + 1)  # `stripes_of` without a call
        if stripe != self.stripe or slot >= self.slots or self.slab_bytes != slab_bytes or self.extent != extent:
            return None
        return PAGE_BYTES + place * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.bytes_up_to(self.slots)

    def pack(self) -> bytes:
        place = self.namespace, self.set_id, self.rank, self.slots, self.slot_bytes
        rest = self.slab_bytes, self.created_ms, self.tenant.encode(), self.stripe
        return _with_crc(_SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, *place, *self.extent, *rest))

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader:
        """Parse a page. Raises Corrupt unless it is a complete, consistent segment header of this format version."""
        _check(page, SEGMENT_MAGIC, "segment")
        _, _, _, namespace, set_id, rank, slots, slot_bytes, *rest = _SEGMENT.unpack_from(page)
        l0, nl, h0, nh, slab_bytes, created_ms, tenant, stripe = rest
        extent, label = Extent(l0, nl, h0, nh), _label(tenant)
        header = cls(namespace, set_id, rank, slots, slot_bytes, extent, slab_bytes, created_ms, label, stripe)
        _check_slabs(extent, slab_bytes)
        if stripe >= header.stripes:
            raise Corrupt(f"segment header: stripe {stripe} of {header.stripes}")
        if slot_bytes != record_bytes(extent, slab_bytes):
            raise Corrupt(f"segment header: slot of {slot_bytes} bytes does not hold its record")
        return header


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header page of a record."""

    key: bytes
    parent: bytes
    namespace: bytes
    slab_bytes: int
    tokens: int
    slot: int
    extent: Extent
    set_id: int
    checksums: tuple[int, ...]

    def pack(self, tags: Iterable[bytes] = ()) -> bytes:
        """Return the page. `tags`: of the slabs, in a signed namespace."""
        identity = self.key, self.parent, self.namespace, self.slab_bytes, self.tokens, self.slot
        body = _RECORD.pack(RECORD_MAGIC, FORMAT_VERSION, 0, *identity, *self.extent, self.set_id)
        sums = struct.pack(f"<{len(self.checksums)}Q", *self.checksums)
        return _with_crc(body.ljust(CHECKSUMS_OFFSET, b"\0") + sums + b"".join(tags))

    @classmethod
    def unpack(cls, page: bytes) -> RecordHeader:
        """Parse a page. Raises Corrupt unless it is a complete, consistent record header of this format version."""
        _check(page, RECORD_MAGIC, "record")
        (_, _, _, key, parent, namespace, slab_bytes, tokens, slot, l0, nl, h0, nh, set_id) = _RECORD.unpack_from(page)
        extent = Extent(l0, nl, h0, nh)
        _check_slabs(extent, slab_bytes)
        sums = struct.unpack_from(f"<{nh}Q", page, CHECKSUMS_OFFSET)
        return cls(key, parent, namespace, slab_bytes, tokens, slot, extent, set_id, sums)


def tags_in(page: bytes, n_heads: int) -> list[bytes]:
    """Return the tags of a record's slabs from its header page: zeros if it is not signed, and fewer bytes if the page
    has no room for them all. n_heads: of the whole record."""
    first = CHECKSUMS_OFFSET + 8 * n_heads
    return [bytes(page[at : at + TAG_BYTES]) for at in range(first, first + TAG_BYTES * n_heads, TAG_BYTES)]


def _label(field: bytes) -> str:
    try:
        label = field.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise Corrupt("segment header: the tenant's label is not UTF-8") from None
    if not label.isprintable():  # control characters of a forged label could affect terminals and logs
        raise Corrupt("segment header: the tenant's label is not printable")
    return label


def record_bytes(extent: Extent, slab_bytes: int) -> int:
    """Return the bytes of a record on disk: its header page and one slab a head."""
    return PAGE_BYTES + extent.n_heads * slab_bytes


def is_blank(page: bytes) -> bool:
    """Return whether the page was never written: an unused slot, or one whose writer died before the header."""
    return not any(page)


def _with_crc(body: bytes) -> bytes:
    page = bytearray(body.ljust(PAGE_BYTES, b"\0"))
    struct.pack_into("<I", page, _CRC_OFFSET, zlib.crc32(page))
    return bytes(page)


def _check(page: bytes, magic: bytes, what: str) -> None:
    if len(page) < PAGE_BYTES:
        raise Corrupt(f"{what} header: {len(page)} bytes, a page has {PAGE_BYTES}")
    if page[:8] != magic:
        raise Corrupt(f"{what} header: starts with {page[:8]!r}")
    version, crc = struct.unpack_from("<II", page, 8)
    blank = bytearray(page[:PAGE_BYTES])
    blank[_CRC_OFFSET : _CRC_OFFSET + 4] = bytes(4)
    if zlib.crc32(blank) != crc:
        raise Corrupt(f"{what} header: its CRC is wrong")
    if version != FORMAT_VERSION:
        raise Corrupt(f"{what} header: format {version}, this kvtier reads {FORMAT_VERSION}")


def _check_slabs(extent: Extent, slab_bytes: int) -> None:
    if not 1 <= extent.n_heads <= HEADS_PER_RECORD_MAX or extent.n_layers < 1:
        raise Corrupt(f"header: {extent.n_heads} heads x {extent.n_layers} layers")
    if slab_bytes <= 0 or slab_bytes % PAGE_BYTES:
        raise Corrupt(f"header: a slab of {slab_bytes} bytes is not whole pages")
