"""CUDA's driver without torch: is there one, and memory that devices copy from and to without a detour.

The library (`libcuda.so.1`) is looked for at the first call; importing this needs none.
"""

from __future__ import annotations

import ctypes
import errno

from kvtier.errors import TierUnavailable
from kvtier.io.native import Message, library


def driver_version() -> int | None:
    """As CUDA counts (13000: 13.0). None: this host has no driver, or one that is too old for kvtier."""
    version = ctypes.c_int()
    error = library.kvtier_cuda_version(ctypes.byref(version), *Message().room)
    return None if error else version.value


def relax_this_thread() -> None:
    """From now on what this thread asks of CUDA neither fails nor spoils a graph that another thread is recording
    (cudaThreadExchangeStreamCaptureMode, relaxed). For threads of our own. Raises TierUnavailable with CUDA's error."""
    message = Message()
    error = library.kvtier_cuda_relax_thread(*message.room)
    if error:
        raise TierUnavailable(f"this thread may disturb CUDA graphs: {message.of(error)}")


def pin(address: int, n_bytes: int, ordinal: int) -> None:
    """Register host memory with CUDA, for all devices, through the context of device `ordinal`. Takes 0.13 s a GiB.

    The interpreter lock is free meanwhile. The memory must stay until `unpin`; whole pages of it are not passed on to
    children of this process (a fork would part the processor's pages from those that the device reads).

    Raises TierUnavailable with the call and the name of CUDA's error; nothing is pinned then.
    """
    message = Message()
    error = library.kvtier_cuda_pin(address, n_bytes, ordinal, *message.room)
    if error:
        raise TierUnavailable(f"{n_bytes} bytes of host memory cannot be pinned: {message.of(error)}")


def unpin(address: int) -> None:
    """Undo `pin`. No copy of that memory may be on its way.

    Raises ValueError when nothing is pinned at `address`, and TierUnavailable with CUDA's error: then the memory may
    still be in CUDA's hands, and must not be freed.
    """
    message = Message()
    error = library.kvtier_cuda_unpin(address, *message.room)
    if error == errno.ENOENT:
        raise ValueError(f"nothing is pinned at {address:#x}")
    if error:
        raise TierUnavailable(f"host memory cannot be unpinned: {message.of(error)}")
