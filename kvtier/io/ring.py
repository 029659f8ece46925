"""I/O ring: native threads that move records between files and memory and checksum them on the way.

Ownership: memory and file descriptors of operations belong to the caller and must stay until `Batch.wait` has returned
True. A read that hangs in the kernel cannot be cancelled, so after a timeout or `cancel` its bytes may still land: keep
the buffer, and the descriptor open, as long as the batch is not done (I10).

A ring belongs to the process that made it; after a fork the child makes its own.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.native import Message, library, quick
from kvtier.runtime.threads import no_thread

# File systems on storage devices. A striped one needs 16 requests in flight: its double (8 x 100 MB/s, 2 ms) reads at
# 86 % of fio's rate with 8 threads, at 100 % with 16. A write's piece is 4 read pieces, because ext4 converts
# fallocated blocks piece by piece (32 MiB records on a virtual disk: 3.93 GB/s with 1 MiB, 4.09 with 4 MiB).
THREADS, PIECE_BYTES, WRITE_PIECES = 16, 1 << 20, 4

# File systems in memory (tmpfs), where the processor copies: a piece stays in L2 until it is summed, and more threads
# than cores only switch. Processor time on two busy Zen 5 cores, 4 MiB records, 8 in flight: 121 ms a GB; with 16
# threads 127 ms with 256 KiB, 132 ms with 512 KiB. Writers of one file exclude each other by its inode's lock, which
# larger pieces take less often. Of fio's rate, 4 MiB records, two Xeon cores: 89 % with 256 KiB, 96 % with 512 KiB,
# 95 % with 1 MiB; 32 MiB records: 103, 107 and 109 %.
MEMORY_THREADS, MEMORY_PIECE_BYTES, MEMORY_WRITE_PIECES = 4, 256 << 10, 2

QUEUED_OPS_MAX = 16384  # operations with pieces that no thread has taken

# H200, PCIe Gen5, tmpfs: 51.4 GB/s (92 % of PCIe) with 12 threads x 2 x 4 MiB, 48.7 with 14 x 4 x 1 MiB, but 31-34 once
# the buffers of all threads outgrow the last-level cache (300 MiB). Figures of a prototype, in no result file.
DEVICE_PIECE_BYTES, DEVICE_SLOTS = 4 << 20, 2

_OP = struct.Struct("=iiqQQIIII16s")
_OPTIONS = struct.Struct("=IIQQiIQ")
_READ, _WRITE, _FLUSH = 0, 1, 2
_VERIFY, _ON_DEVICE = 1, 2
_HUGE_PAGE_BYTES = 2 << 20
_HANDLE = itemgetter(0)  # of a Batch


class ReadOp(NamedTuple):
    """Read of `n_slabs` consecutive slabs. Offset, address and size are bytes, multiples of a page (4096)."""

    fd: int
    offset: int  # of the first slab in the file
    address: int  # target of the first slab, in host memory or on the ring's CUDA device
    slab_bytes: int
    n_slabs: int
    key: bytes  # of the chunk, 16 bytes
    first_head: int  # head of the first slab read
    first_layer: int  # of the record
    checksums: tuple[int, ...] | None  # expected, one a slab; None: only report
    on_device: bool = False  # `address` is device memory; `checksums` is None, because the device sums the slabs


class WriteOp(NamedTuple):
    """Write of a record: its slabs, then its header page with their checksums filled in."""

    fd: int
    offset: int  # of the header page in the file
    address: int  # of the header page (RecordHeader.pack with any checksums), followed by the slabs; it is modified
    slab_bytes: int
    n_slabs: int
    key: bytes
    first_head: int
    first_layer: int
    checksums: tuple[int, ...] | None = None  # expected: if a slab differs, no header is written. None: any


class FlushOp(NamedTuple):
    """fdatasync of a file: data written to it before is then durable, and visible to other nodes."""

    fd: int


class OpResult(NamedTuple):
    error: int  # errno, or 0; ENODATA: the file ends before the last slab; EREMOTEIO: CUDA failed; ECANCELED
    bad_slabs: tuple[int, ...]  # positions (0: first slab read) whose checksum is not the expected one
    checksums: tuple[int, ...]  # of each slab, as read or written; meaningless with an error, 0 on a device

    @property
    def ok(self) -> bool:
        return self.error == 0 and not self.bad_slabs


UNDER_WAY, CLEAN, FAILED = range(3)  # states of a batch; FAILED: ended, and a result is not `ok`


class _Handles:
    """Handles of batches that were submitted together, freed with the last of them."""

    def __init__(self, handles: array.array[int]) -> None:
        self._packed = handles.tobytes()
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            quick.kvtier_batches_free(self._packed, len(self._packed) // 8)


class Batch(NamedTuple):
    """Operations submitted together. Thread-safe. The module's docstring states who owns the memory."""

    handle: int
    slabs_of_ops: Sequence[int]
    owner: _Handles

    def wait(self, timeout_s: float) -> bool:
        """Return True when every operation has ended, False after the timeout."""
        if timeout_s <= 0:
            return bool(quick.kvtier_batch_wait(self.handle, 0))
        return bool(library.kvtier_batch_wait(self.handle, int(timeout_s * 1e9)))

    def cancel(self) -> None:
        """Drop pieces that have not started. Their operations end with ECANCELED once the pieces in flight return."""
        library.kvtier_batch_cancel(self.handle)

    def results(self) -> list[OpResult]:
        """Return one result an operation, in the order submitted. Only after `wait` has returned True."""
        n_ops, n_slabs = len(self.slabs_of_ops), sum(self.slabs_of_ops)
        errors, sums = (ctypes.c_int32 * n_ops)(), (ctypes.c_uint64 * n_slabs)()
        bad = ctypes.create_string_buffer(n_slabs)
        if quick.kvtier_batch_results(self.handle, errors, sums, bad) != 0:
            raise RuntimeError("results of a batch that is not done")
        flags, values = bad.raw, sums[:]
        results = []
        first = 0
        for error, n in zip(errors, self.slabs_of_ops, strict=True):
            op_flags = flags[first : first + n]
            bad_slabs = tuple(i for i in range(n) if op_flags[i]) if 1 in op_flags else ()
            results.append(OpResult(error, bad_slabs, tuple(values[first : first + n])))
            first += n
        return results


class DeviceRing(NamedTuple):
    """CUDA device that a ring reads for, through threads x slots x piece_bytes of pinned memory, allocated at start.

    That memory should fit the last-level cache, so that the device copies from the cache and not from memory.
    """

    ordinal: int  # as CUDA counts, after CUDA_VISIBLE_DEVICES: torch's number
    piece_bytes: int = DEVICE_PIECE_BYTES  # size of a slot: read and copied at once
    slots: int = DEVICE_SLOTS  # of each thread: pieces being read or copied at a time


class Ring:
    """Fixed number of native I/O threads over one bounded queue (I4), and others while some hang. Thread-safe.

    Reads have priority; while reads wait, one piece in eight is a write, on at most half the threads. Batches take
    turns, an operation each.

    Args:
        threads: each moves one piece of an operation at a time. Smaller reads that are adjacent in a file (at most
            64 KiB apart), of any batch, share one system call, up to the size of a piece.
        piece_bytes: of reads; small enough to stay in a core's L2 cache until it is summed.
        write_piece_bytes: of writes; by default as large.
        queued_ops_max: operations that wait for a thread; more are refused.
        device: permits reads with `on_device`, which pass through pinned buffers of each thread. A piece is done when
            its copy to the device has ended.

    Raises ConfigError when this process may have no more threads; TierUnavailable when they cannot be started for
    another reason, or with CUDA's error when the device cannot be used.
    """

    never_waits = True  # see kvtier.io.base.Reader

    def __init__(
        self,
        threads: int,
        piece_bytes: int = PIECE_BYTES,
        *,
        write_piece_bytes: int | None = None,
        queued_ops_max: int = QUEUED_OPS_MAX,
        device: DeviceRing | None = None,
    ) -> None:
        handle = ctypes.c_void_p()
        write_bytes = write_piece_bytes or piece_bytes
        on_device = (-1, 0, 0) if device is None else (device.ordinal, device.slots, device.piece_bytes)
        described = f"a ring of {threads} threads, pieces of {piece_bytes} and {write_bytes} bytes, {device}"
        if device is not None and device.ordinal < 0:
            raise ValueError(described)
        try:
            options = _OPTIONS.pack(threads, queued_ops_max, piece_bytes, write_bytes, *on_device)
        except struct.error:
            raise ValueError(described) from None
        message = Message()
        error = library.kvtier_ring_open(options, ctypes.byref(handle), *message.room)
        if error == errno.EINVAL:
            raise ValueError(described)
        if error == errno.EREMOTEIO:
            raise TierUnavailable(f"CUDA device {on_device[0]} cannot be used for I/O: {message.of(error)}")
        if error == errno.EAGAIN:
            raise no_thread()
        if error:
            raise TierUnavailable(f"I/O threads cannot be started: {message.of(error)}")
        self._handle: ctypes.c_void_p | None = handle
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._widening = threading.Lock()  # held while threads are added, which may pin memory; `submit` takes `_lock`

    def submit(self, ops: Sequence[ReadOp | WriteOp | FlushOp]) -> Batch:
        """Start all operations or none. They run in any order, so submit a flush when its writes have ended.

        Raises TierUnavailable when the queue has no room for all of them or the ring is closed, and ValueError when
        an offset, an address or a size is not whole pages, or a read is for a device that the ring does not have.
        """
        return self.submit_each([ops])[0]

    def submit_each(self, batches: Sequence[Sequence[ReadOp | WriteOp | FlushOp]]) -> list[Batch]:
        """Submit batches one after another until the queue has no room for one; return those that were. Raises as
        `submit` does, TierUnavailable if not even the first was submitted."""
        ops = list(chain.from_iterable(batches))
        packed, expected, slabs_of_ops = _pack(ops)
        sizes = array.array("I", map(len, batches))
        handles = array.array("Q", bytes(8 * len(batches)))
        with self._lock:
            if self._handle is None:
                raise TierUnavailable("the I/O ring is closed")
            if self._pid != os.getpid():
                raise RuntimeError("a ring was carried across a fork: the child makes its own")
            error = quick.kvtier_submit_batches(
                self._handle, packed, sizes.tobytes(), len(sizes), expected, handles.buffer_info()[0]
            )
        if error == errno.EINVAL:
            raise ValueError("an operation is not whole, aligned pages")
        if error == errno.ENODEV:
            raise ValueError("a read for a device on a ring without one")
        owner = _Handles(handles)
        if error and not handles[0]:
            raise TierUnavailable(f"I/O queue: {os.strerror(error)}")
        submitted, first = [], 0
        for handle, size in zip(handles, sizes, strict=True):
            if handle:
                submitted.append(Batch(handle, slabs_of_ops[first : first + size], owner))
                first += size
        return submitted

    def states(self, batches: Sequence[Batch]) -> bytes:
        """Return the state of each batch: UNDER_WAY, CLEAN or FAILED."""
        states = ctypes.create_string_buffer(len(batches))
        handles = array.array("Q", map(_HANDLE, batches)).tobytes()
        quick.kvtier_batches_states(handles, len(batches), states)
        return states.raw

    def widen(self, hung_after_s: float) -> None:
        """Add a thread for each one in a file of which no call has returned for `hung_after_s`, up to `threads`; end
        those added before that are not needed any more. Such a file gets no further thread until a call returns.

        Raises TierUnavailable when threads cannot be started.
        """
        message = Message()
        with self._widening:
            if self._handle is None or self._pid != os.getpid():
                return
            error = library.kvtier_ring_widen(self._handle, int(hung_after_s * 1e9), *message.room)
        if error:
            raise TierUnavailable(f"I/O threads cannot be started beside those that hang: {message.of(error)}")

    def close(self, timeout_s: float = 1.0) -> bool:
        """Cancel queued operations and end the threads. Return False if some hang in the kernel, or threads that are
        being added do: they keep running."""
        is_free = self._widening.acquire(timeout=timeout_s)
        with self._lock:
            handle, self._handle = self._handle, None
        if is_free:
            self._widening.release()
        if handle is None or self._pid != os.getpid():
            return True
        return is_free and bool(library.kvtier_ring_close(handle, int(timeout_s * 1e9)))

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _pack(ops: Sequence[ReadOp | WriteOp | FlushOp]) -> tuple[bytes, bytes, list[int]]:
    """Return the operations in C layout (`OpSpec`), the expected checksums of all slabs, and the slabs of each."""
    packed = []
    expected = array.array("Q")
    slabs_of_ops = []
    for op in ops:
        if isinstance(op, FlushOp):
            packed.append(_OP.pack(_FLUSH, op.fd, 0, 0, 0, 0, 0, 0, 0, bytes(16)))
            slabs_of_ops.append(0)
            continue
        fd, offset, address, slab_bytes, n_slabs, key, first_head, first_layer = op[:8]
        if len(key) != 16:
            raise ValueError(f"a key of {len(key)} bytes")
        kind, sums = _READ if isinstance(op, ReadOp) else _WRITE, op.checksums
        flags = (_VERIFY if sums is not None else 0) | (_ON_DEVICE if isinstance(op, ReadOp) and op.on_device else 0)
        if flags == _VERIFY | _ON_DEVICE:
            raise ValueError("checksums for a read on a device, where the device compares them")
        try:
            fields = _OP.pack(kind, fd, offset, address, slab_bytes, n_slabs, first_head, first_layer, flags, key)
        except struct.error as error:
            raise ValueError(f"an operation is out of range: {error}") from None
        if sums is None:
            expected.frombytes(bytes(8 * n_slabs))
        elif len(sums) == n_slabs:
            expected.extend(sums)
        else:
            raise ValueError(f"{len(sums)} checksums for {n_slabs} slabs")
        packed.append(fields)
        slabs_of_ops.append(n_slabs)
    return b"".join(packed), expected.tobytes(), slabs_of_ops


class RingSizes(NamedTuple):
    """Sizes of a ring for one file system."""

    threads: int
    piece_bytes: int
    write_piece_bytes: int

    def ring(self) -> Ring:
        return Ring(self.threads, self.piece_bytes, write_piece_bytes=self.write_piece_bytes)


def sizes_for(in_memory: bool, threads: int | None = None, piece_bytes: int | None = None) -> RingSizes:
    """Return the default sizes for a file system in memory or on devices, with the given ones in their place."""
    default_threads, default_piece = (MEMORY_THREADS, MEMORY_PIECE_BYTES) if in_memory else (THREADS, PIECE_BYTES)
    piece = piece_bytes or default_piece
    write_pieces = MEMORY_WRITE_PIECES if in_memory else WRITE_PIECES
    return RingSizes(threads or default_threads, piece, piece if piece_bytes else write_pieces * piece)


class AlignedBuffer:
    """Page-aligned anonymous memory for operations: `address`, `view` (writable bytes), `n_bytes`. Huge pages advised.

    Freed with its last view.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ValueError(f"a buffer cannot have {n_bytes} bytes")
        self.n_bytes = n_bytes
        mapped_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        if n_bytes >= _HUGE_PAGE_BYTES:
            mapped_bytes += _HUGE_PAGE_BYTES  # room to start at a huge page
        self._mmap = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
                self._mmap.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        skip = -base % _HUGE_PAGE_BYTES if n_bytes >= _HUGE_PAGE_BYTES else 0
        self.address = base + skip
        self.view = memoryview(self._mmap)[skip : skip + n_bytes]
