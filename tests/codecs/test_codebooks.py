"""The constants of the codec, worked out again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from blake3 import blake3

from kvtier.codecs.turboquant.codebooks import CODEBOOKS, Codebook
from kvtier.codecs.turboquant.rotation import (
    HADAMARD_VECTORS,
    HEAD_SIZES,
    K_PLANE,
    SIGN_VECTORS,
    V_PLANE,
    hadamard,
    signs,
)
from kvtier.geometry import Extent

THEORY = {2: 0.11748, 3: 0.034548, 4: 0.009501, 5: 0.0025047, 6: 0.00064424}


def tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def cells(thresholds: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Chance of each magnitude (both signs together), and the mean of |x| in it, for x of N(0, 1)."""
    edges = [0.0, *thresholds, math.inf]
    chance = np.array([tail(a) - tail(b) for a, b in zip(edges, edges[1:], strict=False)])
    mean = np.array([density(a) - density(b) for a, b in zip(edges, edges[1:], strict=False)]) / chance
    return 2 * chance, mean


def solve(bits: int) -> list[float]:
    """Lloyd's iteration on the thresholds, sped up by extrapolating where it goes (Aitken, element by element)."""
    x = np.linspace(0.2, 3, 2 ** (bits - 1) - 1)

    def step(x: np.ndarray) -> np.ndarray:
        _, mean = cells(list(x))
        return (mean[1:] + mean[:-1]) / 2

    for _ in range(4000):
        x = step(x)
        if np.abs(step(x) - x).max() < 1e-13:
            break
    return list(x)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_thresholds_are_those_of_lloyd_and_max(bits: int) -> None:
    assert np.allclose(CODEBOOKS[bits].thresholds, solve(bits), rtol=1e-7, atol=0)


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=lambda book: book.bits)
def test_thresholds_lie_between_the_means_of_their_cells(book: Codebook) -> None:
    """Which is what makes a quantizer of N(0, 1) the best: for it there is only one."""
    _, mean = cells(list(book.thresholds))
    assert np.allclose(book.thresholds, (mean[1:] + mean[:-1]) / 2, rtol=3e-7, atol=0)
    assert all(np.float32(threshold) == np.float32(f"{threshold:.9g}") for threshold in book.thresholds)


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=lambda book: book.bits)
def test_error_of_whole_centroids(book: Codebook) -> None:
    chance, mean = cells(list(book.thresholds))
    exact = 1 - (chance * mean**2).sum()
    whole = book.unit * np.array(book.centroids)
    error = 1 - 2 * (chance * mean * whole).sum() + (chance * whole**2).sum()
    assert exact == pytest.approx(THEORY[book.bits], rel=1e-4)
    assert exact <= error <= 1.0011 * exact
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
