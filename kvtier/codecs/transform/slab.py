"""Parts of both of the transform codec's kernels: shapes, places in slabs, and tiles of halves of vectors.

A tile of half a vector is (rows, groups, 16) words of two elements, as in kvtier.kernels.tiles. A rotary embedding
turns pairs of elements, one of each half: a thread has both at the same place of two tiles.

P stands for a plane's TransformPlane, C for the launch's TransformShape.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kvtier.codecs.transform.reference import RAW_TOKENS
from kvtier.kernels.tiles import row_words

_RAW_TOKENS = tl.constexpr(RAW_TOKENS)


class TransformPlane(NamedTuple):
    """size: elements of a vector; half: of a half of one in a tile, padded: components of one, powers of two."""

    size: int
    half: int
    padded: int
    is_k: bool


class TransformShape(NamedTuple):
    """rows: of a tile. places: chunks of the longest prompt. fast: with PTX; the interpreter has none."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    warps: int
    places: int
    fast: bool


@triton.jit
def half_columns(P: tl.constexpr) -> tl.tensor:
    """Return the numbers of the words of half a vector, (1, groups, 16)."""
    return tl.arange(0, P.half // 32)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit
def half_words(
    vectors: tl.tuple, blocks: tl.tensor, row: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers to the words of the first halves of tokens' vectors, (rows, groups, 16), and the mask of valid
    ones. The second halves are P.size // 4 words behind.

    vectors: plane_of_head. blocks: to the chunk's block ids. row: tokens, (rows,).
    """
    column = half_columns(P)
    place = row_words(vectors, blocks, row[:, None, None], C) + column
    place = tl.max_contiguous(tl.multiple_of(place, (1, 1, 4)), (1, 1, 4))
    return vectors[0] + place, (row[:, None, None] < C.tokens) & (column < P.size // 4)


@triton.jit
def tile_angles(
    tables: tl.tuple, layer: tl.tensor, place: tl.tensor, token: tl.tensor, P: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers to the cosines of lower elements of words by tokens within the chunk, (rows, groups, 16), and by
    the chunk's place, (1, groups, 16). Those of upper elements are P.half behind, sines 2 * P.half behind."""
    base = tl.load(tables[1] + layer)
    within = tables[2] + base * (C.tokens * 2 * P.half) + _angle_places(token[:, None, None], P)
    at_place = tables[3] + base * (C.places * 2 * P.half) + _angle_places(place, P)
    # The addresses are by runs of four numbers, each run aligned to 16 bytes.
    within = tl.max_contiguous(tl.multiple_of(within, (1, 1, 16)), (1, 1, 4))
    at_place = tl.max_contiguous(tl.multiple_of(at_place, (1, 1, 16)), (1, 1, 4))
    return within, at_place


@triton.jit
def _angle_places(position: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Return the places of positions' cosines in a table of `kernel_angles`. There 16 numbers of two neighbouring
    positions fill a line of the cache, because eight lanes load them at once."""
    column = tl.arange(0, P.half // 32)[None, :, None] * 32 + tl.arange(0, 16)[None, None, :]
    return position // 2 * (4 * P.half) + position % 2 * 16 + column


@triton.jit
def parts_of_layer(
    start: tl.tensor, tables: tl.tuple, layer: tl.tensor, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor]:
    """Return the parts of a layer's bytes, K's and V's, and the pointer to the position. Parts: codes of both planes,
    gains, words of raw elements."""
    codes = start.to(tl.pointer_type(tl.uint8))
    gains = codes + C.tokens * tl.load(tables[0] + layer)
    raw = (gains + 2 * C.tokens).to(tl.pointer_type(tl.int32))
    k, v = (codes, gains, raw), (codes, gains + C.tokens, raw + _RAW_TOKENS * K.size // 2)
    return k, v, raw + _RAW_TOKENS * (K.size + V.size) // 2


@triton.jit
def four_words(
    at: tl.tensor, GROUPS: tl.constexpr, APART: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load four words of each group, (1, groups) each. The groups' words are APART words apart."""
    x = tl.load(at + tl.arange(0, GROUPS)[None, :, None] * APART + tl.arange(0, 4)[None, None, :])
    even, odd = x.reshape(1, GROUPS, 2, 2).split()
    a, c = even.split()
    b, d = odd.split()
    return a, b, c, d


@triton.jit
def byte_places(parts: tl.tuple, token: tl.tensor, BYTE: tl.constexpr) -> tl.tensor:
    """Return where tokens have a byte of the numbers of groups, (rows, groups).

    token: (rows, 1). parts: (1, groups) each: bytes of a group's number, and the places where its parts of all tokens
    begin: the first part of four bytes, the part of two or the second of four, the part of one.
    """
    n_bytes, fours, twos, ones = parts
    has_four = n_bytes >= 4
    rest = tl.where(has_four, BYTE - 4, BYTE)
    size = tl.where(n_bytes == 8, 4, 2)
    is_single = (n_bytes < 8) & (rest >= (n_bytes & 2))
    tail = tl.where(is_single, ones + token, twos + size * token + rest)
    return tl.where(has_four & (BYTE < 4), fours + 4 * token + BYTE, tail)


@triton.jit
def layer_start(
    tables: tl.tuple, first: tl.tensor, layer: tl.tensor, slab_start: tl.tensor, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the byte of a slab where a layer begins. first: the layer that begins at slab_start."""
    rows = tl.load(tables[5] + layer) - tl.load(tables[5] + first)
    REST: tl.constexpr = 2 * C.tokens + 2 * _RAW_TOKENS * (K.size + V.size) + 16
    return slab_start + rows * C.tokens + (layer - first) * REST
