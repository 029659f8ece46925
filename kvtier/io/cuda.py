"""CUDA driver calls without torch: driver version, capture mode of a thread, page-locked host memory.

`libcuda.so.1` is loaded at the first call. Importing this module does not need it.
"""

import ctypes
import errno

from kvtier.errors import TierUnavailable
from kvtier.io.native import Message, library


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
