"""From rotated vectors to packed codes, on the device: bucketing and packing as arithmetic on whole numbers in fp32.

|y| > T is the same as |y| > floor(T) for a whole number y, and the difference of whole numbers, clamped to [0, 1], is 1
or 0: so thresholds need neither comparison nor selection, which have half the rate of additions on a GPU.

P stands for a plane's PlaneCode, C for the launch's ChunkShape (kvtier.kernels.turboquant_tables). Where C.fast is
not set, the same is done without PTX, for the interpreter.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.turboquant_tiles import in_order, total

_INTEGER = tl.constexpr(8388608.0)  # 2^23: the low bits of x + this are the whole number x >= 0
_CLAMPED_DIFFERENCE = tl.constexpr("{ .reg .f32 x; abs.f32 x, $1; sub.rn.sat.f32 $0, x, $2; }")


@triton.jit
def _exceeds(y: tl.tensor, bound: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """1.0 where |y| > bound, else 0.0, also for NaN; both whole numbers."""
    if FAST:
        return tl.inline_asm_elementwise(_CLAMPED_DIFFERENCE, "=f,f,f", [y, bound], tl.float32, True, 1)
    else:
        return tl.where(tl.abs(y) > bound, 1.0, 0.0)


@triton.jit
def _is_negative(y: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """1.0 where the whole number y < 0, else 0.0."""
    if FAST:
        return tl.inline_asm_elementwise("sub.rn.sat.f32 $0, 0f00000000, $1;", "=f,f", [y], tl.float32, True, 1)
    else:
        return tl.where(y < 0.0, 1.0, 0.0)


@triton.jit
def _magnitudes(y: tl.tensor, length: tl.tensor, P: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """How many thresholds times `length` lie below |y|, fp32. length: (rows, 1, 1). Up to seven, a search by halves."""
    T: tl.constexpr = P.thresholds
    if P.bits == 2:
        magnitude = _exceeds(y, tl.floor(length * T[0]), FAST)
    elif P.bits == 3:
        b1, b2, b3 = tl.floor(length * T[0]), tl.floor(length * T[1]), tl.floor(length * T[2])
        upper = _exceeds(y, b2, FAST)
        magnitude = tl.fma(upper, 2.0, _exceeds(y, tl.fma(upper, b3 - b1, b1), FAST))
    elif P.bits == 4:
        b1, b2, b3 = tl.floor(length * T[0]), tl.floor(length * T[1]), tl.floor(length * T[2])
        b5, b6, b7 = tl.floor(length * T[4]), tl.floor(length * T[5]), tl.floor(length * T[6])
        upper = _exceeds(y, tl.floor(length * T[3]), FAST)
        middle = _exceeds(y, tl.fma(upper, b6 - b2, b2), FAST)
        step = tl.fma(upper, (b7 - b5) - (b3 - b1), b3 - b1)
        lower = _exceeds(y, tl.fma(middle, step, tl.fma(upper, b5 - b1, b1)), FAST)
        magnitude = tl.fma(tl.fma(upper, 2.0, middle), 2.0, lower)
    else:
        magnitude = tl.full(y.shape, 0.0, tl.float32)
        for number in tl.static_range(len(P.thresholds)):
            magnitude += _exceeds(y, tl.floor(length * T[number]), FAST)
    return magnitude


@triton.jit
def _upper_upon_lower(fields: tl.tensor, FACTOR: tl.constexpr) -> tl.tensor:
    """(rows, n / 2, size): of (rows, n, size) the second half of n, times FACTOR, upon the first."""
    N_ROWS: tl.constexpr = fields.shape[0]
    HALF: tl.constexpr = fields.shape[1] // 2
    SIZE: tl.constexpr = fields.shape[2]
    lower, upper = fields.reshape(N_ROWS, 2, HALF * SIZE).permute(0, 2, 1).split()
    return tl.fma(upper, FACTOR, lower).reshape(N_ROWS, HALF, SIZE)


@triton.jit
def _store_plane(
    fields: tl.tensor, row: tl.tensor, plane: tl.tensor, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Packs fields of WIDTH bits, (rows, 8, padded / 8) fp32, into bytes and stores them; returns them, four a word.

    row: (rows,), the tokens. plane: where the plane begins. Numbers of up to 16 bits are put together in fp32.
    """
    EIGHTH: tl.constexpr = P.size // 8
    N_WORDS: tl.constexpr = P.padded // 32
    fields = _upper_upon_lower(fields, 16.0)
    if WIDTH <= 2:
        fields = _upper_upon_lower(fields, 4.0)
    if WIDTH == 1:
        fields = _upper_upon_lower(fields, 2.0)
    even, odd = fields.reshape(C.rows, WIDTH, N_WORDS, 2, 2).split()
    lower, upper = tl.fma(odd, 256.0, even).split()
    lower, upper = (lower + _INTEGER).to(tl.int32, bitcast=True), (upper + _INTEGER).to(tl.int32, bitcast=True)
    words = (lower & 0xFFFF) | (upper << 16)
    part, word, token = tl.arange(0, WIDTH)[None, :, None], tl.arange(0, N_WORDS)[None, None, :], row[:, None, None]
    inside = (word < (EIGHTH + 3) // 4) & (token < C.tokens)
    if EIGHTH % 4 == 0:
        at = token * (P.size * WIDTH // 32) + part * (EIGHTH // 4) + word
        tl.store(plane.to(tl.pointer_type(tl.int32)) + at, words, mask=inside)
    else:  # head size 80: ten bytes
        at = token * (P.size * WIDTH // 16) + part * (EIGHTH // 2) + word * 2
        tl.store(plane.to(tl.pointer_type(tl.int16)) + at, words.to(tl.int16), mask=inside)
        inside &= word * 4 + 2 < EIGHTH
        tl.store(plane.to(tl.pointer_type(tl.int16)) + at + 1, (words >> 16).to(tl.int16), mask=inside)
    return words


@triton.jit
def store_codes(
    product: tl.tensor,
    length: tl.tensor,
    row: tl.tensor,
    codes: tl.tensor,
    squares: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Stores the codes of a tile. Returns the sum of the squares of each row's centroids, (rows,) int32.

    product: rotated vectors, (rows, padded) fp32 whole numbers, in the order of the matrix's columns. length: (rows,)
    theirs. row: (rows,) tokens. codes: where the plane's codes begin. squares: table of centroids squared, int32.
    """
    y = in_order(product, 4).reshape(C.rows, 8, P.padded // 8)
    magnitudes = _magnitudes(y, length[:, None, None], P, C.fast)
    negative = _is_negative(y, C.fast)
    upper_plane = codes + C.tokens * P.size * (P.bits - P.bits % 2 - (P.bits == 6) * 2) // 8
    if P.bits == 2:
        words = _store_plane(tl.fma(negative, 2.0, magnitudes), row, codes, 2, P, C)
    elif P.bits == 4:
        words = _store_plane(tl.fma(negative, 8.0, magnitudes), row, codes, 4, P, C)
    elif P.bits == 6:
        high = _exceeds(magnitudes, tl.full(magnitudes.shape, 15.0, tl.float32), C.fast)
        words = _store_plane(tl.fma(high, -16.0, magnitudes), row, codes, 4, P, C)
        _store_plane(tl.fma(negative, 2.0, high), row, upper_plane, 2, P, C)
    else:
        words = _store_plane(magnitudes, row, codes, P.bits - 1, P, C)
        _store_plane(negative, row, upper_plane, 1, P, C)
    if C.fast and P.bits <= 4:
        sums = tl.inline_asm_elementwise(P.energy, "=&r,r", [words], tl.int32, True, 1)
    else:
        sums = tl.load(squares + magnitudes.to(tl.int32))
    return total(total(sums, 1), 1) - (P.padded - P.size) * P.least
