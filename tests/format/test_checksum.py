"""Every compiled version of the checksum against the numpy reference."""

import ctypes
import random

import numpy as np
import pytest

from kvtier.format.checksum import VECTORS, slab_checksum
from kvtier.io import native

INSTRUCTION_SETS = sorted(native.instruction_sets())


def address_of(data: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(data)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("vector", VECTORS, ids=["zeros", "counting", "ones"])
def test_vectors(name: str, vector: tuple[bytes, int, int, bytes, int, int]) -> None:
    key, head, first_layer, slab, seed, expected = vector
    data = ctypes.create_string_buffer(slab, len(slab))
    assert native.checksum(address_of(data), len(slab), seed, instruction_set=name) == expected
    assert native.slab_checksums(address_of(data), len(slab), 1, key, head, first_layer) == (expected,)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_random_sizes_starts_and_alignments(name: str) -> None:
    """Sizes around the vector versions' runs, addresses that are not aligned, counters that wrap at 2^32."""
    rng = random.Random(1)
    sizes = [8 * n for n in range(70)] + [8 * rng.randrange(70, 4000) for _ in range(30)]
    for size in sizes:
        shift = rng.randrange(64)
        data = ctypes.create_string_buffer(rng.randbytes(size + shift), size + shift)
        seed = rng.getrandbits(64)
        first_pair = rng.choice([0, rng.getrandbits(20), 2**32 - rng.randrange(1, 300), rng.getrandbits(40)])
        reference = np.frombuffer(data, np.uint8, size, shift)
        expected = slab_checksum(reference, seed, first_pair)
        assert native.checksum(address_of(data) + shift, size, seed, first_pair, instruction_set=name) == expected


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_pieces_add_up(name: str) -> None:
    rng = random.Random(2)
    size = 65536
    data = ctypes.create_string_buffer(rng.randbytes(size), size)
    seed = rng.getrandbits(64)
    whole = native.checksum(address_of(data), size, seed, instruction_set=name)
    for _ in range(20):
        cuts = sorted({0, size, *(8 * rng.randrange(size // 8) for _ in range(5))})
        parts = [
            native.checksum(address_of(data) + a, b - a, seed, a // 8, instruction_set=name)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        assert sum(parts) % 2**64 == whole


def test_slabs_have_seeds_of_their_own() -> None:
    """Equal bytes under another head, layer or key have another checksum."""
    data = ctypes.create_string_buffer(b"\x05" * 8192, 8192)
    key = bytes(range(16))
    first, second = native.slab_checksums(address_of(data), 4096, 2, key, 0, 0)
    assert first != second
    assert native.slab_checksums(address_of(data), 4096, 1, key, 1, 0) == (second,)
    assert native.slab_checksums(address_of(data), 4096, 1, key, 0, 1) != (first,)
    assert native.slab_checksums(address_of(data), 4096, 1, bytes(16), 0, 0) != (first,)


@pytest.mark.parametrize("size", [-8, 4, 4097])
def test_broken_pairs_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="pairs"):
        native.checksum(0, size, 0)


def test_the_fastest_version_is_in_use() -> None:
    assert native.instruction_set() == list(native.instruction_sets())[-1]
