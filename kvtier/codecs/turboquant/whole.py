"""The engine's elements as whole numbers that the tensor cores can sum exactly, two at a time, on the device.

A vector times a power of two, rounded to whole numbers, is what subnormal numbers are: with max |x| at 2^15 or more of
the least subnormal, 2^-133 in bf16 and 2^-24 in fp16, one multiplication is enough, and the tensor cores take the
product as it is. The matrix has +-2^124, or +-2^15, instead of +-1: so what they put out is in fp16's range.

Squares need 16 bits, which two of these numbers have: a rounded product and, by a fused multiplication and addition,
what was rounded away. The tensor cores sum both.

C stands for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables). Where C.fast is not set, the same
is done in fp32 without PTX, for the interpreter.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.kernels.tiles import WHOLE, floats, operand_rows, tile_rows, total, words_of

_TIMES = "mul.rn.T $0, $1, $2;"
# The square of $2 times $3 (in fp16 half of it) in two parts.
SQUARE_BF16 = tl.constexpr(
    "{ .reg .b32 t, n; mul.rn.bf16x2 t, $2, $3; mul.rn.bf16x2 $0, t, t; neg.bf16x2 n, $0; fma.rn.bf16x2 $1, t, t, n; }"
)
SQUARE_FP16 = tl.constexpr(
    "{ .reg .b32 t, h, n; mul.rn.f16x2 t, $2, $3; mov.b32 h, 0x38003800; mul.rn.f16x2 h, t, h; "
    "mul.rn.f16x2 $0, t, h; neg.f16x2 n, $0; fma.rn.f16x2 $1, t, h, n; }"
)
TIMES_BF16, TIMES_FP16 = (tl.constexpr(_TIMES.replace(".T", kind)) for kind in (".bf16x2", ".f16x2"))


@triton.jit
def power_below(x: tl.tensor) -> tl.tensor:
    """The largest power of two up to x > 0; 0 for zeros and subnormals."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse(power: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """One over a power of two; for 0 something large of which the engine's dtype holds 2^-9th."""
    if not C.is_bf16:
        power = tl.maximum(power, 2.0**-24)
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def twice(x: tl.tensor, IS_BF16: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Words of fp32 x, rounded, in both halves. In bf16 x must be a power of two or 0."""
    if IS_BF16 and FAST:
        bits = x.to(tl.int32, bitcast=True)
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [bits], tl.int32, True, 1)
    else:
        return words_of(x, x, IS_BF16, FAST)


@triton.jit
def _operand(low: tl.tensor, high: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """(rows, 32 n): elements as the tensor cores want them, in registers. low, high: of words (rows, n, 16)."""
    N_GROUPS: tl.constexpr = low.shape[1]
    x = tl.join(low, high).reshape(C.rows, N_GROUPS, 4, 4, 2)
    return operand_rows(x.permute(0, 1, 3, 2, 4).reshape(C.rows, 32 * N_GROUPS), C)


@triton.jit
def _operand_of(words: tl.tensor, C: tl.constexpr) -> tl.tensor:
    KIND: tl.constexpr = tl.bfloat16 if C.is_bf16 else tl.float16
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return _operand(low.to(KIND, bitcast=True), high.to(KIND, bitcast=True), C)


@triton.jit
def matrices(rotation: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return two factors of the result of `whole_and_energy`: the matrix, and one that sums squares.

    The second holds nothing but the positive number of the first's first column, of whose first 32 places none is 0.

    rotation: kvtier.codecs.turboquant.tables.encode_matrix.
    """
    place = tl.arange(0, P.padded)
    matrix = tl.load(rotation + place[:, None] * P.padded + place[None, :])
    ones = tl.load(rotation + place[:, None] % 32 * P.padded + tl.arange(0, 16)[None, :] * 0)
    if C.fast:
        KIND: tl.constexpr = tl.bfloat16 if C.is_bf16 else tl.float16
        matrix, ones = matrix.to(KIND, bitcast=True), ones.to(KIND, bitcast=True)
    return matrix, ones


@triton.jit
def _squares(words: tl.tensor, factor: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Operand of the squares of (rows, n) words times `factor`, (rows, 4 n)."""
    ASM: tl.constexpr = SQUARE_BF16 if C.is_bf16 else SQUARE_FP16
    N_GROUPS: tl.constexpr = words.shape[1] // 16
    upper, lower = tl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r", [words.reshape(C.rows, N_GROUPS, 16), factor], (tl.int32, tl.int32), True, 1
    )
    return _operand_of(tl.join(upper, lower).permute(0, 3, 1, 2).reshape(C.rows, 2 * N_GROUPS, 16), C)


@triton.jit
def whole_and_energy(
    words: tl.tensor, power: tl.tensor, ones: tl.tensor, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Operand of whole numbers, times what the matrix is divided by, and the reference's E, (rows,) fp32.

    words: (rows, groups, 16). power: (rows,) the largest power of two up to each row's largest magnitude.
    """
    if C.fast:
        WHOLE_UNIT: tl.constexpr = 2.0**-118 if C.is_bf16 else 2.0**-9
        SQUARE_UNIT: tl.constexpr = 2.0**-60 if C.is_bf16 else 2.0**-5
        ASM: tl.constexpr = TIMES_BF16 if C.is_bf16 else TIMES_FP16
        N_WORDS: tl.constexpr = words.shape[1] * 16
        factor = inverse(power, C)
        to_whole = twice(factor * WHOLE_UNIT, C.is_bf16, True)[:, None, None]
        to_square = twice(factor * SQUARE_UNIT, C.is_bf16, True)[:, None, None]
        first, second = words.reshape(C.rows, 2, N_WORDS // 2).permute(0, 2, 1).split()
        sums = tl.dot(_squares(first, to_square, C), ones)  # in two steps, for want of registers
        sums = tile_rows(tl.dot(_squares(second, to_square, C), ones, sums), C)  # all columns are the same
        bits = tl.reduce(sums.to(tl.int32, bitcast=True), 1, _elementwise_max)
        whole = tl.inline_asm_elementwise(ASM, "=r,r,r", [words, to_whole], tl.int32, True, 1)
        return _operand_of(whole, C), tl.maximum(bits.to(tl.float32, bitcast=True) * 512.0, 1.0)
    else:
        low, high = floats(words, C.is_bf16)
        factor = inverse(power, C)[:, None, None]
        low, high = low * factor * 32768.0, high * factor * 32768.0
        squares = ((low * low * 2.0**-17 + WHOLE) - WHOLE) + ((high * high * 2.0**-17 + WHOLE) - WHOLE)
        energy = total(total(squares.to(tl.int32), 1), 1).to(tl.float32)
        return _operand((low + WHOLE) - WHOLE, (high + WHOLE) - WHOLE, C), tl.maximum(energy, 1.0)
