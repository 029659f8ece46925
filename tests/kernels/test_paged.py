"""The native gather and scatter against the torch reference, and both against plain indexing."""

import pytest
import torch

from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch, gather, scatter

N_BLOCKS, BLOCK, HEADS, LAYERS = 12, 16, 4, 3
CHUNK_BLOCKS = [7, 2, 3, 4, 11, 0]


def packed(k_size: int, v_size: int, order: str, dtype: torch.dtype) -> PagedKV:
    """K and V of a token side by side in one buffer, dimensions outermost first as in `order` (L, B, N, H)."""
    sizes = {"L": LAYERS, "B": N_BLOCKS, "N": BLOCK, "H": HEADS}
    shape = [sizes[axis] for axis in order]
    noise = torch.Generator().manual_seed(1)
    buffer = torch.randint(0, 255, (*shape, (k_size + v_size) * dtype.itemsize), generator=noise).to(torch.uint8)
    values = buffer.view(dtype).permute(*[order.index(axis) for axis in "LBNH"], 4)
    layers = tuple(
        PagedLayer(values[n, ..., :k_size], values[n, ..., k_size:] if v_size else None) for n in range(LAYERS)
    )
    return PagedKV(layers, BLOCK)


# All pairs of sizes and orders, of orders and dtypes, and of sizes and dtypes.
CASES = [
    (k, v, order, (torch.bfloat16, torch.float32, torch.uint8)[(number + place) % 3])
    for number, (k, v) in enumerate(((32, 32), (80, 80), (576, 0), (64, 128), (5, 3)))
    for place, order in enumerate(("LBNH", "LBHN", "BLHN", "HLBN"))
]


def row(plane: torch.Tensor, token: int, head: int) -> torch.Tensor:
    return plane[CHUNK_BLOCKS[token // BLOCK], token % BLOCK, head]


@pytest.mark.parametrize(("k", "v", "order", "dtype"), CASES)
def test_gather_is_indexing_and_native_equals_reference(k: int, v: int, order: str, dtype: torch.dtype) -> None:
    pages = packed(k, v, order, dtype)
    patch = Patch(slab_layer=0, page_layer=1, n_layers=2, page_head=1, n_heads=3)
    tokens = len(CHUNK_BLOCKS) * BLOCK
    slab_bytes = -(-2 * tokens * (k + v) * dtype.itemsize // 4096) * 4096
    reference, native = (torch.zeros(3, slab_bytes, dtype=torch.uint8) for _ in range(2))
    gather(pages, patch, CHUNK_BLOCKS, reference)
    HostPages(pages).gather([Move(patch, tuple(CHUNK_BLOCKS), native)])
    assert torch.equal(native, reference)
    layer_bytes = tokens * (k + v) * dtype.itemsize
    for layer, token, head in ((0, 0, 0), (1, tokens - 1, 2), (0, 37, 1)):
        start = layer * layer_bytes + token * k * dtype.itemsize
        found = reference[head, start : start + k * dtype.itemsize]
        assert torch.equal(found, row(pages.layers[1 + layer].k, token, 1 + head).contiguous().view(torch.uint8))
        if v:
            start = layer * layer_bytes + (tokens * k + token * v) * dtype.itemsize
            found = reference[head, start : start + v * dtype.itemsize]
            want = row(pages.layers[1 + layer].planes[1], token, 1 + head).contiguous().view(torch.uint8)
            assert torch.equal(found, want)


@pytest.mark.parametrize(("k", "v", "order", "dtype"), CASES)
@pytest.mark.parametrize("first_block", [0, 2, 5])
def test_scatter_puts_back_and_leaves_the_rest(
    k: int, v: int, order: str, dtype: torch.dtype, first_block: int
) -> None:
    source = packed(k, v, order, dtype)
    patch = Patch(slab_layer=1, page_layer=0, n_layers=2, page_head=0, n_heads=HEADS)
    slabs = torch.zeros(HEADS, 3 * len(CHUNK_BLOCKS) * BLOCK * (k + v) * dtype.itemsize, dtype=torch.uint8)
    gather(source, patch, CHUNK_BLOCKS, slabs)
    one, two = packed(k, v, order, dtype), packed(k, v, order, dtype)
    for pages in (one, two):
        for layer in pages.layers:
            for plane in layer.planes:
                plane.zero_()
    scatter(one, patch, CHUNK_BLOCKS, first_block, slabs)
    HostPages(two).scatter([Move(patch, tuple(CHUNK_BLOCKS), slabs, first_block)])
    written = set(CHUNK_BLOCKS[first_block:])
    for number in range(LAYERS):
        for a, b, want in zip(
            one.layers[number].planes, two.layers[number].planes, source.layers[number].planes, strict=True
        ):
            for block in range(N_BLOCKS):
                expected = want[block] if number < 2 and block in written else torch.zeros_like(want[block])
                assert torch.equal(a[block].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
                assert torch.equal(b[block].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("blocks", [[0, 1, 12], [-1, 0, 1]])
def test_blocks_out_of_range_are_refused(blocks: list[int]) -> None:
    pages = packed(32, 32, "LBNH", torch.float32)
    patch = Patch(0, 0, LAYERS, 0, HEADS)
    slabs = torch.zeros(HEADS, LAYERS * 3 * BLOCK * 64 * 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out of range"):
        HostPages(pages).scatter([Move(patch, tuple(blocks), slabs)])
