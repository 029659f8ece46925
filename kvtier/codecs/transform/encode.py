"""The transform codec's encoding on the device: one launch reads pages, and writes slabs and their sums.

A program encodes one layer of one head of one chunk: K, then V, tile after tile. The bytes of whole numbers are
multiplied as int8, so that sums are exact (kvtier.codecs.transform.reference). Four lanes share a row, from its pages
to its codes: the order of the matrix's rows and columns (kvtier.codecs.transform.tables) lets the tensor cores take
whole numbers where they were made, and leave each lane the 8 components of every fourth group. At the end a program
reads back what it wrote, from the cache, and adds its part to its slab's checksum.

P stands for a plane's TransformPlane, C for the launch's TransformShape (kvtier.codecs.transform.slab).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.transform.curve import T_MAX
from kvtier.codecs.transform.reference import GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, RAW_TOKENS, U_MAX
from kvtier.codecs.transform.slab import (
    byte_places,
    four_words,
    half_columns,
    half_words,
    layer_start,
    parts_of_layer,
    tile_angles,
)
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import (
    WHOLE,
    WHOLE_BITS,
    floats,
    fused,
    in_order,
    operand_rows,
    permuted,
    plane_of_head,
    quotient,
    square_root,
    store_by_rows,
    tile_rows,
    total,
)

_GAIN_LEAST, _GAIN_MIN, _POWER_UNIT, _Q_EXPONENT, _U_MAX = (
    tl.constexpr(number) for number in (GAIN_LEAST, GAIN_MIN, POWER_UNIT, Q_EXPONENT, U_MAX)
)
_T_MAX, _RAW_TOKENS = tl.constexpr(T_MAX), tl.constexpr(RAW_TOKENS)
_TWO23_BITS = tl.constexpr(0x4B000000)  # bits of 2^23 in fp32
_COLUMNS = tl.constexpr(64)  # of one product; Triton would move tables of 128 numbers, one a thread, between threads
_KEPT = tl.constexpr(128)  # components of the largest vectors whose matrices stay in shared memory between tiles
_LARGER = tl.constexpr("max.NaN.xorsign.abs.f32 $0, $1, $2;")
_SMALLER = tl.constexpr("min.xorsign.abs.f32 $0, $1, $2;")
# The upper ($0) and the lower bytes ($1) of four whole numbers. The lower halves of $2 to $5 have the numbers plus 128.
_BYTES = tl.constexpr(
    "{ .reg .b32 x, y; prmt.b32 x, $2, $3, 0x5410; prmt.b32 y, $4, $5, 0x5410; prmt.b32 $0, x, y, 0x7531; "
    "prmt.b32 x, x, y, 0x6420; xor.b32 $1, x, 0x80808080; }"
)
# Store a token's number: its first 32 bits are $1; from bit $3 on, 32 at most, it is $2. $4: address of a layer's
# codes; $5: token; $6 to $9: as `byte_places` has them.
_STORE = tl.constexpr(
    "{ .reg .pred p, q, r, s; .reg .b64 a, t; .reg .b32 x, y, z; mov.b32 $0, 0; cvt.u64.u32 t, $5; "
    "setp.ge.s32 p, $6, 4; setp.eq.s32 q, $6, 8; and.b32 z, $6, 1; setp.ne.s32 s, z, 0; "
    "and.b32 z, $6, 2; setp.ne.s32 r, z, 0; shl.b32 z, z, 3; "
    "shl.b32 x, $2, $3; or.b32 x, x, $1; shf.l.clamp.b32 y, $2, 0, $3; selp.b32 y, y, x, p; "
    "cvt.u64.u32 a, $7; add.s64 a, a, $4; mad.wide.u32 a, $5, 4, a; @p st.global.b32 [a], x; "
    "cvt.u64.u32 a, $8; add.s64 a, a, $4; mad.wide.u32 a, $5, 2, a; @r st.global.b16 [a], y; "
    "mad.wide.u32 a, $5, 2, a; @q st.global.b32 [a], y; "
    "cvt.u64.u32 a, $9; add.s64 a, a, $4; add.s64 a, a, t; shr.u32 y, y, z; @s st.global.b8 [a], y; }"
)


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _turned(a: tl.tensor, b: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Take the rotary embedding off pairs."""
    return a * cosine + b * sine, b * cosine - a * sine


@triton.jit
def _elements(
    vectors: tl.tuple,
    blocks: tl.tensor,
    layer: tl.tensor,
    place: tl.tensor,
    token: tl.tensor,
    tables: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load a tile, K without its rotary embedding: the lower and upper elements of the words of the first half of
    vectors, and those of the second half, (rows, groups, 16) fp32 each."""
    at, inside = half_words(vectors, blocks, token, P, C)
    a_low, a_high = floats(tl.load(at, mask=inside, other=0, eviction_policy="evict_first"), C.is_bf16)
    at += P.size // 4
    b_low, b_high = floats(tl.load(at, mask=inside, other=0, eviction_policy="evict_first"), C.is_bf16)
    if P.is_k:
        within, at_place = tile_angles(tables, layer, place, token, P, C)
        for angles in tl.static_range(2):
            turn = within if angles == 0 else at_place
            a_low, b_low = _turned(a_low, b_low, tl.load(turn), tl.load(turn + 2 * P.half))
            turn += P.half
            a_high, b_high = _turned(a_high, b_high, tl.load(turn), tl.load(turn + 2 * P.half))
    return a_low, a_high, b_low, b_high


@triton.jit
def _scaled(
    low: tl.tensor, high: tl.tensor, numbers: tl.tensor, HALF: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (x - mean) * scale of the lower and upper elements of words of half a vector, (rows, groups, 16).

    Scales are powers of two, so one rounding of x * scale - mean * scale gives the same.
    """
    WORDS: tl.constexpr = P.half // 2
    at = numbers + 2 * HALF * WORDS + half_columns(P)
    low = fused(low, tl.load(at + 4 * WORDS), tl.load(at), C.fast)
    return low, fused(high, tl.load(at + 5 * WORDS), tl.load(at + WORDS), C.fast)


@triton.jit
def _larger(x: tl.tensor, y: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return the larger magnitudes of fp32 x and y, with any sign; NaN if either is NaN."""
    if C.fast:
        return tl.inline_asm_elementwise(_LARGER, "=f,f,f", [x, y], tl.float32, True, 1)
    else:
        x, y = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return _float(tl.maximum(x, y))


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    return tl.reduce(x, 1, _elementwise_max)


@triton.jit
def _whole_bytes(low: tl.tensor, high: tl.tensor, factor: tl.tensor, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Round elements of words times a factor to whole numbers. Return their upper and lower bytes, int8 (rows, n): the
    numbers are 256 * upper + lower.

    Of each 32 elements the four lanes have 8 in a row; the tensor cores want 4 of each 16 from each.
    """
    N_ROWS: tl.constexpr = low.shape[0]
    GROUPS: tl.constexpr = low.shape[1]
    whole = tl.full(low.shape, WHOLE + 128, tl.float32)
    x = tl.join(fused(low, factor, whole, C.fast), fused(high, factor, whole, C.fast)).to(tl.int32, bitcast=True)
    if C.fast:
        upper, lower = tl.inline_asm_elementwise(_BYTES, "=&r,=r,r,r,r,r", [x], (tl.int8, tl.int8), True, 4)
    else:
        upper, lower = (x >> 8).to(tl.int8), (x ^ 128).to(tl.int8)
    upper = upper.reshape(N_ROWS, GROUPS, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(N_ROWS, 32 * GROUPS)
    lower = lower.reshape(N_ROWS, GROUPS, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(N_ROWS, 32 * GROUPS)
    return upper, lower


@triton.jit
def _side_by_side(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """(rows, 2 n) of two (rows, n)."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def _two_sides(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Undo `_side_by_side`."""
    left, right = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
    return left, right


@triton.jit
def _matrix(forward: tl.tensor, FIRST: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr) -> tl.tensor:
    """Load some columns of a matrix of bytes, (2 * half, COLUMNS). forward: points to (padded, 2 * half)."""
    # Tensor cores want the elements that they sum next to each other in memory.
    return tl.load(
        forward + (FIRST + tl.arange(0, COLUMNS)[None, :]) * (2 * P.half) + tl.arange(0, 2 * P.half)[:, None]
    )


@triton.jit
def _matrices(forward: tl.tensor, NUMBER: tl.constexpr, P: tl.constexpr) -> tl.tuple:
    """Load _COLUMNS columns of the transform: upper bytes, lower bytes, and those of both halves of the columns.
    forward: points to the bytes (2, padded, 2 * half)."""
    FIRST: tl.constexpr = NUMBER * _COLUMNS
    HALF: tl.constexpr = _COLUMNS // 2
    lower = forward + 2 * P.half * P.padded
    return (
        _matrix(forward, FIRST, _COLUMNS, P),
        _matrix(lower, FIRST, _COLUMNS, P),
        _matrix(lower, FIRST, HALF, P),
        _matrix(lower, FIRST + HALF, HALF, P),
    )


@triton.jit
def _total_sums(
    summed: tl.tensor, lower: tl.tensor, matrix: tl.tensor, whole: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Add the products of lower bytes with lower bytes. Return fp32, rounded once.

    summed: 2^30 plus all other products, whose sum is below 2^30. A byte permute makes fp32 numbers, as fractions of
    WHOLE, of its bits above the lowest 8, and of the sum of all the rest.
    """
    whole = tl.broadcast_to(whole, summed.shape)
    high = _float(permuted(summed, whole, 0x7321, C.fast))
    unit = tl.full(summed.shape, 65536.0, tl.float32)
    if P.padded <= 128:  # the rest is below 2^22
        rest = _float(tl.dot(lower, matrix, permuted(summed, whole, 0x7604, C.fast), out_dtype=tl.int32))
        total_sums = fused(high - (WHOLE + WHOLE / 65536), unit, rest, C.fast)
    else:
        rest = tl.dot(lower, matrix, (summed & 255) << 8, out_dtype=tl.int32).to(tl.float32)
        total_sums = fused(high - WHOLE, unit, rest, C.fast)
    return in_order(tile_rows(total_sums, C), 8)


@triton.jit
def _sums(operands: tl.tuple, matrices: tl.tuple, whole: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Multiply whole numbers with some columns of the transform. Return fp32 (rows, _COLUMNS): the sums are exact and
    rounded once.

    operands: upper and lower bytes. matrices: of `_matrices`. whole: WHOLE_BITS. The last products are of half the
    columns at a time, for want of registers.
    """
    upper, lower = operands
    summed = tl.dot(upper, matrices[0], out_dtype=tl.int32) * 256 + (1 << 30)
    summed = tl.dot(lower, matrices[0], summed, out_dtype=tl.int32)
    left, right = _two_sides(tl.dot(upper, matrices[1], summed, out_dtype=tl.int32))
    left = _total_sums(left, lower, matrices[2], whole, P, C)
    return _side_by_side(left, _total_sums(right, lower, matrices[3], whole, P, C))


@triton.jit
def _column(numbers: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Load a number of each component, (1, padded), in the order of `_sums`."""
    HALF: tl.constexpr = _COLUMNS // 2
    at = numbers + tl.arange(0, HALF)[None, :]
    found = _side_by_side(tl.load(at), tl.load(at + HALF))
    if P.padded > _COLUMNS:
        at += _COLUMNS
        found = _side_by_side(found, _side_by_side(tl.load(at), tl.load(at + HALF)))
    if P.padded > 2 * _COLUMNS:
        at += _COLUMNS
        third = _side_by_side(tl.load(at), tl.load(at + HALF))
        at += _COLUMNS
        found = _side_by_side(found, _side_by_side(third, _side_by_side(tl.load(at), tl.load(at + HALF))))
    return found


@triton.jit
def _components(
    operands: tl.tuple,
    matrices: tl.tuple,
    others: tl.tuple,
    forward: tl.tensor,
    columns: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Return components, (rows, padded) fp32. matrices, others: of the first and of the second _COLUMNS columns, which
    stay in shared memory, for vectors up to _KEPT. columns: units by component, further numbers behind."""
    # The compiler would make this constant anew for each of its uses.
    whole = tl.load(columns + 6 * P.padded + 4).to(tl.int32, bitcast=True)
    n = _sums(operands, matrices, whole, P, C)
    if P.padded == _KEPT:
        n = _side_by_side(n, _sums(operands, others, whole, P, C))
    if P.padded > _KEPT:
        n = _side_by_side(n, _sums(operands, _matrices(forward, 1, P), whole, P, C))
        rest = _sums(operands, _matrices(forward, 2, P), whole, P, C)
        n = _side_by_side(n, _side_by_side(rest, _sums(operands, _matrices(forward, 3, P), whole, P, C)))
    return n * _column(columns, P)


@triton.jit
def _gains(n: tl.tensor, counted: tl.tensor, e: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
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
    gain = ((g.to(tl.int32, bitcast=True) + (1 << 19)) >> 20) + 8 * e - _GAIN_LEAST
    return tl.minimum(tl.maximum(gain, 0), 255)


@triton.jit
def _codes(n: tl.tensor, inverse: tl.tensor, columns: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """int32 (rows, padded): codes plus _TWO23_BITS. columns: pointer to the rates, further numbers behind."""
    t = n * inverse[:, None] * _column(columns, P)
    if C.fast:
        most = tl.full(t.shape, _T_MAX, tl.float32)
        t = tl.inline_asm_elementwise(_SMALLER, "=f,f,f", [t, most], tl.float32, True, 1)
    else:
        t = tl.clamp(t, -_T_MAX, _T_MAX)
    t2 = t * t
    s = _column(columns + 2 * P.padded, P) + t2 * _column(columns + 3 * P.padded, P)
    s = t * (_column(columns + P.padded, P) + t2 * s)
    steps = tl.broadcast_to(_column(columns + 4 * P.padded, P), s.shape)
    s = fused(s, steps, steps, C.fast)
    if C.fast:
        return tl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B000000;", "=r,f", [s], tl.int32, True, 1)
    else:
        return s.to(tl.int32) + _TWO23_BITS


@triton.jit
def _store_codes(
    codes: tl.tensor, code: tl.tensor, row: tl.tensor, whole: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> None:
    """Store the codes (rows, padded) of a tile: those of a group make a number."""
    GROUPS: tl.constexpr = P.padded // 8
    even, odd = (code * _column(whole, P)).reshape(C.rows, 4 * GROUPS, 2).split()
    even, odd = (even + odd).reshape(C.rows, 2 * GROUPS, 2).split()
    whole += P.padded
    quads = tl.arange(0, 2 * GROUPS)[None, :]
    first, last = (even + odd + tl.load(whole + quads)).reshape(C.rows, GROUPS, 2).split()
    n_bytes, fours, twos, ones = four_words(whole + 2 * GROUPS, GROUPS, 4)
    n_bytes, middle = n_bytes & 15, n_bytes >> 4
    n_bytes = tl.where((row < C.tokens)[:, None], n_bytes, 0)
    token = row[:, None]
    if C.fast:
        arguments = [first, last, middle, codes.to(tl.int64), token, n_bytes, fours, twos, ones]
        tl.inline_asm_elementwise(_STORE, "=r,r,r,r,l,r,r,r,r,r", arguments, tl.int32, False, 1)
    else:
        number = (first.to(tl.int64) & 0xFFFFFFFF) | ((last.to(tl.int64) & 0xFFFFFFFF) << middle.to(tl.int64))
        for byte in tl.static_range(8):
            at = codes + byte_places((n_bytes, fours, twos, ones), token, byte)
            tl.store(at, (number >> (8 * byte)).to(tl.uint8), mask=n_bytes > byte)


@triton.jit
def _store_first_token(vectors: tl.tuple, blocks: tl.tensor, raw: tl.tensor, P: tl.constexpr) -> None:
    """Copy a chunk's first token from the pages to `raw`, words of the slab."""
    tl.static_assert(_RAW_TOKENS == 1)
    word = tl.arange(0, P.padded // 2)
    inside = word < P.size // 2
    tl.store(raw + word, tl.load(vectors[0] + tl.load(blocks) * vectors[1] + word, mask=inside), mask=inside)


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

    of_head: the plane's tables of this layer and head. slab: parts_of_layer.
    """
    forward, numbers, whole = of_head
    codes, gains, raw = slab
    vectors = plane_of_head(plane, head)
    _store_first_token(vectors, blocks, raw, P)
    largest = tl.full((C.rows,), 0, tl.int32)
    columns = numbers + 4 * P.half  # behind the means and scales
    counted = tl.load(columns + 6 * P.padded)
    matrices = _matrices(forward, 0, P)
    others = _matrices(forward, 1, P) if P.padded == _KEPT else matrices
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        token = tl.minimum(row, C.tokens - 1)  # rows past the end repeat the last token
        a_low, a_high, b_low, b_high = _elements(vectors, blocks, layer, place, token, tables, P, C)
        a_low, a_high = _scaled(a_low, a_high, numbers, 0, P, C)
        b_low, b_high = _scaled(b_low, b_high, numbers, 1, P, C)
        top = _larger(_larger(a_low, a_high, C), _larger(b_low, b_high, C), C).to(tl.int32, bitcast=True)
        top = _largest(_largest(top & 0x7FFFFFFF))
        largest = tl.maximum(largest, top)
        # A vector that is refused may have any exponent. The limit keeps the shift below defined.
        e = tl.minimum(tl.maximum((top >> 23) - 127 - _Q_EXPONENT, 0), 64)
        factor = _float((127 - e) << 23)[:, None, None]
        a_upper, a_lower = _whole_bytes(a_low, a_high, factor, C)
        b_upper, b_lower = _whole_bytes(b_low, b_high, factor, C)
        operands = (
            operand_rows(_side_by_side(a_upper, b_upper), C),
            operand_rows(_side_by_side(a_lower, b_lower), C),
        )
        n = _components(operands, matrices, others, forward, columns, P, C)
        gain = _gains(n, counted, e, P, C)
        store_by_rows(gains, gain.to(tl.uint8), row, row < C.tokens)
        g = _float((gain + _GAIN_LEAST - 8 * e) << 20)
        inverse = quotient(tl.full(g.shape, 1.0, tl.float32), g, C.fast)
        _store_codes(codes, _codes(n, inverse, columns + P.padded, P, C), row, whole, P, C)
    return tl.reduce(largest, 0, _elementwise_max)


@triton.jit
def _of_head(tables: tl.tuple, cell: tl.tensor, P: tl.constexpr) -> tl.tuple:
    """Return a plane's tables of one layer and head, by its number among those held."""
    matrix, numbers, whole = tables
    return (
        tl.multiple_of(matrix + cell * (4 * P.half * P.padded), 16),
        tl.multiple_of(numbers + cell * (4 * P.half + 6 * P.padded + 8), 16),
        tl.multiple_of(whole + cell * (P.padded + 3 * P.padded // 4), 16),
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
