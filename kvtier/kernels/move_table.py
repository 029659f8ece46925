"""Move tables: addresses of planes and lists of moves, as tables of numbers for kernels over an engine's pages.

Kernels check nothing. What is out of range of pages is found here, before anything is launched.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.paged import Move, PagedKV, Patch, plain_slabs


class Alike(NamedTuple):
    """Moves that one launch can do together, by their places among all. shape: of the slabs of each."""

    patch: Patch
    shape: torch.Size
    n_blocks: int
    places: list[int]


def alike(moves: Sequence[Move]) -> Iterable[Alike]:
    """All moves, those of one patch, shape and number of blocks together."""
    groups: dict[tuple[Patch, torch.Size, int], Alike] = {}
    group: Alike | None = None
    for place, move in enumerate(moves):
        patch, shape, n_blocks = move.patch, move.slabs.shape, len(move.block_ids)
        # Neighbours mostly are alike, and comparing is cheaper than hashing.
        if group is None or n_blocks != group.n_blocks or shape != group.shape or patch != group.patch:
            group = groups.setdefault((patch, shape, n_blocks), Alike(patch, shape, n_blocks, []))
        group.places.append(place)
    return groups.values()


class PageTable:
    """The pages of a PagedKV, all on one device. Keeps no tensor alive. Immutable.

    planes: (layers, planes a layer, 4) int64: address, then strides of block, token and head in bytes.
    bits: of all numbers in it, one upon the other, which says what they are multiples of.
    """

    def __init__(self, pages: PagedKV) -> None:
        planes = [layer.planes for layer in pages.layers]
        self.planes = np.array([[_describe(plane) for plane in of_layer] for of_layer in planes], dtype=np.int64)
        self.bits = int(np.bitwise_or.reduce(self.planes, axis=None))
        self._device = pages.layers[0].k.device
        self._n_blocks = min(plane.shape[0] for of_layer in planes for plane in of_layer)
        self._n_layers, self._n_heads = len(planes), pages.layers[0].k.shape[2]

    def holds(self, patch: Patch) -> bool:
        """Return True if the patch has only layers and heads of the pages, and none before the slabs' first layer."""
        fits = patch.page_layer + patch.n_layers <= self._n_layers and patch.page_head + patch.n_heads <= self._n_heads
        return fits and min(patch.page_layer, patch.page_head, patch.slab_layer) >= 0

    def rows(self, moves: Sequence[Move], to_pages: bool) -> npt.NDArray[np.int64]:
        """(moves, 2 + blocks of each) int64: address in the first slab, first block to move (from pages: all), ids.

        moves: one or more, all of as many blocks. Raises ValueError for slabs that are not contiguous bytes on the
        pages' device, and for blocks that the pages do not have.
        """
        device = self._device
        words: list[int] = []
        for move in moves:
            address, _, _ = plain_slabs(move.slabs, device)
            words += (address + move.skip_bytes, move.first_block if to_pages else 0, *move.block_ids)
        table = np.frombuffer(array("q", words), dtype=np.int64).reshape(len(moves), 2 + len(moves[0].block_ids))
        blocks = table[:, 2:]
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self._n_blocks:
            raise ValueError(f"blocks {blocks.min()}-{blocks.max()} are out of range of {self._n_blocks}")
        if table[:, 1].min() < 0:
            raise ValueError(f"first block {table[:, 1].min()} is out of range")
        return table


def _describe(plane: torch.Tensor) -> tuple[int, ...]:
    """The stride of a dimension of one is never used and may be anything: it must not count against the alignment."""
    assert plane.stride(3) == 1
    steps = (stride if n > 1 else 0 for stride, n in zip(plane.stride()[:3], plane.shape[:3], strict=True))
    return (plane.data_ptr(), *(step * plane.element_size() for step in steps))
