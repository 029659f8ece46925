"""CUDA driver calls without torch: driver version, capture mode of a thread, page-locked host memory, launches.

`libcuda.so.1` is loaded at the first call. Importing this module does not need it.
"""

import ctypes
import errno
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.io.native import Message, library

NO_EVENT = 0  # handle with which `launch` records no event
ARGUMENTS_MAX = 22  # most arguments of a kernel
SCRATCH_POINTERS = 2  # arguments that Triton adds behind those of the source; null, as kernels here have no scratch
_LAUNCH = struct.Struct(f"<9Q5I4x{ARGUMENTS_MAX + SCRATCH_POINTERS}Q")  # LaunchSpec of native/launch.h


class _Own(threading.local):
    def __init__(self) -> None:
        self.message = Message()


_own = _Own()  # a buffer for messages per thread: to allocate one takes as long as the rest of a launch here


class KernelHandle(NamedTuple):
    """A kernel that is loaded in the current device's context: the driver's handle, and threads and bytes of shared
    memory of a program."""

    function: int
    threads: int
    shared_bytes: int


class PinnedCopy(NamedTuple):
    """Bytes to be copied between pinned host memory and the device."""

    host: int = 0
    device: int = 0
    n_bytes: int = 0


def driver_version() -> int | None:
    """Return the version as CUDA counts (13000: 13.0), or None without a driver or with one too old for kvtier."""
    version = ctypes.c_int()
    error = library.kvtier_cuda_version(ctypes.byref(version), *Message().room)
    return None if error else version.value


def relax_this_thread() -> None:
    """Set this thread's capture mode to relaxed (cudaThreadExchangeStreamCaptureMode) for its lifetime.

    Its CUDA calls then neither fail nor invalidate a graph that another thread is recording. Raises TierUnavailable
    with CUDA's error.
    """
    message = Message()
    error = library.kvtier_cuda_relax_thread(*message.room)
    if error:
        raise TierUnavailable(f"this thread may disturb CUDA graphs: {message.of(error)}")


def pin(address: int, n_bytes: int, ordinal: int) -> None:
    """Register host memory with CUDA for all devices, through the context of device `ordinal`. Takes 0.13 s a GiB.

    The interpreter lock is released during the call. The memory must stay mapped until `unpin`. Whole pages of it are
    not inherited by child processes: copy-on-write would give this process other pages than the device reads.

    Raises TierUnavailable with the call and the name of CUDA's error; nothing is pinned then.
    """
    message = Message()
    error = library.kvtier_cuda_pin(address, n_bytes, ordinal, *message.room)
    if error:
        raise TierUnavailable(f"{n_bytes} bytes of host memory cannot be pinned: {message.of(error)}")


def unpin(address: int) -> None:
    """Undo `pin`. No copy from or to that memory may be in flight.

    Raises ValueError when nothing is pinned at `address`, and TierUnavailable with CUDA's error: the memory may then
    still be registered and must not be freed.
    """
    message = Message()
    error = library.kvtier_cuda_unpin(address, *message.room)
    if error == errno.ENOENT:
        raise ValueError(f"nothing is pinned at {address:#x}")
    if error:
        raise TierUnavailable(f"host memory cannot be unpinned: {message.of(error)}")


def launch(
    kernel: KernelHandle,
    grid: tuple[int, int, int],
    arguments: Sequence[int],
    stream_and_event: tuple[int, int],
    table: PinnedCopy = PinnedCopy(),  # noqa: B008
    answer: PinnedCopy = PinnedCopy(),  # noqa: B008
) -> None:
    """Copy a table to the device, launch a kernel, copy its answer back and record an event, on one stream of the
    current device, without waiting for it.

    grid: if it has a 0, no kernel is launched. arguments: addresses, and integers below 2^64; at most ARGUMENTS_MAX,
    and two pointers behind them are null for Triton's scratch memory. stream_and_event: handles of the driver, as torch
    has them too.

    Raises TierUnavailable with CUDA's error: part of it may be under way on the stream.
    """
    function, *sizes = kernel
    if len(arguments) > ARGUMENTS_MAX:
        raise ValueError(f"{len(arguments)} arguments of a kernel: at most {ARGUMENTS_MAX}")
    padding = (0,) * (ARGUMENTS_MAX + SCRATCH_POINTERS - len(arguments))
    message = _own.message
    error = library.kvtier_cuda_launch(
        _LAUNCH.pack(*stream_and_event, function, *table, *answer, *grid, *sizes, *arguments, *padding), *message.room
    )
    if error:
        raise TierUnavailable(f"a kernel cannot be launched: {message.of(error)}")
