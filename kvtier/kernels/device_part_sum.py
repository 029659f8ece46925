"""Checksum of a part of a slab on the device, for kernels that sum what they have just written.

kvtier.kernels.device_checksum sums whole pages; parts of a slab begin and end anywhere within them.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.device_checksum import add, page_keys, place_keys, products

_STEP = tl.constexpr(4)  # pages that one iteration sums, so that their loads can overlap


@triton.jit
def sum_part(
    slab: tl.tensor, first: tl.tensor, end: tl.tensor, seed: tl.tensor, PAIRS: tl.constexpr, AT_ONCE: tl.constexpr
) -> tl.tensor:
    """Return what pairs [first, end) of a slab add to its checksum (format.checksum), int64.

    PAIRS: pairs of a page. AT_ONCE: number of these that are summed at once, so that they stay in registers. Pages are
    loaded whole, even if only some of their pairs count: the first and the last page alone, the others _STEP at a time.
    """
    words = tl.multiple_of(slab.to(tl.pointer_type(tl.int64)), 16)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first_page, last = first // PAIRS, (end - 1) // PAIRS
    summed = tl.full((AT_ONCE,), 0, tl.uint64)
    nothing = tl.full((AT_ONCE,), 0, tl.uint64)
    for start in range(0, PAIRS, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        keys = place_keys(place, low, high)
        pairs = tl.load(words + first_page * PAIRS + place)
        inside = (first_page * PAIRS + place >= first) & (first_page * PAIRS + place < end)
        summed += tl.where(inside, products(pairs, keys, page_keys(first_page, low, high)), nothing)
        page = first_page + 1
        while page + _STEP <= last:
            for number in tl.static_range(_STEP):
                pairs = tl.load(words + (page + number) * PAIRS + place)
                summed += products(pairs, keys, page_keys(page + number, low, high))
            page += _STEP
        while page <= last:
            pairs = tl.load(words + page * PAIRS + place)
            summed += tl.where(page * PAIRS + place < end, products(pairs, keys, page_keys(page, low, high)), nothing)
            page += 1
    return tl.reduce(summed, 0, add).to(tl.int64, bitcast=True)


@triton.jit
def answer_layer(
    answers: tl.tensor,
    slab: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    slab_bytes: tl.tensor,
    seed: tl.tensor,
    is_refused: tl.tensor,
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Add a program's layer, bytes [first, end) of a slab, to the slab's checksum, and mark a refused chunk.

    Grid: (heads, layers, moves). The bytes behind the last layer, up to the slab's end, are summed with that layer.
    answers: (moves, heads + 1) int64. seed: pointer to the slab's seed, int64. PAIRS, AT_ONCE: as in `sum_part`.
    """
    if tl.program_id(1) == tl.num_programs(1) - 1:
        end = slab_bytes.to(end.dtype)
    head, n_heads = tl.program_id(0), tl.num_programs(0)
    found = sum_part(slab, first // 8, end // 8, tl.load(seed).to(tl.uint64, bitcast=True), PAIRS, AT_ONCE)
    answer = answers + tl.program_id(2) * (n_heads + 1)
    tl.atomic_add(answer + head, found, sem="relaxed")
    tl.atomic_or(answer + n_heads, is_refused.to(tl.int64), mask=is_refused, sem="relaxed")
