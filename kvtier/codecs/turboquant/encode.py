"""Turboquant's encoding on the device: one launch reads pages, and writes codes, scales, means and sums.

A program encodes one layer of one head of one chunk: K, then V, tile after tile. What must be equal on all machines is
made of whole numbers, as the reference has it (kvtier.codecs.turboquant.reference): whole.py makes them, the tensor
cores rotate them exactly, pack.py finds and packs the codes. Almost all of it works on two elements at
a time. Vectors of 64 and 128 elements are rotated as in warps.py, by warps that do not wait for each other.

At the end a program reads back what it wrote, from the cache, and adds its part to its slab's checksum.

P stands for a plane's PlaneCode, C for the launch's TurboquantChunkShape (kvtier.codecs.turboquant.tables).
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max

from kvtier.codecs.turboquant.layout import RAW_TOKENS
from kvtier.codecs.turboquant.mean import take_mean, turned
from kvtier.codecs.turboquant.pack import store_codes
from kvtier.codecs.turboquant.warps import energies, hadamard16, rotated
from kvtier.codecs.turboquant.whole import matrices, power_below, whole_and_energy
from kvtier.kernels.device_part_sum import answer_layer
from kvtier.kernels.tiles import (
    floats,
    in_order,
    largest,
    load_words,
    plane_of_head,
    quotient,
    square_root,
    store_by_rows,
    tile_columns,
    tile_rows,
    value_of,
    words_of,
)

_ELEMENT_MAX = tl.constexpr(65536.0)
_RAW_TOKENS = tl.constexpr(RAW_TOKENS)
_SCALE_MIN = tl.constexpr(2.0**-20)
_SCALE_MAX = tl.constexpr(65504.0)


@triton.jit
def _centred(
    words: tl.tensor, angles: tl.tensor, mean: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Words of K without its rotary embedding and mean, rounded to the engine's dtype."""
    column = tile_columns(P)
    low, high = floats(words, C.is_bf16)
    if P.is_turned:
        low, high = turned(low, high, angles, row, False, P, C)
    low_mean, high_mean = floats(tl.load(mean + column, mask=column < P.size // 2, other=0), True)
    return words_of(low - low_mean, high - high_mean, C.is_bf16, C.fast)


@triton.jit
def _store_scales(scales: tl.tensor, scale: tl.tensor, row: tl.tensor, inside: tl.tensor, C: tl.constexpr) -> None:
    if C.by_warps:
        store_by_rows(scales, scale, row, inside)
    else:
        tl.store(scales + row, scale, mask=inside)


@triton.jit
def _encode_plane(
    plane: tl.tensor,
    head: tl.tensor,
    blocks: tl.tensor,
    tables: tl.tuple,
    slab: tl.tuple,
    P: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Encodes K or V of one layer, head and chunk. Returns True if the chunk must be refused.

    plane: pointers to base and strides, as in kvtier.kernels.device. tables: words to flip elements with,
    encode_matrix, squares of centroids by code, tile_angles (all of tables.py). slab: pointers to write codes, scales,
    mean and raw tokens to; the mean is of K only.
    """
    signs, rotation, squares, angles = tables
    codes, scales, mean, raw = slab
    column, vectors = tile_columns(P), plane_of_head(plane, head)
    if C.by_warps:
        plus, minus = hadamard16(0, C), hadamard16(1, C)
    else:
        matrix, ones = matrices(rotation, P, C)
    following = load_words(vectors, blocks, tl.arange(0, C.rows), P, C, "evict_first") if C.by_warps else 0
    refused = tl.full((C.rows,), 0, tl.int32)
    for start in range(0, C.tokens, C.rows):
        row = start + tl.arange(0, C.rows)
        if C.by_warps:
            words, following = following, load_words(vectors, blocks, row + C.rows, P, C, "evict_first")
        else:
            words = load_words(vectors, blocks, row, P, C, "evict_first")
        flip = tl.load(signs + column)
        raw_place = row[:, None, None] * (P.size // 2) + column
        tl.store(raw + raw_place, words, mask=(row[:, None, None] < _RAW_TOKENS) & (column < P.size // 2))
        if P.is_k:
            original = value_of(largest(words, C), C)
            words = _centred(words, angles, mean, row, P, C)
        words ^= flip
        top = value_of(largest(words, C), C)
        power = power_below(top)
        if C.by_warps:
            energy = energies(words, power, C)
            product = rotated(words, power, plus, minus, P, C)
        else:
            whole, energy = whole_and_energy(words, power, ones, C)
            product = in_order(tile_rows(tl.dot(whole, matrix), C), 4)
        if not C.fast:
            product = product * (1 / 512)
        normal = quotient(tl.full(top.shape, P.spread, tl.float32), square_root(energy, C.fast), C.fast)
        found = store_codes(product, normal, row, codes, squares, P, C)
        scale = square_root(quotient(energy, found.to(tl.float32), C.fast), C.fast) * P.scale_unit
        scale = tl.where(top == 0.0, 0.0, scale * (power * (1 / 32768)))
        sound = (top < _ELEMENT_MAX) & (scale >= _SCALE_MIN) & (scale <= _SCALE_MAX)  # not if anything is NaN
        inside = row < C.tokens
        is_bad = (top != 0.0) & (sound == 0)
        if P.is_k:  # also where turning, or holding within fp16's values, makes it look finite
            is_bad |= (original < _ELEMENT_MAX) == 0
        refused |= (inside & is_bad).to(tl.int32)
        _store_scales(scales, scale.to(tl.float16), row, inside, C)
    return tl.reduce(refused, 0, _elementwise_max)


# Nothing is specialized on values: another chunk or rank must not mean another compilation.
@triton.jit(
    do_not_specialize=(
        "planes", "table", "answers", "page_layer", "first_head", "page_heads", "slab_start", "slab_bytes",
    )
)  # fmt: skip
def encode_chunks(
    planes: tl.tensor,
    table: tl.tensor,
    signs: tl.tensor,
    k_rotation: tl.tensor,
    v_rotation: tl.tensor,
    k_squares: tl.tensor,
    v_squares: tl.tensor,
    angles: tl.tensor,
    answers: tl.tensor,
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

    planes: (layers, 2, 4) int64. table: (moves, 2 + n_blocks + heads) int64: address of the slabs, first block (not
    looked at), block ids, seeds. signs: (layers, page_heads, 2, words) int32. answers: (moves, heads + 1) int64, zeros
    at first: sums of slabs, and not zero where a chunk is refused. angles: tile_angles.
    slab_start: place in a slab of the first of these layers. The rest behind the last one, up to the slab's end, is
    summed with it.
    """
    N_BLOCKS: tl.constexpr = C.tokens // C.block_tokens
    K_BYTES: tl.constexpr = C.tokens * K.size * K.bits // 8
    V_BYTES: tl.constexpr = C.tokens * V.size * V.bits // 8
    MEAN: tl.constexpr = K_BYTES + V_BYTES + 4 * C.tokens
    RAW: tl.constexpr = MEAN + 2 * K.size
    LAYER_BYTES: tl.constexpr = RAW + 2 * _RAW_TOKENS * (K.size + V.size)
    WIDEST: tl.constexpr = K.padded if K.padded > V.padded else V.padded
    n_heads = tl.num_programs(0)
    head = tl.program_id(0)
    move = table + tl.program_id(2).to(tl.int64) * (2 + N_BLOCKS + n_heads)
    layer = page_layer + tl.program_id(1)
    plane = planes + layer * 8
    flips = signs + ((layer * page_heads + first_head + head) * WIDEST).to(tl.int64)
    slab = tl.load(move) + head.to(tl.int64) * slab_bytes
    first = slab_start + tl.program_id(1) * LAYER_BYTES
    start = tl.multiple_of((slab + first).to(tl.pointer_type(tl.int8)), 16)
    scales = (start + (K_BYTES + V_BYTES)).to(tl.pointer_type(tl.float16))
    mean, raw = (start + MEAN).to(tl.pointer_type(tl.int32)), (start + RAW).to(tl.pointer_type(tl.int32))
    take_mean(plane, first_head + head, move + 2, angles, mean, K, C)
    tl.debug_barrier()
    k_tables, v_tables = (flips, k_rotation, k_squares, angles), (flips + WIDEST // 2, v_rotation, v_squares, angles)
    k_slab = (start, scales, mean, raw)
    v_slab = (start + K_BYTES, scales + C.tokens, mean, raw + _RAW_TOKENS * K.size // 2)
    refused = _encode_plane(plane, first_head + head, move + 2, k_tables, k_slab, K, C)
    refused |= _encode_plane(plane + 4, first_head + head, move + 2, v_tables, v_slab, V, C)
    tl.debug_barrier()
    AT_ONCE: tl.constexpr = PAIRS if C.warps >= 4 else 128 * C.warps
    seed = move + 2 + N_BLOCKS + head
    answer_layer(answers, slab, first, first + LAYER_BYTES, slab_bytes, seed, refused != 0, PAIRS, AT_ONCE)
