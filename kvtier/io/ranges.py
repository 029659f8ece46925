"""Range reads: native threads that move byte ranges of files to host and device memory, through slots of their own.

Of a read: files as an array of FILE, targets of TARGET, copies as int64 rows in the order of `weights.copies.Copy`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierUnavailable
from kvtier.io.native import Message, library, quick

# The fastest of those tried on an H200 with PCIe Gen5 and 16 cores, from tmpfs (benchmarks/results/gpu/
# weights_threads.json): more threads take cores from each other, more slots no longer fit into the last-level cache.
THREADS, SLOTS, PIECE_BYTES = 12, 2, 4 << 20
# Sizes of a reader that shares its host with others. Two readers on 32 cores, each with its own GPU, were 16 % faster
# with 16 threads and buffers of 2 MiB than with 12 and 4 MiB, and used less memory (weights_two_ranks.json). One reader
# alone was 12 % slower with 14 threads and buffers of 2 MiB (weights_sizes.json).
SHARED_THREADS, SHARED_PIECE_BYTES = 16, 2 << 20
THREADS_MIN = 4  # threads of a reader that shares its host, even with fewer cores: storage serves several reads at once
# Bytes of a file that one checksum covers: `slab_checksum` under `slab_seed(SEED_KEY, 0, 0)`, the last block padded
# with zeros to whole pairs.
BLOCK_BYTES = 1 << 20
SEED_KEY = b"kvtier weights\0\0"  # of all blocks
# sums: address of one u64 a block, or 0. not_summed: address of one byte a block, other than 0 for blocks that get no
# checksum; or 0. is_cached: 1 for a file that is in the page cache and read through it; if its sums is 0 too, gaps
# between rows are not read.
FILE = np.dtype([("fd", "<i8"), ("size", "<i8"), ("sums", "<u8"), ("not_summed", "<u8"), ("is_cached", "<u8")])
TARGET = np.dtype([("address", "<u8"), ("on_device", "<u8")])  # bytes of address 0 are read and dropped
COPY_FIELDS = 8

SAMPLES, SAMPLE_BYTES = 64, 1 << 20  # of a file, to estimate how much of it is in the page cache
_OPTIONS = struct.Struct("=IIQQiI")
_libc = ctypes.CDLL(None)
_WAIT_NS = 50_000_000  # between calls of `progress`, nanoseconds


@dataclass(frozen=True, slots=True)
class RangeFailure:
    """First failure of a read, in file number `file`. error: errno; ENODATA: the file ends at byte `offset`.

    ETIMEDOUT: no byte came for the time given. EREMOTEIO: CUDA failed, see `message`.
    """

    error: int
    file: int
    offset: int
    message: str


class RangeProgress(NamedTuple):
    """Bytes that landed and bytes that were read so far. All bytes have landed of earlier files than `file`, and of
    this one before `offset`."""

    bytes_landed: int
    bytes_read: int
    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Bytes that landed in targets, and bytes of files that were read for them."""

    bytes_landed: int
    bytes_read: int
    failure: RangeFailure | None


class RangeReader:
    """Threads and slots for reads, one at a time. Slots are allocated, and pinned for a device, when first needed.

    device_ordinal: CUDA device of the targets with `on_device`; None: there are none, and CUDA is not loaded.
    Raises TierUnavailable with CUDA's error when the device cannot be used.
    """

    def __init__(
        self,
        device_ordinal: int | None = None,
        *,
        threads: int = THREADS,
        slots: int = SLOTS,
        piece_bytes: int = PIECE_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.device_ordinal = device_ordinal
        self._handle: ctypes.c_void_p | None = None
        ordinal = -1 if device_ordinal is None else device_ordinal
        self._options = _OPTIONS.pack(threads, slots, piece_bytes, block_bytes, ordinal, 0)
        self._pid = os.getpid()
        self._open()

    def _open(self) -> None:
        handle, message = ctypes.c_void_p(), Message()
        error = library.kvtier_slots_open(self._options, ctypes.byref(handle), *message.room)
        if error == errno.EINVAL:
            raise ValueError(f"invalid options of range reads: {_OPTIONS.unpack(self._options)}")
        if error:
            raise TierUnavailable(f"CUDA device {self.device_ordinal} cannot be used for I/O: {message.of(error)}")
        self._handle = handle

    def prepare(self) -> None:
        """Begin to allocate and pin all slots, on threads of their own; without it, reads do as they need them."""
        message = Message()
        error = library.kvtier_slots_prepare(self._handle, *message.room)
        if error:
            raise TierUnavailable(f"threads cannot be started: {message.of(error)}")

    def read(
        self,
        files: npt.NDArray[np.void],
        copies: npt.NDArray[np.int64],
        targets: npt.NDArray[np.void],
        *,
        stall_s: float = 120.0,
        progress: Callable[[RangeProgress], object] | None = None,
    ) -> RangeResult:
        """Return when the last byte has landed, or no byte will land any more after a failure.

        stall_s: longest time without any new byte, seconds. progress: is called about 20 times a second and at the
        end. The caller has checked that copies fit their targets. An exception, such as
        KeyboardInterrupt, stops the read first.
        """
        if copies.dtype != np.int64 or copies.shape != (len(copies), COPY_FIELDS) or not copies.flags.c_contiguous:
            raise ValueError(f"copies are an int64 array of {copies.shape}")
        job, message = ctypes.c_void_p(), Message()
        arrays = [part for array in (files, copies, targets) for part in (array.ctypes.data, len(array))]
        error = library.kvtier_range_start(self._handle, *arrays, ctypes.byref(job), *message.room)
        if error == errno.EINVAL:
            raise ValueError("a copy is out of range")
        if error:
            raise TierUnavailable(f"weights cannot be read: {message.of(error)}")
        try:
            failure = self._wait(job, stall_s, progress)
            done = _progress(job)
            return RangeResult(done.bytes_landed, done.bytes_read, failure)
        finally:
            library.kvtier_range_cancel(job)
            if not library.kvtier_range_wait(job, _WAIT_NS):
                self.close()  # a thread that hangs keeps the slots, so the next read takes others
                self._open()
            library.kvtier_range_free(job)

    def _wait(
        self, job: ctypes.c_void_p, stall_s: float, progress: Callable[[RangeProgress], object] | None
    ) -> RangeFailure | None:
        last, last_s = 0, time.monotonic()
        while not library.kvtier_range_wait(job, _WAIT_NS):
            done = _progress(job)
            moved = done.bytes_landed + done.bytes_read
            if moved != last:
                last, last_s = moved, time.monotonic()
            if time.monotonic() - last_s > stall_s:
                return RangeFailure(errno.ETIMEDOUT, 0, 0, "")
            if progress is not None:
                progress(done)
        if progress is not None:
            progress(_progress(job))
        file, offset, message = ctypes.c_uint32(), ctypes.c_uint64(), Message()
        error = library.kvtier_range_failure(job, ctypes.byref(file), ctypes.byref(offset), *message.room)
        return RangeFailure(error, file.value, offset.value, message.of(error)) if error else None

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            library.kvtier_slots_free(handle)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def shared_sizes(readers: int) -> dict[str, int]:
    """Return sizes, as keyword arguments, for each of `readers` RangeReaders that read on this host at once."""
    threads = max(THREADS_MIN, min(SHARED_THREADS, len(os.sched_getaffinity(0)) // readers))
    return {"threads": threads, "piece_bytes": SHARED_PIECE_BYTES}


def resident_share(fd: int, file_bytes: int) -> float | None:
    """Return the share of a file that is in the page cache, or None where the kernel does not say.

    Of long files by SAMPLES ranges: the kernel looks at each page, 35 ms for 4 GiB in pages of 4 KiB.
    """
    step = max(SAMPLE_BYTES, file_bytes // SAMPLES // SAMPLE_BYTES * SAMPLE_BYTES)
    places = [(at, min(SAMPLE_BYTES, file_bytes - at)) for at in range(0, file_bytes, step)]
    resident = [int(quick.kvtier_resident_bytes(fd, *place)) for place in places]
    # Kernels before 6.5 do not say. In a container's overlayfs all say 0, as the pages are those of the layer below.
    if max(resident, default=0) <= 0:
        resident = _resident_in_mapping(fd, places) or resident
    if min(resident, default=0) < 0:
        return None
    return min(1.0, sum(resident) / max(1, sum(n_bytes for _, n_bytes in places)))


def _resident_in_mapping(fd: int, places: list[tuple[int, int]]) -> list[int] | None:
    """Return the bytes of each (offset, length) that mincore finds in the page cache, or None where it does not say."""
    if os.fstat(fd).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return None  # mincore says of such a file that all its pages are cached
    try:
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):  # a file system without mappings; an empty file
        return None
    with mapping:
        view = np.frombuffer(mapping, np.uint8)
        begin = view.ctypes.data
        del view  # else the mapping could not be closed
        found = []
        for offset, n_bytes in places:
            pages = np.zeros(-(-n_bytes // mmap.PAGESIZE), np.uint8)
            where = (ctypes.c_void_p(begin + offset), ctypes.c_size_t(n_bytes), ctypes.c_void_p(pages.ctypes.data))
            if _libc.mincore(*where) != 0:
                return None
            found.append(int((pages & 1).sum()) * mmap.PAGESIZE)
    return found


def _progress(job: ctypes.c_void_p) -> RangeProgress:
    landed, read, file, offset = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint64()
    quick.kvtier_range_progress(job, *map(ctypes.byref, (landed, read, file, offset)))
    return RangeProgress(landed.value, read.value, file.value, offset.value)
