"""The constants of the codec, worked out again."""

import math

import numpy as np
import pytest
from blake3 import blake3

from kvtier.codecs.turboquant import codebooks
from kvtier.codecs.turboquant.buckets import codes, thresholds
from kvtier.codecs.turboquant.codebooks import CODEBOOKS, Codebook
from kvtier.codecs.turboquant.rotation import (
    HEAD_SIZES,
    K_PLANE,
    V_PLANE,
    hadamard,
    signs,
)
from kvtier.format.geometry import Extent

WORSE_THAN_EXACT = {4: 1.0047, 5: 1.0021, 6: 1.0181}
THEORY = {4: 0.009501, 5: 0.0025047, 6: 0.00064424}
SIGN_VECTORS: tuple[tuple[int, int, int, int, str], ...] = (
    # seed, layer, head, plane, the first 64 bits of the stream
    (0, 0, 0, K_PLANE, "91238a1f2d7928bc"),
    (0, 0, 0, V_PLANE, "38be5da0f21e709f"),
    (7, 31, 5, K_PLANE, "6f19906721c450dc"),
)
HADAMARD_VECTORS = {
    64: "a360a0f32c83e1f611cd6f2d966014bf",
    80: "e035dfbb9df1a33193ec6cbd7aa246da",
    96: "c55588da8d6053ddc7689f9afabaeedd",
    128: "5b462d3be6f5d1a0e1acc6454823bd4b",
    256: "dbd0c280fae5796b5ec85415c11812b3",
}


def tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def cells(edges: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Chance of each code and the mean of x in its bucket, for x of N(0, 1)."""
    edges = [-math.inf, *edges, math.inf]
    chance = np.array([tail(a) - tail(b) for a, b in zip(edges, edges[1:], strict=False)])
    mean = np.array([density(a) - density(b) for a, b in zip(edges, edges[1:], strict=False)]) / chance
    return chance, mean


def best_error(edges: list[float]) -> float:
    """Return the error of the best centroids that are symmetric about 0."""
    chance, mean = cells(edges)
    ours = (chance * mean - (chance * mean)[::-1]) / (chance + chance[::-1])
    return 1 - 2 * (chance * mean * ours).sum() + (chance * ours**2).sum()


def edges_of(book: Codebook, reach: float) -> list[float]:
    """In deviations, if the curve spans `reach` of them."""
    return [2 * reach * threshold for threshold in thresholds(book.bits)]


BY_BITS = pytest.mark.parametrize("book", CODEBOOKS.values(), ids=lambda book: book.bits)


@BY_BITS
def test_thresholds_are_where_the_curve_changes(book: Codebook) -> None:
    """Numbers next to each threshold, on the curve itself."""
    for number, threshold in enumerate(thresholds(book.bits), start=1):
        assert np.float32(threshold) == threshold
        for x, code in ((threshold, number), (np.nextafter(np.float32(threshold), np.float32(-1)), number - 1)):
            v = np.float16(0.5 + float(x))
            assert codes(book.bits, np.array([v]))[0] == code
    every = codes(book.bits, np.linspace(0, 1, 5000).astype(np.float16))
    assert every[0] == 0 and every[-1] == 2**book.bits - 1 and (np.diff(every) >= 0).all()


@BY_BITS
def test_curves_are_odd_about_their_middle(book: Codebook) -> None:
    v = np.linspace(0, 1, 101)
    curve = sum(c * v**n for n, c in enumerate(book.curve, start=1))
    assert np.allclose(curve + curve[::-1], 2**book.bits - 1, rtol=0, atol=1e-9 if book.bits <= 4 else 0.07)
    assert all(np.float16(c) == c for c in book.curve)
    if book.bits <= 4:
        assert book.curve == (0.0, 3.0 * (2**book.bits - 1), -2.0 * (2**book.bits - 1))


@BY_BITS
def test_reach_gives_the_least_error(book: Codebook) -> None:
    error = best_error(edges_of(book, book.reach))
    assert all(
        error <= best_error(edges_of(book, book.reach * change)) * 1.00002 for change in (0.99, 0.995, 1.005, 1.01)
    )
    assert error <= WORSE_THAN_EXACT[book.bits] * THEORY[book.bits]


@BY_BITS
def test_error_of_whole_centroids(book: Codebook) -> None:
    edges = edges_of(book, book.reach)
    chance, mean = cells(edges)
    exact = best_error(edges)
    positive = np.array(book.centroids)
    whole = book.unit * np.concatenate([-positive[::-1], positive])
    error = 1 - 2 * (chance * mean * whole).sum() + (chance * whole**2).sum()
    assert exact <= error <= 1.0011 * exact
    stated = [float(line.split()[2]) for line in (codebooks.__doc__ or "").splitlines() if line[:8].strip().isdigit()]
    assert error == pytest.approx(stated[book.bits - 4], rel=1e-4)
    assert list(book.centroids) == sorted(book.centroids) and book.centroids[-1] <= (127 if book.bits <= 4 else 2047)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_hadamard(size: int) -> None:
    matrix = hadamard(size).astype(np.int64)
    assert (np.abs(matrix) == 1).all()
    assert (matrix @ matrix.T == size * np.eye(size)).all()
    assert blake3(hadamard(size).tobytes()).hexdigest()[:32] == HADAMARD_VECTORS[size]


def test_a_size_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="112"):
        hadamard(112)


@pytest.mark.parametrize(("seed", "layer", "head", "plane", "stream"), SIGN_VECTORS)
def test_sign_vectors(seed: int, layer: int, head: int, plane: int, stream: str) -> None:
    row = signs(seed, Extent(layer, 1, head, 1), plane, 64)[0, 0]
    assert np.packbits(row < 0, bitorder="little").tobytes().hex() == stream


def test_signs_depend_on_global_numbers_alone() -> None:
    whole = signs(3, Extent(0, 4, 0, 8), V_PLANE, 80)
    assert (signs(3, Extent(2, 2, 5, 3), V_PLANE, 80) == whole[2:, 5:]).all()
    assert (signs(3, Extent(0, 4, 0, 8), V_PLANE, 128)[..., :80] == whole).all()


def test_signs_differ_from_row_to_row() -> None:
    rows = np.concatenate([signs(0, Extent(0, 8, 0, 8), plane, 128).reshape(-1, 128) for plane in (K_PLANE, V_PLANE)])
    agree = (rows.astype(int) @ rows.T.astype(int))[~np.eye(len(rows), dtype=bool)]
    assert np.abs(agree).max() < 70 and abs(rows.mean()) < 0.03
