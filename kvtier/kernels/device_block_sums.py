"""Checksums of blocks that are scattered over a device's memory in pieces, in Triton.

A block is a slab of kvtier.format.checksum whose bytes were copied to different places. A program sums some pages of a
piece. A piece may begin at any pair of a page, so the pairs that a program holds at a time belong to two pages.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.kernels.device_checksum import add, fold, mix32
from kvtier.kernels.launch import on_device

PIECE_FIELDS = 4  # of the table: address (a multiple of 8), first pair in the block, pairs, number of the block
PAGES, STEP, WARPS = 16, 4, 4  # of a program: pages, pages at a time, warps


@triton.jit
def _keys(page: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tuple:
    p0 = mix32(page.to(tl.uint32) * 0x9E3779B9 + high)
    return p0, fold(p0 ^ low)


@triton.jit
def _products(
    pairs: tl.tensor, a0: tl.tensor, a1: tl.tensor, is_next: tl.tensor, of_page: tl.tuple, of_next: tl.tuple
) -> tl.tensor:
    """(lanes,) uint64: the summands of pairs of a page and the next one."""
    pairs = pairs.to(tl.uint64, bitcast=True)
    x = pairs.to(tl.uint32) + (a0 ^ tl.where(is_next, of_next[0], of_page[0]))
    y = (pairs >> 32).to(tl.uint32) + (a1 ^ tl.where(is_next, of_next[1], of_page[1]))
    return x.to(tl.uint64) * y.to(tl.uint64)


# Not specialized on values, so that it is compiled once, at start.
@triton.jit(do_not_specialize=("seed",))
def _sum_pieces(
    table: tl.tensor, sums: tl.tensor, seed: tl.tensor, PAIRS: tl.constexpr, PAGES: tl.constexpr, STEP: tl.constexpr
) -> None:
    """Grid: (pieces, parts of PAGES pages of the largest piece). Adds the sum of a part to its block's.

    table: (pieces, 4) int64, see PIECE_FIELDS. sums: (blocks,) int64, zeros at first.
    """
    piece = table + tl.program_id(0).to(tl.int64) * 4
    n_pairs = tl.load(piece + 2).to(tl.int32)
    at = tl.program_id(1) * (PAGES * PAIRS)
    if at < n_pairs:
        words = tl.load(piece).to(tl.pointer_type(tl.int64))
        first = tl.load(piece + 1).to(tl.int32) + at
        low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        lane = tl.arange(0, PAIRS)
        place = first % PAIRS + lane
        is_next = place >= PAIRS  # in the page after `page`
        a0 = mix32((place % PAIRS).to(tl.uint32) + low)
        a1 = fold(a0 ^ high)
        page = first // PAIRS
        of_page = _keys(page, low, high)
        total = tl.full((PAIRS,), 0, tl.uint64)
        end = tl.minimum(at + PAGES * PAIRS, n_pairs)
        while at + STEP * PAIRS <= end:
            for _ in tl.static_range(STEP):
                page += 1
                of_next = _keys(page, low, high)
                total += _products(tl.load(words + at + lane), a0, a1, is_next, of_page, of_next)
                of_page = of_next
                at += PAIRS
        while at < end:
            page += 1
            of_next = _keys(page, low, high)
            inside = at + lane < end
            products = _products(tl.load(words + at + lane, inside, 0), a0, a1, is_next, of_page, of_next)
            total += tl.where(inside, products, tl.full((PAIRS,), 0, tl.uint64))
            of_page = of_next
            at += PAIRS
        part = tl.reduce(total, 0, add).to(tl.int64, bitcast=True)
        tl.atomic_add(sums + tl.load(piece + 3), part, sem="relaxed")


class BlockSums:
    """A launch that is prepared: the table is on the device, and the kernel is compiled and loaded."""

    def __init__(self, pieces: npt.NDArray[np.int64], n_blocks: int, seed: int, device: torch.device) -> None:
        """Prepare to sum pieces. May take a second.

        pieces: (n, PIECE_FIELDS), in the order of their blocks. seed: of all blocks. What Triton raises
        where it has no compiler is passed on.
        """
        self._device = device
        self._blocks, self._n_summed = pieces[:, 3].copy(), 0
        self._table = torch.from_numpy(np.ascontiguousarray(pieces)).to(device)
        self._sums = torch.zeros(n_blocks, dtype=torch.int64, device=device)
        self._seed = seed - (1 << 64) if seed >> 63 else seed
        self._parts = -(-int(pieces[:, 2].max(initial=0)) // (PAGES * PAIRS_PER_PAGE))
        self._launch(0)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # another thread launches, maybe on another stream

    def _launch(self, stop: int) -> None:
        with on_device(self._device):
            _sum_pieces[(stop - self._n_summed, self._parts)](
                self._table[self._n_summed :], self._sums, self._seed, PAIRS_PER_PAGE, PAGES, STEP, num_warps=WARPS
            )

    def sum_until(self, block: int) -> None:
        """Begin to sum blocks before `block` that were not summed so far: their bytes are there."""
        stop = int(np.searchsorted(self._blocks, block))
        if stop > self._n_summed:
            self._launch(stop)
            self._n_summed = stop

    def sums(self) -> npt.NDArray[np.uint64]:
        """Sum the blocks that are left. Return the sums of all, (n_blocks,); 0 for blocks without pieces."""
        self.sum_until(len(self._sums))
        return self._sums.cpu().numpy().view(np.uint64)
