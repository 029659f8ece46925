"""Pages of layers that are not alike (BandedPages), with either copier, against slabs that are put together by hand."""

from collections.abc import Callable

import pytest
import torch

from kvtier.codecs.bands import BandedPages, Copier
from kvtier.format.geometry import Extent, Geometry, LayerForm, padded
from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch
from tests.kernels.device_rig import DEVICE, INTERPRETED, device

BLOCK_TOKENS, BLOCKS, HEADS, LAYERS = 16, 7, 3, 6
SLOTS = Geometry(LAYERS, HEADS, 54, 0, "turboquant_3bit_nc", 1, "heads", 32, (0, 5), LayerForm(64, 64, "bfloat16", 2))
"""A slot is 54 bytes, a plain vector 128, in planes of K and of V."""
MIDDLE = Geometry(LAYERS, HEADS, 32, 32, "fp8_e4m3", 1, "heads", 32, (2, 3), LayerForm(32, 32, "float16", 2))
COPIERS: list[Callable[[PagedKV], Copier]] = [device.DevicePages, *([HostPages] if INTERPRETED else [])]


def random_layer(geometry: Geometry, number: int, heads: int) -> PagedLayer:
    """As vLLM 0.32 lays layers out: [block][token][head][K, then V], in one tensor."""
    form = geometry.form_of(number)
    generator = torch.Generator().manual_seed(number)
    size = BLOCKS, BLOCK_TOKENS, heads, form.vector_bytes
    data = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(DEVICE)
    whole = data.view(getattr(torch, form.dtype, torch.uint8))
    k, v = whole[..., : form.k_head_size], whole[..., form.k_head_size :]
    return PagedLayer(k, v if form.v_head_size else None)


def copies(layers: tuple[PagedLayer, ...], fill: int | None = None) -> tuple[PagedLayer, ...]:
    """Of the same bytes, or of `fill`."""

    def copy(plane: torch.Tensor) -> torch.Tensor:
        data = plane.contiguous().view(torch.uint8).clone()
        return (data if fill is None else data.fill_(fill)).view(plane.dtype)

    return tuple(PagedLayer(copy(x.k), None if x.v is None else copy(x.v)) for x in layers)


def expected_slab(layers: tuple[PagedLayer, ...], blocks: tuple[int, ...], head: int) -> torch.Tensor:
    """[layer][K, then V][token][byte] of one head."""
    planes = [plane for layer in layers for plane in layer.planes]
    return torch.cat([p[list(blocks), :, head].contiguous().view(torch.uint8).flatten() for p in planes])


@pytest.mark.parametrize(
    ("make_copier", "geometry"), [(COPIERS[0], SLOTS), (COPIERS[-1], MIDDLE)], ids=["slots", "fp8"]
)
@pytest.mark.parametrize("held", [range(6), range(1, 5), range(1, 6), range(2, 4)], ids=str)
@pytest.mark.parametrize("record", [range(6), range(5), range(1, 4)], ids=str)
def test_records_of_other_layers(
    make_copier: Callable[[PagedKV], Copier], geometry: Geometry, held: range, record: range
) -> None:
    """Two chunks of the layers that a rank and a record have in common, for two of the rank's heads."""
    everything = tuple(random_layer(geometry, number, HEADS) for number in range(LAYERS))
    common = range(max(held.start, record.start), min(held.stop, record.stop))
    patch = Patch(common.start - record.start, common.start - held.start, len(common), 1, 2)
    pages = PagedKV(copies(everything)[held.start : held.stop], BLOCK_TOKENS)
    mover = BandedPages(pages, geometry, Extent(held.start, len(held), 0, HEADS), make_copier)
    chunks = [(5, 2), (0, 6)]

    of_record = everything[record.start : record.stop]
    whole = [torch.stack([expected_slab(of_record, blocks, 1 + head) for head in range(2)]) for blocks in chunks]
    first = geometry.chunk_tokens * geometry.vectors_bytes(range(record.start, common.start))
    end = geometry.chunk_tokens * geometry.vectors_bytes(range(record.start, common.stop))
    size = padded(whole[0].shape[1]) + 4096
    slabs = [torch.full((2, size), 7, dtype=torch.uint8, device=DEVICE) for _ in chunks]
    mover.gather([Move(patch, blocks, slab) for blocks, slab in zip(chunks, slabs, strict=True)])
    for slab, wanted in zip(slabs, whole, strict=True):
        assert torch.equal(slab[:, first:end], wanted[:, first:end])
        assert (slab[:, :first] == 7).all() and (slab[:, padded(end) :] == 7).all()

    empty = copies(everything, fill=9)[held.start : held.stop]
    target = PagedKV(empty, BLOCK_TOKENS)
    back = BandedPages(target, geometry, Extent(held.start, len(held), 0, HEADS), make_copier)
    for slab, wanted in zip(slabs, whole, strict=True):
        slab[:, : wanted.shape[1]] = wanted
    back.scatter([Move(patch, (3, 4), slabs[0]), Move(patch, (1, 5), slabs[1], first_block=1)])
    placed = {3: 5, 4: 2, 5: 6}
    for number, layer in zip(held, empty, strict=True):
        for plane, source in zip(layer.planes, everything[number].planes, strict=True):
            data, was = plane.view(torch.uint8), source.contiguous().view(torch.uint8)
            for block in range(BLOCKS):
                for head in range(HEADS):
                    if number in common and head >= 1 and block in placed:
                        assert torch.equal(data[block, :, head], was[placed[block], :, head])
                    else:
                        assert (data[block, :, head] == 9).all()


@pytest.mark.parametrize(
    ("patch", "blocks", "columns"),
    [
        (Patch(0, 0, 6, 0, 3), (0, 1), 32 * (4 * 54 + 2 * 256) - 1),
        (Patch(0, 1, 6, 0, 3), (0, 1), 1 << 16),
        (Patch(1, 0, 2, 0, 3), (0, 1), 1 << 16),
        (Patch(0, 0, 6, 0, 2), (0, 1), 1 << 16),
        (Patch(0, 0, 6, 0, 3), (0,), 1 << 16),
        (Patch(0, -1, 2, 0, 3), (0, 1), 1 << 16),
    ],
    ids=["slab too short", "layers", "before the model", "heads", "part of a chunk", "negative"],
)
def test_what_is_out_of_range_moves_nothing(patch: Patch, blocks: tuple[int, ...], columns: int) -> None:
    layers = tuple(random_layer(SLOTS, number, HEADS) for number in range(LAYERS))
    mover = BandedPages(PagedKV(layers, BLOCK_TOKENS), SLOTS, SLOTS.whole, device.DevicePages)
    good = torch.zeros(3, 1 << 16, dtype=torch.uint8, device=DEVICE)
    bad = torch.zeros(3, columns, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="out of range"):
        mover.gather([Move(Patch(0, 0, 6, 0, 3), (0, 1), good), Move(patch, blocks, bad)])
    assert not good.any()


def test_pages_that_are_not_what_the_geometry_says_are_refused() -> None:
    layers = tuple(random_layer(MIDDLE, number, HEADS) for number in range(LAYERS))
    with pytest.raises(AssertionError, match="layer 0"):
        BandedPages(PagedKV(layers, BLOCK_TOKENS), SLOTS, SLOTS.whole, HostPages)


@pytest.mark.parametrize("make_copier", COPIERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("skip_bytes", [4096 + 1, -1])
def test_bytes_skipped_beyond_a_slab_are_refused(make_copier: Callable[[PagedKV], Copier], skip_bytes: int) -> None:
    """The copiers themselves: a slab of 4096 bytes more than the one layer that is moved."""
    mover = make_copier(PagedKV((random_layer(SLOTS, 1, HEADS),), BLOCK_TOKENS))
    slabs = torch.zeros(HEADS, 32 * 54 + 4096, dtype=torch.uint8, device=DEVICE)
    patch = Patch(0, 0, 1, 0, HEADS)
    mover.gather([Move(patch, (0, 1), slabs, skip_bytes=4096)])
    assert slabs[:, 4096:].any(1).all() and not slabs[:, :4096].any()
    with pytest.raises((ValueError, OverflowError)):
        mover.gather([Move(patch, (0, 1), slabs, skip_bytes=skip_bytes)])
