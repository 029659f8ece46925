"""What turboquant's kernels are compiled for, and the matrices and tables that they read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codecs.turboquant.codebooks import CODEBOOKS
from kvtier.codecs.turboquant.reference import decode_unit, scale_unit
from kvtier.codecs.turboquant.rotation import hadamard

IN_A_WORD = 4
"""Bytes of codes that a thread has side by side after the rotation."""


class PlaneCode(NamedTuple):
    """How K, or V, is coded: what the compiler must know.

    size: elements of a vector; padded: of one in a tile. thresholds: of |y| in units of a vector's deviation. least:
    the square of the first centroid. energy: PTX that sums the squares of the centroids in a word of the first plane.
    centroids: PTX that makes centroids of four bytes of codes. permuted: whether that is how they are decoded.
    """

    size: int
    padded: int
    bits: int
    has_mean: bool
    thresholds: tuple[float, ...]
    least: int
    scale_unit: float
    decode_unit: float
    energy: str
    centroids: str
    permuted: bool


class ChunkShape(NamedTuple):
    """rows: of a tile. fast: with PTX; the interpreter has none."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    warps: int
    fast: bool


def plane_code(size: int, bits: int, has_mean: bool, fast: bool) -> PlaneCode:
    """Of a vector's `size` elements with codes of `bits`; K has a mean. fast: as in ChunkShape."""
    book = CODEBOOKS[bits]
    # Operands of int8 have at least 32 columns, and bytes are taken four at a time.
    permuted = fast and (bits == 4 or (bits < 4 and size >= 96)) and size % 32 == 0
    return PlaneCode(
        size, padded_size(size), bits, has_mean, book.thresholds, book.centroids[0] ** 2, scale_unit(bits),
        decode_unit(bits, size), _energy_ptx(book.centroids) if bits <= 4 else "",
        _centroid_ptx(book.centroids) if permuted else "", permuted,
    )  # fmt: skip


def padded_size(size: int) -> int:
    """Elements of a vector in a tile: eight parts, each padded to a power of two."""
    return 8 * max(8, 1 << (size // 8 - 1).bit_length())


def places(size: int) -> npt.NDArray[np.int64]:
    """(padded,): which element lies at each place of a tile; -1 where none does."""
    part = padded_size(size) // 8
    eighth, within = np.divmod(np.arange(8 * part), part)
    return np.where(within < size // 8, eighth * (size // 8) + within, -1)


def product_columns(n_columns: int, side_by_side: int) -> npt.NDArray[np.int64]:
    """(n_columns,): for each column of a product its place after `turboquant_tiles.in_order`.

    Of every 8 columns the tensor cores leave a thread 2. In order, a thread has `side_by_side` (4 or 8) in a row.
    """
    column = np.arange(n_columns)
    pair, lane, pairs = column >> 3, column >> 1 & 3, side_by_side // 2
    return (column & 1) | (pair % pairs) << 1 | lane * side_by_side | pair // pairs * (4 * side_by_side)


def encode_matrix(size: int) -> npt.NDArray[np.float16]:
    """(padded, padded): what vectors are multiplied with from the right, in the order of the accumulators' columns."""
    padded = padded_size(size)
    matrix = np.zeros((padded, padded), dtype=np.float16)
    element = places(size)[product_columns(padded, IN_A_WORD)]
    matrix[:size, element >= 0] = hadamard(size)[element[element >= 0]].T
    # Its rows: of each group of 32 a thread has 8 in a row, of which the tensor cores want two at a time.
    row = np.arange(padded)
    ordered: npt.NDArray[np.float16] = matrix[row // 32 * 32 + row % 8 // 2 * 8 + row % 32 // 8 * 2 + row % 2]
    return ordered


def decode_matrix(code: PlaneCode) -> npt.NDArray[np.int8 | np.float16]:
    """What centroids are multiplied with from the right, in the order of the accumulators' columns.

    (padded, padded) int8, or fp16 where centroids have more than 7 bits. Where the code is `permuted`: column after
    column, and its rows in the order in which the PTX puts out elements.
    """
    padded = code.padded
    dtype = np.int8 if code.bits <= 4 else np.float16
    inner = _permuted_places(code) if code.permuted else places(code.size)
    outer = product_columns(padded, 8)
    matrix = np.zeros((padded, padded), dtype=dtype)
    rows, columns = np.flatnonzero(inner >= 0), np.flatnonzero(outer < code.size)
    matrix[np.ix_(rows, columns)] = hadamard(code.size)[np.ix_(inner[rows], outer[columns])]
    return np.ascontiguousarray(matrix.T) if code.permuted else matrix


def signed_centroids(bits: int) -> npt.NDArray[np.int8 | np.float16]:
    """(codes,): int8, or fp16 where they have more than 7 bits."""
    positive = CODEBOOKS[bits].centroids
    return np.array([*positive, *(-c for c in positive)], dtype=np.int8 if bits <= 4 else np.float16)


def squares(bits: int) -> npt.NDArray[np.int32]:
    """(magnitudes,): centroids squared."""
    return np.array(CODEBOOKS[bits].centroids, dtype=np.int32) ** 2


def _energy_ptx(centroids: tuple[int, ...]) -> str:
    """PTX of one word of codes ($1) to the sum of its centroids' squares ($0).

    prmt takes bytes out of a table of eight by the low three bits of each nibble, and dp4a sums products of bytes. Two
    bits a code are two nibbles' worth of words.
    """
    table = (*centroids, *(0,) * (8 - len(centroids)))
    low, high = (int.from_bytes(bytes(part), "little") for part in (table[:4], table[4:]))
    magnitude = {2: 0x1, 4: 0x3, 8: 0x7}[len(centroids)]
    mask = magnitude * 0x11111111
    lines = [".reg .b32 m, c;", "mov.b32 $0, 0;"]
    for shift in (0, 2) if magnitude < 4 else (0,):
        for half in (0, 16):
            lines += [f"shr.u32 m, $1, {shift + half};", f"and.b32 m, m, {mask};",
                      f"prmt.b32 c, {low}, {high}, m;", "dp4a.u32.u32 $0, c, c, $0;"]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


def _permuted_places(code: PlaneCode) -> npt.NDArray[np.int64]:
    """(padded,): which element lies at each place of the operands that the PTX makes, one after the other; or -1.

    Of four bytes, a nibble is two fields' worth or one. An output has the nibbles of two bytes, first byte first:
    of 4 bits the first and the second two bytes; of 2 bits likewise, of the lower field of each nibble, then the upper.
    """
    part = code.padded // 8
    width = 4 if code.bits == 4 else 2
    n_outputs = 8 // width
    output, group, within = np.unravel_index(np.arange(code.padded), (n_outputs, width, part))
    byte = within // 4 * 4 + output % 2 * 2 + within % 4 // 2
    field = within % 2 * (4 // width) + output // 2
    element = field * (code.size * width // 8) + group * (code.size // 8) + byte
    return np.where(within // 4 * 4 < code.size // 8, element, -1)


def _centroid_ptx(centroids: tuple[int, ...]) -> str:
    """PTX of four bytes, a code in each nibble ($2), to centroids, four int8 each in $0 and $1: those of the first two
    bytes, and of the others.

    prmt selects by the low three bits of a nibble. Of codes of 4 bits: once in a table of the positive centroids and
    once in one of the negative; where bit 3 is set it spreads a byte's top bit, which makes a mask of the signs.
    """
    signed = [*centroids, *(-c for c in centroids), *(0,) * 6]
    tables = [int.from_bytes(bytes(c & 255 for c in signed[n : n + 4]), "little") for n in (0, 4, 8, 12)]
    if len(centroids) < 8:
        lines = [".reg .b32 m;", f"prmt.b32 $0, {tables[0]}, {tables[1]}, $2;", "shr.u32 m, $2, 16;",
                 f"prmt.b32 $1, {tables[0]}, {tables[1]}, m;"]  # fmt: skip
        return "{ " + " ".join(lines) + " }"
    lines = [".reg .b32 m, u, p, n, s;", "and.b32 m, $2, 0x77777777;", "shl.b32 u, $2, 4;"]
    # The signs of a word's first two bytes are the top bits of u's byte 0, $2's 0, u's 1 and $2's 1.
    for output, signs in (("$0", "0x9d8c"), ("$1", "0xbfae")):
        lines += [
            f"prmt.b32 p, {tables[0]}, {tables[1]}, m;", f"prmt.b32 n, {tables[2]}, {tables[3]}, m;",
            f"prmt.b32 s, $2, u, {signs};", f"lop3.b32 {output}, n, p, s, 0xe4;", "shr.u32 m, m, 16;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"
