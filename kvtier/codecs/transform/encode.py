"""The transform codec's encoding on the device: one launch reads pages, and writes slabs and their sums.

A program does one layer of one head of one chunk: K, then V, tile after tile. Vectors are two halves, because a rotary
embedding turns pairs of them; a transform is a product with each half. The bytes of whole numbers are
multiplied as int8, so that sums are exact (kvtier.codecs.transform.reference). At the end a program reads back what
it wrote, from the cache, and adds its part to its slab's checksum.

P stands for a plane's TransformPlane, C for the launch's TransformShape (kvtier.codecs.transform.slab).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.transform.reference import GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, RAW_TOKENS, U_MAX
from kvtier.codecs.transform.slab import layer_start, parts_of_layer
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import WHOLE, WHOLE_BITS, fused, plane_of_head, quotient, square_root, total

_GAIN_LEAST, _GAIN_MIN, _POWER_UNIT, _Q_EXPONENT, _U_MAX = (
    tl.constexpr(number) for number in (GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, U_MAX)
)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_KEPT = tl.constexpr(128)  # components of the largest vectors whose matrices stay in shared memory between tiles


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
def _places_of(
    vectors: tl.tuple, blocks: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers (rows, half) to the first halves of tokens' vectors, and the columns of the elements.

    vectors: plane_of_head. row: tokens, all within the chunk.
    """
    base, block_stride, token_stride = vectors
    column = tl.arange(0, P.half)[None, :]
    words = tl.load(blocks + row // C.block_tokens) * block_stride + (row % C.block_tokens).to(tl.int64) * token_stride
    # Starts count elements of two bytes. Pages are aligned to 16 bytes, so starts are multiples of 8.
    starts = tl.multiple_of(2 * words, 8)
    return base.to(tl.pointer_type(tl.int16)) + starts[:, None] + column, column


@triton.jit
def _turned(
    low: tl.tensor, high: tl.tensor, angles: tl.tensor, inside: tl.tensor, P: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Take the rotary embedding off. angles: pointers to cosines (rows or 1, half); sines behind."""
    cosine = tl.load(angles, mask=inside, other=0.0)
    sine = tl.load(angles + P.size // 2, mask=inside, other=0.0)
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
def _bytes_of_rows(q: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the upper and the lower bytes of whole numbers, int8 each: q = 256 * upper + lower."""
    return ((q + 128) >> 8).to(tl.int8), q.to(tl.int8)


@triton.jit
def _halves(matrix: tl.tensor, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Load both halves of the transform's bytes, (half, padded) each. matrix: points to (2, padded, half)."""
    # Tensor cores want the elements that they sum next to each other in memory.
    at = matrix + tl.arange(0, P.padded)[None, :] * P.half + tl.arange(0, P.half)[:, None]
    return tl.load(at), tl.load(at + P.half * P.padded)


@triton.jit
def _component_sums(
    low: tl.tensor, high: tl.tensor, forward: tl.tensor, upper: tl.tuple, lower: tl.tuple, P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiply whole numbers of both halves, (rows, half) each, with the transform. Return fp32 (rows, padded): the
    sums are exact and rounded once.

    forward: points to the transform's upper bytes; the lower ones follow. upper, lower: what `_halves` loads of both.
    """
    low_upper, low_lower = _bytes_of_rows(low)
    high_upper, high_lower = _bytes_of_rows(high)
    if P.padded > _KEPT:
        upper = _halves(forward, P)
    summed = tl.dot(low_upper, upper[0], out_dtype=tl.int32)
    summed = tl.dot(high_upper, upper[1], summed, out_dtype=tl.int32) << 8  # below 2^30
    summed = tl.dot(low_lower, upper[0], summed, out_dtype=tl.int32)
    summed = tl.dot(high_lower, upper[1], summed, out_dtype=tl.int32)
    if P.padded > _KEPT:
        lower = _halves(forward + 2 * P.half * P.padded, P)
    summed = tl.dot(low_upper, lower[0], summed, out_dtype=tl.int32)
    summed = tl.dot(high_upper, lower[1], summed, out_dtype=tl.int32)
    least = tl.dot(low_lower, lower[0], ((summed & 255) << 8), out_dtype=tl.int32)
    least = tl.dot(high_lower, lower[1], least, out_dtype=tl.int32)
    # fp32 holds both whole numbers, so only their sum is rounded.
    upper_sum = (summed >> 8).to(tl.float32)
    return fused(upper_sum, tl.full(upper_sum.shape, 65536.0, tl.float32), least.to(tl.float32), C.fast)


@triton.jit
def _whole(x: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return x * factor, rounded to a whole number."""
    return (x * factor + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    return tl.reduce(x, 1, _elementwise_max)


@triton.jit
def _gains(n: tl.tensor, counted: tl.tensor, e: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """int32 (rows): gains as they are stored."""
    top = tl.maximum(_largest(tl.abs(n)), _GAIN_MIN)
    exponent = top.to(tl.int32, bitcast=True) >> 23
    n *= _float((254 - exponent) << 23)[:, None]
    n *= n
    n *= n
    n *= n
    unit = tl.full(n.shape, _POWER_UNIT, tl.float32)
    # Multiplying by a power of two is exact, so only the sum is rounded.
    rounded = fused(n, unit, tl.full(n.shape, WHOLE, tl.float32), C.fast)
    summed = total(rounded.to(tl.int32, bitcast=True) - WHOLE_BITS, 1)
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
def _split(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the even and the odd columns."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return even, odd


@triton.jit
def _store_codes(
    codes: tl.tensor, code: tl.tensor, row: tl.tensor, row_bytes: tl.tensor, whole: tl.tensor, P: tl.constexpr,
    C: tl.constexpr,
) -> None:  # fmt: skip
    """Store the codes (rows, padded) of a tile. They make a number for each group; a thread stores two bytes of it."""
    group, pair = tl.arange(0, P.padded // 8)[None, :, None], tl.arange(0, 4)[:, None, None]
    start, n_bytes = tl.load(whole + P.padded + group), tl.load(whole + P.padded + P.padded // 8 + group)
    even_shift, odd_shift = _split(tl.load(whole + tl.arange(0, P.padded)[None, :]))
    even, odd = _split(code)
    pairs = (even | (odd << (odd_shift - even_shift))).to(tl.int64) << even_shift.to(tl.int64)
    # Triton spreads a warp's threads over the first dimensions: here over the bytes of a row, which are neighbours.
    number = total(pairs.reshape(C.rows, P.padded // 8, 4), 2).trans(1, 0)[None, :, :]
    two = (number >> (16 * pair).to(tl.int64)).to(tl.int32)
    at = codes + (row[None, None, :] * row_bytes + start + 2 * pair)
    rest = tl.where((row < C.tokens)[None, None, :], n_bytes - 2 * pair, 0)
    tl.store(at, two.to(tl.uint8), mask=rest > 0)
    tl.store(at + 1, (two >> 8).to(tl.uint8), mask=rest > 1)


@triton.jit
def _raw_places(
    vectors: tl.tuple, blocks: tl.tensor, raw: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return pointers to the first halves of raw tokens, in pages and in the slab, and the mask of valid elements."""
    row = tl.arange(0, _RAW_TOKENS)
    at, column = _places_of(vectors, blocks, row, P, C)
    return at, raw + (row[:, None] * P.size + column), column < P.size // 2


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
    """Encode K or V of one layer, head and chunk. Return int32: the bits of the largest |u|, more where one is NaN.

    of_head: the plane's tables of this layer and head. slab: codes and bytes of a row, gains, raw elements.
    """
    forward, numbers, whole = of_head
    codes, row_bytes, gains, raw = slab
    raw = raw.to(tl.pointer_type(tl.int16))
    vectors = plane_of_head(plane, head)
    in_page, in_slab, is_raw = _raw_places(vectors, blocks, raw, P, C)
    tl.store(in_slab, tl.load(in_page, mask=is_raw), mask=is_raw)
    tl.store(in_slab + P.size // 2, tl.load(in_page + P.size // 2, mask=is_raw), mask=is_raw)
    largest = tl.full((C.rows,), 0, tl.int32)
    component = tl.arange(0, P.padded)[None, :]
    columns = numbers + 4 * P.half + component  # behind the means and scales of both halves
    counted = tl.load(numbers + 4 * P.half + 6 * P.padded)
    upper, lower = _halves(forward, P), _halves(forward + 2 * P.half * P.padded, P)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        token = tl.minimum(row, C.tokens - 1)  # rows past the end repeat the last token
        at, column = _places_of(vectors, blocks, token, P, C)
        inside = column < P.size // 2
        low = _elements(tl.load(at, mask=inside, other=0), C)
        high = _elements(tl.load(at + P.size // 2, mask=inside, other=0), C)
        if P.is_k:
            within, at_place = _angles(tables, layer, place, token, column, P, C)
            low, high = _turned(low, high, within, inside, P)
            low, high = _turned(low, high, at_place, inside, P)
        low = (low - tl.load(numbers + column)) * tl.load(numbers + 2 * P.half + column)
        high = (high - tl.load(numbers + P.half + column)) * tl.load(numbers + 3 * P.half + column)
        low_bits, high_bits = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        top = _largest(tl.maximum(low_bits & 0x7FFFFFFF, high_bits & 0x7FFFFFFF))
        largest = tl.maximum(largest, top)
        # A vector that is refused may have any exponent. The limit keeps the shift below defined.
        e = tl.minimum(tl.maximum((top >> 23) - 127 - _Q_EXPONENT, 0), 64)
        factor = _float((127 - e) << 23)[:, None]
        n = _component_sums(_whole(low, factor), _whole(high, factor), forward, upper, lower, P, C) * tl.load(columns)
        gain = _gains(n, counted, e, C)
        tl.store(gains + row, gain.to(tl.uint8), mask=row < C.tokens)
        g = _float((gain + _GAIN_LEAST - 8 * e) << 20)
        code = _codes(n, quotient(tl.full(g.shape, 1.0, tl.float32), g, C.fast), columns + P.padded, P)
        _store_codes(codes, code, row, row_bytes, whole, P, C)
    return tl.reduce(largest, 0, _elementwise_max)


@triton.jit
def _of_head(tables: tl.tuple, cell: tl.tensor, P: tl.constexpr) -> tl.tuple:
    """A plane's tables of one layer and head, by its number among those held."""
    matrix, numbers, whole = tables
    return (
        matrix + cell * (4 * P.half * P.padded),
        numbers + cell * (4 * P.half + 6 * P.padded + 8),
        whole + cell * (P.padded + P.padded // 4),
    )


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
    first = layer_start(tables, page_layer, layer, slab_start, K, V, C)
    k_slab, v_slab, places = parts_of_layer(slab + first, tables, layer, K, V, C)
    position = tl.load(move + 1)
    place = tl.minimum(position // C.tokens, C.places - 1).to(tl.int32)
    number = tl.arange(0, 4)
    tl.store(places + number, tl.where(number == 0, position.to(tl.int32), 0))
    cell = (layer * page_heads + first_head + head).to(tl.int64)
    plane, of_page = planes + layer * 8, first_head + head
    k_head, v_head = _of_head(of_k, cell, K), _of_head(of_v, cell, V)
    k_largest = _encode_plane(plane, of_page, move + 2, layer, place, k_head, tables, k_slab, K, C)
    v_largest = _encode_plane(plane + 4, of_page, move + 2, layer, place, v_head, tables, v_slab, V, C)
    is_sound = _float(tl.maximum(k_largest, v_largest)) < _U_MAX  # false for NaN
    is_refused = (is_sound == 0) | (position != place * C.tokens)
    tl.debug_barrier()
    end = layer_start(tables, page_layer, layer + 1, slab_start, K, V, C)
    answer_layer(answers, slab, first, end, slab_bytes, move + 2 + N_BLOCKS + head, is_refused, PAIRS, PAIRS)
