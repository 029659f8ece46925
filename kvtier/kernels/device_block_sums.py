"""Checksums of blocks that are scattered over a device's memory in pieces, in Triton.

A block is a slab of kvtier.format.checksum whose bytes were copied to different places (`block_sums`). A program sums
some pages of a piece. A piece may begin at any pair of a page, so the pairs that a program holds at a time belong to
two pages.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.kernels.block_sums import PAGES
from kvtier.kernels.device_checksum import add, page_keys, place_keys, products
from kvtier.kernels.device_code import DeviceCode

STEP, WARPS = 4, 4  # of a program: pages at a time, warps
WARP_THREADS = 32
CONSTANTS = {"PAIRS": PAIRS_PER_PAGE, "PAGES": PAGES, "STEP": STEP}


@triton.jit
def _of_two(pairs: tl.tensor, keys: tl.tuple, is_next: tl.tensor, of_page: tl.tuple, of_next: tl.tuple) -> tl.tensor:
    """(lanes,) uint64: the summands of pairs of a page and the next one."""
    of_pair = tl.where(is_next, of_next[0], of_page[0]), tl.where(is_next, of_next[1], of_page[1])
    return products(pairs, keys, of_pair)


@triton.jit
def _sum_pieces(
    table: tl.tensor, sums: tl.tensor, seed: tl.tensor, PAIRS: tl.constexpr, PAGES: tl.constexpr, STEP: tl.constexpr
) -> None:
    """Grid: (pieces, parts of PAGES pages of the largest piece). Adds the sum of a part to its block's.

    table: (pieces, 4) int64, see block_sums.PIECE_FIELDS. sums: (blocks,) int64, zeros at first.
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
        keys = place_keys(place % PAIRS, low, high)
        page = first // PAIRS
        of_page = page_keys(page, low, high)
        total = tl.full((PAIRS,), 0, tl.uint64)
        end = tl.minimum(at + PAGES * PAIRS, n_pairs)
        while at + STEP * PAIRS <= end:
            for _ in tl.static_range(STEP):
                page += 1
                of_next = page_keys(page, low, high)
                total += _of_two(tl.load(words + at + lane), keys, is_next, of_page, of_next)
                of_page = of_next
                at += PAIRS
        while at < end:
            page += 1
            of_next = page_keys(page, low, high)
            inside = at + lane < end
            found = _of_two(tl.load(words + at + lane, inside, 0), keys, is_next, of_page, of_next)
            total += tl.where(inside, found, tl.full((PAIRS,), 0, tl.uint64))
            of_page = of_next
            at += PAIRS
        part = tl.reduce(total, 0, add).to(tl.int64, bitcast=True)
        tl.atomic_add(sums + tl.load(piece + 3), part, sem="relaxed")


def compiled(capability: int) -> DeviceCode:
    """Compile for devices of a compute capability, such as 90. What Triton raises where it cannot is passed on.

    Raises RuntimeError for a kernel with scratch memory, which `cuda.launch` does not give it.
    """
    places = {(_sum_pieces.arg_names.index(name),): value for name, value in CONSTANTS.items()}
    types = {"table": "*i64", "sums": "*i64", "seed": "i64"} | dict.fromkeys(CONSTANTS, "constexpr")
    target = GPUTarget("cuda", capability, WARP_THREADS)
    found = triton.compile(ASTSource(_sum_pieces, types, places), target=target, options={"num_warps": WARPS})
    scratch = {name: n for name, n in found.metadata._asdict().items() if name.endswith("scratch_size") and n}
    if scratch:
        raise RuntimeError(f"this Triton compiles the kernel with scratch memory ({scratch}), which it would not get")
    return DeviceCode(found.metadata.name, WARPS * WARP_THREADS, found.metadata.shared, found.asm["cubin"])


def interpret(grid: tuple[int, int], table: torch.Tensor, sums: torch.Tensor, seed: int) -> None:
    """Run the kernel by Triton's interpreter, on tensors of the CPU."""
    _sum_pieces[grid](table, sums, seed, **CONSTANTS)
