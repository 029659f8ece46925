"""Packing of rotated vectors into codes, on the device.

A code is a curve's value, rounded (kvtier.codecs.turboquant.buckets): up to 4 bits in fp16, two elements at a time,
without a comparison. Four codes are four bytes of a word, and fields of some words become one by shifts.

With more than 16 centroids PTX loads their squares from a table, in the lane that has the code. tl.load would move
codes to a layout of its own, and squares back, through shared memory: as compiled, with 35 to 37 barriers a tile.

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables). Where
C.fast is not set, codes are counted by thresholds, as the reference does, without PTX, for the interpreter.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.turboquant.whole import twice
from kvtier.kernels.tiles import floats, fused, total

_WHOLE32 = tl.constexpr(8388608.0)
_PLACE = tl.constexpr(  # of |v| <= 1 on the curve: v, two of them
    "{ .reg .b32 z, h; cvt.rn.f16x2.f32 z, $2, $1; mov.b32 h, 0x38003800; fma.rn.sat.f16x2 $0, z, $3, h; }"
)


@triton.jit
def _codes_in_words(low: tl.tensor, high: tl.tensor, normal: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Words with two codes, in the lower bytes of their halves; the upper bytes mean nothing.

    low, high: rotated elements. normal: (rows,) fp32, the reference's n * sqrt(E) over sqrt(E).
    """
    factor = twice(normal, False, C.fast)[:, None, None]
    if C.fast and P.bits == 4:
        words = tl.inline_asm_elementwise(P.curve, "=r,f,f,r", [low, high, factor], tl.int32, True, 1)
    elif C.fast:
        words = tl.inline_asm_elementwise(_PLACE, "=r,f,f,r", [low, high, factor], tl.int32, True, 1)
        low, high = floats(words, False)
        low, high = _on_curve(low, P, C), _on_curve(high, P, C)
        words = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], tl.int32, True, 1)
    else:
        factor = normal.to(tl.float16).to(tl.float32)[:, None, None]
        low, high = low.to(tl.float16).to(tl.float32) * factor, high.to(tl.float16).to(tl.float32) * factor
        words = tl.full(low.shape, 0, tl.int32)
        for number in tl.static_range(len(P.thresholds)):
            words += (low >= P.thresholds[number]).to(tl.int32) + ((high >= P.thresholds[number]).to(tl.int32) << 16)
    return words


@triton.jit
def _on_curve(v: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Return int32 whose lowest byte is the code of v, fp32 in [0, 1]. The second byte is 0."""
    value = tl.full(v.shape, P.coefficients[len(P.coefficients) - 1], tl.float32)
    for number in tl.static_range(1, len(P.coefficients)):
        coefficient = tl.full(v.shape, P.coefficients[len(P.coefficients) - 1 - number], tl.float32)
        value = fused(value, v, coefficient, C.fast)
    value = fused(value, v, tl.full(v.shape, _WHOLE32, tl.float32), C.fast)
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _bytes_of(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, 8, n / 2): the lower bytes of the halves of each two words, (rows, 8, n)."""
    N_ROWS: tl.constexpr = words.shape[0]
    HALF: tl.constexpr = words.shape[2] // 2
    even, odd = words.reshape(N_ROWS, 8, HALF, 2).split()
    if C.fast:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [even, odd], tl.int32, True, 1)
    else:
        even, odd = (even & 0xFF) | ((even >> 8) & 0xFF00), (odd & 0xFF) | ((odd >> 8) & 0xFF00)
        return even | (odd << 16)


@triton.jit
def _upper_upon_lower(words: tl.tensor, FACTOR: tl.constexpr) -> tl.tensor:
    """(rows, n / 2, size): of (rows, n, size) the second half of n, times FACTOR, upon the first."""
    N_ROWS: tl.constexpr = words.shape[0]
    HALF: tl.constexpr = words.shape[1] // 2
    SIZE: tl.constexpr = words.shape[2]
    lower, upper = words.reshape(N_ROWS, 2, HALF * SIZE).permute(0, 2, 1).split()
    return (lower + upper * FACTOR).reshape(N_ROWS, HALF, SIZE)


@triton.jit
def _store_plane(
    nibbles: tl.tensor, row: tl.tensor, plane: tl.tensor, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> None:
    """Packs fields of WIDTH bits, one in each nibble of (rows, 4, padded / 32) words, and stores them.

    row: (rows,), the tokens. plane: where the plane begins.
    """
    if C.by_warps:
        if WIDTH == 4:
            _store_nibbles(nibbles, row, plane, P, C)
        else:
            _store_upper(nibbles, row, plane, WIDTH, P, C)
        return
    EIGHTH: tl.constexpr = P.size // 8
    N_WORDS: tl.constexpr = P.padded // 32
    words = nibbles
    if WIDTH <= 2:
        words = _upper_upon_lower(words, 4)
    if WIDTH == 1:
        words = _upper_upon_lower(words, 2)
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


@triton.jit
def _store_nibbles(nibbles: tl.tensor, row: tl.tensor, plane: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> None:
    """Store 4 bits each of 64 or 128 elements in accesses of 8 bytes: words stay in the lanes that made them."""
    N: tl.constexpr = P.padded // 32
    first, second = nibbles.reshape(C.rows, 2, 2 * N).permute(0, 2, 1).split()
    _store_twos(first, row, plane, 0, 4 * N, C)
    _store_twos(second, row, plane, 2 * N, 4 * N, C)


@triton.jit
def _store_upper(
    nibbles: tl.tensor, row: tl.tensor, plane: tl.tensor, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> None:
    """Store the upper 1 or 2 bits of each code, as `_store_nibbles` does the lower 4. Two lanes have the single bits of
    a word: the word is their sum."""
    N: tl.constexpr = P.padded // 32
    if WIDTH == 2:
        _store_twos(_upper_upon_lower(nibbles, 4).reshape(C.rows, 2 * N), row, plane, 0, 2 * N, C)
    else:
        _store_twos(total(nibbles << tl.arange(0, 4)[None, :, None], 1), row, plane, 0, N, C)


@triton.jit
def _store_twos(
    words: tl.tensor, row: tl.tensor, plane: tl.tensor, AT: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr
) -> None:
    """Store (rows, n) words from word AT of a row of ROW words on."""
    word = tl.arange(0, words.shape[1])[None, :]
    at = tl.max_contiguous(tl.multiple_of(row[:, None] * ROW + AT + word, (1, 2)), (1, 2))
    tl.store(plane.to(tl.pointer_type(tl.int32)) + at, words, mask=row[:, None] < C.tokens)


@triton.jit
def _energy(bytes: tl.tensor, nibbles: tl.tensor, squares: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """(rows,) int32: the sum of the squares of the codes' centroids, places behind a vector's end among them."""
    if C.fast and P.bits == 4:
        sums = tl.inline_asm_elementwise(P.energy, "=&r,r", [nibbles], tl.int32, True, 1)
    elif C.fast:
        sums = tl.inline_asm_elementwise(P.energy, "=&r,r,l", [bytes, squares], tl.int32, True, 1)
    else:
        sums = tl.load(squares + (bytes & 0xFF)) + tl.load(squares + ((bytes >> 8) & 0xFF))
        sums += tl.load(squares + ((bytes >> 16) & 0xFF)) + tl.load(squares + ((bytes >> 24) & 0xFF))
    return total(total(sums, 1), 1)


@triton.jit
def store_codes(
    product: tl.tensor,
    normal: tl.tensor,
    row: tl.tensor,
    codes: tl.tensor,
    squares: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Stores the codes of a tile. Returns the sum of the squares of each row's centroids, (rows,) int32.

    product: rotated vectors over 2^9, (rows, padded) fp32. normal: (rows,), as in
    `_codes_in_words`. row: (rows,) tokens. codes: where the plane's codes begin. squares: by code, int32.
    """
    low, high = product.reshape(C.rows, 8, P.padded // 16, 2).split()
    bytes = _bytes_of(_codes_in_words(low, high, normal, P, C), C)
    upper_plane = codes + C.tokens * P.size * 4 // 8
    if P.bits == 4:
        nibbles = _upper_upon_lower(bytes, 16)
    else:
        nibbles = _upper_upon_lower(bytes & 0x0F0F0F0F, 16)
        upper = _upper_upon_lower((bytes >> 4) & 0x0F0F0F0F, 16)
    if P.bits == 4:
        _store_plane(nibbles, row, codes, 4, P, C)
    else:
        _store_plane(nibbles, row, codes, 4, P, C)
        _store_plane(upper, row, upper_plane, P.bits - 4, P, C)
    return _energy(bytes, nibbles, squares, P, C) - (P.padded - P.size) * P.least
