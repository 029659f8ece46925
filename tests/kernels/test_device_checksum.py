"""The Triton checksum against the reference in numpy: the same sums, whatever lies in one call."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.format.checksum import VECTORS, slab_checksum, slab_seed
from kvtier.kernels.paged import SlabRun
from tests.kernels.device_pages import noise
from tests.kernels.device_rig import DEVICE, device_checksum

PAGE = 4096
WALK = device_checksum.WALKS[0]


def run_of(n_slabs: int, n_pages: int, seed: int) -> SlabRun:
    rng = random.Random(seed)
    slabs = noise(n_slabs * n_pages * PAGE, seed).view(n_slabs, n_pages * PAGE)
    return SlabRun(slabs, rng.randbytes(16), rng.randrange(128), rng.randrange(100))


def expected(run: SlabRun) -> tuple[int, ...]:
    slabs = run.slabs.cpu().numpy()
    seeds = [slab_seed(run.key, run.first_head + number, run.first_layer) for number in range(len(slabs))]
    return tuple(slab_checksum(slab, seed) for slab, seed in zip(slabs, seeds, strict=True))


def sums(runs: list[SlabRun]) -> list[tuple[int, ...]]:
    return device_checksum.slab_checksums(runs).wait()


@pytest.mark.parametrize(("key", "head", "layer", "slab", "seed", "checksum"), VECTORS)
def test_vectors(key: bytes, head: int, layer: int, slab: bytes, seed: int, checksum: int) -> None:
    run = SlabRun(torch.frombuffer(bytearray(slab), dtype=torch.uint8).view(1, -1).to(DEVICE), key, head, layer)
    assert device_checksum.slab_seeds(key, head, 1, layer).tolist() == [[seed]]
    assert sums([run]) == [(checksum,)]


@pytest.mark.parametrize("n_pages", [1, 2, 3, 5, WALK.step, WALK.pages - 1, WALK.pages, WALK.pages + 1, 3 * WALK.pages])
def test_slabs_of_any_number_of_pages(n_pages: int) -> None:
    run = run_of(2, n_pages, n_pages)
    assert sums([run]) == [expected(run)]


@pytest.mark.parametrize("byte", [0, 255])
def test_words_and_sums_that_overflow(byte: int) -> None:
    run = run_of(1, 3, 1)
    run.slabs.fill_(byte)
    assert sums([run]) == [expected(run)]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=5))
def test_runs_of_different_slabs_in_one_call(shapes: list[tuple[int, int]]) -> None:
    """Answers come in the order of the runs, though equal sizes are summed together."""
    runs = [run_of(n_slabs, n_pages, number) for number, (n_slabs, n_pages) in enumerate(shapes)]
    assert sums(runs) == [expected(run) for run in runs]


def test_seeds_are_those_of_the_definition() -> None:
    keys = [run_of(1, 1, number).key for number in range(5)]
    for head, n_heads, layer in ((0, 1, 0), (3, 8, 0), (7, 3, 31)):
        wanted = [[slab_seed(key, head + n, layer) for n in range(n_heads)] for key in keys]
        assert device_checksum.slab_seeds(b"".join(keys), head, n_heads, layer).tolist() == wanted


def test_nothing_around_the_slabs_counts_and_nothing_is_written() -> None:
    whole = noise(5 * PAGE, 1)
    run = SlabRun(whole[PAGE : 4 * PAGE].view(1, 3 * PAGE), bytes(16), 0, 0)
    was = whole.clone()
    first = sums([run])
    assert first == [expected(run)] and torch.equal(whole, was)
    whole[:PAGE] += 1
    whole[4 * PAGE :] += 1
    assert sums([run]) == first
    whole[3 * PAGE + 17] ^= 4
    assert sums([run]) != first


@pytest.mark.parametrize(
    "slabs",
    [
        torch.zeros(1, 4095, dtype=torch.uint8),
        torch.zeros(1, 4104, dtype=torch.uint8),
        torch.zeros(1, 8192, dtype=torch.uint8)[:, ::2],
        torch.zeros(1, 4096, dtype=torch.int8),
        torch.zeros(4096, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.uint8)[8:4104].view(1, 4096),
    ],
)
def test_what_cannot_be_summed_is_refused(slabs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="slabs"):
        device_checksum.slab_checksums([SlabRun(slabs, bytes(16), 0, 0)])


def test_keys_are_sixteen_bytes() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        device_checksum.slab_checksums([run_of(1, 1, 1)._replace(key=bytes(15))])
