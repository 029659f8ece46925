"""Checksums of blocks in pieces: those of the definition, wherever a piece begins and ends."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.format.checksum import slab_checksum
from kvtier.kernels.block_sums import PAGES, BlockSums
from tests.kernels.device_pages import noise
from tests.kernels.device_rig import DEVICE

PART = PAGES * 512  # pairs of a program
SEED = 0xF7BCC62A7F7C25C0


def sums(memory: torch.Tensor, pieces: list[tuple[int, int, int, int]], n_blocks: int) -> list[int]:
    """A piece: first pair in memory, first pair in the block, pairs, block."""
    table = np.array(sorted(pieces, key=lambda piece: piece[3]), np.int64).reshape(-1, 4)
    table[:, 0] = memory.data_ptr() + 8 * table[:, 0]
    prepared = BlockSums(table, n_blocks, SEED, DEVICE)
    for block in (0, n_blocks // 2, n_blocks // 2):  # in two parts
        prepared.sum_until(block)
    return [int(value) for value in prepared.sums()]


def expected(memory: torch.Tensor, pieces: list[tuple[int, int, int, int]], n_blocks: int) -> list[int]:
    found = [0] * n_blocks
    for at, first, n_pairs, block in pieces:
        content = memory[8 * at : 8 * (at + n_pairs)].cpu().numpy()
        found[block] = (found[block] + slab_checksum(content, SEED, first)) % 2**64
    return found


@pytest.mark.parametrize("n_pairs", [1, 513, PART - 1, PART, 2 * PART + 700])
@pytest.mark.parametrize("first", [0, 1, 511, 1300])
def test_pieces_of_any_length(first: int, n_pairs: int) -> None:
    memory = noise(8 * 20_000, n_pairs)
    pieces = [(3, first, n_pairs, 0)]
    assert sums(memory, pieces, 1) == expected(memory, pieces, 1)


PIECES = st.tuples(st.integers(0, 5000), st.integers(0, 100_000), st.integers(1, 5000), st.integers(0, 3))


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=6))
def test_pieces_add_up(pieces: list[tuple[int, int, int, int]]) -> None:
    memory = noise(8 * 10_000, 1)
    assert sums(memory, pieces, 4) == expected(memory, pieces, 4)


@pytest.mark.parametrize("byte", [0, 255])
def test_words_and_sums_that_overflow(byte: int) -> None:
    memory = torch.full((8 * 5000,), byte, dtype=torch.uint8, device=DEVICE)
    pieces = [(0, 100, 5000, 1)]
    assert sums(memory, pieces, 2) == expected(memory, pieces, 2)
