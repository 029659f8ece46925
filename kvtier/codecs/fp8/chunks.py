"""fp8's encoding and decoding on the device, a launch each: from pages to codes, scales and sums, and back.

A program does one layer of one head of one chunk: K, then V, tile after tile. After encoding it reads back what it
wrote, from the cache, and adds its part to its slab's checksum.

P stands for a plane's PlaneShape, C for the launch's Fp8ChunkShape. Tiles are those of kvtier.kernels.tiles.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.fp8.codec import CODE_MAX, SCALE_MAX, SCALE_MIN
from kvtier.codecs.fp8.numbers import codes_of, halves_of
from kvtier.kernels.device_part_sum import sum_part
from kvtier.kernels.tiles import floats, load_words, plane_of_head, quotient, tile_columns, tile_words, words_of

_CODE_MAX, _SCALE_MIN, _SCALE_MAX = (tl.constexpr(limit) for limit in (CODE_MAX, SCALE_MIN, SCALE_MAX))


class PlaneShape(NamedTuple):
    """size: elements of a vector, a multiple of 8; padded: of one in a tile, a power of two."""

    size: int
    padded: int


class Fp8ChunkShape(NamedTuple):
    """rows: of a tile. fast: with PTX; the interpreter has none."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    fast: bool


@triton.jit
def _code_places(row: tl.tensor, P: tl.constexpr, C: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(rows, groups, 16): where the pairs of codes of a tile lie in their plane, and whether they are any.

    Four a thread and no more, though more lie side by side: as the words of pages, so that nothing has to move.
    """
    row, column = row[:, None, None], tile_columns(P)
    place = tl.max_contiguous(tl.multiple_of(row * (P.size // 2) + column, (1, 1, 4)), (1, 1, 4))
    return place, (row < C.tokens) & (column < P.size // 2)


@triton.jit
def _largest(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """(rows,) fp32: the largest magnitude of each row. By their bits, because NaN > infinity > all else there."""
    x = tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    x = tl.reduce(tl.reduce(x, 1, _elementwise_max), 1, _elementwise_max)
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _encode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Encodes K or V of one layer, head and chunk. Returns whether it must be refused.

    plane: to base and strides, as in kvtier.kernels.device. codes, scales: where they go.
    """
    refused = tl.full((C.rows,), 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        low, high = floats(load_words(plane_of_head(plane, head), blocks, row, P, C, ""), C.is_bf16)
        top = _largest(low, high)
        exact = quotient(top, tl.full(top.shape, _CODE_MAX, tl.float32), C.fast)
        sound = (top == 0.0) | ((exact >= _SCALE_MIN) & (exact <= _SCALE_MAX))  # neither, if it is NaN
        scale = exact.to(tl.float16)
        divisor = tl.where(top == 0.0, 1.0, scale.to(tl.float32))
        place, inside = _code_places(row, P, C)
        tl.store(codes + place, codes_of(low, high, divisor[:, None, None], C.fast), mask=inside)
        tl.store(scales + row, scale, mask=row < C.tokens)
        refused |= ((row < C.tokens) & (sound == 0)).to(tl.int32)
    return tl.reduce(refused, 0, _elementwise_max)


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
    chunk is refused. slab_start: where in a slab the first of these layers lies. What lies behind the last, up to the
    slab's end, is summed with it.
    """
    N_BLOCKS: tl.constexpr = C.tokens // C.block_tokens
    LAYER_BYTES: tl.constexpr = C.tokens * (K.size + V.size + 4)
    n_heads = tl.num_programs(0)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS + n_heads)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of((slab + first).to(tl.pointer_type(tl.int16)), 16)
    scales = (codes + C.tokens * (K.size + V.size) // 2).to(tl.pointer_type(tl.float16))
    refused = _encode_plane(plane, first_head + head, move + 2, codes, scales, K, C)
    refused |= _encode_plane(
        plane + 4, first_head + head, move + 2, codes + C.tokens * K.size // 2, scales + C.tokens, V, C
    )
    tl.debug_barrier()
    end = first + LAYER_BYTES
    if tl.program_id(1) == tl.num_programs(1) - 1:
        end = slab_bytes
    seed = tl.load(move + 2 + N_BLOCKS + head).to(tl.uint64, bitcast=True)
    answer = answers + tl.program_id(2) * (n_heads + 1)
    tl.atomic_add(answer + head, sum_part(slab, first // 8, end // 8, seed, PAIRS, PAIRS), sem="relaxed")
    tl.atomic_or(answer + n_heads, refused.to(tl.int64), mask=refused != 0, sem="relaxed")


@triton.jit
def _decode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    move: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decodes K or V of one layer, head and chunk, but for the blocks before the move's first."""
    first_token = tl.load(move + 1) * C.block_tokens
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        place, inside = _code_places(row, P, C)
        low, high = floats(halves_of(tl.load(codes + place, mask=inside, other=0)), False)
        scale = tl.load(scales + row, mask=row < C.tokens, other=0.0).to(tl.float32) * 256.0
        scale = scale[:, None, None]
        words = words_of(low * scale, high * scale, C.is_bf16, C.fast)
        base, place, inside = tile_words(plane_of_head(plane, head), move + 2, row, P, C)
        tl.store(base + place, words, mask=inside & (row[:, None, None] >= first_token))


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
    LAYER_BYTES: tl.constexpr = C.tokens * (K.size + V.size + 4)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + C.tokens // C.block_tokens)
    plane = planes + (page_layer + tl.program_id(1)) * 8
    start = tl.load(move) + head.to(tl.int64) * slab_bytes + slab_start + tl.program_id(1) * LAYER_BYTES
    codes = tl.multiple_of(start.to(tl.pointer_type(tl.int16)), 16)
    scales = (codes + C.tokens * (K.size + V.size) // 2).to(tl.pointer_type(tl.float16))
    _decode_plane(plane, first_head + head, move, codes, scales, K, C)
    _decode_plane(plane + 4, first_head + head, move, codes + C.tokens * K.size // 2, scales + C.tokens, V, C)
