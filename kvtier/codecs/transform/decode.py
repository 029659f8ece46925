"""The transform codec's decoding on the device: one launch takes codes, transforms their levels back and fills pages.

A program decodes one layer of one head of one chunk, K, then V. The tensor cores want each operand's elements in
certain threads. PTX loads the codes and their levels there, so that nothing moves between threads: four lanes share a
row, and each has every fourth group of 8 components. The matrix has its rows in this order, and its columns in one
that leaves each lane 16 bytes of the engine's elements (kvtier.codecs.transform.tables).

P stands for a plane's TransformPlane, C for the launch's TransformShape (kvtier.codecs.transform.slab).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.transform.reference import GAIN_LEAST, RAW_TOKENS
from kvtier.codecs.transform.slab import (
    byte_places,
    four_words,
    half_columns,
    half_words,
    layer_start,
    parts_of_layer,
    tile_angles,
)
from kvtier.kernels.tiles import (
    copy_first_token,
    fused,
    in_order,
    operand_rows,
    plane_of_head,
    tile_rows,
    words_of,
)

_GAIN_LEAST, _RAW_TOKENS = tl.constexpr(GAIN_LEAST), tl.constexpr(RAW_TOKENS)
# Bits [0, 32) of a token's number, and bits [$8, $8 + 32). $2: address of a layer's codes; $3: token; $4 to $7: as
# `byte_places` has them; $8: 32 at most. Each load has a register of its own, because two into one wait for each other.
_QUADS = tl.constexpr(
    "{ .reg .pred p, q, r, s; .reg .b64 a, b, c, d, t; .reg .b32 x, y, z, w; .reg .b16 u; cvt.u64.u32 t, $3; "
    "setp.ge.s32 p, $4, 4; setp.eq.s32 q, $4, 8; and.b32 y, $4, 1; setp.ne.s32 s, y, 0; "
    "and.b32 z, $4, 2; setp.ne.s32 r, z, 0; shl.b32 z, z, 3; "
    "cvt.u64.u32 a, $5; add.s64 a, a, $2; mad.wide.u32 a, $3, 4, a; mov.b32 x, 0; @p ld.global.nc.b32 x, [a]; "
    "cvt.u64.u32 b, $6; add.s64 b, b, $2; mad.wide.u32 b, $3, 2, b; mov.b32 w, 0; @r ld.global.nc.u16 w, [b]; "
    "mad.wide.u32 d, $3, 2, b; mov.b32 y, 0; @q ld.global.nc.b32 y, [d]; "
    "cvt.u64.u32 c, $7; add.s64 c, c, $2; add.s64 c, c, t; mov.b16 u, 0; @s ld.global.nc.u8 u, [c]; "
    "or.b32 y, y, w; cvt.u32.u16 w, u; shl.b32 w, w, z; or.b32 y, y, w; selp.b32 x, x, y, p; mov.b32 $0, x; "
    "shf.r.clamp.b32 $1, x, y, $8; }"
)
# The pair $2, $3 turned by the angle with cosine $4 and sine $5.
_TURN = tl.constexpr(
    "{ .reg .f32 x, y; mul.rn.f32 x, $3, $5; neg.f32 x, x; mul.rn.f32 y, $2, $5; fma.rn.f32 $0, $2, $4, x; "
    "fma.rn.f32 $1, $3, $4, y; }"
)
# Levels of the four codes in $4. Byte n of $5 is the shift that moves code n to the top of a word; byte n of $6 is 32
# less the code's bits. $7: levels. A code's place among the levels is its bits behind a 1.
_LEVELS = tl.constexpr(
    "{ .reg .b64 a; .reg .b32 x, y, z; "
    + " ".join(
        f"shr.u32 y, $5, {8 * n}; shf.l.wrap.b32 x, 0, $4, y; prmt.b32 z, $6, 0, 0x444{n}; "
        f"shf.r.clamp.b32 x, x, 1, z; mad.wide.u32 a, x, 2, $7; ld.global.nc.b16 ${n}, [a];"
        for n in range(4)
    )
    + " }"
)


@triton.jit
def _quads(
    codes: tl.tensor, token: tl.tensor, parts: tl.tuple, middles: tl.tensor, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the numbers that begin with the codes of the first and of the last four components of each group, (rows,
    groups) int32 each.

    token: (rows, 1). parts: as in `byte_places`. middles: bits of the first four components of groups, (1, groups).
    """
    token, middles = tl.broadcast(token, middles)
    if C.fast:
        n_bytes, fours, twos, ones = parts
        arguments = [codes.to(tl.int64), token, n_bytes, fours, twos, ones, middles]
        first, last = tl.inline_asm_elementwise(
            _QUADS, "=&r,=r,l,r,r,r,r,r,r", arguments, (tl.int32, tl.int32), True, 1
        )
    else:
        number = tl.full(token.shape, 0, tl.int64)
        for byte in tl.static_range(8):
            is_there = tl.broadcast_to(parts[0] > byte, token.shape)
            found = tl.load(codes + byte_places(parts, token, byte), mask=is_there, other=0)
            number |= found.to(tl.int64) << (8 * byte)
        first, last = number.to(tl.int32), (number >> middles.to(tl.int64)).to(tl.int32)
    return first, last


@triton.jit
def _levels(number: tl.tensor, shifts: tl.tensor, rests: tl.tensor, levels: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, groups, 2, 2) fp16: levels of four components. number: (rows, groups), of `_quads`. shifts, rests: (1,
    groups), of `decode_tables`."""
    number, shifts = tl.broadcast(number, shifts)
    number, rests = tl.broadcast(number, rests)
    if C.fast:
        types: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        a, b, c, d = tl.inline_asm_elementwise(
            _LEVELS, "=&h,=&h,=&h,=h,r,r,r,l", [number, shifts, rests, levels.to(tl.int64)], types, True, 1
        )
    else:
        a, b = _level(number, shifts, rests, levels, 0), _level(number, shifts, rests, levels, 1)
        c, d = _level(number, shifts, rests, levels, 2), _level(number, shifts, rests, levels, 3)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _level(number: tl.tensor, shifts: tl.tensor, rests: tl.tensor, levels: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return the levels of the codes of one of the four components."""
    moved = (number.to(tl.int64) << ((shifts >> (8 * N)) & 31).to(tl.int64)) & 0xFFFFFFFF
    return tl.load(levels + ((moved | (1 << 32)) >> ((rests >> (8 * N)) & 63).to(tl.int64)).to(tl.int32))


@triton.jit
def _operand(
    codes: tl.tensor, token: tl.tensor, whole: tl.tensor, levels: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """(rows, padded) fp16: levels of a tile's codes. token: (rows,). Other arguments as in `_decode_plane`."""
    GROUPS: tl.constexpr = P.padded // 8
    n_bytes, fours, twos, ones = four_words(whole, GROUPS, 8)
    first, last = _quads(codes, token[:, None], (n_bytes & 15, fours, twos, ones), n_bytes >> 4, C)
    a, b, c, d = four_words(whole + 4, GROUPS, 8)
    first, last = _levels(first, a, b, levels, C), _levels(last, c, d, levels, C)
    # A lane has one group of each 32 components. The tensor cores want two components of it at a time.
    x = tl.join(first, last).permute(0, 1, 4, 2, 3).reshape(C.rows, GROUPS // 4, 4, 4, 2)
    return operand_rows(x.permute(0, 1, 3, 2, 4).reshape(C.rows, P.padded), C)


@triton.jit
def _half(
    product: tl.tensor, g: tl.tensor, numbers: tl.tensor, HALF: tl.constexpr, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the lower and upper elements of words of half a vector, (rows, groups, 16) fp32 each. product: (rows,
    half). g: (rows, 1, 1)."""
    WORDS: tl.constexpr = P.half // 2
    x = in_order(tile_rows(product, C), 8).reshape(C.rows, P.half // 32, 16, 2)
    low, high = x.split()
    means = numbers + 2 * HALF * WORDS + half_columns(P)
    low = fused(low, tl.load(means + 4 * WORDS) * g, tl.load(means), C.fast)
    high = fused(high, tl.load(means + 5 * WORDS) * g, tl.load(means + WORDS), C.fast)
    return low, high


@triton.jit
def _turned(a: tl.tensor, b: tl.tensor, cosine: tl.tensor, sine: tl.tensor, C: tl.constexpr) -> tuple[
    tl.tensor, tl.tensor
]:  # fmt: skip
    """Turn pairs by angles."""
    if C.fast:
        a, b = tl.inline_asm_elementwise(
            _TURN, "=&f,=f,f,f,f,f", [a, b, cosine, sine], (tl.float32, tl.float32), True, 1
        )
    else:
        a, b = a * cosine - b * sine, b * cosine + a * sine
    return a, b


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
    """Decode K or V of one layer, head and chunk into pages.

    of_head: the plane's tables of this layer and head. slab: codes, gains, raw elements.
    """
    inverse, numbers, whole = of_head
    codes, gains, raw = slab
    vectors = plane_of_head(plane, head)
    tl.static_assert(_RAW_TOKENS == 1)
    copy_first_token(vectors, blocks, first_token, raw, P)
    matrix = inverse + tl.arange(0, P.padded)[:, None] * (2 * P.half) + tl.arange(0, P.half)[None, :]
    to_a, to_b = tl.load(matrix), tl.load(matrix + P.half)
    for start in range(first_token // C.rows * C.rows, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        token = tl.minimum(row, C.tokens - 1)
        g = (tl.load(gains + token).to(tl.int32) + _GAIN_LEAST) << 20
        g = g.to(tl.float32, bitcast=True)[:, None, None]
        x = _operand(codes, token, whole, tables[4], P, C)
        a_low, a_high = _half(tl.dot(x, to_a), g, numbers, 0, P, C)
        b_low, b_high = _half(tl.dot(x, to_b), g, numbers, 1, P, C)
        if P.is_k:
            within, at_place = tile_angles(tables, layer, place, token, P, C)
            for angles in tl.static_range(2):
                turn = at_place if angles == 0 else within
                a_low, b_low = _turned(a_low, b_low, tl.load(turn), tl.load(turn + 2 * P.half), C)
                turn += P.half
                a_high, b_high = _turned(a_high, b_high, tl.load(turn), tl.load(turn + 2 * P.half), C)
        at, inside = half_words(vectors, blocks, row, P, C)
        inside &= row[:, None, None] >= tl.maximum(first_token, _RAW_TOKENS)
        tl.store(at, words_of(a_low, a_high, C.is_bf16, C.fast), mask=inside)
        tl.store(at + P.size // 4, words_of(b_low, b_high, C.is_bf16, C.fast), mask=inside)


@triton.jit
def _of_head(tables: tl.tuple, cell: tl.tensor, P: tl.constexpr) -> tl.tuple:
    """Return a plane's tables of one layer and head, by its number among those held."""
    matrix, numbers, whole = tables
    return (
        tl.multiple_of(matrix + cell * (2 * P.half * P.padded), 16),
        tl.multiple_of(numbers + cell * (4 * P.half), 16),
        tl.multiple_of(whole + cell * P.padded, 16),
    )


# Nothing is specialized on values: another chunk or rank must not mean another compilation.
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
    first = layer_start(tables, page_layer, layer, slab_start, K, V, C)
    k_slab, v_slab, places = parts_of_layer(slab + first, tables, layer, K, V, C)
    place = tl.minimum((tl.load(places).to(tl.int64) & 0xFFFFFFFF) // C.tokens, C.places - 1).to(tl.int32)
    first_token = (tl.load(move + 1) * C.block_tokens).to(tl.int32)
    cell = (layer * page_heads + first_head + head).to(tl.int64)
    plane, of_page = planes + layer * 8, first_head + head
    k_head, v_head = _of_head(of_k, cell, K), _of_head(of_v, cell, V)
    _decode_plane(plane, of_page, move + 2, layer, place, first_token, k_head, tables, k_slab, K, C)
    _decode_plane(plane + 4, of_page, move + 2, layer, place, first_token, v_head, tables, v_slab, V, C)
