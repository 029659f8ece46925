"""A program's part of a slab's checksum on the device, for kernels that sum what they have just written.

kvtier.kernels.device_checksum sums whole pages; parts of a slab begin and end anywhere within them.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.device_checksum import add, fold, mix32


@triton.jit
def _page_sums(
    words: tl.tensor, page: tl.tensor, first: tl.tensor, end: tl.tensor, keys: tl.tuple, MASKED: tl.constexpr
) -> tl.tensor:
    """(lanes,) uint64: the summands of those pairs of one page that are in [first, end)."""
    a0, a1, low, high = keys
    place = page * a0.shape[0] + tl.arange(0, a0.shape[0])
    inside = (place >= first) & (place < end)
    pairs = tl.load(words + place, mask=inside, other=0) if MASKED else tl.load(words + place)
    p0 = mix32(page.to(tl.uint32) * 0x9E3779B9 + high)
    p1 = fold(p0 ^ low)
    x = pairs.to(tl.uint32) + (a0 ^ p0)
    y = (pairs >> 32).to(tl.uint32) + (a1 ^ p1)
    products = x.to(tl.uint64) * y.to(tl.uint64)
    return tl.where(inside, products, tl.full(products.shape, 0, tl.uint64)) if MASKED else products


@triton.jit
def sum_part(slab: tl.tensor, first: tl.tensor, end: tl.tensor, seed: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """The summands of pairs [first, end) of a slab (kvtier.checksum), int64. PAIRS: of a page."""
    words = tl.multiple_of(slab.to(tl.pointer_type(tl.int64)), 16)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a0 = mix32(tl.arange(0, PAIRS).to(tl.uint32) + low)
    keys = (a0, fold(a0 ^ high), low, high)
    page, last = first // PAIRS, (end - 1) // PAIRS
    summed = _page_sums(words, page, first, end, keys, True)
    page += 1
    while page < last:
        summed += _page_sums(words, page, first, end, keys, False)
        page += 1
    if page == last:
        summed += _page_sums(words, page, first, end, keys, True)
    return tl.reduce(summed, 0, add).to(tl.int64, bitcast=True)
