"""Pinning and the driver's version, over a double of CUDA's driver and without any."""

import threading

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import cuda as cuda_driver
from kvtier.io.native import library
from kvtier.io.ring import AlignedBuffer

from cuda_double import CudaDouble

N_BYTES = 16 * PAGE_BYTES
STILL_PINNED: list[AlignedBuffer] = []


def test_memory_is_registered_until_unpinned(cuda: CudaDouble) -> None:
    buffer = AlignedBuffer(N_BYTES)
    before = cuda.outstanding()
    cuda_driver.pin(buffer.address, N_BYTES, 1)
    assert cuda.outstanding() == before + 2  # the range, and the context that it is registered through
    with pytest.raises(
        TierUnavailable, match="65536 bytes .*cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    ):
        cuda_driver.pin(buffer.address, N_BYTES, 1)
    cuda_driver.unpin(buffer.address)
    assert cuda.outstanding() == before
    with pytest.raises(ValueError, match="nothing is pinned"):
        cuda_driver.unpin(buffer.address)


def test_pinning_does_not_spoil_a_capture(cuda: CudaDouble) -> None:
    """The engine records CUDA graphs while the host arena is pinned; the thread's own mode and device stay."""
    buffer = AlignedBuffer(N_BYTES)
    cuda.capture(True)
    cuda_driver.pin(buffer.address, N_BYTES, 0)
    cuda_driver.unpin(buffer.address)
    assert (cuda.capture_mode_of_thread(), cuda.contexts_of_thread()) == (0, 0)


def test_a_thread_of_ours_is_relaxed_for_good(cuda: CudaDouble) -> None:
    seen: list[int] = []

    def work() -> None:
        cuda.enter()
        cuda_driver.relax_this_thread()
        seen.append(cuda.capture_mode_of_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, cuda.capture_mode_of_thread()) == ([2], 0)


def test_a_thread_that_cannot_be_relaxed_does_not_pin(cuda: CudaDouble) -> None:
    buffer = AlignedBuffer(N_BYTES)
    before = cuda.outstanding()
    cuda.fail("cuThreadExchangeStreamCaptureMode")
    with pytest.raises(TierUnavailable, match="cuThreadExchangeStreamCaptureMode: CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_driver.pin(buffer.address, N_BYTES, 0)
    assert (cuda.outstanding(), cuda.contexts_of_thread()) == (before, 0)


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemHostRegister"])
def test_what_cannot_be_pinned_is_said_and_leaves_nothing(cuda: CudaDouble, call: str) -> None:
    buffer = AlignedBuffer(N_BYTES)
    cuda.fail(call)
    with pytest.raises(TierUnavailable, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_driver.pin(buffer.address, N_BYTES, 0)
    cuda_driver.pin(buffer.address, N_BYTES, 0)
    cuda_driver.unpin(buffer.address)


def test_memory_that_cannot_be_unpinned_must_stay(cuda: CudaDouble) -> None:
    buffer = AlignedBuffer(N_BYTES)
    cuda_driver.pin(buffer.address, N_BYTES, 0)
    cuda.fail("cuMemHostUnregister")
    with pytest.raises(TierUnavailable, match="cuMemHostUnregister: CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_driver.unpin(buffer.address)
    cuda.left_behind = 1
    STILL_PINNED.append(buffer)


def test_pinning_from_many_threads(cuda: CudaDouble) -> None:
    buffers = [AlignedBuffer(N_BYTES) for _ in range(6)]
    finished: list[int] = []

    def work(address: int) -> None:
        for _ in range(50):
            cuda_driver.pin(address, N_BYTES, 0)
            cuda_driver.unpin(address)
        finished.append(address)

    threads = [threading.Thread(target=work, args=(buffer.address,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == sorted(buffer.address for buffer in buffers)


def test_the_version_is_the_drivers(cuda: CudaDouble) -> None:
    assert cuda_driver.driver_version() == 13000


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nowhere/libcuda.so.1", "no CUDA driver on this host: .*No such file"),
        ("libc.so.6", "libc.so.6 has no cuInit"),
    ],
)
def test_without_a_driver(path: str, reason: str) -> None:
    """None at all, or a library that has not what is needed."""
    library.kvtier_cuda_load(path.encode())
    try:
        assert cuda_driver.driver_version() is None
        with pytest.raises(TierUnavailable, match=reason):
            cuda_driver.pin(AlignedBuffer(N_BYTES).address, N_BYTES, 0)
    finally:
        library.kvtier_cuda_load(None)
