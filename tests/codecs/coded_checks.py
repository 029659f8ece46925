"""What the kernels of every codec are held to beside its torch reference: all bytes of slabs and of pages, verdicts,
sums, and that nothing moves when a move is out of range.

`ours` and `reference` make movers (kvtier.codecs.base) over pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier.codecs.base import Mover
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import Move, PagedKV, Patch
from tests.codecs.turboquant_rig import sums_of
from tests.kernels.device_pages import LAYOUTS, Cache, noise

KEY = bytes(range(16))
SMALLEST = Cache("B2NHD", heads=1, layers=1, blocks=4)
Change = Callable[[torch.Tensor], torch.Tensor]
MakeMover = Callable[[PagedKV], Mover]

GOOD = Patch(0, 0, 1, 0, 1)
OUT_OF_RANGE = [
    (GOOD, (0, 4), 0),
    (GOOD, (-1, 0), 0),
    (GOOD, (0, 1 << 40), 0),
    (GOOD, (0, 1), -1),
    (GOOD, (0,), 0),
    (GOOD, (0, 1, 2), 0),
    (Patch(0, 1, 1, 0, 1), (0, 1), 0),
    (Patch(0, 0, 1, 1, 1), (0, 1), 0),
    (Patch(0, -1, 1, 0, 1), (0, 1), 0),
    (Patch(3, 0, 1, 0, 1), (0, 1), 0),
]
"""(patch, block ids, first block): GOOD with two of the blocks 0 to 3 is good, and each of these has one fault."""


def gaussian(cache: Cache, seed: int = 1, change: Change | None = None) -> PagedKV:
    """Pages of Gaussian values. change: of (blocks, tokens, heads, size) fp32 values, before they are rounded."""
    pages = cache.pages(noise(cache.n_bytes, seed))
    generator = torch.Generator().manual_seed(seed)
    for layer in pages.layers:
        for plane in layer.planes:
            values = torch.randn(plane.shape, generator=generator)
            plane.copy_(change(values) if change else values)
    return pages


class CodedModel:
    """Some pages of a model, and what moves them. held: what of the model they are; None: all of it."""

    cache: Cache
    tokens: int
    held: Extent | None

    @property
    def extent(self) -> Extent:
        return self.held or Extent(0, self.cache.layers, 0, self.cache.heads)

    @property
    def whole(self) -> Patch:
        return Patch(0, 0, self.cache.layers, 0, self.cache.heads)

    def slabs(self, patch: Patch) -> torch.Tensor:
        """Room for the patch, full of noise."""
        raise NotImplementedError

    def ours(self, pages: PagedKV, *tiling: Any) -> Mover:
        raise NotImplementedError

    def reference(self, pages: PagedKV) -> Mover:
        raise NotImplementedError


def check(model: CodedModel, pages: PagedKV, parts: list[tuple[Patch, tuple[int, ...], int]], *tiling: Any) -> None:
    """Parts: patch, block ids, first block. tiling: one, or none for that of the tests."""
    moves = [Move(patch, ids, model.slabs(patch), first, KEY) for patch, ids, first in parts]
    check_bytes(lambda pages: model.ours(pages, *tiling), model.reference, model.cache, model.extent, pages, moves)


def check_whole(model: CodedModel, change: Change | None = None, *tiling: Any) -> None:
    """A chunk of all of the model, its blocks in reverse."""
    ids = tuple(reversed(range(model.tokens // model.cache.tokens)))
    check(model, gaussian(model.cache, change=change), [(model.whole, ids, 0)], *tiling)


def check_bytes(
    ours: MakeMover, reference: MakeMover, cache: Cache, extent: Extent, pages: PagedKV, moves: Sequence[Move]
) -> None:
    """Encodes all moves in one call, decodes them in another; neither is refused. extent: of the model, the pages."""
    wanted = [move._replace(slabs=move.slabs.clone()) for move in moves]
    found, others = (made.encode(those) for made, those in ((ours(pages), moves), (reference(pages), wanted)))
    assert found is not None and others is not None
    for move, want, verdict, other in zip(moves, wanted, found.wait(), others.wait(), strict=True):
        assert torch.equal(move.slabs, want.slabs), "slabs, and their padding as it was"
        assert not verdict.is_refused and not other.is_refused
        assert verdict.sums in (None, sums_of(want, extent))
        assert (verdict.sums is None) == (move.patch.slab_layer > 0)
    before = noise(cache.n_bytes, 9)
    filled, theirs = before.clone(), before.clone()
    ours(cache.pages(filled)).decode(wanted)
    reference(cache.pages(theirs)).decode(wanted)
    assert torch.equal(filled, theirs), "pages, and what lies around them"


def check_refused(model: CodedModel, bad: Sequence[tuple[int, float, float]]) -> None:
    """Chunks of one block, of which only those in the middle are refused. bad: (plane, value, factor) of one element of
    the last token's vector of one head, and of all others of that vector."""
    pages = gaussian(model.cache)
    for block, (plane, value, factor) in enumerate(bad, start=1):
        vector = pages.layers[0].planes[plane][block, 15, 1]
        vector *= factor
        vector[17] = value
    moves = [Move(model.whole, (block,), model.slabs(model.whole)) for block in range(model.cache.blocks)]
    wanted = [False, *(True for _ in bad), False]
    for mover in (model.ours(pages), model.reference(pages)):
        assert [verdict.is_refused for verdict in mover.encode(moves).wait()] == wanted


def check_nothing_moves(ours: MakeMover, slabs: torch.Tensor, bad: tuple[Patch, tuple[int, ...], int]) -> None:
    """In chunks of two blocks of SMALLEST, also of the good move before it. slabs: of GOOD."""
    patch, block_ids, first_block = bad
    buffer = noise(SMALLEST.n_bytes, 1)
    was = buffer.clone()
    with pytest.raises(ValueError, match="out of range"):
        ours(SMALLEST.pages(buffer)).decode(
            [Move(GOOD, (1, 2), slabs), Move(patch, block_ids, slabs.clone(), first_block)]
        )
    assert torch.equal(buffer, was)


def check_alignment(ours: MakeMover, slabs: torch.Tensor) -> None:
    """Pages and slabs that are not aligned are refused, and pages of float32."""
    with pytest.raises(ValueError, match="not all multiples of 16"):
        ours(replace(SMALLEST, shift=8).pages(noise(SMALLEST.n_bytes + 8, 1)))
    with pytest.raises(ValueError, match="float32"):
        ours(gaussian(replace(SMALLEST, dtype=torch.float32)))
    shifted = noise(slabs.numel() + 16, 2)[8 : 8 + slabs.numel()].view(slabs.shape)
    with pytest.raises(ValueError, match="not all slabs.* are aligned"):
        ours(gaussian(SMALLEST)).encode([Move(GOOD, (1,), shifted)])


class CodedSuite:
    """Tests of every codec's kernels. model: makes a codec over a cache, with `tokens` and `held` as keywords; tile: a
    tiling of 64 tokens for heads of 64 elements."""

    model: Any
    tile: Any

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout: str) -> None:
        check_whole(self.model(Cache(layout, layers=2)))

    @pytest.mark.parametrize(("k_size", "v_size"), [(128, 64), (64, 128)])
    def test_k_and_v_of_different_sizes(self, k_size: int, v_size: int) -> None:
        check_whole(self.model(Cache("LBNHC", k_size=k_size, v_size=v_size, heads=1, layers=1)))

    @pytest.mark.parametrize("tokens", [48, 80])
    def test_chunks_that_are_no_whole_tiles(self, tokens: int) -> None:
        check_whole(self.model(replace(SMALLEST, blocks=8), tokens=tokens), None, self.tile)

    def test_parts_of_pages_and_slabs_in_one_call(self) -> None:
        """A stage of a model: layers 2-4 of 6, heads 4-6 of 8. Some slabs begin where the patch does, some before."""
        cache = Cache("B2NHD", layers=3, heads=3)
        parts = [
            (Patch(0, 0, 3, 0, 3), (1,), 0),
            (Patch(0, 1, 2, 1, 2), (3,), 0),
            (Patch(2, 0, 2, 2, 1), (2,), 0),
            (Patch(0, 0, 3, 0, 3), (0,), 0),
        ]
        check(self.model(cache, held=Extent(2, 3, 4, 3)), gaussian(cache), parts)

    def test_decoding_leaves_the_first_blocks(self) -> None:
        """Decoding leaves the first blocks as they are, also where they end within the first or the second tile."""
        model = self.model(replace(SMALLEST, blocks=8), tokens=128)
        parts = [(model.whole, (4, 1, 7, 2, 0, 6, 3, 5), first) for first in (1, 3, 4, 6, 8)]
        check(model, gaussian(model.cache), parts, self.tile)

    @pytest.mark.parametrize("bad", OUT_OF_RANGE)
    def test_moves_out_of_range_are_refused_before_any_byte_moves(
        self, bad: tuple[Patch, tuple[int, ...], int]
    ) -> None:
        model = self.model(SMALLEST, tokens=32)
        check_nothing_moves(model.ours, model.slabs(GOOD), bad)

    def test_pages_and_slabs_that_are_not_aligned_are_refused(self) -> None:
        model = self.model(SMALLEST)
        check_alignment(model.ours, model.slabs(GOOD))

    def test_nothing_to_move(self) -> None:
        ours = self.model(SMALLEST).ours(gaussian(SMALLEST))
        assert ours.encode([]).wait() == []
        ours.decode([])
