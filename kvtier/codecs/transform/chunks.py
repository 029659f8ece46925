"""The transform codec's encoding and decoding on the device, a launch each: from pages to slabs and sums, and back.

A program does one layer of one head of one chunk: K, then V, tile after tile. Vectors are two halves, because a rotary
embedding turns pairs of them; a transform is a product with each half. When encoding, the bytes of whole numbers are
multiplied as int8, so that sums are exact (kvtier.codecs.transform.reference). After encoding a program reads back what
it wrote, from the cache, and adds its part to its slab's checksum.

P stands for a plane's TransformPlane, C for the launch's TransformShape, T for tables (kvtier.codecs.transform.device).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.transform.reference import GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, RAW_TOKENS, U_MAX
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import quotient, square_root, total

_GAIN_LEAST, _GAIN_MIN, _POWER_UNIT, _Q_EXPONENT, _U_MAX = (
    tl.constexpr(number) for number in (GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, U_MAX)
)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum with it is rounded to a whole number
_WHOLE_BITS = tl.constexpr(0x4B400000)


class TransformPlane(NamedTuple):
    """size: elements of a vector; half: of a half of one in a tile, padded: components of one, powers of two."""

    size: int
    half: int
    padded: int
    is_k: bool


class TransformShape(NamedTuple):
    """rows: of a tile. places: chunks of the longest prompt. fast: with PTX; the interpreter has none."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    places: int
    fast: bool


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _elements(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """fp32 of elements in the engine's dtype, int16."""
    if C.is_bf16:
        return _float(words.to(tl.int32) << 16)
    else:
        return words.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rounded(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """int16 of the engine's dtype, held within its finite values."""
    if C.is_bf16:
        bits = tl.clamp(x, -3.3895313892515355e38, 3.3895313892515355e38).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        return tl.clamp(x, -65504.0, 65504.0).to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _places_of(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Pointers (rows, half) of the elements of the first half of a tile, the mask of valid ones, and their columns."""
    column = tl.arange(0, P.half)[None, :]
    block = tl.load(blocks + row // C.block_tokens, mask=row < C.tokens, other=0)
    token = (row % C.block_tokens).to(tl.int64)
    base = tl.load(plane) + head * tl.load(plane + 3) + block * tl.load(plane + 1) + token * tl.load(plane + 2)
    inside = (row < C.tokens)[:, None] & (column < P.size // 2)
    return base[:, None].to(tl.pointer_type(tl.int16)) + column, inside, column


@triton.jit
def _turned(
    low: tl.tensor, high: tl.tensor, angles: tl.tensor, inside: tl.tensor, IS_BACK: tl.constexpr, P: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Take the rotary embedding off, or put it back. angles: pointers to cosines (rows or 1, half); sines behind."""
    cosine = tl.load(angles, mask=inside, other=0.0)
    sine = tl.load(angles + P.size // 2, mask=inside, other=0.0)
    if IS_BACK:
        return low * cosine - high * sine, high * cosine + low * sine
    else:
        return low * cosine + high * sine, high * cosine - low * sine


@triton.jit
def _angles(
    tables: tl.tuple, layer: tl.tensor, place: tl.tensor, row: tl.tensor, column: tl.tensor, P: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Pointers to the angles of tokens within the chunk, (rows, half), and of the chunk's place, (1, half)."""
    base = tl.load(tables[1] + layer)
    within = tables[2] + (base * C.tokens + row[:, None]) * P.size + column
    return within, tables[3] + (base * C.places + place) * P.size + column


@triton.jit
def _product(q: tl.tensor, forward: tl.tensor, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Sums of products of whole numbers (rows, half) with those of a matrix, by bytes of weight 2^16, 2^8 and 1."""
    place = forward + tl.arange(0, P.half)[:, None] * P.padded + tl.arange(0, P.padded)[None, :]
    high, low = tl.load(place), tl.load(place + 2 * P.half * P.padded)
    q_low = ((q + 128) & 255) - 128
    q_high = ((q - q_low) >> 8).to(tl.int8)
    q_low = q_low.to(tl.int8)
    middle = tl.dot(q_high, low, out_dtype=tl.int32) + tl.dot(q_low, high, out_dtype=tl.int32)
    return tl.dot(q_high, high, out_dtype=tl.int32), middle, tl.dot(q_low, low, out_dtype=tl.int32)


@triton.jit
def _whole(low: tl.tensor, high: tl.tensor) -> tl.tuple:
    """Whole numbers of both halves, their exponents (rows), and whether they are sound (rows)."""
    low_sound, high_sound = tl.abs(low) < _U_MAX, tl.abs(high) < _U_MAX
    low, high = tl.where(low_sound, low, 0.0), tl.where(high_sound, high, 0.0)
    top = tl.reduce(tl.maximum(tl.abs(low), tl.abs(high)), 1, _elementwise_max)
    e = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) - 127 - _Q_EXPONENT, 0)
    factor = _float((127 - e) << 23)[:, None]
    low_whole = (low * factor + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
    high_whole = (high * factor + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
    return low_whole, high_whole, e, low_sound & high_sound


@triton.jit
def _gains(n: tl.tensor, coded: tl.tensor, counted: tl.tensor, e: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """int32 (rows): gains as they are stored."""
    n *= coded
    top = tl.maximum(tl.reduce(tl.abs(n), 1, _elementwise_max), _GAIN_MIN)
    exponent = top.to(tl.int32, bitcast=True) >> 23
    n *= _float((254 - exponent) << 23)[:, None]
    n *= n
    n *= n
    n *= n
    summed = total((n * _POWER_UNIT + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS, 1)
    root = tl.where(summed == 0, 1.0, summed.to(tl.float32) * counted)
    root = square_root(square_root(square_root(root, C.fast), C.fast), C.fast)
    g = tl.maximum(tl.where(summed == 0, 0.0, root) * _float(exponent << 23), _GAIN_MIN)
    return tl.clamp((((g.to(tl.int32, bitcast=True) + (1 << 19)) >> 20) + 8 * e - _GAIN_LEAST).to(tl.float32), 0.0,
                    255.0).to(tl.int32)  # fmt: skip


@triton.jit
def _codes(n: tl.tensor, inverse: tl.tensor, columns: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """int32 (rows, padded). columns: pointers to the rate (1, padded), rows of further numbers behind."""
    t = tl.clamp(n * inverse[:, None] * tl.load(columns), -1.0, 1.0)
    t2 = t * t
    s = tl.load(columns + 2 * P.padded) + t2 * tl.load(columns + 3 * P.padded)
    s = t * (tl.load(columns + P.padded) + t2 * s)
    steps = tl.load(columns + 4 * P.padded)
    return tl.clamp((s + 1) * steps, 0.0, 2 * steps - 1).to(tl.int32)


@triton.jit
def _groups(x: tl.tensor, C: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    return x.reshape(C.rows, P.padded // 8, 8)


@triton.jit
def _bytes_of(
    whole: tl.tensor, row: tl.tensor, row_bytes: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Places of the bytes of groups in the codes (rows, groups, 8), and the mask of those that are there."""
    group = tl.arange(0, P.padded // 8)
    start, n_bytes = tl.load(whole + 2 * P.padded + group), tl.load(whole + 2 * P.padded + P.padded // 8 + group)
    number = tl.arange(0, 8)[None, None, :]
    is_there = (number < n_bytes[None, :, None]) & (row < C.tokens)[:, None, None]
    return row[:, None, None] * row_bytes + start[None, :, None] + number, is_there


@triton.jit
def _encode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    layer: tl.tensor,
    place: tl.tensor,
    of_head: tl.tuple,
    tables: tl.tuple,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Encode K or V of one layer, head and chunk. Return (rows, half) bool, whether vectors are sound.

    of_head: the plane's tables of this layer and head. slab: codes and bytes of a row, gains, raw elements.
    """
    forward, numbers, whole = of_head
    codes, row_bytes, gains, raw = slab
    is_sound = tl.full((C.rows, P.half), 1, tl.int32) > 0
    component = tl.arange(0, P.padded)[None, :]
    columns = numbers + 4 * P.half + component  # behind the means and scales of both halves
    unit, coded = tl.load(columns), tl.load(columns + P.padded)
    counted = tl.load(numbers + 4 * P.half + 7 * P.padded)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        at, inside, column = _places_of(plane, head, blocks, row, P, C)
        low_words, high_words = tl.load(at, mask=inside, other=0), tl.load(at + P.size // 2, mask=inside, other=0)
        of_raw, is_raw = raw + (row[:, None] * P.size + column), inside & (row < _RAW_TOKENS)[:, None]
        tl.store(of_raw, low_words, mask=is_raw)
        tl.store(of_raw + P.size // 2, high_words, mask=is_raw)
        low, high = _elements(low_words, C), _elements(high_words, C)
        if P.is_k:
            within, at_place = _angles(tables, layer, place, row, column, P, C)
            low, high = _turned(low, high, within, inside, False, P)
            low, high = _turned(low, high, at_place, column < P.size // 2, False, P)
        low = (low - tl.load(numbers + column)) * tl.load(numbers + 2 * P.half + column)
        high = (high - tl.load(numbers + P.half + column)) * tl.load(numbers + 3 * P.half + column)
        low, high, e, sound = _whole(tl.where(inside, low, 0.0), tl.where(inside, high, 0.0))
        is_sound &= sound
        low_high, low_middle, low_low = _product(low, forward, P)
        high_high, high_middle, high_low = _product(high, forward + P.half * P.padded, P)
        summed = ((low_high + high_high).to(tl.int64) << 16) + ((low_middle + high_middle).to(tl.int64) << 8)
        n = (summed + (low_low + high_low)).to(tl.float32) * unit
        gain = _gains(n, coded, counted, e, C)
        tl.store(gains + row, gain.to(tl.uint8), mask=row < C.tokens)
        g = _float((gain + _GAIN_LEAST - 8 * e) << 20)
        found = _codes(n, quotient(tl.full(g.shape, 1.0, tl.float32), g, C.fast), columns + 2 * P.padded, P)
        shifted = found.to(tl.int64) << tl.load(whole + component).to(tl.int64)
        packed = total(_groups(shifted, C, P), 2)[:, :, None] >> (8 * tl.arange(0, 8)[None, None, :]).to(tl.int64)
        at, is_there = _bytes_of(whole, row, row_bytes, P, C)
        tl.store(codes + at, (packed & 255).to(tl.uint8), mask=is_there)
    return is_sound


@triton.jit
def _decode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    layer: tl.tensor,
    place: tl.tensor,
    first_token: tl.tensor,
    of_head: tl.tuple,
    tables: tl.tuple,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decode K or V of one layer, head and chunk into pages. Arguments as of `_encode_plane`."""
    inverse, numbers, whole = of_head
    codes, row_bytes, gains, raw = slab
    component = tl.arange(0, P.padded)[None, :]
    shift, first = tl.load(whole + component).to(tl.int64), tl.load(whole + P.padded + component)
    steps = tl.load(numbers + 4 * P.half + 6 * P.padded + component)
    mask = (2 * steps).to(tl.int64) - 1
    matrix = inverse + tl.arange(0, P.padded)[:, None] * (2 * P.half) + tl.arange(0, P.half)[None, :]
    backs = numbers + 4 * P.half + 7 * P.padded + 8
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        at, is_there = _bytes_of(whole, row, row_bytes, P, C)
        parts = tl.load(codes + at, mask=is_there, other=0).to(tl.int64)
        packed = total(parts << (8 * tl.arange(0, 8)[None, None, :]).to(tl.int64), 2)
        spread = tl.broadcast_to(packed[:, :, None], (C.rows, P.padded // 8, 8)).reshape(C.rows, P.padded)
        code = ((spread >> shift) & mask).to(tl.int32)
        values = tl.load(tables[4] + first + code)
        gain = tl.load(gains + row, mask=row < C.tokens, other=0).to(tl.int32)
        g = _float((gain + _GAIN_LEAST) << 20)[:, None]
        at, inside, column = _places_of(plane, head, blocks, row, P, C)
        low = tl.load(numbers + column) + tl.dot(values, tl.load(matrix)) * (tl.load(backs + column) * g)
        high = tl.dot(values, tl.load(matrix + P.half)) * (tl.load(backs + P.half + column) * g)
        high = tl.load(numbers + P.half + column) + high
        if P.is_k:
            within, at_place = _angles(tables, layer, place, row, column, P, C)
            low, high = _turned(low, high, at_place, column < P.size // 2, True, P)
            low, high = _turned(low, high, within, inside, True, P)
        of_raw, is_raw = raw + (row[:, None] * P.size + column), inside & (row < _RAW_TOKENS)[:, None]
        low_raw = tl.load(of_raw, mask=is_raw, other=0)
        high_raw = tl.load(of_raw + P.size // 2, mask=is_raw, other=0)
        inside &= (row >= first_token)[:, None]
        tl.store(at, tl.where(is_raw, low_raw, _rounded(low, C)), mask=inside)
        tl.store(at + P.size // 2, tl.where(is_raw, high_raw, _rounded(high, C)), mask=inside)


@triton.jit
def _of_head(tables: tl.tuple, cell: tl.tensor, MATRICES: tl.constexpr, P: tl.constexpr) -> tl.tuple:
    """A plane's tables of one layer and head, by its number among those held."""
    matrix, numbers, whole = tables
    return (
        matrix + cell * (MATRICES * 2 * P.half * P.padded),
        numbers + cell * (4 * P.half + 7 * P.padded + 8 + 2 * P.half),
        whole + cell * (2 * P.padded + P.padded // 4),
    )


@triton.jit
def _parts(
    start: tl.tensor, tables: tl.tuple, layer: tl.tensor, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor]:
    """Parts of a layer's bytes: K's, V's (see `_encode_plane`), and the position."""
    codes = start.to(tl.pointer_type(tl.uint8))
    row_bytes = tl.load(tables[0] + layer)
    gains = codes + C.tokens * row_bytes
    raw = (gains + 2 * C.tokens).to(tl.pointer_type(tl.int16))
    of_k, of_v = (codes, row_bytes, gains, raw), (codes, row_bytes, gains + C.tokens, raw + _RAW_TOKENS * K.size)
    return of_k, of_v, (raw + _RAW_TOKENS * (K.size + V.size)).to(tl.pointer_type(tl.int32))


@triton.jit
def _layer_start(tables: tl.tuple, first: tl.tensor, layer: tl.tensor, slab_start: tl.tensor, K: tl.constexpr,
                 V: tl.constexpr, C: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Byte of a slab where a layer begins. first: the layer that begins at slab_start."""
    rows = tl.load(tables[5] + layer) - tl.load(tables[5] + first)
    REST: tl.constexpr = 2 * C.tokens + 2 * _RAW_TOKENS * (K.size + V.size) + 16
    return slab_start + rows * C.tokens + (layer - first) * REST


# Nothing is specialized on values: another chunk or rank must not mean another compilation.
@triton.jit(
    do_not_specialize=(
        "planes", "table", "answers", "page_layer", "first_head", "page_heads", "slab_start", "slab_bytes",
    )
)  # fmt: skip
def encode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    answers: tl.tensor,
    tables: tl.tuple,
    of_k: tl.tuple,
    of_v: tl.tuple,
    page_layer: tl.tensor,
    first_head: tl.tensor,
    page_heads: tl.tensor,
    slab_start: tl.tensor,
    slab_bytes: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Grid: (heads, layers, moves): heads run fastest, so that pages are read whole while they are open in memory.

    planes: (layers, 2, 4) int64. table: (moves, 2 + n_blocks + heads) int64: address of the slabs, position, block ids,
    seeds. answers: (moves, heads + 1) int64, zeros at first: sums of slabs, and not zero where a chunk is refused.
    tables, of_k, of_v: kvtier.codecs.transform.device. slab_start: place in a slab of the first of these layers. The
    rest behind the last layer, up to the slab's end, is summed with it.
    """
    N_BLOCKS: tl.constexpr = C.tokens // C.block_tokens
    n_heads = tl.num_programs(0)
    head, layer = tl.program_id(0), page_layer + tl.program_id(1)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS + n_heads)
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = _layer_start(tables, page_layer, layer, slab_start, K, V, C)
    k_slab, v_slab, places = _parts(slab + first, tables, layer, K, V, C)
    position = tl.load(move + 1)
    place = tl.minimum(position // C.tokens, C.places - 1).to(tl.int32)
    number = tl.arange(0, 4)
    tl.store(places + number, tl.where(number == 0, position.to(tl.int32), 0))
    cell = (layer * page_heads + first_head + head).to(tl.int64)
    plane, of_page = planes + layer * 8, first_head + head
    k_head, v_head = _of_head(of_k, cell, 2, K), _of_head(of_v, cell, 2, V)
    k_sound = _encode_plane(plane, of_page, move + 2, layer, place, k_head, tables, k_slab, K, C)
    v_sound = _encode_plane(plane + 4, of_page, move + 2, layer, place, v_head, tables, v_slab, V, C)
    bad_k = tl.reduce(tl.reduce((k_sound == 0).to(tl.int32), 1, _elementwise_max), 0, _elementwise_max)
    bad_v = tl.reduce(tl.reduce((v_sound == 0).to(tl.int32), 1, _elementwise_max), 0, _elementwise_max)
    is_refused = (bad_k | bad_v | (position != place * C.tokens).to(tl.int32)) != 0
    tl.debug_barrier()
    end = _layer_start(tables, page_layer, layer + 1, slab_start, K, V, C)
    answer_layer(answers, slab, first, end, slab_bytes, move + 2 + N_BLOCKS + head, is_refused, PAIRS, PAIRS)


@triton.jit(
    do_not_specialize=(
        "planes", "table", "page_layer", "first_head", "page_heads", "slab_start", "slab_bytes",
    )
)  # fmt: skip
def decode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    tables: tl.tuple,
    of_k: tl.tuple,
    of_v: tl.tuple,
    page_layer: tl.tensor,
    first_head: tl.tensor,
    page_heads: tl.tensor,
    slab_start: tl.tensor,
    slab_bytes: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Grid: (heads, layers, moves), as in `encode_chunks`. table: (moves, 2 + n_blocks) int64: address of the slabs,
    first block to fill, block ids."""
    head, layer = tl.program_id(0), page_layer + tl.program_id(1)
    move = table + tl.program_id(2).to(tl.int64) * (2 + C.tokens // C.block_tokens)
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = _layer_start(tables, page_layer, layer, slab_start, K, V, C)
    k_slab, v_slab, places = _parts(slab + first, tables, layer, K, V, C)
    place = tl.minimum((tl.load(places).to(tl.int64) & 0xFFFFFFFF) // C.tokens, C.places - 1).to(tl.int32)
    first_token = tl.load(move + 1) * C.block_tokens
    cell = (layer * page_heads + first_head + head).to(tl.int64)
    plane, of_page = planes + layer * 8, first_head + head
    k_head, v_head = _of_head(of_k, cell, 1, K), _of_head(of_v, cell, 1, V)
    _decode_plane(plane, of_page, move + 2, layer, place, first_token, k_head, tables, k_slab, K, C)
    _decode_plane(plane + 4, of_page, move + 2, layer, place, first_token, v_head, tables, v_slab, V, C)
