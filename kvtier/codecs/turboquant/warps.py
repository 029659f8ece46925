"""Rotation of vectors of 64 and 128 elements by warps that do not wait for each other.

A warp's tile is 8 rows, or a multiple. The rotation of 64 or 128 elements is one of order 16, over those four of the
bits of an element's index that are within a group's half of four lanes, and sums and differences over the others,
which a thread has by itself. So the matrix is a few registers, and nothing passes through shared memory. The first
dimension of a dot is the warps: Triton gives each its own part, and takes the tensor cores' instructions of one warp
(wgmma would be one of four, which wait for each other).

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables); numbers
and units are those of whole.py.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.turboquant.whole import SQUARE_BF16, SQUARE_FP16, TIMES_BF16, TIMES_FP16, inverse, twice
from kvtier.kernels.tiles import WHOLE, floats, total


@triton.jit
def _halves(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(..., 2): a word's two elements."""
    KIND: tl.constexpr = tl.bfloat16 if C.is_bf16 else tl.float16
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return tl.join(low.to(KIND, bitcast=True), high.to(KIND, bitcast=True))


@triton.jit
def hadamard16(FLIP: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Return the Hadamard matrix for 16 elements, (warps, 16, 16). FLIP: 1 for its negative.

    Rows: lane, word, element; columns: word, lane, element, as the tensor cores leave them to lanes.
    """
    row = tl.arange(0, 16)[:, None]
    both = (row & 1 | (row & 2) << 2 | (row & 12) >> 1) & tl.arange(0, 16)[None, :]
    both ^= both >> 2
    odd = (both ^ (both >> 1) ^ FLIP) & 1
    if not C.fast:
        matrix = 1.0 - 2.0 * odd.to(tl.float32)
    elif C.is_bf16:
        matrix = (odd * 0x8000 + 0x7D80).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        matrix = (odd * 0x8000 + 0x7800).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.broadcast_to(matrix[None, :, :], (C.warps, 16, 16))


@triton.jit
def _summed_and_less(y: tl.tensor) -> tl.tensor:
    """The last dimension's two become their sum and their difference."""
    a, b = y.split()
    return tl.join(a + b, a - b)


@triton.jit
def rotated(
    words: tl.tensor, power: tl.tensor, plus: tl.tensor, minus: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """(rows, padded) fp32: whole numbers, rotated. words: (rows, groups, 16). plus, minus: of hadamard16."""
    GROUPS: tl.constexpr = P.padded // 32
    ROUNDS: tl.constexpr = C.rows // (8 * C.warps)
    TALL: tl.constexpr = ROUNDS * GROUPS * 8
    # round, warp, row, group, lane, half, (word, element)
    x = _whole_numbers(words, power, C).reshape(ROUNDS, C.warps, 8, GROUPS, 4, 2, 4)
    first, second = x.permute(1, 0, 3, 2, 4, 6, 5).split()
    first, second = first.reshape(C.warps, TALL, 16), second.reshape(C.warps, TALL, 16)
    y = tl.join(tl.dot(second, plus, tl.dot(first, plus)), tl.dot(second, minus, tl.dot(first, plus)))
    y = y.reshape(C.warps, ROUNDS, GROUPS, 8, 16, 2).permute(1, 0, 3, 4, 5, 2)
    # round, warp, row, column, half, group
    if GROUPS == 4:
        y = _summed_and_less(y.reshape(ROUNDS, C.warps, 8, 16, 2, 2, 2)).permute(0, 1, 2, 3, 4, 6, 5)
        y = _summed_and_less(y).reshape(ROUNDS, C.warps, 8, 2, 2, 2, 2, 2, 2, 2)
        # columns are: word, lane's upper bit, lower bit, element; then half, the group's lower bit, its upper bit
        y = y.permute(0, 1, 2, 9, 8, 4, 5, 7, 3, 6)
    else:
        tl.static_assert(GROUPS == 2)
        y = _summed_and_less(y).reshape(ROUNDS, C.warps, 8, 2, 2, 2, 2, 2, 2).permute(0, 1, 2, 8, 4, 5, 7, 3, 6)
    return y.reshape(C.rows, P.padded)


@triton.jit
def _whole_numbers(words: tl.tensor, power: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, groups, 16, 2)."""
    if C.fast:
        UNIT: tl.constexpr = 2.0**-118 if C.is_bf16 else 2.0**-9
        ASM: tl.constexpr = TIMES_BF16 if C.is_bf16 else TIMES_FP16
        factor = twice(inverse(power, C) * UNIT, C.is_bf16, True)[:, None, None]
        return _halves(tl.inline_asm_elementwise(ASM, "=r,r,r", [words, factor], tl.int32, True, 1), C)
    else:
        factor = inverse(power, C)[:, None, None]
        low, high = floats(words, C.is_bf16)
        low, high = low * factor * 32768.0, high * factor * 32768.0
        return tl.join((low + WHOLE) - WHOLE, (high + WHOLE) - WHOLE)


@triton.jit
def energies(words: tl.tensor, power: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows,) fp32: the reference's E. words: (rows, groups, 16)."""
    factor = inverse(power, C)
    if C.fast:
        GROUPS: tl.constexpr = words.shape[1]
        ROUNDS: tl.constexpr = C.rows // (8 * C.warps)
        UNIT: tl.constexpr = 2.0**-60 if C.is_bf16 else 2.0**-5
        ASM: tl.constexpr = SQUARE_BF16 if C.is_bf16 else SQUARE_FP16
        KIND: tl.constexpr = tl.bfloat16 if C.is_bf16 else tl.float16
        ONE: tl.constexpr = 0x7D80 if C.is_bf16 else 0x7800
        upper, lower = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,r,r",
            [words, twice(factor * UNIT, C.is_bf16, True)[:, None, None]],
            (tl.int32, tl.int32),
            True,
            1,
        )
        # round, warp, row, group, lane, half, word, part, element
        x = _halves(tl.join(upper, lower), C).reshape(ROUNDS, C.warps, 8, GROUPS, 4, 2, 2, 2, 2)
        x = x.permute(1, 0, 5, 2, 3, 7, 4, 6, 8).reshape(C.warps, ROUNDS * 16, GROUPS * 32)
        ones = tl.full((C.warps, GROUPS * 32, 8), ONE, tl.int16).to(KIND, bitcast=True)
        sums = tl.dot(x, ones).reshape(C.warps, ROUNDS, 2, 8, 8).permute(1, 0, 3, 4, 2)
        first, second = sums.split()
        bits = (first + second).reshape(C.rows, 8).to(tl.int32, bitcast=True)  # all columns are the same
        sums = tl.reduce(bits, 1, _elementwise_max).to(tl.float32, bitcast=True) * 512.0
    else:
        low, high = floats(words, C.is_bf16)
        low, high = low * factor[:, None, None], high * factor[:, None, None]
        squares = ((low * low * 2.0**13 + WHOLE) - WHOLE) + ((high * high * 2.0**13 + WHOLE) - WHOLE)
        sums = total(total(squares.to(tl.int32), 1), 1).to(tl.float32)
    return tl.maximum(sums, 1.0)
