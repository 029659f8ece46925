"""Pinning, launches and the driver's version, over a double of CUDA's driver and without any."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import cuda as cuda_driver
from kvtier.io.native import library
from kvtier.io.ring import AlignedBuffer

from cuda_double import CudaDouble

N_BYTES = 16 * PAGE_BYTES
N = 100  # words of a table
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

    def work(address: int) -> None:
        for _ in range(50):
            cuda_driver.pin(address, N_BYTES, 0)
            cuda_driver.unpin(address)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [buffer.address for buffer in buffers]))


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


def test_a_launch_brings_its_table_and_fetches_its_answer_in_order(cuda: CudaDouble) -> None:
    """The copies are late: a kernel that did not wait for its table, or an answer taken too early, would be wrong."""
    with Stream(cuda) as stream:
        for factor in (1, 3):
            stream.host[:N] = range(factor, factor * (N + 1), factor)
            stream.launch((N, 1, 1))
            assert stream.host[N] == -7, "waited"
            stream.wait()
            assert stream.host[N] == factor * N * (N + 1) // 2
            stream.host[N] = -7


def test_a_launch_of_an_empty_grid_brings_the_table_alone(cuda: CudaDouble) -> None:
    with Stream(cuda) as stream:
        stream.host[:N] = range(N)
        stream.launch((N, 0, 1))
        stream.wait()
        assert stream.device[:N] == list(range(N))
        assert stream.host[N] == 0, "the answer's place on the device, which no kernel has written"


def test_a_launch_without_an_event_records_none(cuda: CudaDouble) -> None:
    with Stream(cuda) as stream:
        stream.host[:N] = range(N)
        cuda.fail("cuEventRecord")
        stream.launch((N, 1, 1), is_recorded=False)
        stream.drain()
        assert stream.host[N] == N * (N - 1) // 2


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventRecord"])
def test_a_launch_that_fails_says_which_call_failed(cuda: CudaDouble, call: str) -> None:
    with Stream(cuda) as stream:
        cuda.fail(call)
        with pytest.raises(TierUnavailable, match=f"cannot be launched: {call}: CUDA_ERROR_OUT_OF_MEMORY"):
            stream.launch((N, 1, 1))
        stream.drain()


class Stream:
    """A stream and an event of the double, N words of a table behind which there is room for an answer, the same on the
    device, and a kernel that adds the table up."""

    def __init__(self, cuda: CudaDouble) -> None:
        self._driver, self._cuda = ctypes.CDLL(str(cuda.path)), cuda
        self._buffer = AlignedBuffer(PAGE_BYTES)
        words = ctypes.c_int64 * (N + 1)
        self.host, self.device = words.from_address(self._buffer.address), words()
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()

        @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        def add_up(arguments: Any) -> None:
            table, answer, count = (arguments[number][0] for number in range(3))
            assert not any(
                arguments[number][0] for number in range(3, cuda_driver.ARGUMENTS_MAX + cuda_driver.SCRATCH_POINTERS)
            ), "scratch that Triton adds is null"
            numbers = (ctypes.c_int64 * count).from_address(table)
            ctypes.c_int64.from_address(answer).value = sum(numbers)

        self._kernel = add_up

    def __enter__(self) -> Self:
        self._cuda.enter()
        self.host[N] = -7
        cuda_driver.pin(self._buffer.address, PAGE_BYTES, 0)
        assert self._driver.cuStreamCreate(ctypes.byref(self._stream), 1) == 0
        assert self._driver.cuEventCreate(ctypes.byref(self._event), 0) == 0
        self._cuda.delay(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.cuEventDestroy_v2(self._event)
        self._driver.cuStreamDestroy_v2(self._stream)
        cuda_driver.unpin(self._buffer.address)
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def launch(self, grid: tuple[int, int, int], is_recorded: bool = True) -> None:
        host, device = ctypes.addressof(self.host), ctypes.addressof(self.device)
        function = ctypes.cast(self._kernel, ctypes.c_void_p).value
        assert function is not None and self._stream.value is not None and self._event.value is not None
        cuda_driver.launch(
            cuda_driver.KernelHandle(function, 128, 0),
            grid,
            (device, device + 8 * N, N),
            (self._stream.value, self._event.value if is_recorded else cuda_driver.NO_EVENT),
            cuda_driver.PinnedCopy(host, device, 8 * N),
            cuda_driver.PinnedCopy(host + 8 * N, device + 8 * N, 8),
        )

    def wait(self) -> None:
        assert self._driver.cuEventSynchronize(self._event) == 0

    def drain(self) -> None:
        assert self._driver.cuStreamSynchronize(self._stream) == 0
