"""The mean of K over the chunk, on the device: of some of its tokens, their rotary embedding taken off.

Elements become whole numbers of 16 bits and a sign, so that their sums are the same in any order.

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.turboquant.whole import power_below
from kvtier.kernels.tiles import WHOLE, WHOLE_BITS, floats, load_words, plane_of_head, total, words_of


@triton.jit
def turned(
    low: tl.tensor,
    high: tl.tensor,
    angles: tl.tensor,
    row: tl.tensor,
    IS_BACK: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Take the rotary embedding off the elements of a tile, or put it back (kvtier.codecs.turboquant.turns).

    low, high: (rows, groups, 16) fp32, the lower and upper elements of words. angles: tile_angles. row: (rows,) tokens.
    The halves of a vector are groups, which one thread has, so nothing moves between threads.
    """
    HALF: tl.constexpr = P.padded // 64
    QUARTER: tl.constexpr = P.size // 4
    place = tl.arange(0, HALF)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    at = angles + row[:, None, None] * (4 * QUARTER) + place
    inside = row[:, None, None] < C.tokens
    low_cos = tl.load(at, mask=inside, other=0.0)
    high_cos = tl.load(at + QUARTER, mask=inside, other=0.0)
    low_sin = tl.load(at + 2 * QUARTER, mask=inside, other=0.0)
    high_sin = tl.load(at + 3 * QUARTER, mask=inside, other=0.0)
    return _turned(low, low_cos, low_sin, IS_BACK, P), _turned(high, high_cos, high_sin, IS_BACK, P)


@triton.jit
def _turned(x: tl.tensor, cosine: tl.tensor, sine: tl.tensor, IS_BACK: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = P.padded // 64
    a, b = x.reshape(ROWS, 2, HALF, 16).permute(0, 2, 3, 1).split()
    if IS_BACK:
        a, b = a * cosine - b * sine, b * cosine + a * sine
    else:
        a, b = a * cosine + b * sine, b * cosine - a * sine
    return tl.join(a, b).permute(0, 3, 1, 2).reshape(ROWS, 2 * HALF, 16)


@triton.jit
def _elements(
    vectors: tl.tuple, blocks: tl.tensor, angles: tl.tensor, start: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Elements of tokens that count, from the start-th of them on; zeros where there are no more."""
    STEP: tl.constexpr = C.tokens // 128 if C.tokens >= 128 else 1  # the reference's mean_step
    row = (start + tl.arange(0, C.rows)) * STEP + (STEP - 1)
    low, high = floats(load_words(vectors, blocks, row, P, C, "evict_last"), C.is_bf16)
    if P.is_turned:
        low, high = turned(low, high, angles, row, False, P, C)
    return low, high


@triton.jit
def _whole(x: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return (x * factor * 32768.0 + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def take_mean(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    angles: tl.tensor,
    mean: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Store the mean of K over the chunk. mean: its place in the slab."""
    ROWS: tl.constexpr = C.rows
    GROUPS: tl.constexpr = P.padded // 32
    STEP: tl.constexpr = C.tokens // 128 if C.tokens >= 128 else 1
    N_TOKENS: tl.constexpr = C.tokens // STEP
    vectors = plane_of_head(plane, head)
    tops = tl.full((ROWS, GROUPS, 16), 0, tl.int32)
    for start in range(0, N_TOKENS, ROWS):
        low, high = _elements(vectors, blocks, angles, start, P, C)
        tops = tl.maximum(tops, low.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        tops = tl.maximum(tops, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.reduce(tl.reduce(tl.reduce(tops, 2, _elementwise_max), 1, _elementwise_max), 0, _elementwise_max)
    power = tl.maximum(power_below(top.to(tl.float32, bitcast=True)), 2.0**-16)
    factor = (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    low_sums = tl.full((ROWS, GROUPS, 16), 0, tl.int32)
    high_sums = tl.full((ROWS, GROUPS, 16), 0, tl.int32)
    for start in range(0, N_TOKENS, ROWS):
        low, high = _elements(vectors, blocks, angles, start, P, C)
        low_sums += _whole(low, factor)
        high_sums += _whole(high, factor)
    unit = power * (1 / 32768)
    low_mean = (total(low_sums, 0).to(tl.float32) * (1 / N_TOKENS)) * unit
    high_mean = (total(high_sums, 0).to(tl.float32) * (1 / N_TOKENS)) * unit
    column = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(mean + column, words_of(low_mean, high_mean, True, C.fast), mask=column < P.size // 2)
