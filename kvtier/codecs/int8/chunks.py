"""int8's kernels on the device: one launch encodes pages to codes, scales and checksums, one decodes them.

A program does one layer of one head of one chunk: K, then V, tile after tile. It reads K twice: for the ranges of its
channels, then for its codes. Cache hints ask L2 to keep K in between. After encoding, a program reads its own output
back and adds its part to its slab's checksum.

P stands for a plane's PlaneShape, C for the launch's Int8ChunkShape. Tiles of V are those of kvtier.kernels.tiles.
A tile of K is two tensors, a and b, (rows, words): a has the words of the first half of a head, b has the words of
their partners in the second half, at the same places. So one thread has both channels of a pair in its registers.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _elementwise_min

from kvtier.codecs.int8.codec import CODE_UNIT, ELEMENT_MAX, PAIR_CODES, RATIO_MAX, RAW_TOKENS, STEP_MIN
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import (
    WHOLE,
    copy_first_token,
    floats,
    fused,
    largest,
    load_words,
    permuted,
    plane_of_head,
    quotient,
    row_words,
    square_root,
    tile_columns,
    tile_words,
    value_of,
    words_of,
)

_CODE_UNIT, _STEP_MIN, _ELEMENT_MAX = tl.constexpr(CODE_UNIT), tl.constexpr(STEP_MIN), tl.constexpr(ELEMENT_MAX)
_PAIR_CODES, _PAIR_CODES_ROOT = tl.constexpr(PAIR_CODES), tl.constexpr(PAIR_CODES**0.5)
_RATIO_MAX = tl.constexpr(RATIO_MAX)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_UNROLL = tl.constexpr(2)  # tiles of K in one iteration of an encoding loop
_TWO23, _TWO23_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)
_LEAST_BF16, _LEAST_FP16, _MOST_BF16, _MOST_FP16 = (
    tl.constexpr(f"{name}.NaN.{kind} $0, $1, $2;") for name in ("min", "max") for kind in ("bf16x2", "f16x2")
)


class PlaneShape(NamedTuple):
    """size: elements of a vector, a multiple of 8; padded: elements of a vector in a tile, a power of two."""

    size: int
    padded: int


class Int8ChunkShape(NamedTuple):
    """rows: those of a tile of V; a tile of K has half as many. fast: use inline PTX, which the interpreter lacks."""

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
def _pair_columns(P: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the numbers of the words in a row's first half, those of their partners, and the mask of valid ones, each
    (1, words)."""
    WORDS: tl.constexpr = P.size // 4
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2  # words of a run, kvtier.codecs.int8.codec.RUN
    a = tl.arange(0, P.padded // 4)[None, :]
    b = 2 * WORDS - SIDE_BY_SIDE * (a // SIDE_BY_SIDE + 1) + a % SIDE_BY_SIDE
    return a, b, a < WORDS


@triton.jit
def _pair_places(start: tl.tensor, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the places of the words of a row's first half and of their partners, (rows, words) each.

    start: places of the rows' first words, (rows, 1), multiples of 4.
    """
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2
    a_column, b_column, _ = _pair_columns(P)
    a = tl.max_contiguous(tl.multiple_of(start + a_column, (1, 4)), (1, 4))
    b = tl.multiple_of(start + b_column, (1, SIDE_BY_SIDE))
    return a, tl.max_contiguous(b, (1, SIDE_BY_SIDE))


@triton.jit
def _pair_code_places(row: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Return the places in their plane of words of two codes each, (rows, words). row: (rows, 1)."""
    SIDE_BY_SIDE: tl.constexpr = 4 if P.size % 16 == 0 else 2
    a_column, _, _ = _pair_columns(P)
    place = tl.multiple_of(row * (P.size // 4) + a_column, (1, SIDE_BY_SIDE))
    return tl.max_contiguous(place, (1, SIDE_BY_SIDE))


@triton.jit
def _load_pairs(
    vectors: tl.tuple, blocks: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr, EVICT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the words of the first half of a tile of K, and their partners, (rows, words) int32 each.

    row: tokens of the chunk, (rows, 1).
    """
    _, _, is_column = _pair_columns(P)
    a_place, b_place = _pair_places(row_words(vectors, blocks, row, C), P)
    if P.size == P.padded:
        a = tl.load(vectors[0] + a_place, eviction_policy=EVICT)
        b = tl.load(vectors[0] + b_place, eviction_policy=EVICT)
    else:
        a = tl.load(vectors[0] + a_place, mask=is_column, other=0, eviction_policy=EVICT)
        b = tl.load(vectors[0] + b_place, mask=is_column, other=0, eviction_policy=EVICT)
    return a, b


@triton.jit
def _ordered(half: tl.tensor) -> tl.tensor:
    """Return int32 numbers in the order of the elements whose sign-extended bits are `half`. NaN is at either end. The
    function is its own inverse."""
    return half ^ ((half >> 31) & 0x7FFF)


@triton.jit
def _extreme(x: tl.tensor, y: tl.tensor, MOST: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Return words of the greater elements of x and y, or of the lesser ones; NaN where either element is NaN."""
    if C.fast:
        LEAST_ASM: tl.constexpr = _LEAST_BF16 if C.is_bf16 else _LEAST_FP16
        MOST_ASM: tl.constexpr = _MOST_BF16 if C.is_bf16 else _MOST_FP16
        ASM: tl.constexpr = MOST_ASM if MOST else LEAST_ASM
        word = tl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        x_low, y_low = _ordered((x << 16) >> 16), _ordered((y << 16) >> 16)
        x_high, y_high = _ordered(x >> 16), _ordered(y >> 16)
        low = tl.maximum(x_low, y_low) if MOST else tl.minimum(x_low, y_low)
        high = tl.maximum(x_high, y_high) if MOST else tl.minimum(x_high, y_high)
        word = permuted(_ordered(low), _ordered(high), 0x5410, False)
    return word


@triton.jit
def _store_ranges(
    scales: tl.tensor, scratch: tl.tensor, least: tl.tensor, most: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> None:
    """Store the least (in `scales`) and the largest (in `scratch`) element of each channel, fp32: those of even
    channels, then those of odd ones. least, most: words of elements, (rows, words)."""
    word, half = tl.arange(0, P.padded // 4)[:, None], tl.arange(0, 2)[None, :]
    place, inside = word + half * (P.size // 4), word < P.size // 4
    even, odd = floats(least, C.is_bf16)
    found = tl.reduce(tl.join(even, odd), 0, _elementwise_min)
    tl.store(scales + place, tl.where(found == 0.0, 0.0, found), mask=inside)  # +0 for -0: either may be the least
    even, odd = floats(most, C.is_bf16)
    tl.store(scratch + place, tl.reduce(tl.join(even, odd), 0, _elementwise_max), mask=inside)


@triton.jit
def _top(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Return the bits of the largest magnitude of four elements, those of a word of x and one of y, int32. The bits of
    NaN are above those of infinity, and these above all others."""
    return tl.maximum(
        tl.maximum(x & 0x7FFF, (x >> 16) & 0x7FFF),
        tl.maximum(y & 0x7FFF, (y >> 16) & 0x7FFF),
    )


@triton.jit
def _find_ranges(
    vectors: tl.tuple, blocks: tl.tensor, scales: tl.tensor, scratch: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Store the least element of each channel in the slab, and the largest in the scratch, in the same order. Return
    the bits of the largest magnitude, int32. The chunk's first token is left out of all three.

    scales, scratch: pointers to fp32.
    """
    ROWS: tl.constexpr = C.rows // 2
    INFINITIES: tl.constexpr = 0x7F807F80 if C.is_bf16 else 0x7C007C00
    MINUS: tl.constexpr = -0x7FFF8000  # the signs of a word's elements
    row = tl.arange(0, ROWS)[:, None]
    a_least = tl.full((ROWS, P.padded // 4), INFINITIES, tl.int32)
    a_most, b_least, b_most = a_least ^ MINUS, a_least, a_least ^ MINUS
    for start in tl.range(0, C.tokens, ROWS, loop_unroll_factor=_UNROLL):
        # Read the second token in place of the first, and the last one past the end. A token that is read twice does
        # not change the ranges.
        counted = tl.minimum(tl.maximum(start + row, _RAW_TOKENS), C.tokens - 1)
        a, b = _load_pairs(vectors, blocks, counted, P, C, "evict_last")
        a_least, a_most = _extreme(a_least, a, False, C), _extreme(a_most, a, True, C)
        b_least, b_most = _extreme(b_least, b, False, C), _extreme(b_most, b, True, C)
    top = tl.maximum(_top(a_least, a_most), _top(b_least, b_most))
    top = tl.reduce(tl.reduce(top, 1, _elementwise_max), 0, _elementwise_max)
    _store_ranges(scales, scratch, a_least, a_most, P, C)
    _store_ranges(scales + P.size // 2, scratch + P.size // 2, b_least, b_most, P, C)
    return top


@triton.jit
def _make_scales(scales: tl.tensor, scratch: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tuple:
    """Store the scales of the pairs of channels. Return (least of a, least of b, inverse of the step, number of codes
    of a, number of codes of b), (pairs,) fp32 each.

    scales, scratch: pointers to fp32, to the results of `_find_ranges`. The inverses are stored behind them in the
    scratch.
    """
    pair = tl.arange(0, P.padded // 2)
    inside = pair < P.size // 2
    place = pair % 2 * (P.size // 4) + pair // 2
    a_least = tl.load(scales + place, mask=inside, other=0.0)
    b_least = tl.load(scales + P.size // 2 + place, mask=inside, other=0.0)
    a_range = tl.load(scratch + place, mask=inside, other=0.0) - a_least
    b_range = tl.load(scratch + P.size // 2 + place, mask=inside, other=0.0) - b_least
    floor = tl.maximum(tl.maximum(a_range, b_range) * (1.0 / _RATIO_MAX), _STEP_MIN)
    ratio = quotient(tl.maximum(a_range, floor), tl.maximum(b_range, floor), C.fast)
    one = tl.full(ratio.shape, 1.0, tl.float32)
    n_a = (square_root(ratio, C.fast) * _PAIR_CODES_ROOT).to(tl.int32).to(tl.float32)
    n_b = quotient(one * _PAIR_CODES, n_a, C.fast).to(tl.int32).to(tl.float32)
    step = tl.maximum(a_range * quotient(one, n_a - 1.0, C.fast), b_range * quotient(one, n_b - 1.0, C.fast))
    bits = tl.where(step < _STEP_MIN, 0.0, step).to(tl.int32, bitcast=True)
    bits = ((bits + 0xFFFF) >> 16) & 0xFFFF  # rounded up
    inverse = _inverse(bits, C)
    steps = (scales + P.size).to(tl.pointer_type(tl.int16))
    tl.store(steps + pair, bits.to(tl.int16), mask=inside)
    tl.store(steps + P.size // 2 + pair, n_b.to(tl.int32).to(tl.int16), mask=inside)
    tl.store(scratch + P.size + place, inverse, mask=inside)
    return a_least, b_least, inverse, n_a, n_b


@triton.jit
def _encode_first_token(
    vectors: tl.tuple, blocks: tl.tensor, raw: tl.tensor, scale: tl.tuple, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Copy the chunk's first token to `raw`. Return its codes, (pairs,) int16, and the bits of its largest magnitude.
    scale: the result of `_make_scales`."""
    tl.static_assert(_RAW_TOKENS == 1)
    SIDE_BY_SIDE: tl.constexpr = 8 if P.size % 16 == 0 else 4  # elements of a run
    a_least, b_least, inverse, n_a, n_b = scale
    pair = tl.arange(0, P.padded // 2)
    inside = pair < P.size // 2
    partner = P.size - SIDE_BY_SIDE * (pair // SIDE_BY_SIDE + 1) + pair % SIDE_BY_SIDE
    token = (vectors[0] + tl.load(blocks) * vectors[1]).to(tl.pointer_type(tl.int16))
    raw = raw.to(tl.pointer_type(tl.int16))
    a, b = tl.load(token + pair, mask=inside, other=0), tl.load(token + partner, mask=inside, other=0)
    tl.store(raw + pair, a, mask=inside)
    tl.store(raw + partner, b, mask=inside)
    a, b = a.to(tl.int32), b.to(tl.int32)
    top = tl.reduce(tl.maximum(a & 0x7FFF, b & 0x7FFF), 0, _elementwise_max)
    # The ranges do not include this token, so its elements may be outside of them.
    a = (tl.clamp((value_of(a, C) - a_least) * inverse, 0.0, n_a - 1.0) + WHOLE) - WHOLE
    b = (tl.clamp((value_of(b, C) - b_least) * inverse, 0.0, n_b - 1.0) + WHOLE) - WHOLE
    return (a * n_b + b + WHOLE).to(tl.int32, bitcast=True).to(tl.int16), top


@triton.jit
def _pair_codes(
    a: tl.tensor, b: tl.tensor, a_least: tl.tensor, b_least: tl.tensor, inverse: tl.tensor, n_b: tl.tensor
) -> tl.tensor:
    """Return int32 whose lower halves are the codes of pairs. a, b: elements within their channel's range.

    The step was rounded up, so (a - least) * inverse exceeds n - 1 by rounding errors at most (2^-22 of it) and needs
    no clamp. The lower half of WHOLE's bits is 0, so these bits do not change the lower half of the result.
    """
    a = ((a - a_least) * inverse + WHOLE).to(tl.int32, bitcast=True)
    return a * n_b + ((b - b_least) * inverse + WHOLE).to(tl.int32, bitcast=True)


@triton.jit
def _encode_k(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, slab: tl.tuple, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Encode K of one layer, head and chunk, by pairs of channels. Return the bits of the largest magnitude, int32.

    plane: pointers to base and strides, as in kvtier.kernels.device. slab: pointers to the words of codes, scales and
    raw tokens.

    Each scale is computed once, so a thread computes those of other channels than it reads. Threads exchange them
    through the slab, with barriers. The scratch has the values that the slab does not keep. It is stored where the
    codes will be: it needs 6 bytes a channel, and the codes of a chunk's 16 tokens or more take at least 16.
    """
    codes, scale_words, raw = slab
    ROWS: tl.constexpr = C.rows // 2
    WORDS: tl.constexpr = P.size // 4
    vectors = plane_of_head(plane, head)
    scales, scratch = scale_words.to(tl.pointer_type(tl.float32)), codes.to(tl.pointer_type(tl.float32))
    top = _find_ranges(vectors, blocks, scales, scratch, P, C)
    tl.debug_barrier()
    scale = _make_scales(scales, scratch, P, C)
    first_codes, first_top = _encode_first_token(vectors, blocks, raw, scale, P, C)
    tl.debug_barrier()
    column, _, is_column = _pair_columns(P)
    even_inverse = tl.load(scratch + 4 * WORDS + column, mask=is_column, other=0.0)
    odd_inverse = tl.load(scratch + 5 * WORDS + column, mask=is_column, other=0.0)
    a_even_least = tl.load(scales + column, mask=is_column, other=0.0)
    a_odd_least = tl.load(scales + WORDS + column, mask=is_column, other=0.0)
    b_even_least = tl.load(scales + 2 * WORDS + column, mask=is_column, other=0.0)
    b_odd_least = tl.load(scales + 3 * WORDS + column, mask=is_column, other=0.0)
    n_b = tl.load(scale_words + 5 * WORDS + column, mask=is_column, other=0)
    even_n_b, odd_n_b = n_b & 0xFFFF, (n_b >> 16) & 0xFFFF
    tl.debug_barrier()  # all threads have read the scratch: codes may overwrite it
    pair = tl.arange(0, P.padded // 2)
    tl.store(codes.to(tl.pointer_type(tl.int16)) + pair, first_codes, mask=pair < P.size // 2)
    for start in tl.range(0, C.tokens, ROWS, loop_unroll_factor=_UNROLL):
        row = start + tl.arange(0, ROWS)[:, None]
        a, b = _load_pairs(vectors, blocks, tl.minimum(row, C.tokens - 1), P, C, "evict_first")
        a_even, a_odd = floats(a, C.is_bf16)
        b_even, b_odd = floats(b, C.is_bf16)
        even = _pair_codes(a_even, b_even, a_even_least, b_even_least, even_inverse, even_n_b)
        odd = _pair_codes(a_odd, b_odd, a_odd_least, b_odd_least, odd_inverse, odd_n_b)
        inside = (row >= _RAW_TOKENS) & (row < C.tokens)
        if P.size != P.padded:
            inside &= is_column
        tl.store(codes + _pair_code_places(row, P), permuted(even, odd, 0x5410, C.fast), mask=inside)
    return tl.maximum(top, first_top)


@triton.jit
def _encode_v(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, slab: tl.tuple, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Encode V of one layer, head and chunk, by token. Return the bits of the largest magnitude, int32.

    slab: pointers to codes and steps, int16, and to words of raw tokens. Other arguments as in `_encode_k`.
    """
    codes, steps, raw = slab
    vectors = plane_of_head(plane, head)
    tops = tl.full((C.rows,), 0, tl.int32)
    following = load_words(vectors, blocks, tl.arange(0, C.rows), P, C, "evict_first")
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        words = following
        following = load_words(vectors, blocks, row + C.rows, P, C, "evict_first")
        top = largest(words, C)
        tops = tl.maximum(tops, top)
        step = _v_step_bits(value_of(top, C))
        inverse = _inverse(step, C)[:, None, None]
        # The step is rounded to bf16, so a quotient is at most 127 * (1 + 2^-8) < 127.5 and needs no clamp.
        low, high = floats(words, C.is_bf16)
        low, high = low * inverse + WHOLE, high * inverse + WHOLE
        pair = permuted(low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True), 0x0040, C.fast).to(tl.int16)
        place, inside = _code_places(row, P, C)
        tl.store(codes + place, pair, mask=inside)
        # Four threads have each row's step, and the first of them stores it. From a tensor of shape (rows,) Triton
        # would first move the steps between all threads, with barriers.
        thread = tl.arange(0, 4)[:, None]
        is_step = (thread == 0) & (row[None, :] < C.tokens)
        step = tl.broadcast_to(step.to(tl.int16)[None, :], (4, C.rows))
        tl.store(steps + tl.max_contiguous(row[None, :] + thread, (1, 1)), step, mask=is_step)
        tl.store(raw + place, words, mask=inside & (row[:, None, None] < _RAW_TOKENS))
    return tl.reduce(tops, 0, _elementwise_max)


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
    """Encode chunks. Grid: (heads, layers, moves): heads run fastest, so that pages are read whole while they are open
    in memory.

    planes: (layers, 2, 4) int64. table: (moves, 2 + n_blocks + heads) int64: address of the slabs, first block (not
    used), block ids, seeds. answers: (moves, heads + 1) int64, zeros at first; the kernel adds the slabs' checksums,
    and sets the last entry where a chunk is refused. slab_start: place of the first of these layers in a slab. The
    bytes behind the last layer, up to the slab's end, are summed with that layer.
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
    k_top = _encode_k(plane, first_head + head, move + 2, (words, words + SCALES // 4, raw), K, C)
    v_slab = (codes + V_CODES // 2, codes + V_STEPS // 2, raw + _RAW_TOKENS * K.size // 2)
    v_top = _encode_v(plane + 4, first_head + head, move + 2, v_slab, V, C)
    is_refused = (value_of(tl.maximum(k_top, v_top), C) < _ELEMENT_MAX) == 0  # also where it is NaN
    tl.debug_barrier()
    seed = move + 2 + N_BLOCKS + head
    answer_layer(answers, slab, first, first + LAYER_BYTES, slab_bytes, seed, is_refused, PAIRS, PAIRS)


@triton.jit
def _above_two23(words: tl.tensor, SELECTOR: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return 2^23 + n, fp32, where n is the number in one or two bytes of each word. A byte permute makes it without a
    conversion instruction.

    SELECTOR: as in `permuted`: 7, then 4 for each byte that is zero, then the numbers of n's bytes.
    """
    two23 = tl.full(words.shape, _TWO23_BITS, tl.int32)
    return permuted(words, two23, SELECTOR, FAST).to(tl.float32, bitcast=True)


@triton.jit
def _pair_elements(
    code: tl.tensor,
    a_least: tl.tensor,
    b_least: tl.tensor,
    step: tl.tensor,
    n_b: tl.tensor,
    inverse: tl.tensor,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the elements of a and of b, fp32, that the codes of pairs stand for.

    code: 2^23 + the code. inverse: 1 / n_b. All products but the first are exact, so a fused multiplication and
    addition gives what separate ones give.
    """
    code = code - (_TWO23 - 0.5)
    # The rounded number is a + (b + 0.5) / n_b - 0.5, at least 0.5 / n_b away from the next rounding boundary. So the
    # error of `inverse` cannot change a.
    a = (fused(code, inverse, tl.full(code.shape, -0.5, tl.float32), C.fast) + WHOLE) - WHOLE
    b = fused(a, -n_b, code, C.fast) - 0.5
    return fused(a, step, a_least, C.fast), fused(b, step, b_least, C.fast)


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
    ROWS: tl.constexpr = C.rows // 2
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
    tl.static_assert(_RAW_TOKENS == 1)
    copy_first_token(vectors, blocks, first_token, raw, P)
    for start in range(first_token // ROWS * ROWS, C.tokens, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = row < C.tokens
        if P.size != P.padded:
            inside &= is_column
        code = tl.load(codes + _pair_code_places(row, P), mask=inside, other=0)
        even, odd = _above_two23(code, 0x7410, C.fast), _above_two23(code, 0x7432, C.fast)
        a_even, b_even = _pair_elements(even, a_even_least, b_even_least, even_step, even_n_b, even_inverse, C)
        a_odd, b_odd = _pair_elements(odd, a_odd_least, b_odd_least, odd_step, odd_n_b, odd_inverse, C)
        a_place, b_place = _pair_places(row_words(vectors, blocks, tl.minimum(row, C.tokens - 1), C), P)
        inside &= row >= tl.maximum(first_token, _RAW_TOKENS)
        tl.store(vectors[0] + a_place, words_of(a_even, a_odd, C.is_bf16, C.fast), mask=inside)
        tl.store(vectors[0] + b_place, words_of(b_even, b_odd, C.is_bf16, C.fast), mask=inside)


@triton.jit
def _v_elements(
    codes: tl.tensor, step: tl.tensor, FIRST: tl.constexpr, SECOND: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Return the elements of two of the four codes in each word, (rows, groups, 16) fp32.

    codes: (rows, groups, 8) words, each code with 128 added. FIRST, SECOND: selectors of `_above_two23`.
    """
    ROWS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    first = _above_two23(codes, FIRST, FAST) - (_TWO23 + 128.0)
    second = _above_two23(codes, SECOND, FAST) - (_TWO23 + 128.0)
    return tl.join(first, second).reshape(ROWS, GROUPS, 16) * step


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
    """Decode V of one layer, head and chunk. slab: as in `_encode_v`, but `codes` points to words of four codes.
    first_token: the first one to fill."""
    codes, steps, raw = slab
    vectors = plane_of_head(plane, head)
    tl.static_assert(_RAW_TOKENS == 1)
    copy_first_token(vectors, blocks, first_token, raw, P)
    column = tl.arange(0, P.padded // 32)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    for start in range(first_token // C.rows * C.rows, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        code_place = row[:, None, None] * (P.size // 4) + column
        code_place = tl.max_contiguous(tl.multiple_of(code_place, (1, 1, 2)), (1, 1, 2))
        inside = (row[:, None, None] < C.tokens) & (column < P.size // 4)
        four = tl.load(codes + code_place, mask=inside, other=0) ^ -0x7F7F7F80  # signed bytes, 128 added to each
        step = tl.load(steps + row, mask=row < C.tokens, other=0).to(tl.int32) << 16
        step = step.to(tl.float32, bitcast=True)[:, None, None]
        low = _v_elements(four, step, 0x7440, 0x7442, C.fast)
        high = _v_elements(four, step, 0x7441, 0x7443, C.fast)
        base, place, inside = tile_words(vectors, blocks, row, P, C)
        inside &= row[:, None, None] >= tl.maximum(first_token, _RAW_TOKENS)
        tl.store(base + place, words_of(low, high, C.is_bf16, C.fast), mask=inside)


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
    """Decode chunks. Grid: (heads, layers, moves), as in `encode_chunks`. table: (moves, 2 + n_blocks) int64: address
    of the slabs, first block to fill, block ids."""
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
    first_token = (tl.load(move + 1) * C.block_tokens).to(tl.int32)
    _decode_k(plane, first_head + head, move + 2, first_token, (words, words + SCALES // 4, raw), K, C)
    v_slab = (words + V_CODES // 4, codes + V_STEPS // 2, raw + _RAW_TOKENS * K.size // 2)
    _decode_v(plane + 4, first_head + head, move + 2, first_token, v_slab, V, C)
