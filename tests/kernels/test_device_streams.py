"""On a GPU only: launches wait for no stream, and what they were given stays as it was until they have run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvtier.arena.arena import Arena
from kvtier.kernels.launch import pin_tables
from kvtier.kernels.paged import Move, Patch, SlabRun, gather
from kvtier.worker.arenas import _device_buffer
from kvtier.worker.context import ChunkArena
from tests.kernels.device_pages import Cache, noise
from tests.kernels.device_rig import INTERPRETED, device, device_checksum

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

CACHE = Cache("B2NHD", blocks=64)
PATCH = Patch(0, 0, CACHE.layers, 0, CACHE.heads)
SLAB_BYTES = 2 * CACHE.layers * CACHE.tokens * 256
CYCLES = 400_000_000  # of the GPU: some 0.2 s


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


@contextmanager
def busy_stream() -> Iterator[None]:
    """The current stream is busy meanwhile. What waits for it fails: by its own confession, or by the time it took."""
    stream = torch.cuda.current_stream()
    stream.synchronize()
    torch.cuda._sleep(CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        assert not stream.query(), "something waited for the stream"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()


def test_moves_wait_for_nothing_and_their_tables_are_theirs() -> None:
    """More launches than tables pinned ahead, each of other blocks: a table that is written again too early shows."""
    pages = CACHE.pages(noise(CACHE.n_bytes, 1))
    mover = device.DevicePages(pages)
    wanted = noise(32 * CACHE.heads * SLAB_BYTES, 2).view(32, CACHE.heads, SLAB_BYTES)
    found = wanted.clone()
    ids = [(2 * number, 63 - 2 * number) for number in range(32)]
    for number in range(32):
        gather(pages, PATCH, ids[number], wanted[number])
    with busy_stream():
        for number in range(32):
            mover.gather([Move(PATCH, ids[number], found[number])])
    assert torch.equal(found, wanted)


def test_sums_are_started_without_waiting() -> None:
    slabs = noise(8 * 4096, 2).view(8, 4096)
    device_checksum.prepare(slabs.device)
    quiet = device_checksum.slab_checksums([SlabRun(slabs, bytes(16), 0, 0)]).wait()[0]
    with busy_stream():
        pending = [device_checksum.slab_checksums([SlabRun(slabs[n:], bytes(16), n, 0)]) for n in range(8)]
    assert [found.wait()[0] for found in pending] == [quiet[n:] for n in range(8)]


def test_a_table_larger_than_a_launch_buffer_and_answers_that_no_thread_awaits() -> None:
    slabs = noise(6000 * 4096, 4).view(6000, 4096)
    halves = [SlabRun(slabs[first : first + 3000], bytes(16), first, 0) for first in (0, 3000)]
    wanted = [device_checksum.slab_checksums([half]).wait()[0] for half in halves]
    for _ in range(40):
        device_checksum.slab_checksums(halves[:1])
    assert device_checksum.slab_checksums(halves).wait() == wanted
    (whole,) = device_checksum.slab_checksums([SlabRun(slabs, bytes(16), 0, 0)]).wait()
    assert whole == wanted[0] + wanted[1]


def test_waiting_for_sums_waits_for_their_own_stream() -> None:
    slabs = noise(4096, 2).view(1, 4096)
    device_checksum.prepare(slabs.device)
    with busy_stream():
        slabs.fill_(7)  # after the sleep: sums taken too early are those of the noise
        pending = device_checksum.slab_checksums([SlabRun(slabs, bytes(16), 0, 0)])
    assert pending.wait() == device_checksum.slab_checksums([SlabRun(slabs, bytes(16), 0, 0)]).wait()


def test_a_scatter_comes_after_what_its_stream_did_before() -> None:
    """The zeroing of blocks, say."""
    buffer = noise(CACHE.n_bytes, 3)
    pages = CACHE.pages(buffer)
    mover = device.DevicePages(pages)
    slabs = torch.zeros(CACHE.heads, SLAB_BYTES, dtype=torch.uint8, device=buffer.device)
    mover.gather([Move(PATCH, (5, 9), slabs)])
    was = buffer.clone()
    with busy_stream():
        for plane in (plane for layer in pages.layers for plane in layer.planes):
            plane[5].zero_()
            plane[9].zero_()
        mover.scatter([Move(PATCH, (5, 9), slabs)])
    assert torch.equal(buffer, was)


def test_padding_is_blanked_without_waiting() -> None:
    buffer = _device_buffer(96 * 12288, torch.device("cuda", 0)).fill_(7)
    arena: ChunkArena = Arena(buffer, 12288)
    pin_tables(buffer.device)
    arena.blank([0], n_slabs=1, slab_bytes=4096, begin=4095)
    with busy_stream():
        for first in range(0, 96, 6):
            arena.blank([first + 5, first + 1], n_slabs=2, slab_bytes=4096, begin=4090)
    slots = buffer.view(96, 3, 4096)
    changed = slots == 0
    assert changed[5::6, 1:, 4090:].all() and changed[1::6, 1:, 4090:].all()
    assert changed.sum() == 32 * 2 * 6 + 1
