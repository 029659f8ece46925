"""Read plan: the slabs of a chunk's records that together make up one rank's share of it, by the index entry. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import record_bytes, slot_start
from kvtier.index.base import Location
from kvtier.kernels.paged import Patch

Form = tuple[Extent, int]  # of a record: its extent, and the bytes of a slab
_form_of = attrgetter("extent", "slab_bytes")


class Cut(NamedTuple):
    """Run of slabs that a rank reads of a record, and their place. All records of one form have the same cut.

    wanted: the part of the record that the rank needs. One slab is read for each head of it. first_slab: number of the
    first of these among the record's slabs. slot_offset: their offset within the arena slot, bytes. patch: place of the
    slabs in the rank's pages.
    """

    wanted: Extent
    first_slab: int
    slab_bytes: int
    n_bytes: int
    slot_offset: int
    patch: Patch


class Source(NamedTuple):
    """A run of slabs of one record. checksums: of these slabs."""

    location: Location
    cut: Cut
    checksums: tuple[int, ...]


def place_in_file(location: Location) -> range:
    """Return the range of bytes of the record in its segment file. A slot is as large as its record."""
    n_bytes = record_bytes(location.extent, location.slab_bytes)
    start = slot_start(location.set_id, location.slot, n_bytes)
    return range(start, start + n_bytes)


def sources_of(locations: Sequence[Location], held: Extent, slot_bytes: int) -> tuple[Source, ...] | None:
    """Return the sources that together fill `held`; None if the records do not cover it or exceed the slot."""
    cuts = cuts_of(tuple(map(_form_of, locations)), held, slot_bytes)
    if cuts is None:
        return None
    sources = []
    for number, cut in cuts:
        location, first = locations[number], cut.first_slab
        sources.append(Source(location, cut, location.checksums[first : first + cut.wanted.n_heads]))
    return tuple(sources)


@lru_cache(maxsize=256)
def cuts_of(forms: tuple[Form, ...], held: Extent, slot_bytes: int) -> tuple[tuple[int, Cut], ...] | None:
    """Return the cut of each record that is needed, by the record's number; None as `sources_of`. Cached, because the
    chunks of a prompt have the same cuts."""
    parts = _parts_of([extent for extent, _ in forms], held)
    if parts is None:
        return None
    cuts = []
    offset = PAGE_BYTES
    for number, wanted in parts:
        extent, slab_bytes = forms[number]
        n_bytes = wanted.n_heads * slab_bytes
        patch = Patch(
            slab_layer=wanted.first_layer - extent.first_layer,
            page_layer=wanted.first_layer - held.first_layer,
            n_layers=wanted.n_layers,
            page_head=wanted.first_head - held.first_head,
            n_heads=wanted.n_heads,
        )
        cuts.append((number, Cut(wanted, wanted.first_head - extent.first_head, slab_bytes, n_bytes, offset, patch)))
        offset += n_bytes
    return tuple(cuts) if offset <= slot_bytes else None


def _parts_of(extents: Sequence[Extent], held: Extent) -> list[tuple[int, Extent]] | None:
    """Return the part to take of each record, by the record's number; None if the records do not cover `held`.

    Records with the most layers are used first, then those with the most heads. A slab is read whole, even for a few of
    its layers, so many small parts of large records would be read several times and exceed the slot.
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
    return None if holes else parts


def slabs_bytes(sources: Sequence[Source]) -> int:
    """Return the size of all slabs, which are contiguous in the arena slot."""
    last = sources[-1].cut
    return last.slot_offset + last.n_bytes - PAGE_BYTES


def _shared(extent: Extent, held: Extent) -> tuple[int, int]:
    """Return the numbers of layers and of heads that both extents have."""
    common = extent.intersect(held)
    return (common.n_layers, common.n_heads) if common else (0, 0)
