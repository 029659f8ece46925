"""Read plan: which slabs of which records together make one rank's share of a chunk, by its index entry. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import record_bytes, slot_start
from kvtier.index.base import Location
from kvtier.kernels.paged import Patch


@dataclass(frozen=True, slots=True)
class Source:
    """A run of slabs of one record, and where they go.

    wanted: the part of the record that this rank takes; its heads are the slabs that are read.
    slot_offset: byte within the arena slot at which the first slab lands.
    """

    location: Location
    wanted: Extent
    slot_offset: int

    @property
    def slab_bytes(self) -> int:
        return self.location.slab_bytes

    @property
    def n_bytes(self) -> int:
        return self.wanted.n_heads * self.slab_bytes

    @property
    def header_offset(self) -> int:
        """Byte of the segment file at which the record's header page starts."""
        return place_in_file(self.location).start

    @property
    def first_slab(self) -> int:
        """Place of the first slab that is read among the record's."""
        return self.wanted.first_head - self.location.extent.first_head

    @property
    def file_offset(self) -> int:
        """Byte of the segment file at which the first slab starts."""
        return self.header_offset + PAGE_BYTES + self.first_slab * self.location.slab_bytes

    @property
    def checksums(self) -> tuple[int, ...]:
        return self.location.checksums[self.first_slab : self.first_slab + self.wanted.n_heads]

    def patch(self, held: Extent) -> Patch:
        """Return the place of the slabs in the pages of a rank that holds `held`."""
        return Patch(
            slab_layer=self.wanted.first_layer - self.location.extent.first_layer,
            page_layer=self.wanted.first_layer - held.first_layer,
            n_layers=self.wanted.n_layers,
            page_head=self.wanted.first_head - held.first_head,
            n_heads=self.wanted.n_heads,
        )


def place_in_file(location: Location) -> range:
    """Bytes of the segment file that the record takes, from its header page on: slots are as large as their records."""
    n_bytes = record_bytes(location.extent, location.slab_bytes)
    start = slot_start(location.set_id, location.slot, n_bytes)
    return range(start, start + n_bytes)


def sources_of(locations: Sequence[Location], held: Extent, slot_bytes: int) -> tuple[Source, ...] | None:
    """Reads that together fill `held`; None when they do not cover it or exceed the slot."""
    parts = _parts_of(tuple(location.extent for location in locations), held)
    if parts is None:
        return None
    sources = []
    offset = PAGE_BYTES
    for number, wanted in parts:
        source = Source(locations[number], wanted, offset)
        offset += source.n_bytes
        sources.append(source)
    return tuple(sources) if offset <= slot_bytes else None


@lru_cache(maxsize=256)
def _parts_of(extents: tuple[Extent, ...], held: Extent) -> tuple[tuple[int, Extent], ...] | None:
    """Return the part to take of each record, by its number; None when they do not cover `held`. Cached, because a load
    asks for every chunk, and the chunks of a prompt are cut alike.

    Records of most layers are taken first, then those of most heads: a slab is read whole whatever is wanted of it, so
    what several records have would else be read several times, and not fit.
    """
    by_share = sorted(range(len(extents)), key=lambda number: _shared(extents[number], held), reverse=True)
    parts: list[tuple[int, Extent]] = []
    holes = [held]
    for number in by_share:
        left: list[Extent] = []
        for hole in holes:
            wanted = hole.intersect(extents[number])
            if wanted is None:
                left.append(hole)
                continue
            parts.append((number, wanted))
            left += hole.minus(wanted)
        holes = left
    return None if holes else tuple(parts)


def end_of(sources: Sequence[Source]) -> int:
    """Byte of the arena slot at which the last slab ends."""
    return max(source.slot_offset + source.n_bytes for source in sources)


def _shared(extent: Extent, held: Extent) -> tuple[int, int]:
    """(layers, heads)"""
    common = extent.intersect(held)
    return (common.n_layers, common.n_heads) if common else (0, 0)
