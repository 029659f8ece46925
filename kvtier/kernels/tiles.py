"""Tiles of the engine's pages: device functions that the kernels of all codecs share.

A tile is some tokens' vectors of one plane and head. It is loaded and stored as 32-bit words of two elements, shaped
(rows, groups, 16 words). So four threads share a row, each has 16 bytes of every group, and most of a reduction over a
row happens within a thread. (Where Triton cannot order dimensions by addresses, it gives threads to the first.)

P stands for a plane's PlaneCode or PlaneShape, C for the launch's Int8ChunkShape or TurboquantChunkShape.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

# Combine functions of Triton itself: with ours the interpreter is a hundred times slower.
from triton.language.standard import _elementwise_max, _sum_combine


@triton.jit
def total(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the sum over AXIS in x's own type. The interpreter, as the tests set it up, lacks tl.sum."""
    return tl.reduce(x, AXIS, _sum_combine)


_LARGER_BF16, _LARGER_FP16 = (tl.constexpr(f"max.NaN.xorsign.abs.{kind} $0, $1, $2;") for kind in ("bf16x2", "f16x2"))
# 1.5 * 2^23: x + this - this is x rounded to a whole number, half to even, which is in the sum's lower bits.
WHOLE = tl.constexpr(12582912.0)
WHOLE_BITS = tl.constexpr(0x4B400000)

# The sequences of sqrt.rn and div.rn without their branch for operands that are not normal: callers ignore the results
# of such operands.
_SQUARE_ROOT = tl.constexpr(
    "{ .reg .f32 r, s, h, e; rsqrt.approx.ftz.f32 r, $1; mul.rn.f32 s, $1, r; mul.rn.f32 h, r, 0f3F000000; "
    "neg.f32 e, s; fma.rn.f32 e, e, s, $1; fma.rn.f32 $0, e, h, s; }"
)
_QUOTIENT = tl.constexpr(
    "{ .reg .f32 n, r, e, q; neg.f32 n, $2; rcp.approx.ftz.f32 r, $2; fma.rn.f32 e, n, r, 0f3F800000; "
    "fma.rn.f32 r, r, e, r; mul.rn.f32 q, $1, r; fma.rn.f32 e, n, q, $1; fma.rn.f32 q, r, e, q; "
    "fma.rn.f32 e, n, q, $1; fma.rn.f32 $0, r, e, q; }"
)


@triton.jit
def square_root(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return the square root, rounded to nearest even, of x between 2^-60 and 2^60; undefined for other x."""
    if FAST:
        return tl.inline_asm_elementwise(_SQUARE_ROOT, "=&f,f", [x], tl.float32, True, 1)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def quotient(x: tl.tensor, y: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return x / y, rounded to nearest even, where x, y and x / y are between 2^-60 and 2^60; undefined elsewhere."""
    if FAST:
        return tl.inline_asm_elementwise(_QUOTIENT, "=&f,f,f", [x, y], tl.float32, True, 1)
    else:
        return tl.div_rn(x, y)


@triton.jit
def fused(x: tl.tensor, y: tl.tensor, z: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return x * y + z, rounded once, fp32. Without PTX this holds only if fp64 holds x * y + z exactly."""
    if FAST:
        return tl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], tl.float32, True, 1)
    else:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)


@triton.jit
def tile_columns(P: tl.constexpr) -> tl.tensor:
    """Return the numbers of a row's words, (1, groups, 16)."""
    return tl.arange(0, P.padded // 32)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit
def plane_of_head(plane: tl.tensor, head: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the start of a head's vectors, and the strides of block and token in words.

    plane: pointer to base and strides of block, token and head, in bytes. Call it before a loop: because of the loop's
    stores the compiler does not move these loads out of it.
    """
    base = (tl.load(plane) + head * tl.load(plane + 3)).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(base, 16), tl.load(plane + 1) // 4, tl.load(plane + 2) // 4


@triton.jit
def tile_words(
    vectors: tl.tuple, blocks: tl.tensor, rows: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the words of a tile of these tokens: the plane's base, the offset of each, and the mask of valid ones.

    vectors: plane_of_head. blocks: to the chunk's block ids. rows: (rows,).
    """
    column = tile_columns(P)
    place = row_words(vectors, blocks, rows[:, None, None], C) + column
    place = tl.max_contiguous(tl.multiple_of(place, (1, 1, 4)), (1, 1, 4))
    return vectors[0], place, (rows[:, None, None] < C.tokens) & (column < P.size // 2)


@triton.jit
def row_words(vectors: tl.tuple, blocks: tl.tensor, row: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return the offset of the first word of each of these tokens, int64. row: tokens, of any shape. Other arguments as
    in `tile_words`."""
    _, block_stride, token_stride = vectors
    block = tl.load(blocks + row // C.block_tokens, mask=row < C.tokens, other=0)
    token = (row % C.block_tokens).to(tl.int64)
    return block * block_stride + token * token_stride


@triton.jit
def load_words(
    vectors: tl.tuple, blocks: tl.tensor, rows: tl.tensor, P: tl.constexpr, C: tl.constexpr, EVICT: tl.constexpr
) -> tl.tensor:
    """Load a tile, (rows, groups, 16) int32, with zeros past the chunk's or a row's end. rows: tokens, (rows,). EVICT:
    the load's eviction policy."""
    base, place, inside = tile_words(vectors, blocks, rows, P, C)
    return tl.load(base + place, mask=inside, other=0, eviction_policy=EVICT)


@triton.jit
def prefetch(at: tl.tensor, FAST: tl.constexpr) -> None:
    """Start to load lines of 128 bytes into the L2 cache, without waiting. at: pointers into them."""
    if FAST:
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1)


@triton.jit
def copy_first_token(
    vectors: tl.tuple, blocks: tl.tensor, first_token: tl.tensor, raw: tl.tensor, P: tl.constexpr
) -> None:
    """Copy a chunk's first token from `raw`, words of the slab, to the pages, unless it is before `first_token`, the
    first token to fill. It is copied once, so that no tile needs a select."""
    word = tl.arange(0, P.padded // 2)
    wanted = (word < P.size // 2) & (first_token == 0)
    tl.store(vectors[0] + tl.load(blocks) * vectors[1] + word, tl.load(raw + word, mask=wanted, other=0), mask=wanted)


@triton.jit
def store_by_rows(at: tl.tensor, values: tl.tensor, row: tl.tensor, inside: tl.tensor) -> None:
    """Store a value for each row, (rows,), from one of the row's four lanes, without a barrier. at: where row 0 has its
    value."""
    ROWS: tl.constexpr = row.shape[0]
    lane = tl.arange(0, 4)[:, None]
    places = tl.max_contiguous(row[None, :] + lane, (1, 1))  # else 32 rows would go to one warp
    tl.store(at + places, tl.broadcast_to(values[None, :], (4, ROWS)), mask=inside[None, :] & (lane == 0))


@triton.jit
def permuted(x: tl.tensor, y: tl.tensor, SELECTOR: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return int32 words of four bytes of x and y, int32, like the instruction prmt.

    SELECTOR: four hexadecimal digits, the last one for the lowest byte; 0 to 3 choose a byte of x, 4 to 7 one of y.
    """
    if FAST:
        selector = tl.full(x.shape, SELECTOR, tl.int32)
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], tl.int32, True, 1)
    else:
        word = tl.full(x.shape, 0, tl.int32)
        for place in tl.static_range(4):
            NUMBER: tl.constexpr = (SELECTOR >> (4 * place)) & 7
            source = x if NUMBER < 4 else y
            word |= ((source >> (NUMBER % 4 * 8)) & 0xFF) << (8 * place)
    return word


@triton.jit
def _larger(x: tl.tensor, y: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return words of the larger magnitudes of x and y; NaN where either element is NaN. The signs mean nothing."""
    ASM: tl.constexpr = _LARGER_BF16 if C.is_bf16 else _LARGER_FP16
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], tl.int32, True, 1)


@triton.jit
def _folded(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return (rows, n / 2) words of the larger magnitudes of the two halves of (rows, n) words."""
    N_ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    first, second = x.reshape(N_ROWS, 2, HALF).permute(0, 2, 1).split()
    return _larger(first, second, C)


@triton.jit
def largest(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return the bits of the largest magnitude in each row of words, (rows,) int32; those of NaN if a row has NaN."""
    N_ROWS: tl.constexpr = words.shape[0]
    N_GROUPS: tl.constexpr = words.shape[1]
    if C.fast and N_GROUPS <= 4:
        even, odd = words.reshape(N_ROWS, N_GROUPS * 4, 2, 2).split()
        even, odd = _larger(even, odd, C).split()
        x = _larger(even, odd, C)
        if N_GROUPS == 4:
            x = _folded(x, C)
        x = _folded(x, C)
        x = tl.maximum(x & 0x7FFF, (x >> 16) & 0x7FFF)  # NaN > infinity > all else
    else:  # with 256 elements Triton would move data to other threads at each step
        x = tl.reduce(tl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF), 1, _elementwise_max)
    return tl.reduce(x, 1, _elementwise_max)


@triton.jit
def value_of(bits: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return the element of these bits, fp32."""
    if C.is_bf16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def operand_rows(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Reorder the rows of a tile, (rows, n), so that each is in the thread that needs it for an operand of the tensor
    cores. No data moves.

    A thread of a tile has rows that are 8 * warps apart; a thread of an operand has two rows 8 apart, and the next 16
    rows are those of the next warp.
    """
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    ROUNDS: tl.constexpr = ROWS // (16 * C.warps)
    return x.reshape(ROUNDS, 2, C.warps, 8, N).permute(0, 2, 1, 3, 4).reshape(ROWS, N)


@triton.jit
def tile_rows(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Undo `operand_rows` for a product, (rows, n)."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    ROUNDS: tl.constexpr = ROWS // (16 * C.warps)
    return x.reshape(ROUNDS, C.warps, 2, 8, N).permute(0, 2, 1, 3, 4).reshape(ROWS, N)


@triton.jit
def in_order(product: tl.tensor, SIDE_BY_SIDE: tl.constexpr) -> tl.tensor:
    """Reorder a product's columns as `product_columns` says (kvtier.codecs.turboquant.tables). No data moves."""
    N_ROWS: tl.constexpr = product.shape[0]
    N_COLUMNS: tl.constexpr = product.shape[1]
    PAIRS: tl.constexpr = SIDE_BY_SIDE // 2
    parts = product.reshape(N_ROWS, N_COLUMNS // (4 * SIDE_BY_SIDE), PAIRS, 4, 2)
    return parts.permute(0, 1, 3, 2, 4).reshape(N_ROWS, N_COLUMNS)


@triton.jit
def floats(words: tl.tensor, IS_BF16: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the lower and the upper element of each word, fp32. The elements are bf16 if IS_BF16, else fp16."""
    if IS_BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _bf16_bits(x: tl.tensor) -> tl.tensor:
    """Round finite fp32 to bf16, to nearest even. Return its bits in the lower half of int32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def words_of(low: tl.tensor, high: tl.tensor, IS_BF16: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return words of two elements each, rounded to nearest even: bf16 if IS_BF16, else fp16, clamped to finite
    values."""
    if not IS_BF16:
        low, high = tl.clamp(low, -65504.0, 65504.0), tl.clamp(high, -65504.0, 65504.0)
    if FAST and IS_BF16:
        words = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    elif FAST:
        words = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    elif IS_BF16:
        words = _bf16_bits(low) | (_bf16_bits(high) << 16)
    else:
        low16, high16 = low.to(tl.float16).to(tl.int16, bitcast=True), high.to(tl.float16).to(tl.int16, bitcast=True)
        words = (low16.to(tl.int32) & 0xFFFF) | (high16.to(tl.int32) << 16)
    return words
