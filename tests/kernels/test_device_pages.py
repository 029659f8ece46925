"""The Triton gather and scatter against the torch reference: every byte of pages and slabs, and around them."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.format.geometry import padded
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch, gather, scatter
from kvtier.kernels.table_kernel import TableAnswer, TableKernel
from tests.kernels.device_pages import GUARD, LAYOUTS, Cache, noise
from tests.kernels.device_rig import DEVICE, device

FP8 = torch.float8_e4m3fn


def slab_bytes(cache: Cache, patch: Patch, n_blocks: int) -> int:
    row = (cache.k_size + cache.v_size) * cache.dtype.itemsize
    return padded((patch.slab_layer + patch.n_layers) * n_blocks * cache.tokens * row)


def buffer_of_slabs(patch: Patch, size: int, shift: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes with a guard before and behind, and the slabs between."""
    whole = noise(2 * GUARD + shift + patch.n_heads * size, seed)
    return whole, whole[GUARD + shift :][: patch.n_heads * size].view(patch.n_heads, size)


def check(cache: Cache, parts: list[tuple[Patch, tuple[int, ...], int]], shift: int = 0) -> None:
    """Gathers all parts (patch, block ids, first block), then scatters other slabs, and compares with the reference."""
    before = noise(cache.n_bytes, 1)
    for first_seed in (10, 20):
        ours, theirs = before.clone(), before.clone()
        our_pages, their_pages = cache.pages(ours), cache.pages(theirs)
        moves, pairs = [], []
        for number, (patch, block_ids, first_block) in enumerate(parts):
            size = slab_bytes(cache, patch, len(block_ids))
            ours_whole, ours_slabs = buffer_of_slabs(patch, size, shift, first_seed + number)
            _, their_slabs = buffer_of_slabs(patch, size, 0, 0)
            their_slabs.copy_(ours_slabs)
            moves.append(Move(patch, block_ids, ours_slabs, first_block))
            pairs.append((ours_whole, ours_whole.clone(), ours_slabs, their_slabs))
            if first_seed == 10:
                gather(their_pages, patch, block_ids, their_slabs)
            else:
                scatter(their_pages, patch, block_ids, first_block, their_slabs)
        mover = device.DevicePages(our_pages)
        (mover.gather if first_seed == 10 else mover.scatter)(moves)
        assert torch.equal(ours, theirs), "the cache and what lies around it"
        for whole, was, slabs, expected in pairs:
            assert torch.equal(slabs, expected)
            end = GUARD + shift
            assert torch.equal(whole[:end], was[:end]) and torch.equal(whole[-GUARD:], was[-GUARD:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    dtype, size = [(torch.bfloat16, 128), (FP8, 64), (torch.float16, 80)][LAYOUTS.index(layout) % 3]
    cache = Cache(layout, dtype, size, size, layers=2)
    whole = Patch(0, 0, 2, 0, cache.heads)
    check(cache, [(whole, (5, 2), 0), (whole, (7, 0), 1)])


@pytest.mark.parametrize(("size", "tokens"), [(96, 16), (256, 16), (128, 64), (80, 48), (64, 256)])
def test_head_and_block_sizes(size: int, tokens: int) -> None:
    cache = Cache("B2NHD", torch.bfloat16, size, size, layers=1, blocks=3, tokens=tokens)
    check(cache, [(Patch(0, 0, 1, 0, 2), (2, 0), 1)])


@pytest.mark.parametrize("layout", ["mla3", "mla4"])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 64), (FP8, 16)])
def test_mla(layout: str, dtype: torch.dtype, tokens: int) -> None:
    cache = Cache(layout, dtype, 576, 0, heads=1, layers=2, blocks=4, tokens=tokens)
    check(cache, [(Patch(1, 0, 2, 0, 1), (3, 0), 0), (Patch(0, 1, 1, 0, 1), (1,), 0)])


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Cache, list[tuple[Patch, tuple[int, ...], int]], int]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, FP8, torch.uint8, torch.float32]))
    k_size, v_size = draw(st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (48, 32), (5, 3), (20, 20)]))
    layout = draw(st.sampled_from(LAYOUTS if k_size == v_size else LAYOUTS[:6]))
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shift = draw(st.sampled_from([0, 0, 16, 8, 4]))
    cache = Cache(layout, dtype, k_size, v_size, heads, layers, 7, draw(st.sampled_from([16, 24])), shift)
    parts = []
    block_ids = draw(st.permutations(range(cache.blocks)))
    for _ in range(draw(st.integers(1, 3))):
        n_blocks, n_layers, n_heads = draw(st.integers(1, 2)), draw(st.integers(1, layers)), draw(st.integers(1, heads))
        patch = Patch(
            draw(st.integers(0, 2)),
            draw(st.integers(0, layers - n_layers)),
            n_layers,
            draw(st.integers(0, heads - n_heads)),
            n_heads,
        )
        parts.append((patch, tuple(block_ids[:n_blocks]), draw(st.integers(0, n_blocks))))
        block_ids = block_ids[n_blocks:]
    return cache, parts, draw(st.sampled_from([0, 0, 8, 2, 1]))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(_cases())
@example((Cache("LBHNC", torch.uint8, 5, 3, 3, 2, 7, 16, 4), [(Patch(1, 1, 1, 1, 2), (6, 1), 1)], 1))
def test_any_patch_of_any_cache(case: tuple[Cache, list[tuple[Patch, tuple[int, ...], int]], int]) -> None:
    check(*case)


def test_more_heads_than_a_tile() -> None:
    cache = Cache("B2NHD", torch.bfloat16, 128, 128, heads=5, layers=1, blocks=3)
    assert cache.heads * cache.tokens * cache.k_size * 2 // 8 > device.TILINGS[0].words
    check(cache, [(Patch(0, 0, 1, 1, 4), (1,), 0)])


@pytest.mark.parametrize("layout", [*LAYOUTS, "mla3", "mla4"])
@pytest.mark.parametrize("heads", [1, 8])
def test_common_layouts_are_moved_sixteen_bytes_at_a_time(layout: str, heads: int) -> None:
    is_mla = layout.startswith("mla")
    cache = Cache(layout, FP8, 576 if is_mla else 64, 0 if is_mla else 64, 1 if is_mla else heads)
    assert device.DevicePages(cache.pages(noise(cache.n_bytes, 1))).access_bytes == 16


def test_strides_of_dimensions_of_one_do_not_count() -> None:
    values = noise(2 * 16 * 128, 1).view(2, 16, 1, 128)
    odd = values.as_strided(values.shape, (16 * 128, 128, 1, 1))
    assert device.DevicePages(PagedKV((PagedLayer(odd, None),), 16)).access_bytes == 16


def test_offsets_of_more_than_32_bits() -> None:
    """Blocks 5 GiB apart, in memory that is not touched but at two places."""
    stride, row = 5 << 30, 64
    far = torch.empty(stride + 16 * row, dtype=torch.uint8, device=DEVICE)
    blocks = far.as_strided((2, 16, 1, row), (stride, row, row, 1))
    blocks.copy_(noise(2 * 16 * row, 1).view(2, 16, 1, row))
    pages = PagedKV((PagedLayer(blocks, None),), 16)
    slabs = torch.zeros(1, 4096, dtype=torch.uint8, device=DEVICE)
    mover = device.DevicePages(pages)
    mover.gather([Move(Patch(0, 0, 1, 0, 1), (1, 0), slabs)])
    assert torch.equal(slabs[0, : 32 * row].view(2, 16, row), blocks.flip(0)[:, :, 0])
    mover.scatter([Move(Patch(0, 0, 1, 0, 1), (0, 1), slabs)])
    assert torch.equal(slabs[0, : 32 * row].view(2, 16, row), blocks[:, :, 0])


GOOD = Patch(0, 0, 2, 0, 2)


@pytest.mark.parametrize(
    ("patch", "block_ids", "first_block", "heads"),
    [
        (GOOD, (0, 8), 0, 2),
        (GOOD, (-1, 0), 0, 2),
        (GOOD, (0, 1 << 40), 0, 2),
        (GOOD, (0, 1), -1, 2),
        (Patch(0, 2, 2, 0, 2), (0, 1), 0, 2),
        (Patch(0, 0, 2, 1, 2), (0, 1), 0, 2),
        (Patch(0, -1, 2, 0, 2), (0, 1), 0, 2),
        (Patch(3, 0, 2, 0, 2), (0, 1), 0, 2),
        (GOOD, (0, 1), 0, 1),
        (GOOD, (0, 1, 2, 3, 4), 0, 2),
    ],
)
def test_moves_out_of_range_are_refused_before_any_byte_moves(
    patch: Patch, block_ids: tuple[int, ...], first_block: int, heads: int
) -> None:
    cache = Cache("B2NHD")
    buffer = noise(cache.n_bytes, 1)
    was = buffer.clone()
    mover = device.DevicePages(cache.pages(buffer))
    good = Move(GOOD, (5, 6), noise(2 * 16384, 2).view(2, 16384))
    bad = Move(patch, block_ids, noise(heads * 16384, 3).view(heads, 16384), first_block)
    with pytest.raises(ValueError, match="out of range"):
        mover.scatter([good, bad])
    assert torch.equal(buffer, was)


@pytest.mark.parametrize(
    "slabs",
    [
        torch.zeros(2, 32768, dtype=torch.uint8)[:, ::2],
        torch.zeros(2, 16384, dtype=torch.int8),
        torch.zeros(2, 16384, dtype=torch.uint8, device="meta"),
    ],
)
def test_other_slabs_are_refused(slabs: torch.Tensor) -> None:
    cache = Cache("B2NHD")
    mover = device.DevicePages(cache.pages(noise(cache.n_bytes, 1)))
    with pytest.raises(ValueError, match="are not plain bytes"):
        mover.gather([Move(GOOD, (5, 6), slabs)])


def test_nothing_to_move() -> None:
    cache = Cache("B2NHD")
    buffer = noise(cache.n_bytes, 1)
    was = buffer.clone()
    mover = device.DevicePages(cache.pages(buffer))
    mover.scatter([])
    mover.scatter([Move(GOOD, (), noise(8192, 2).view(2, 4096)), Move(GOOD, (1, 2), noise(32768, 3).view(2, 16384), 2)])
    assert torch.equal(buffer, was)


@pytest.mark.parametrize(("shift", "width"), [(0, 16), (16, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_slabs_that_are_off_are_moved_in_narrower_words(
    monkeypatch: pytest.MonkeyPatch, shift: int, width: int
) -> None:
    """A GPU faults on an access that is not aligned; a CPU, and so the interpreter, does not care."""
    launches: list[dict[str, int]] = []

    class Recorder(TableKernel):
        def launch(self, *arguments: Any, **options: Any) -> TableAnswer:
            launches.append(self._constants)
            return super().launch(*arguments, **options)

    monkeypatch.setattr(device, "TableKernel", Recorder)
    cache = Cache("B2NHD")
    mover = device.DevicePages(cache.pages(noise(cache.n_bytes, 1)))
    slabs = [noise(2 * 16384 + GUARD, 2)[off : off + 2 * 16384].view(2, 16384) for off in (0, shift)]
    launches.clear()
    mover.gather([Move(GOOD, (1, 2), each) for each in slabs])
    assert [launch["WORD_BYTES"] * launch["VECTOR"] for launch in launches] == [width]
