"""int8's encoding and decoding on the device, a launch each: from pages to codes, scales and sums, and back.

A program does one layer of one head of one chunk: K, then V, tile after tile. K is read twice, the second time from the
cache: for the ranges of its channels, then for its codes. After encoding a program reads back what it wrote, from the
cache, and adds its part to its slab's checksum.

P stands for a plane's PlaneShape, C for the launch's Int8ChunkShape. Tiles are those of kvtier.kernels.tiles.
A tile of K is two tensors of one shape, a and b: words of the first half of a head, and at the same places the words of
their partners in the second half. So both channels of a pair are in the registers of one thread.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _elementwise_min

from kvtier.codecs.int8.codec import CODE_MAX, CODE_UNIT, ELEMENT_MAX, PAIR_CODES, RATIO_MAX, RAW_TOKENS, STEP_MIN
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import (
    WHOLE,
    floats,
    load_words,
    plane_of_head,
    quotient,
    row_words,
    square_root,
    tile_columns,
    tile_words,
    words_of,
)

_CODE_MAX, _CODE_UNIT, _STEP_MIN, _ELEMENT_MAX = (
    tl.constexpr(number) for number in (CODE_MAX, CODE_UNIT, STEP_MIN, ELEMENT_MAX)
)
_PAIR_CODES, _PAIR_CODES_ROOT = tl.constexpr(PAIR_CODES), tl.constexpr(PAIR_CODES**0.5)
_RATIO_MAX = tl.constexpr(RATIO_MAX)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
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
def _v_step_bits(reach: tl.tensor) -> tl.tensor:
    """int32: bf16 bits of the step of V's codes, for elements whose largest magnitude is `reach`."""
    exact = reach * _CODE_UNIT
    bits = tl.where(exact < _STEP_MIN, 0.0, exact).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _inverse(step_bits: tl.tensor, C: tl.constexpr) -> tl.tensor:
    step = (step_bits << 16).to(tl.float32, bitcast=True)
    one = tl.full(step.shape, 1.0, tl.float32)
    return tl.where(step == 0.0, 0.0, quotient(one, tl.where(step == 0.0, 1.0, step), C.fast))


@triton.jit
def _codes(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """int16: codes of low in the lower and of high in the upper byte."""
    low, high = tl.clamp(low, -_CODE_MAX, _CODE_MAX) + WHOLE, tl.clamp(high, -_CODE_MAX, _CODE_MAX) + WHOLE
    pair = (low.to(tl.int32, bitcast=True) & 0xFF) | (high.to(tl.int32, bitcast=True) << 8)
    return pair.to(tl.int16)


@triton.jit
def _pair_columns(P: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(1, groups, 16) each: numbers of the words in a row's first half, those of their partners, mask of valid ones."""
    WORDS: tl.constexpr = P.size // 4
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2  # words of a run, kvtier.codecs.int8.codec.RUN
    a = tl.arange(0, P.padded // 64)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    b = 2 * WORDS - SIDE_BY_SIDE * (a // SIDE_BY_SIDE + 1) + a % SIDE_BY_SIDE
    return a, b, a < WORDS


@triton.jit
def _pair_places(start: tl.tensor, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(rows, groups, 16) each: places of the words of both halves of rows that begin at `start`, a multiple of 4."""
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2
    a_column, b_column, _ = _pair_columns(P)
    a = tl.max_contiguous(tl.multiple_of(start + a_column, (1, 1, 4)), (1, 1, 4))
    b = tl.multiple_of(start + b_column, (1, 1, SIDE_BY_SIDE))
    return a, tl.max_contiguous(b, (1, 1, SIDE_BY_SIDE))


@triton.jit
def _pair_code_places(row: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """(rows, groups, 16): places of the words of two pairs' codes in their plane."""
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2
    a_column, _, _ = _pair_columns(P)
    place = tl.multiple_of(row[:, None, None] * (P.size // 4) + a_column, (1, 1, SIDE_BY_SIDE))
    return tl.max_contiguous(place, (1, 1, SIDE_BY_SIDE))


@triton.jit
def _widened(least: tl.tensor, top: tl.tensor, x: tl.tensor, counts: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the minimum and maximum of each place of a tile, updated with x where `counts` is true."""
    return tl.minimum(least, tl.where(counts, x, _INFINITY)), tl.maximum(top, tl.where(counts, x, -_INFINITY))


@triton.jit
def _make_scale(
    a_least: tl.tensor, a_top: tl.tensor, b_least: tl.tensor, b_top: tl.tensor, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the scale of pairs of channels a and b: (minimum of a, minimum of b, bf16 bits of their common step,
    number of codes of a, number of codes of b).

    Shapes: (rows, groups, 16) of each argument, (1, groups, 16) of each result.
    """
    a_least, a_range = _least_and_range(a_least, a_top)
    b_least, b_range = _least_and_range(b_least, b_top)
    floor = tl.maximum(tl.maximum(a_range, b_range) * (1.0 / _RATIO_MAX), _STEP_MIN)
    ratio = quotient(tl.maximum(a_range, floor), tl.maximum(b_range, floor), C.fast)
    one = tl.full(ratio.shape, 1.0, tl.float32)
    n_a = (square_root(ratio, C.fast) * _PAIR_CODES_ROOT).to(tl.int32).to(tl.float32)
    n_b = quotient(one * _PAIR_CODES, n_a, C.fast).to(tl.int32).to(tl.float32)
    step = tl.maximum(a_range * quotient(one, n_a - 1.0, C.fast), b_range * quotient(one, n_b - 1.0, C.fast))
    bits = tl.where(step < _STEP_MIN, 0.0, step).to(tl.int32, bitcast=True)
    return a_least, b_least, ((bits + 0xFFFF) >> 16) & 0xFFFF, n_a, n_b


@triton.jit
def _least_and_range(least: tl.tensor, largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the minimum of each channel and its range, maximum - minimum; (1, groups, 16) each."""
    least, largest = tl.reduce(least, 0, _elementwise_min), tl.reduce(largest, 0, _elementwise_max)
    least = tl.where(least == 0.0, 0.0, least)
    return least[None, :, :], (largest - least)[None, :, :]


@triton.jit
def _whole(x: tl.tensor, n: tl.tensor) -> tl.tensor:
    """Round to whole numbers from 0 to n - 1."""
    return (tl.clamp(x, 0.0, n - 1.0) + WHOLE) - WHOLE


@triton.jit
def _pair_codes(a: tl.tensor, b: tl.tensor, scale: tl.tuple, inverse: tl.tensor) -> tl.tensor:
    """int32: codes of pairs, below 2^16. scale: the result of `_make_scale`."""
    a_least, b_least, _, n_a, n_b = scale
    a, b = _whole((a - a_least) * inverse, n_a), _whole((b - b_least) * inverse, n_b)
    return (a * n_b + b + WHOLE).to(tl.int32, bitcast=True) & 0xFFFF


@triton.jit
def _load_pairs(
    vectors: tl.tuple, blocks: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr, EVICT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(rows, groups, 16) int32 each: words of the first half of a tile of K, and their partners."""
    _, _, is_column = _pair_columns(P)
    a_place, b_place = _pair_places(row_words(vectors, blocks, row, C), P)
    inside = is_column & (row[:, None, None] < C.tokens)
    a = tl.load(vectors[0] + a_place, mask=inside, other=0, eviction_policy=EVICT)
    return a, tl.load(vectors[0] + b_place, mask=inside, other=0, eviction_policy=EVICT)


@triton.jit
def _encode_k(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, slab: tl.tuple, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Encode K of one layer, head and chunk, by pairs of channels. Return bits of the largest magnitude of each row of
    a tile.

    plane: pointers to base and strides, as in kvtier.kernels.device. slab: pointers to the words of codes, scales and
    raw tokens.
    """
    codes, scales, raw = slab
    SHAPE: tl.constexpr = (C.rows, P.padded // 64, 16)
    WORDS: tl.constexpr = P.size // 4
    vectors = plane_of_head(plane, head)
    column, _, is_column = _pair_columns(P)
    a_even_least, a_odd_least = tl.full(SHAPE, _INFINITY, tl.float32), tl.full(SHAPE, _INFINITY, tl.float32)
    b_even_least, b_odd_least = tl.full(SHAPE, _INFINITY, tl.float32), tl.full(SHAPE, _INFINITY, tl.float32)
    a_even_top, a_odd_top = tl.full(SHAPE, -_INFINITY, tl.float32), tl.full(SHAPE, -_INFINITY, tl.float32)
    b_even_top, b_odd_top = tl.full(SHAPE, -_INFINITY, tl.float32), tl.full(SHAPE, -_INFINITY, tl.float32)
    tops = tl.full(SHAPE, 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        a, b = _load_pairs(vectors, blocks, row, P, C, "evict_last")
        a_even, a_odd = floats(a, C.is_bf16)
        b_even, b_odd = floats(b, C.is_bf16)
        counts = ((row >= _RAW_TOKENS) & (row < C.tokens))[:, None, None]
        a_even_least, a_even_top = _widened(a_even_least, a_even_top, a_even, counts)
        a_odd_least, a_odd_top = _widened(a_odd_least, a_odd_top, a_odd, counts)
        b_even_least, b_even_top = _widened(b_even_least, b_even_top, b_even, counts)
        b_odd_least, b_odd_top = _widened(b_odd_least, b_odd_top, b_odd, counts)
        tops = tl.maximum(tops, tl.maximum(_magnitudes(a_even, a_odd), _magnitudes(b_even, b_odd)))
    even = _make_scale(a_even_least, a_even_top, b_even_least, b_even_top, C)
    odd = _make_scale(a_odd_least, a_odd_top, b_odd_least, b_odd_top, C)
    tl.store(scales + column, even[0].to(tl.int32, bitcast=True), mask=is_column)
    tl.store(scales + WORDS + column, odd[0].to(tl.int32, bitcast=True), mask=is_column)
    tl.store(scales + 2 * WORDS + column, even[1].to(tl.int32, bitcast=True), mask=is_column)
    tl.store(scales + 3 * WORDS + column, odd[1].to(tl.int32, bitcast=True), mask=is_column)
    tl.store(scales + 4 * WORDS + column, even[2] | (odd[2] << 16), mask=is_column)
    n_b = even[4].to(tl.int32) | (odd[4].to(tl.int32) << 16)
    tl.store(scales + 5 * WORDS + column, n_b, mask=is_column)
    even_inverse, odd_inverse = _inverse(even[2], C), _inverse(odd[2], C)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        a, b = _load_pairs(vectors, blocks, row, P, C, "evict_first")
        a_even, a_odd = floats(a, C.is_bf16)
        b_even, b_odd = floats(b, C.is_bf16)
        code = _pair_codes(a_even, b_even, even, even_inverse) | (_pair_codes(a_odd, b_odd, odd, odd_inverse) << 16)
        inside = is_column & (row[:, None, None] < C.tokens)
        tl.store(codes + _pair_code_places(row, P), code, mask=inside)
        inside = inside & (row[:, None, None] < _RAW_TOKENS)
        a_place, b_place = _pair_places(row[:, None, None] * (P.size // 2), P)
        tl.store(raw + a_place, a, mask=inside)
        tl.store(raw + b_place, b, mask=inside)
    return tl.reduce(tl.reduce(tops, 1, _elementwise_max), 1, _elementwise_max)


@triton.jit
def _encode_v(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, slab: tl.tuple, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Encode V of one layer, head and chunk, by token. slab: pointers to codes and steps, int16, and to words of raw
    tokens. Other arguments and result as in `_encode_k`."""
    codes, steps, raw = slab
    vectors = plane_of_head(plane, head)
    tops = tl.full((C.rows,), 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        words = load_words(vectors, blocks, row, P, C, "evict_first")
        low, high = floats(words, C.is_bf16)
        top = tl.reduce(tl.reduce(_magnitudes(low, high), 1, _elementwise_max), 1, _elementwise_max)
        step = _v_step_bits(top.to(tl.float32, bitcast=True))
        inverse = _inverse(step, C)[:, None, None]
        place, inside = _code_places(row, P, C)
        tl.store(codes + place, _codes(low * inverse, high * inverse), mask=inside)
        tl.store(steps + row, step.to(tl.int16), mask=row < C.tokens)
        tl.store(raw + place, words, mask=inside & (row[:, None, None] < _RAW_TOKENS))
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
    V_STEPS: tl.constexpr = C.tokens * (K.size + V.size)
    SCALES: tl.constexpr = V_STEPS + 2 * C.tokens
    RAW: tl.constexpr = SCALES + 6 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    n_heads = tl.num_programs(0)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS + n_heads)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of((slab + first).to(tl.pointer_type(tl.int16)), 16)
    words = codes.to(tl.pointer_type(tl.int32))
    raw = words + RAW // 4
    k_tops = _encode_k(plane, first_head + head, move + 2, (words, words + SCALES // 4, raw), K, C)
    v_slab = (codes + V_CODES // 2, codes + V_STEPS // 2, raw + _RAW_TOKENS * K.size // 2)
    v_tops = _encode_v(plane + 4, first_head + head, move + 2, v_slab, V, C)
    top = tl.reduce(tl.maximum(k_tops, v_tops), 0, _elementwise_max).to(tl.float32, bitcast=True)
    is_refused = (top < _ELEMENT_MAX) == 0  # also where it is NaN
    tl.debug_barrier()
    seed = move + 2 + N_BLOCKS + head
    answer_layer(answers, slab, first, first + LAYER_BYTES, slab_bytes, seed, is_refused, PAIRS, PAIRS)


@triton.jit
def _fill(
    pages: tl.tensor,
    raw: tl.tensor,
    first_token: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Store a tile of elements into pages. The chunk's first tokens are copied from `raw` instead.

    pages, raw: pointers to the word of each place, valid where `inside` is true.
    """
    is_raw = row[:, None, None] < _RAW_TOKENS
    stored = tl.load(raw, mask=inside & is_raw, other=0)
    words = tl.where(is_raw, stored, words_of(low, high, C.is_bf16, C.fast))
    tl.store(pages, words, mask=inside & (row[:, None, None] >= first_token))


@triton.jit
def _pair_elements(
    code: tl.tensor, a_least: tl.tensor, b_least: tl.tensor, step: tl.tensor, n_b: tl.tensor, inverse: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the elements of a and of b, fp32, that the codes of pairs stand for. inverse: 1 / n_b."""
    code = code.to(tl.float32)
    # The rounded number is a + (b + 0.5) / n_b - 0.5, at least 0.5 / n_b away from the next rounding boundary. So the
    # error of `inverse` cannot change a.
    a = (((code + 0.5) * inverse - 0.5) + WHOLE) - WHOLE
    return a_least + a * step, b_least + (code - a * n_b) * step


@triton.jit
def _decode_k(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    first_token: tl.tensor,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decode K of one layer, head and chunk. Arguments as in `_encode_k`. first_token: the first one to fill."""
    codes, scales, raw = slab
    WORDS: tl.constexpr = P.size // 4
    vectors = plane_of_head(plane, head)
    column, _, is_column = _pair_columns(P)
    a_even_least = tl.load(scales + column, mask=is_column, other=0).to(tl.float32, bitcast=True)
    a_odd_least = tl.load(scales + WORDS + column, mask=is_column, other=0).to(tl.float32, bitcast=True)
    b_even_least = tl.load(scales + 2 * WORDS + column, mask=is_column, other=0).to(tl.float32, bitcast=True)
    b_odd_least = tl.load(scales + 3 * WORDS + column, mask=is_column, other=0).to(tl.float32, bitcast=True)
    even_step, odd_step = floats(tl.load(scales + 4 * WORDS + column, mask=is_column, other=0), True)
    n_b = tl.load(scales + 5 * WORDS + column, mask=is_column, other=0x10001)
    even_n_b, odd_n_b = (n_b & 0xFFFF).to(tl.float32), ((n_b >> 16) & 0xFFFF).to(tl.float32)
    one = tl.full(even_n_b.shape, 1.0, tl.float32)
    even_inverse, odd_inverse = quotient(one, even_n_b, C.fast), quotient(one, odd_n_b, C.fast)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        inside = is_column & (row[:, None, None] < C.tokens)
        code = tl.load(codes + _pair_code_places(row, P), mask=inside, other=0)
        even, odd = code & 0xFFFF, (code >> 16) & 0xFFFF
        a_even, b_even = _pair_elements(even, a_even_least, b_even_least, even_step, even_n_b, even_inverse)
        a_odd, b_odd = _pair_elements(odd, a_odd_least, b_odd_least, odd_step, odd_n_b, odd_inverse)
        a_place, b_place = _pair_places(row_words(vectors, blocks, row, C), P)
        a_raw, b_raw = _pair_places(row[:, None, None] * (P.size // 2), P)
        _fill(vectors[0] + a_place, raw + a_raw, first_token, row, inside, a_even, a_odd, C)
        _fill(vectors[0] + b_place, raw + b_raw, first_token, row, inside, b_even, b_odd, C)


@triton.jit
def _decode_v(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    first_token: tl.tensor,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decode V of one layer, head and chunk. Arguments as in `_encode_v`. first_token: the first one to fill."""
    codes, steps, raw = slab
    vectors = plane_of_head(plane, head)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        place, inside = _code_places(row, P, C)
        pair = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
        step = tl.load(steps + row, mask=row < C.tokens, other=0).to(tl.int32) << 16
        step = step.to(tl.float32, bitcast=True)[:, None, None]
        low, high = ((pair << 24) >> 24).to(tl.float32) * step, (pair >> 8).to(tl.float32) * step
        base, page_place, _ = tile_words(vectors, blocks, row, P, C)
        _fill(base + page_place, raw + place, first_token, row, inside, low, high, C)


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
    V_STEPS: tl.constexpr = C.tokens * (K.size + V.size)
    SCALES: tl.constexpr = V_STEPS + 2 * C.tokens
    RAW: tl.constexpr = SCALES + 6 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + C.tokens // C.block_tokens)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    start = tl.load(move) + head.to(tl.int64) * slab_bytes + slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of(start.to(tl.pointer_type(tl.int16)), 16)
    words = codes.to(tl.pointer_type(tl.int32))
    raw = words + RAW // 4
    first_token = tl.load(move + 1) * C.block_tokens
    _decode_k(plane, first_head + head, move + 2, first_token, (words, words + SCALES // 4, raw), K, C)
    v_slab = (codes + V_CODES // 2, codes + V_STEPS // 2, raw + _RAW_TOKENS * K.size // 2)
    _decode_v(plane + 4, first_head + head, move + 2, first_token, v_slab, V, C)
