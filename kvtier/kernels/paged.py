"""Between the engine's paged KV and head-major slabs: views, and the torch reference of gather and scatter.

These move bytes without looking at them, so every element type is handled alike. The reference runs on any device;
tests and benchmarks compare the native code and the kernels with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class PagedLayer:
    """One layer of the engine's KV cache, as views into it (never copies).

    k: (n_blocks, block_tokens, heads, k_head_size), any strides but a contiguous last dimension.
    v: (n_blocks, block_tokens, heads, v_head_size), or None where K holds everything (MLA).
    """

    k: torch.Tensor
    v: torch.Tensor | None

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.k,) if self.v is None else (self.k, self.v)


@dataclass(frozen=True)
class PagedKV:
    """The layers that one rank holds, in order of layer number, over the same block ids.

    is_k_by_element: the bytes of K of a block and head are [element][token], as vLLM has them on most CPUs. What only
    moves bytes takes them as they are.
    """

    layers: tuple[PagedLayer, ...]
    block_tokens: int
    is_k_by_element: bool = False

    def vectors(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer, (n_blocks, block_tokens, heads, size), views of any strides."""
        k, *others = self.layers[layer].planes
        if self.is_k_by_element:
            k = k.as_strided(k.shape, (k.stride(0), 1, k.stride(2), k.shape[1]), k.storage_offset())
        return k, *others

    @property
    def vector_bytes(self) -> int:
        """Bytes of K and V of one token, one layer, one head."""
        return sum(plane.shape[-1] * plane.element_size() for plane in self.layers[0].planes)


class SlabRun(NamedTuple):
    """Contiguous slabs of one record, and the seeds of their checksums (kvtier.format.checksum)."""

    slabs: torch.Tensor  # (n_slabs, slab_bytes) uint8, contiguous
    key: bytes
    first_head: int
    first_layer: int


class Patch(NamedTuple):
    """Map from a part of some slabs to a part of a rank's pages; numbers count from the start of either.

    Layers [slab_layer, slab_layer + n_layers) of each slab are the pages' layers from `page_layer` on;
    the slabs, in order, are the pages' heads [page_head, page_head + n_heads).
    """

    slab_layer: int
    page_layer: int
    n_layers: int
    page_head: int
    n_heads: int


class Move(NamedTuple):
    """One chunk between blocks and slabs.

    block_ids: of the whole chunk. slabs: (patch.n_heads, slab_bytes) uint8, contiguous, on the pages' device.
    first_block: a scatter leaves the blocks before it untouched. key: of the chunk, 16 bytes, where a gather may sum
    what it writes (format.checksum). skip_bytes: of each slab, before the layers that the patch counts: layers of other
    sizes (kvtier.codecs.bands). position: of the chunk's first token in the prompt, for a gather.
    """

    patch: Patch
    block_ids: tuple[int, ...]
    slabs: torch.Tensor
    first_block: int = 0
    key: bytes = bytes(16)
    skip_bytes: int = 0
    position: int = 0


def plain_slabs(slabs: torch.Tensor, device: torch.device) -> tuple[int, int, int]:
    """(address, number, bytes of each) of slabs that kernels on `device` may read and fill in place.

    slabs: (n, slab_bytes) uint8, contiguous. Raises ValueError for others.
    """
    if slabs.dtype is torch.uint8 and slabs.is_contiguous() and slabs.device == device:
        shape = slabs.shape
        if len(shape) == 2:
            return slabs.data_ptr(), *shape
    raise ValueError(
        f"slabs {tuple(slabs.shape)} {slabs.dtype} on {slabs.device}, strides {slabs.stride()}, are not plain bytes"
    )


def gather(pages: PagedKV, patch: Patch, block_ids: Sequence[int], slabs: torch.Tensor) -> None:
    """Copies blocks into slabs.

    slabs: (n_heads, slab_bytes) uint8; each is [layer][K, then V][token][element], as kvtier.codecs.raw lays it out.
    """
    for page, slab in _planes(pages, patch, slabs, len(block_ids)):
        slab.copy_(page[list(block_ids)].permute(2, 0, 1, 3))


def scatter(pages: PagedKV, patch: Patch, block_ids: Sequence[int], first_block: int, slabs: torch.Tensor) -> None:
    """Copies slabs (as in `gather`) back into blocks, leaving the first `first_block` of `block_ids` untouched."""
    for page, slab in _planes(pages, patch, slabs, len(block_ids)):
        page[list(block_ids[first_block:])] = slab[:, first_block:].permute(1, 2, 0, 3)


def _planes(
    pages: PagedKV, patch: Patch, slabs: torch.Tensor, n_blocks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal shape but for order: pages (n_blocks_all, block, heads, bytes), slabs (heads, n, block, bytes)."""
    heads = slice(patch.page_head, patch.page_head + patch.n_heads)
    layer_bytes = n_blocks * pages.block_tokens * pages.vector_bytes
    for number in range(patch.n_layers):
        offset = (patch.slab_layer + number) * layer_bytes
        for plane in pages.layers[patch.page_layer + number].planes:
            row_bytes = plane.shape[-1] * plane.element_size()
            n_bytes = n_blocks * pages.block_tokens * row_bytes
            slab = slabs[:, offset : offset + n_bytes].view(patch.n_heads, n_blocks, pages.block_tokens, row_bytes)
            yield plane[:, :, heads].view(torch.uint8), slab
            offset += n_bytes
