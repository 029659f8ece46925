"""What the checksum must tell apart, on the definition itself: any change of any word, place, key, head or layer."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.format.checksum import slab_checksum, slab_seed

PAGES = 4
SLAB = np.random.default_rng(7).integers(0, 256, PAGES * 4096, dtype=np.uint8)
SEED = slab_seed(b"0123456789abcdef", 3, 0)
SUM = slab_checksum(SLAB, SEED)


@given(st.integers(0, SLAB.size - 1), st.integers(1, 255))
def test_a_changed_byte(position: int, flip: int) -> None:
    changed = SLAB.copy()
    changed[position] ^= flip
    assert slab_checksum(changed, SEED) != SUM


@given(st.integers(0, PAGES - 1), st.integers(0, PAGES - 1))
def test_swapped_pages_also_of_equal_sums(one: int, two: int) -> None:
    changed = SLAB.reshape(PAGES, 4096).copy()
    changed[[one, two]] = changed[[two, one]]
    assert (slab_checksum(changed.ravel(), SEED) == SUM) == (one == two)
    words = np.arange(1024, dtype="<u4")
    up_down = np.concatenate([words, words[::-1], words, words[::-1]]).view(np.uint8)
    down_up = np.concatenate([words[::-1], words, words, words[::-1]]).view(np.uint8)
    assert slab_checksum(up_down, SEED) != slab_checksum(down_up, SEED)


def test_zeroes_and_stale_pages() -> None:
    assert slab_checksum(np.zeros_like(SLAB), SEED) not in (0, SUM)
    for page in range(PAGES):
        torn = SLAB.copy()
        torn[page * 4096 : (page + 1) * 4096] = 0
        assert slab_checksum(torn, SEED) != SUM


def test_sparse_data_hides_no_flip() -> None:
    """In a slab of zeroes a pair's other word multiplies the flipped one: it must not be zero with its key."""
    zeroes = np.zeros(8 * 4096, dtype=np.uint8)
    whole = slab_checksum(zeroes, SEED)
    for position in range(0, zeroes.size, 97):
        zeroes[position] = 1
        assert slab_checksum(zeroes, SEED) != whole
        zeroes[position] = 0


def test_another_key_head_or_layer() -> None:
    seeds = {slab_seed(bytes([key]) * 16, head, layer) for key in range(8) for head in range(8) for layer in range(8)}
    assert len(seeds) == 512
    assert len({slab_checksum(SLAB, seed) for seed in seeds}) == 512
