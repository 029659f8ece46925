"""Constants that turboquant's kernels are compiled for, and the matrices and tables that they read."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codecs.turboquant.buckets import WHOLE16, thresholds
from kvtier.codecs.turboquant.codebooks import CODEBOOKS
from kvtier.codecs.turboquant.reference import decode_unit, scale_unit, spread
from kvtier.codecs.turboquant.rotation import hadamard

IN_A_WORD = 4  # bytes of codes that a thread has side by side after the rotation


class PlaneCode(NamedTuple):
    """Code of K or V: all that the compiler must know.

    size: elements of a vector; padded: of one in a tile. is_k: a mean is taken off, is_turned: and before it the
    rotary embedding. thresholds, coefficients: as in kvtier.codecs.turboquant.buckets. curve: PTX that makes codes of
    two elements, up to 4 bits. energy: PTX that sums the squares of the centroids of a word's codes. least: the square
    of the first centroid. centroids: PTX that makes the centroids of a word's codes; "" where tl.load does. permuted:
    this PTX takes two codes a byte and permutes registers; else it takes one code a byte and shuffles between lanes.
    """

    size: int
    padded: int
    bits: int
    is_k: bool
    is_turned: bool
    thresholds: tuple[float, ...]
    coefficients: tuple[float, ...]
    spread: float
    least: int
    scale_unit: float
    decode_unit: float
    curve: str
    energy: str
    centroids: str
    permuted: bool

    @property
    def shuffled(self) -> bool:
        """Tell whether `centroids` shuffles between lanes."""
        return self.centroids != "" and not self.permuted

    @property
    def suits_warps(self) -> bool:
        """Tell whether kvtier.codecs.turboquant.warps can encode it."""
        return self.size in (64, 128)


class TurboquantChunkShape(NamedTuple):
    """rows: tokens of a tile. fast: with inline PTX, which the interpreter lacks. by_warps: encode as in warps.py."""

    tokens: int
    block_tokens: int
    is_bf16: bool
    rows: int
    warps: int
    fast: bool
    by_warps: bool = False


def plane_code(size: int, bits: int, is_k: bool, is_turned: bool, fast: bool) -> PlaneCode:
    """Return the code of vectors of `size` elements with `bits` each. fast: see TurboquantChunkShape."""
    book = CODEBOOKS[bits]
    is_small = bits == 4
    permuted = fast and is_small and size % 32 == 0  # bytes are taken four at a time
    shuffled = fast and not is_small and size in (64, 128, 256)  # each of four lanes has 2, 4 or 8 words
    return PlaneCode(
        size,
        padded_size(size),
        bits,
        is_k,
        is_turned,
        thresholds(bits),
        book.curve,
        spread(bits),
        book.centroids[0] ** 2,
        scale_unit(bits, size),
        decode_unit(bits, size),
        _curve_ptx(book.curve) if is_small else "",
        _energy_ptx(book.centroids) if is_small else _loaded_energy_ptx(),
        _centroid_ptx(book.centroids) if permuted else _shuffled_centroid_ptx(bits) if shuffled else "",
        permuted,
    )


def padded_size(size: int) -> int:
    """Elements of a vector in a tile: eight parts, each padded to a power of two."""
    return 8 * max(8, 1 << (size // 8 - 1).bit_length())


def places(size: int) -> npt.NDArray[np.int64]:
    """(padded,): the element at each place of a tile; -1 where there is none."""
    part = padded_size(size) // 8
    eighth, within = np.divmod(np.arange(8 * part), part)
    return np.where(within < size // 8, eighth * (size // 8) + within, -1)


def product_columns(n_columns: int, side_by_side: int) -> npt.NDArray[np.int64]:
    """(n_columns,): for each column of a product its place after `tiles.in_order`.

    Of every 8 columns the tensor cores leave a thread 2. In order, a thread has `side_by_side` (4 or 8) in a row.
    """
    column = np.arange(n_columns)
    pair, lane, pairs = column >> 3, column >> 1 & 3, side_by_side // 2
    return (column & 1) | (pair % pairs) << 1 | lane * side_by_side | pair // pairs * (4 * side_by_side)


def encode_matrix(size: int, is_bf16: bool, fast: bool) -> npt.NDArray[np.int16 | np.float32]:
    """(padded, padded): what vectors are multiplied with from the right, in the order of the accumulators' columns.

    +-1 in fp32, or where it is `fast` bits of the engine's dtype, times what makes 2^-9 of the least subnormal.
    """
    padded = padded_size(size)
    matrix = np.zeros((padded, padded), dtype=np.float32)
    element = places(size)[product_columns(padded, IN_A_WORD)]
    matrix[:size, element >= 0] = hadamard(size)[element[element >= 0]].T
    # Its rows: of each group of 32 a thread has 8 in a row, of which the tensor cores want two at a time.
    row = np.arange(padded)
    ordered: npt.NDArray[np.float32] = matrix[row // 32 * 32 + row % 8 // 2 * 8 + row % 32 // 8 * 2 + row % 2]
    if not fast:
        return ordered
    if is_bf16:
        return ((ordered * np.float32(2.0**124)).view(np.int32) >> 16).astype(np.int16)
    return (ordered * 2.0**15).astype(np.float16).view(np.int16)


def decode_matrix(code: PlaneCode) -> npt.NDArray[np.int8 | np.float16]:
    """Return the matrix that centroids are multiplied with from the right, in the order of the accumulators' columns.

    (padded, padded) int8, or fp16 where centroids have more than 7 bits. Where the code is `permuted`: column after
    column, and its rows in the order in which the PTX puts out elements.
    """
    padded = code.padded
    dtype = np.int8 if code.bits <= 4 else np.float16
    if code.permuted:
        inner = _permuted_places(code)
    else:
        inner = _shuffled_places(code.size) if code.shuffled else places(code.size)
    outer = product_columns(padded, 8)
    matrix = np.zeros((padded, padded), dtype=dtype)
    rows, columns = np.flatnonzero(inner >= 0), np.flatnonzero(outer < code.size)
    matrix[np.ix_(rows, columns)] = hadamard(code.size)[np.ix_(inner[rows], outer[columns])]
    return np.ascontiguousarray(matrix.T) if code.permuted else matrix


def signed_centroids(bits: int) -> npt.NDArray[np.int8 | np.float16]:
    """Return the centroids, (codes,) int8 for codes of up to 4 bits, else (64,) fp16. A lane holds two of these: with
    codes of 5 bits one and a 0."""
    positive = CODEBOOKS[bits].centroids
    signed = [*(-c for c in reversed(positive)), *positive]
    return np.array(signed, np.int8) if bits <= 4 else np.array(signed + [0] * (64 - len(signed)), np.float16)


def squares(bits: int) -> npt.NDArray[np.int32]:
    """(codes,): centroids squared."""
    positive = np.array(CODEBOOKS[bits].centroids, dtype=np.int32)
    return np.concatenate([positive[::-1], positive]) ** 2


def _curve_ptx(curve: tuple[float, ...]) -> str:
    """PTX of two rotated elements ($1, $2: fp32) and n, twice ($3), to codes in the halves' lower bytes ($0)."""
    twice = [int(np.float16(value).view(np.uint16)) * 0x10001 for value in (0.5, *curve, WHOLE16)]
    lines = [
        ".reg .b32 v, c;",
        "cvt.rn.f16x2.f32 v, $2, $1;",
        f"mov.b32 c, {twice[0]};",
        "fma.rn.sat.f16x2 v, v, $3, c;",
        f"mov.b32 $0, {twice[-2]};",
    ]
    for value in (*twice[-3:0:-1], twice[-1]):
        lines += [f"mov.b32 c, {value};", "fma.rn.f16x2 $0, $0, v, c;"]
    return "{ " + " ".join(lines) + " }"


def _energy_ptx(centroids: tuple[int, ...]) -> str:
    """PTX of eight codes, one a nibble ($1), to the sum of their centroids' squares ($0).

    prmt takes bytes out of a table of eight by the low three bits of each nibble, and dp4a sums products of bytes.
    Codes are folded first: those of bit 3 count upwards, the others downwards.
    """
    low, high = (int.from_bytes(bytes(centroids[part : part + 4]), "little") for part in (0, 4))
    lines = [
        ".reg .b32 m, c;",
        "shr.u32 c, $1, 3;",
        "and.b32 c, c, 0x11111111;",
        "mul.lo.u32 c, c, 7;",
        "lop3.b32 m, $1, c, 0x77777777, 0x82;",
        f"prmt.b32 c, {low}, {high}, m;",
        "mov.b32 $0, 0;",
        "dp4a.u32.u32 $0, c, c, $0;",
        "shr.u32 m, m, 16;",
        f"prmt.b32 c, {low}, {high}, m;",
        "dp4a.u32.u32 $0, c, c, $0;",
    ]
    return "{ " + " ".join(lines) + " }"


def _loaded_energy_ptx() -> str:
    """Return PTX that sums the squares of four codes' centroids ($0). $1: the codes, one a byte. $2: address of
    `squares`."""
    lines = [".reg .b32 c, x, y, z;", ".reg .b64 a;"]
    for byte, target in enumerate(("$0", "x", "y", "z")):
        lines += [
            f"prmt.b32 c, $1, 0, {0x4440 + byte};",
            "mad.wide.u32 a, c, 4, $2;",
            f"ld.global.nc.b32 {target}, [a];",
        ]
    lines += ["add.u32 $0, $0, x;", "add.u32 y, y, z;", "add.u32 $0, $0, y;"]
    return "{ " + " ".join(lines) + " }"


def _permuted_places(code: PlaneCode) -> npt.NDArray[np.int64]:
    """(padded,): the element at each place of the operands that the PTX makes, one after the other; or -1.

    The first output has the nibbles of the first two of four bytes, first byte first, the second those of the others.
    """
    part = code.padded // 8
    output, group, within = np.unravel_index(np.arange(code.padded), (2, 4, part))
    byte = within // 4 * 4 + output * 2 + within % 4 // 2
    element = within % 2 * (code.size // 2) + group * (code.size // 8) + byte
    return np.where(within // 4 * 4 < code.size // 8, element, -1)


def _shuffled_places(size: int) -> npt.NDArray[np.int64]:
    """Return the element at each place of the operand that `decode._shuffled` makes, (size,)."""
    n_words = size // 32  # words of codes that a lane has
    word, pair, half, lane, side = np.unravel_index(np.arange(size), (n_words, 2, 2, 4, 2))
    return half * (size // 2) + (lane * n_words + word) * 4 + pair * 2 + side


def _centroid_ptx(centroids: tuple[int, ...]) -> str:
    """PTX of four bytes, a code in each nibble ($2), to centroids, four int8 each in $0 and $1: those of the first two
    bytes, and of the others.

    prmt selects by the low three bits of a nibble: once in a table of the negative centroids and
    once in one of the positive; where bit 3 is set it spreads a byte's top bit, which makes a mask of the signs.
    """
    signed = [*(-c for c in reversed(centroids)), *centroids]
    tables = [int.from_bytes(bytes(c & 255 for c in signed[n : n + 4]), "little") for n in (0, 4, 8, 12)]
    lines = [".reg .b32 m, u, p, n, s;", "and.b32 m, $2, 0x77777777;", "shl.b32 u, $2, 4;"]
    # The top bits of a word's first two bytes' codes are those of u's byte 0, $2's 0, u's 1 and $2's 1.
    for output, signs in (("$0", "0x9d8c"), ("$1", "0xbfae")):
        lines += [
            f"prmt.b32 n, {tables[0]}, {tables[1]}, m;",
            f"prmt.b32 p, {tables[2]}, {tables[3]}, m;",
            f"prmt.b32 s, $2, u, {signs};",
            f"lop3.b32 {output}, p, n, s, 0xe4;",
            "shr.u32 m, m, 16;",
        ]
    return "{ " + " ".join(lines) + " }"


def _shuffled_centroid_ptx(bits: int) -> str:
    """Return PTX of four codes, one a byte ($2), to their centroids, fp16 ($0, $1). $3: `decode._lane_centroids`.

    The lower 5 bits of a code are the lane that holds its centroid, and bit 5 is the half of this lane's register.
    """
    lines = [".reg .b32 c, x, y, z, u;", "shfl.sync.idx.b32 x, $3, $2, 31, 0xffffffff;"]
    for byte, target in ((1, "y"), (2, "z"), (3, "u")):
        lines += [f"shr.u32 c, $2, {8 * byte};", f"shfl.sync.idx.b32 {target}, $3, c, 31, 0xffffffff;"]
    if bits == 5:
        lines += ["prmt.b32 $0, x, y, 0x5410;", "prmt.b32 $1, z, u, 0x5410;"]
    else:  # a half's two bytes are chosen by two nibbles of prmt's selector
        lines += ["and.b32 $0, $2, 0x20202020;", "shr.u32 c, $0, 4;", "or.b32 c, c, $0;", "add.u32 c, c, 0x54105410;"]
        lines += ["prmt.b32 $0, x, y, c;", "shr.u32 c, c, 16;", "prmt.b32 $1, z, u, c;"]
    return "{ " + " ".join(lines) + " }"
