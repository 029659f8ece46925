"""The mean of K over a chunk, on the device: of some of its tokens, and only where it pays.

Elements become whole numbers of 7 bits, two at a time, by one multiplication and addition to a number from which on
the format has no smaller parts than theirs. They are 64 too large, so that sums of two in a word do not disturb each
other, and a sum of squares is dp4a's.

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.turboquant.whole import inverse, largest, power_below, twice, value_of
from kvtier.kernels.tiles import floats, load_words, plane_of_head, total, words_of

_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23
_WHOLE_BITS = tl.constexpr(0x4B400000)
_SMALL = (
    "{ .reg .b32 m, w, z; mov.b32 m, M; mov.b32 z, 0; fma.rn.T w, $2, $3, m; and.b32 $0, w, 0x00FF00FF; "
    "dp4a.u32.u32 $1, $0, $0, z; }"
)
_SMALL_BF16 = tl.constexpr(_SMALL.replace(".T", ".bf16x2").replace(", M", ", 0x40404040"))  # 3
_SMALL_FP16 = tl.constexpr(_SMALL.replace(".T", ".f16x2").replace(", M", ", 0x4C404C40"))  # 17


@triton.jit
def _small(words: tl.tensor, factor: tl.tensor, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two whole numbers of each word, in its halves, and the sum of their squares. factor: makes them less than 1."""
    if C.fast:
        ASM: tl.constexpr = _SMALL_BF16 if C.is_bf16 else _SMALL_FP16
        halves = twice(factor, C.is_bf16, True)
        small, squares = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [words, halves], (tl.int32, tl.int32), True, 1)
    else:
        low, high = floats(words, C.is_bf16)
        low = (low * (factor * 64.0) + _WHOLE).to(tl.int32, bitcast=True) - (_WHOLE_BITS - 64)
        high = (high * (factor * 64.0) + _WHOLE).to(tl.int32, bitcast=True) - (_WHOLE_BITS - 64)
        small, squares = (low & 0xFFFF) | (high << 16), low * low + high * high
    return small, squares


@triton.jit
def take_mean(
    plane: tl.tensor, head: tl.tensor, blocks: tl.tensor, mean: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> None:
    """Stores the mean of K over the chunk, or zeros where it does not pay. mean: where it lies in the slab."""
    ROWS: tl.constexpr = C.mean_rows
    GROUPS: tl.constexpr = P.padded // 32
    STEP: tl.constexpr = C.tokens // 128 if C.tokens >= 128 else 1  # the reference's mean_step
    N_TOKENS: tl.constexpr = (C.tokens + STEP - 1) // STEP
    N_ROWS: tl.constexpr = (N_TOKENS + ROWS - 1) // ROWS * ROWS
    vectors = plane_of_head(plane, head)
    words = _words(vectors, blocks, 0, STEP, P, C)
    tops = largest(words, C)
    for start in range(ROWS, N_TOKENS, ROWS):
        tops = tl.maximum(tops, largest(_words(vectors, blocks, start, STEP, P, C), C))
    power = tl.maximum(power_below(value_of(tl.reduce(tops, 0, _elementwise_max), C)), 2.0**-16)
    if N_TOKENS > ROWS:  # else they are still in registers
        words = _words(vectors, blocks, 0, STEP, P, C)
    sums, squares = _small(words, inverse(power, C) * 0.5, C)
    energies = total(squares, 1)
    for start in range(ROWS, N_TOKENS, ROWS):
        small, squares = _small(_words(vectors, blocks, start, STEP, P, C), inverse(power, C) * 0.5, C)
        sums += small
        energies += total(squares, 1)
    column = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(mean + column, total(sums, 0), mask=column < P.size // 2)
    of_all = total(total(energies, 1), 0)
    tl.debug_barrier()
    # By memory to one word a thread: all threads have all sums now.
    word = tl.arange(0, P.padded // 2)
    both = tl.load(mean + word, mask=word < P.size // 2, other=64 * N_ROWS * 0x10001)
    low, high = both & 0xFFFF, (both >> 16) & 0xFFFF
    of_all += 4096 * N_ROWS * P.padded - 128 * total(low + high, 0)
    low, high = low - 64 * N_ROWS, high - 64 * N_ROWS
    low64, high64 = low.to(tl.int64), high.to(tl.int64)
    of_mean = total(low64 * low64 + high64 * high64, 0)
    pays = (8 * of_mean >= N_TOKENS * of_all.to(tl.int64)).to(tl.int32)
    unit = power * (1 / 32)
    low_mean = ((low * pays).to(tl.float32) * (1 / N_TOKENS)) * unit
    words = words_of(low_mean, ((high * pays).to(tl.float32) * (1 / N_TOKENS)) * unit, True, C.fast)
    tl.debug_barrier()  # all have read the sums
    tl.store(mean + word, words, mask=word < P.size // 2)


@triton.jit
def _words(
    vectors: tl.tuple,
    blocks: tl.tensor,
    start: tl.tensor,
    STEP: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Of tokens that count, from the start-th of them on; zeros where there are no more."""
    return load_words(vectors, blocks, (start + tl.arange(0, C.mean_rows)) * STEP, P, C, "evict_last")
