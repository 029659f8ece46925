"""int8's encoding and decoding on the device, a launch each: from pages to codes, scales and sums, and back.

A program does one layer of one head of one chunk: K, then V, tile after tile. K is read twice, the second time from the
cache: for the ranges of its channels, then for its codes. After encoding a program reads back what it wrote, from the
cache, and adds its part to its slab's checksum.

P stands for a plane's PlaneShape, C for the launch's Int8ChunkShape. Tiles are those of kvtier.kernels.tiles.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _elementwise_min

from kvtier.codecs.int8.codec import CODE_MAX, CODE_UNIT, ELEMENT_MAX, RAW_TOKENS, SCALE_MIN
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import floats, load_words, plane_of_head, quotient, tile_columns, tile_words, words_of

_CODE_MAX, _CODE_UNIT, _SCALE_MIN, _ELEMENT_MAX = (
    tl.constexpr(number) for number in (CODE_MAX, CODE_UNIT, SCALE_MIN, ELEMENT_MAX)
)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum with it has a whole number in its lower bits
_INFINITY = tl.constexpr(float("inf"))


class PlaneShape(NamedTuple):
    """size: elements of a vector, a multiple of 8; padded: of one in a tile, a power of two."""

    size: int
    padded: int


class Int8ChunkShape(NamedTuple):
    """rows: of a tile. fast: with PTX; the interpreter has none."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    fast: bool


@triton.jit
def _code_places(row: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(rows, groups, 16): places of the pairs of codes of a tile in their plane, and the mask of valid ones.

    Four a thread and no more, though more are side by side: as the words of pages, so that nothing has to move.
    """
    row, column = row[:, None, None], tile_columns(P)
    place = tl.max_contiguous(tl.multiple_of(row * (P.size // 2) + column, (1, 1, 4)), (1, 1, 4))
    return place, (row < C.tokens) & (column < P.size // 2)


@triton.jit
def _magnitudes(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """int32: bits of the larger magnitude of each word. NaN > infinity > all else there."""
    return tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _scale_bits(reach: tl.tensor) -> tl.tensor:
    """int32: bits of the scale, bf16, of codes that reach so far either way."""
    exact = reach * _CODE_UNIT
    bits = tl.where(exact < _SCALE_MIN, 0.0, exact).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _inverse(scale_bits: tl.tensor, C: tl.constexpr) -> tl.tensor:
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(scale == 0.0, 0.0, quotient(one, tl.where(scale == 0.0, 1.0, scale), C.fast))


@triton.jit
def _codes(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """int16: codes of low in the lower and of high in the upper byte."""
    low, high = tl.clamp(low, -_CODE_MAX, _CODE_MAX) + _WHOLE, tl.clamp(high, -_CODE_MAX, _CODE_MAX) + _WHOLE
    pair = (low.to(tl.int32, bitcast=True) & 0xFF) | (high.to(tl.int32, bitcast=True) << 8)
    return pair.to(tl.int16)


@triton.jit
def _store_raw(raw: tl.tensor, words: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> None:
    """Store the first tokens of a chunk as they are."""
    place, inside = _code_places(row, P, C)
    tl.store(raw + place, words, mask=inside & (row[:, None, None] < _RAW_TOKENS))


@triton.jit
def _middle(least: tl.tensor, largest: tl.tensor) -> tl.tensor:
    middle = (least + largest) * 0.5
    return tl.where(middle == 0.0, 0.0, middle)


@triton.jit
def _encode_k(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    codes: tl.tensor,
    middles: tl.tensor,
    scales: tl.tensor,
    raw: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Encode K of one layer, head and chunk, by channel. Return bits of the largest magnitude of each row of a tile.

    plane: to base and strides, as in kvtier.kernels.device. codes, middles, scales, raw: their places in the slab.
    """
    SHAPE: tl.constexpr = (C.rows, P.padded // 32, 16)
    column, vectors = tile_columns(P), plane_of_head(plane, head)
    low_least, high_least = tl.full(SHAPE, _INFINITY, tl.float32), tl.full(SHAPE, _INFINITY, tl.float32)
    low_top, high_top = tl.full(SHAPE, -_INFINITY, tl.float32), tl.full(SHAPE, -_INFINITY, tl.float32)
    tops = tl.full(SHAPE, 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        low, high = floats(load_words(vectors, blocks, row, P, C, "evict_last"), C.is_bf16)
        counts = ((row >= _RAW_TOKENS) & (row < C.tokens))[:, None, None]
        low_least = tl.minimum(low_least, tl.where(counts, low, _INFINITY))
        high_least = tl.minimum(high_least, tl.where(counts, high, _INFINITY))
        low_top = tl.maximum(low_top, tl.where(counts, low, -_INFINITY))
        high_top = tl.maximum(high_top, tl.where(counts, high, -_INFINITY))
        tops = tl.maximum(tops, _magnitudes(low, high))
    low_least, low_top = tl.reduce(low_least, 0, _elementwise_min), tl.reduce(low_top, 0, _elementwise_max)
    high_least, high_top = tl.reduce(high_least, 0, _elementwise_min), tl.reduce(high_top, 0, _elementwise_max)
    low_middle, high_middle = _middle(low_least, low_top)[None, :, :], _middle(high_least, high_top)[None, :, :]
    low_scale = _scale_bits(tl.maximum(low_top[None, :, :] - low_middle, low_middle - low_least[None, :, :]))
    high_scale = _scale_bits(tl.maximum(high_top[None, :, :] - high_middle, high_middle - high_least[None, :, :]))
    is_column = column < P.size // 2
    tl.store(middles + 2 * column, low_middle, mask=is_column)
    tl.store(middles + 2 * column + 1, high_middle, mask=is_column)
    tl.store(scales + column, low_scale | (high_scale << 16), mask=is_column)
    low_inverse, high_inverse = _inverse(low_scale, C), _inverse(high_scale, C)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        words = load_words(vectors, blocks, row, P, C, "evict_first")
        low, high = floats(words, C.is_bf16)
        place, inside = _code_places(row, P, C)
        found = _codes((low - low_middle) * low_inverse, (high - high_middle) * high_inverse)
        tl.store(codes + place, found, mask=inside)
        _store_raw(raw, words, row, P, C)
    return tl.reduce(tl.reduce(tops, 1, _elementwise_max), 1, _elementwise_max)


@triton.jit
def _encode_v(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    raw: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Encode V of one layer, head and chunk, by token. Arguments and result as of `_encode_k`."""
    vectors = plane_of_head(plane, head)
    tops = tl.full((C.rows,), 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        words = load_words(vectors, blocks, row, P, C, "evict_first")
        low, high = floats(words, C.is_bf16)
        top = tl.reduce(tl.reduce(_magnitudes(low, high), 1, _elementwise_max), 1, _elementwise_max)
        scale = _scale_bits(top.to(tl.float32, bitcast=True))
        inverse = _inverse(scale, C)[:, None, None]
        place, inside = _code_places(row, P, C)
        tl.store(codes + place, _codes(low * inverse, high * inverse), mask=inside)
        tl.store(scales + row, scale.to(tl.int16), mask=row < C.tokens)
        _store_raw(raw, words, row, P, C)
        tops = tl.maximum(tops, top)
    return tops


# Nothing is specialized on values: another chunk or rank must not mean another compilation.
@triton.jit(do_not_specialize=("planes", "table", "answers", "page_layer", "first_head", "slab_start", "slab_bytes"))
def encode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    answers: tl.tensor,
    page_layer: tl.tensor,
    first_head: tl.tensor,
    slab_start: tl.tensor,
    slab_bytes: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Grid: (heads, layers, moves): heads run fastest, so that pages are read whole while they are open in memory.

    planes: (layers, 2, 4) int64. table: (moves, 2 + n_blocks + heads) int64: address of the slabs, first block (not
    looked at), block ids, seeds. answers: (moves, heads + 1) int64, zeros at first: sums of slabs, and not zero where a
    chunk is refused. slab_start: place in a slab of the first of these layers. The rest behind the last layer, up to
    the slab's end, is summed with it.
    """
    N_BLOCKS: tl.constexpr = C.tokens // C.block_tokens
    V_CODES: tl.constexpr = C.tokens * K.size
    V_SCALES: tl.constexpr = C.tokens * (K.size + V.size)
    MIDDLES: tl.constexpr = V_SCALES + 2 * C.tokens
    RAW: tl.constexpr = MIDDLES + 6 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    n_heads = tl.num_programs(0)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS + n_heads)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of((slab + first).to(tl.pointer_type(tl.int16)), 16)
    words = codes.to(tl.pointer_type(tl.int32))
    middles, raw = (words + MIDDLES // 4).to(tl.pointer_type(tl.float32)), words + RAW // 4
    k_tops = _encode_k(plane, first_head + head, move + 2, codes, middles, words + MIDDLES // 4 + K.size, raw, K, C)
    v_tops = _encode_v(
        plane + 4,
        first_head + head,
        move + 2,
        codes + V_CODES // 2,
        codes + V_SCALES // 2,
        raw + _RAW_TOKENS * K.size // 2,
        V,
        C,
    )
    top = tl.reduce(tl.maximum(k_tops, v_tops), 0, _elementwise_max).to(tl.float32, bitcast=True)
    is_refused = (top < _ELEMENT_MAX) == 0  # also where it is NaN
    tl.debug_barrier()
    seed = move + 2 + N_BLOCKS + head
    answer_layer(answers, slab, first, first + LAYER_BYTES, slab_bytes, seed, is_refused, PAIRS, PAIRS)


@triton.jit
def _fill(
    vectors: tl.tuple,
    blocks: tl.tensor,
    raw: tl.tensor,
    first_token: tl.tensor,
    row: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Store a tile of elements into pages; the chunk's first tokens from where they are raw."""
    place, inside = _code_places(row, P, C)
    is_raw = row[:, None, None] < _RAW_TOKENS
    stored = tl.load(raw + place, mask=inside & is_raw, other=0)
    words = tl.where(is_raw, stored, words_of(low, high, C.is_bf16, C.fast))
    base, place, inside = tile_words(vectors, blocks, row, P, C)
    tl.store(base + place, words, mask=inside & (row[:, None, None] >= first_token))


@triton.jit
def _elements(codes: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """fp32 of the codes of a tile: of the lower and of the upper element of each word."""
    place, inside = _code_places(row, P, C)
    pair = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    return ((pair << 24) >> 24).to(tl.float32), (pair >> 8).to(tl.float32)


@triton.jit(do_not_specialize=("planes", "table", "page_layer", "first_head", "slab_start", "slab_bytes"))
def decode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    page_layer: tl.tensor,
    first_head: tl.tensor,
    slab_start: tl.tensor,
    slab_bytes: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Grid: (heads, layers, moves), as in `encode_chunks`. table: (moves, 2 + n_blocks) int64: address of the slabs,
    first block to fill, block ids."""
    V_CODES: tl.constexpr = C.tokens * K.size
    V_SCALES: tl.constexpr = C.tokens * (K.size + V.size)
    MIDDLES: tl.constexpr = V_SCALES + 2 * C.tokens
    RAW: tl.constexpr = MIDDLES + 6 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + C.tokens // C.block_tokens)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    start = tl.load(move) + head.to(tl.int64) * slab_bytes + slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of(start.to(tl.pointer_type(tl.int16)), 16)
    words = codes.to(tl.pointer_type(tl.int32))
    middles, raw = (words + MIDDLES // 4).to(tl.pointer_type(tl.float32)), words + RAW // 4
    first_token = tl.load(move + 1) * C.block_tokens

    column = tile_columns(K)
    is_column = column < K.size // 2
    low_middle = tl.load(middles + 2 * column, mask=is_column, other=0.0)
    high_middle = tl.load(middles + 2 * column + 1, mask=is_column, other=0.0)
    low_scale, high_scale = floats(tl.load(words + MIDDLES // 4 + K.size + column, mask=is_column, other=0), True)
    vectors = plane_of_head(plane, first_head + head)
    for tile in range(0, C.tokens, C.rows):
        row = tile + tl.arange(0, C.rows)
        low, high = _elements(codes, row, K, C)
        low, high = low_middle + low * low_scale, high_middle + high * high_scale
        _fill(vectors, move + 2, raw, first_token, row, low, high, K, C)

    vectors = plane_of_head(plane + 4, first_head + head)
    for tile in range(0, C.tokens, C.rows):
        row = tile + tl.arange(0, C.rows)
        low, high = _elements(codes + V_CODES // 2, row, V, C)
        scale = tl.load(codes + V_SCALES // 2 + row, mask=row < C.tokens, other=0).to(tl.int32) << 16
        scale = scale.to(tl.float32, bitcast=True)[:, None, None]
        _fill(vectors, move + 2, raw + _RAW_TOKENS * K.size // 2, first_token, row, low * scale, high * scale, V, C)
