"""Pages whose layers are not alike, as bands of neighbouring layers that are: engines that quantize their KV leave some
layers out. Gather and scatter have one row size a launch, so each band has its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch


class Copier(Protocol):
    """Gather and scatter over one engine's pages, whose layers are alike."""

    def gather(self, moves: Sequence[Move]) -> None: ...

    def scatter(self, moves: Sequence[Move]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Band:
    """layers: numbers within the model."""

    layers: range
    copier: Copier


class BandedPages:
    """A Copier over pages of any layers. Slabs are as kvtier.codecs.raw lays them out."""

    def __init__(
        self, pages: PagedKV, geometry: Geometry, held: Extent, make_copier: Callable[[PagedKV], Copier]
    ) -> None:
        """held: the layers and heads of the model that the pages are."""
        for number, layer in enumerate(pages.layers, held.first_layer):
            assert sum(row_bytes(layer)) == geometry.form_of(number).vector_bytes, f"layer {number}: {row_bytes(layer)}"
        self._geometry = geometry
        self._held = held
        self._chunk_blocks = geometry.chunk_tokens // pages.block_tokens
        self._bands = []
        first = held.first_layer
        for _, alike in groupby(pages.layers, row_bytes):
            layers = tuple(alike)
            copier = make_copier(PagedKV(layers, pages.block_tokens))
            self._bands.append(_Band(range(first, first + len(layers)), copier))
            first += len(layers)

    def gather(self, moves: Sequence[Move]) -> None:
        """Gather like kvtier.kernels.paged.gather, a launch a band. Raises ValueError where a move is out of range."""
        for band, parts in self._split(moves):
            band.copier.gather(parts)

    def scatter(self, moves: Sequence[Move]) -> None:
        """Scatter like kvtier.kernels.paged.scatter. Raises as `gather` does."""
        for band, parts in self._split(moves):
            band.copier.scatter(parts)

    def _split(self, moves: Sequence[Move]) -> list[tuple[_Band, list[Move]]]:
        for move in moves:
            self._check(move)
        split = [(band, [part for move in moves if (part := self._part(band, move))]) for band in self._bands]
        return [(band, parts) for band, parts in split if parts]

    def _part(self, band: _Band, move: Move) -> Move | None:
        """Return the part of a move in the band. Its slabs hold the record's other layers, too."""
        patch, begin = move.patch, self._begin(move)
        first = max(band.layers.start, begin + patch.slab_layer)
        end = min(band.layers.stop, begin + patch.slab_layer + patch.n_layers)
        if first >= end:
            return None
        in_band = Patch(0, first - band.layers.start, end - first, patch.page_head, patch.n_heads)
        return move._replace(patch=in_band, skip_bytes=self._offset(begin, first))

    def _begin(self, move: Move) -> int:
        """The first layer of the record that the slabs are of."""
        return self._held.first_layer + move.patch.page_layer - move.patch.slab_layer

    def _offset(self, begin: int, layer: int) -> int:
        """Byte of a slab that begins with layer `begin` where `layer` begins."""
        return self._geometry.chunk_tokens * self._geometry.vectors_bytes(range(begin, layer))

    def _check(self, move: Move) -> None:
        patch, begin, held = move.patch, self._begin(move), self._held
        end = begin + patch.slab_layer + patch.n_layers
        fits = begin >= 0 and min(patch.slab_layer, patch.page_layer) >= 0 and end <= held.end_layer
        fits = fits and len(move.block_ids) == self._chunk_blocks
        if not fits or patch.n_heads != move.slabs.shape[0] or self._offset(begin, end) > move.slabs.shape[1]:
            raise ValueError(
                f"{patch} of {len(move.block_ids)} blocks is out of range of layers {held.first_layer} to "
                f"{held.end_layer - 1} or of slabs {tuple(move.slabs.shape)}"
            )


def row_bytes(layer: PagedLayer) -> tuple[int, ...]:
    """Bytes of each vector of one token and head: layers that have the same are alike."""
    return tuple(plane.shape[-1] * plane.element_size() for plane in layer.planes)
