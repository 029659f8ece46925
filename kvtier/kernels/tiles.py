"""Tiles of the engine's pages: device functions that the kernels of all codecs share.

A tile is some tokens' vectors of one plane and head. It is loaded and stored as 32-bit words of two elements, shaped
(rows, groups, 16 words): so four threads share a row, each has 16 bytes of every group, and what is reduced over a row
is mostly reduced within a thread. (Of dimensions that it cannot order by addresses, Triton gives threads to the first.)

P stands for a plane's PlaneCode or PlaneShape, C for the launch's Int8ChunkShape or TurboquantChunkShape.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

# The interpreter is a hundred times as fast with these as with ours.
from triton.language.standard import _elementwise_max, _sum_combine


@triton.jit
def total(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """tl.sum, but of its own type; the interpreter, as tests have it, does not know tl.sum."""
    return tl.reduce(x, AXIS, _sum_combine)


_LARGER_BF16, _LARGER_FP16 = (tl.constexpr(f"max.NaN.xorsign.abs.{kind} $0, $1, $2;") for kind in ("bf16x2", "f16x2"))
# 1.5 * 2^23: x + this - this is x rounded to a whole number, half to even, which is in the sum's lower bits.
WHOLE = tl.constexpr(12582912.0)
WHOLE_BITS = tl.constexpr(0x4B400000)

# What sqrt.rn and div.rn come to, without the branch for what is not normal: there our results do not count.
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
    """Rounded to nearest even, of x between 2^-60 and 2^60; else anything."""
    if FAST:
        return tl.inline_asm_elementwise(_SQUARE_ROOT, "=&f,f", [x], tl.float32, True, 1)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def quotient(x: tl.tensor, y: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """x / y, rounded to nearest even, where all are between 2^-60 and 2^60; else anything."""
    if FAST:
        return tl.inline_asm_elementwise(_QUOTIENT, "=&f,f,f", [x, y], tl.float32, True, 1)
    else:
        return tl.div_rn(x, y)


@triton.jit
def fused(x: tl.tensor, y: tl.tensor, z: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """x * y + z, rounded once, fp32; without PTX where fp64 holds all of it."""
    if FAST:
        return tl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], tl.float32, True, 1)
    else:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)


@triton.jit
def tile_columns(P: tl.constexpr) -> tl.tensor:
    """(1, groups, 16): numbers of a row's words."""
    return tl.arange(0, P.padded // 32)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit
def plane_of_head(plane: tl.tensor, head: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the start of a head's vectors, and the strides of block and token in words.

    plane: to base and strides of block, token and head, in bytes. Taken before a loop: what it stores keeps the
    compiler from doing so.
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
    """int64: offset of the first word of each of these tokens. row: of any shape. Others as in `tile_words`."""
    _, block_stride, token_stride = vectors
    block = tl.load(blocks + row // C.block_tokens, mask=row < C.tokens, other=0)
    token = (row % C.block_tokens).to(tl.int64)
    return block * block_stride + token * token_stride


@triton.jit
def load_words(
    vectors: tl.tuple, blocks: tl.tensor, rows: tl.tensor, P: tl.constexpr, C: tl.constexpr, EVICT: tl.constexpr
) -> tl.tensor:
    """(rows, groups, 16) int32; zeros past the chunk's or a row's end. rows: (rows,) tokens. EVICT: from caches."""
    base, place, inside = tile_words(vectors, blocks, rows, P, C)
    return tl.load(base + place, mask=inside, other=0, eviction_policy=EVICT)


@triton.jit
def permuted(x: tl.tensor, y: tl.tensor, SELECTOR: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """int32: words of four bytes, which the hexadecimal digits of SELECTOR choose, the last one the lowest byte: 0 to 3
    of x, 4 to 7 of y, int32."""
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
    """Return the larger magnitudes of two words; NaN where either is."""
    ASM: tl.constexpr = _LARGER_BF16 if C.is_bf16 else _LARGER_FP16
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], tl.int32, True, 1)


@triton.jit
def _folded(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, n / 2): the larger of the first half of (rows, n) words and the second."""
    N_ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    first, second = x.reshape(N_ROWS, 2, HALF).permute(0, 2, 1).split()
    return _larger(first, second, C)


@triton.jit
def largest(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows,) int32: bits of the largest magnitude of each row of words; those of NaN where there is any."""
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
    else:  # of 256 elements Triton would have other threads for each step
        x = tl.reduce(tl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF), 1, _elementwise_max)
    return tl.reduce(x, 1, _elementwise_max)


@triton.jit
def value_of(bits: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """fp32 of an element's bits."""
    if C.is_bf16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def operand_rows(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, n): a tile's rows in the order in which the tensor cores want them where they are. No data moves.

    Threads have every eighth row of theirs times the warps; of an operand they want two rows eight apart, then the
    next warp's.
    """
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    ROUNDS: tl.constexpr = ROWS // (16 * C.warps)
    return x.reshape(ROUNDS, 2, C.warps, 8, N).permute(0, 2, 1, 3, 4).reshape(ROWS, N)


@triton.jit
def tile_rows(x: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, n): the reverse of `operand_rows`, for a product."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    ROUNDS: tl.constexpr = ROWS // (16 * C.warps)
    return x.reshape(ROUNDS, C.warps, 2, 8, N).permute(0, 2, 1, 3, 4).reshape(ROWS, N)


@triton.jit
def in_order(product: tl.tensor, SIDE_BY_SIDE: tl.constexpr) -> tl.tensor:
    """(rows, columns), its columns ordered as by `product_columns` (kvtier.codecs.turboquant.tables). No data moves."""
    N_ROWS: tl.constexpr = product.shape[0]
    N_COLUMNS: tl.constexpr = product.shape[1]
    PAIRS: tl.constexpr = SIDE_BY_SIDE // 2
    parts = product.reshape(N_ROWS, N_COLUMNS // (4 * SIDE_BY_SIDE), PAIRS, 4, 2)
    return parts.permute(0, 1, 3, 2, 4).reshape(N_ROWS, N_COLUMNS)


@triton.jit
def floats(words: tl.tensor, IS_BF16: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The lower and the upper element of each word, fp32. They are bf16, else fp16."""
    if IS_BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _bf16_bits(x: tl.tensor) -> tl.tensor:
    """Finite fp32 to nearest even, in the lower half of int32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def words_of(low: tl.tensor, high: tl.tensor, IS_BF16: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Words of two elements each, rounded to nearest even: bf16, else fp16, held within its finite values."""
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
