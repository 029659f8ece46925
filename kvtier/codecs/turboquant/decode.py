"""Turboquant's decoding on the device: one launch takes codes, rotates their centroids back and fills pages.

A program decodes one layer of one head of one chunk, K, then V. Centroids up to 4 bits are whole numbers of 7 bits: the
tensor cores turn them back as int8, exactly. prmt makes them, four at a time, out of tables in two registers. Centroids
of 5 and 6 bits do not fit there: they are fp16, each lane of a warp holds two of them, and shuffles bring them to the
lanes that hand them to the tensor cores. (tl.load would move codes to a layout of its own, as in pack.py.) Both ways
reorder a vector's elements, and the rows of the matrix have the same order (tables.py).

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape. Without PTX, or for head sizes that four
lanes cannot share in whole words, centroids are looked up by tl.load.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.turboquant.layout import RAW_TOKENS
from kvtier.codecs.turboquant.mean import turned
from kvtier.kernels.tiles import (
    copy_first_token,
    floats,
    fused,
    in_order,
    operand_rows,
    plane_of_head,
    prefetch,
    tile_columns,
    tile_rows,
    tile_words,
    words_of,
)

_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_LANE_CENTROIDS = tl.constexpr(
    "{ .reg .b32 l, x, y; .reg .b64 a; mov.u32 l, %laneid; mad.wide.u32 a, l, 2, $1; ld.global.nc.u16 x, [a]; "
    "add.u32 l, l, 32; mad.wide.u32 a, l, 2, $1; ld.global.nc.u16 y, [a]; prmt.b32 $0, x, y, 0x5410; }"
)


@triton.jit
def _plane_bytes(
    plane: tl.tensor, row: tl.tensor, eighth: tl.tensor, WIDTH: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """(rows, n, padded / 8) uint8: for each eighth of a vector (`eighth`, (1, n, 1)) the bytes that have its fields.

    Four bytes a thread and no more, though more are side by side: that is how an operand of the tensor cores wants
    them, and moving them between threads costs more than four loads for one.
    """
    N_BYTES: tl.constexpr = P.size * WIDTH // 8
    within = tl.arange(0, P.padded // 8)[None, None, :]
    at = row[:, None, None] * N_BYTES + eighth % WIDTH * (P.size // 8) + within
    if P.size % 32 == 0:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 1, 4)), (1, 1, 4))
    inside = (row[:, None, None] < C.tokens) & (within < P.size // 8)
    return tl.load(plane.to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0)


@triton.jit
def _looked_up(
    codes: tl.tensor, row: tl.tensor, matrix: tl.tensor, centroids: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """(rows, padded) fp32: the codes' centroids, turned back. Any number of bits and any head size."""
    ROWS: tl.constexpr = C.rows
    FIRST: tl.constexpr = 4
    eighth = tl.arange(0, 8)[None, :, None]
    bytes = _plane_bytes(codes, row, eighth, FIRST, P, C).to(tl.int32)
    code = (bytes >> (eighth // FIRST * FIRST)) & ((1 << FIRST) - 1)
    if P.bits > FIRST:
        SECOND: tl.constexpr = P.bits - FIRST
        bytes = _plane_bytes(codes + C.tokens * P.size * FIRST // 8, row, eighth, SECOND, P, C).to(tl.int32)
        code |= ((bytes >> (eighth // SECOND * SECOND)) & ((1 << SECOND) - 1)) << FIRST
    return tl.dot(operand_rows(tl.load(centroids + code).reshape(ROWS, P.padded), C), matrix).to(tl.float32)


@triton.jit
def _matrix_half(matrix: tl.tensor, HALF: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Half of the rows of the matrix, which is stored column after column for int8 operands."""
    row = HALF * (P.padded // 2) + tl.arange(0, P.padded // 2)
    return tl.load(matrix + row[:, None] + tl.arange(0, P.padded)[None, :] * P.padded)


@triton.jit
def _centroids(fields: tl.tensor, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two int8 for each byte of two fields, in the order of tables.py."""
    first, second = tl.inline_asm_elementwise(P.centroids, "=&r,=&r,r", [fields], (tl.int8, tl.int8), True, 4)
    return first, second


@triton.jit
def _permuted(codes: tl.tensor, row: tl.tensor, halves: tl.tuple, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """(rows, padded) fp32, as `_looked_up`: of 4 bits, by prmt. halves: of the matrix.

    The assembly works on four bytes that a thread has side by side; each output is four centroids.
    """
    bytes = _plane_bytes(codes, row, tl.arange(0, 4)[None, :, None], 4, P, C)
    c0, c1 = _centroids(operand_rows(bytes.reshape(C.rows, P.padded // 2), C), P)
    found = tl.dot(c0, halves[0], out_dtype=tl.int32)
    return tl.dot(c1, halves[1], found, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _lane_centroids(centroids: tl.tensor) -> tl.tensor:
    """Return a register that holds fp16 centroids n and n + 32 in lane n of each warp. To Triton it is a scalar."""
    return tl.inline_asm_elementwise(_LANE_CENTROIDS, "=&r,l", [centroids], tl.int32, True, 1)


@triton.jit
def _pairs(codes: tl.tensor, held: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Return the centroids of words of four codes, one a byte: (..., 2) int32, two fp16 centroids in each."""
    first, second = tl.inline_asm_elementwise(P.centroids, "=&r,=&r,r,r", [codes, held], (tl.int32, tl.int32), True, 1)
    return tl.join(first, second)


@triton.jit
def _code_words(codes: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the words of the lower and of the upper plane of codes that `_shuffled` takes, (rows, words) int32."""
    WORDS: tl.constexpr = P.size // 32  # words of codes that a lane has
    UPPER: tl.constexpr = P.bits - 4
    word, inside = tl.arange(0, 4 * WORDS)[None, :], row[:, None] < C.tokens
    at = tl.max_contiguous(tl.multiple_of(row[:, None] * (4 * WORDS) + word, (1, WORDS)), (1, WORDS))
    lower = tl.load(codes.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    # Several words of the lower plane share a word of the upper one: each uses other bits of its bytes.
    at = row[:, None] * (UPPER * WORDS) + word % (UPPER * WORDS)
    at = tl.max_contiguous(tl.multiple_of(at, (1, WORDS)), (1, WORDS))
    upper = tl.load((codes + C.tokens * P.size // 2).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    return lower, upper


@triton.jit
def _shuffled(words: tl.tuple, held: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Return the operand of centroids, (rows, size) fp16, of 5 or 6 bits. words: `_code_words`. held:
    `_lane_centroids`.

    Four lanes share a row, as in an operand of the tensor cores. Each makes the centroids of its own words of codes, so
    nothing else moves between lanes.
    """
    WORDS: tl.constexpr = P.size // 32
    UPPER: tl.constexpr = P.bits - 4
    FIELDS: tl.constexpr = 0x10101010 if UPPER == 1 else 0x30303030
    lower, upper = words
    upper >>= tl.arange(0, 4 * WORDS)[None, :] // (UPPER * WORDS) * UPPER
    first = (lower & 0x0F0F0F0F) | ((upper << 4) & FIELDS)  # codes of the vector's first half
    second = ((lower >> 4) & 0x0F0F0F0F) | (upper & FIELDS)
    pairs = tl.join(_pairs(first, held, P), _pairs(second, held, P))
    even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    x = tl.join(even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True))
    x = x.reshape(C.rows, 4, 4 * WORDS, 2).permute(0, 2, 1, 3).reshape(C.rows, P.size)  # a lane has 2 of every 8
    return operand_rows(x, C)


@triton.jit
def _decode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    move: tl.tensor,
    tables: tl.tuple,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decodes K or V of one layer, head and chunk. Arguments as in encode.py; move: pointer to a row of the move table.
    tables: words to flip elements with, decode_matrix, centroids by code, tile_angles."""
    signs, matrix, centroids, angles = tables
    codes, scales, mean, raw = slab
    ROWS: tl.constexpr = C.rows
    column = tile_columns(P)
    place = tl.arange(0, P.padded)
    if P.permuted:
        halves = _matrix_half(matrix, 0, P), _matrix_half(matrix, 1, P)
    else:
        whole = tl.load(matrix + place[:, None] * P.padded + place[None, :])
    first_token = tl.load(move + 1).to(tl.int32) * C.block_tokens
    vectors = plane_of_head(plane, head)
    tl.static_assert(_RAW_TOKENS == 1)
    copy_first_token(vectors, move + 2, first_token, raw, P)
    if P.shuffled:
        held = _lane_centroids(centroids)
        ahead = _code_words(codes, first_token // ROWS * ROWS + tl.arange(0, ROWS), P, C)
    for start in range(first_token // ROWS * ROWS, C.tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        if P.permuted:
            product = _permuted(codes, row, halves, P, C)
        elif P.shuffled:
            operand = _shuffled(ahead, held, P, C)
            ahead = _code_words(codes, row + ROWS, P, C)  # of the next tile: they arrive while this one is decoded
            product = tl.dot(operand, whole).to(tl.float32)
        else:
            product = _looked_up(codes, row, whole, centroids, P, C)
        low, high = in_order(tile_rows(product, C), 8).reshape(ROWS, P.padded // 32, 16, 2).split()
        scale = tl.load(scales + row, mask=row < C.tokens, other=0.0).to(tl.float32) * P.decode_unit
        scale = scale[:, None, None]
        flip = tl.load(signs + column)
        if P.is_k:  # flipped as the vector is, which is flipped back with it
            low_mean, high_mean = floats(tl.load(mean + column, mask=column < P.size // 2, other=0) ^ flip, True)
            low, high = fused(low, scale, low_mean, C.fast), fused(high, scale, high_mean, C.fast)
        else:
            low, high = low * scale, high * scale
        if P.is_turned:
            low = (low.to(tl.int32, bitcast=True) ^ (flip << 16)).to(tl.float32, bitcast=True)
            high = (high.to(tl.int32, bitcast=True) ^ (flip & -65536)).to(tl.float32, bitcast=True)
            low, high = turned(low, high, angles, row, True, P, C)
            words = words_of(low, high, C.is_bf16, C.fast)
        else:
            words = words_of(low, high, C.is_bf16, C.fast) ^ flip
        base, place_of_words, inside = tile_words(vectors, move + 2, row, P, C)
        wanted = tl.maximum(first_token, _RAW_TOKENS)
        tl.store(base + place_of_words, words, mask=inside & (row[:, None, None] >= wanted))


# Nothing is specialized on values: another chunk or rank must not mean another compilation.
@triton.jit(do_not_specialize=("planes", "table", "page_layer", "first_head", "page_heads", "slab_start", "slab_bytes"))
def decode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    signs: tl.tensor,
    k_matrix: tl.tensor,
    v_matrix: tl.tensor,
    k_centroids: tl.tensor,
    v_centroids: tl.tensor,
    angles: tl.tensor,
    page_layer: tl.tensor,
    first_head: tl.tensor,
    page_heads: tl.tensor,
    slab_start: tl.tensor,
    slab_bytes: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Grid: (heads, layers, moves). Arguments as in encode.encode_chunks; table: (moves, 2 + n_blocks)."""
    N_BLOCKS: tl.constexpr = C.tokens // C.block_tokens
    K_BYTES: tl.constexpr = C.tokens * K.size * K.bits // 8
    V_BYTES: tl.constexpr = C.tokens * V.size * V.bits // 8
    MEAN: tl.constexpr = K_BYTES + V_BYTES + 4 * C.tokens
    RAW: tl.constexpr = MEAN + 2 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    WIDEST: tl.constexpr = K.padded if K.padded > V.padded else V.padded
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS)
    layer = page_layer + tl.program_id(1)
    plane = planes + layer * 8
    flips = signs + ((layer * page_heads + first_head + head) * WIDEST).to(tl.int64)
    first = (slab_start + tl.program_id(1) * LAYER_BYTES).to(tl.int64) + head.to(tl.int64) * slab_bytes
    start = tl.multiple_of((tl.load(move) + first).to(tl.pointer_type(tl.int8)), 16)
    # The loads below begin tile by tile. With this prefetch k4v4 decoded 2.14 TB/s on an H200 instead of 1.98.
    lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(LAYER_BYTES, 128))) * 128
    prefetch(start + tl.minimum(lines, LAYER_BYTES - 1), C.fast)
    scales = (start + (K_BYTES + V_BYTES)).to(tl.pointer_type(tl.float16))
    mean, raw = (start + MEAN).to(tl.pointer_type(tl.int32)), (start + RAW).to(tl.pointer_type(tl.int32))
    k_tables, v_tables = (flips, k_matrix, k_centroids, angles), (flips + WIDEST // 2, v_matrix, v_centroids, angles)
    k_slab = (start, scales, mean, raw)
    v_slab = (start + K_BYTES, scales + C.tokens, mean, raw + _RAW_TOKENS * K.size // 2)
    _decode_plane(plane, first_head + head, move, k_tables, k_slab, K, C)
    _decode_plane(plane + 4, first_head + head, move, v_tables, v_slab, V, C)
