"""KvikIO engine: reads into device memory through KvikIO (cuFile, or KvikIO's own POSIX fallback).

The interface is the ring's: submit, wait, cancel, results. By default KvikIO runs one thread and reads through the page
cache; this module sets threads, direct I/O and bounce buffers of a piece, keeps many reads in flight, and opens and
registers each file once. KvikIO's settings apply to the whole process.

Each piece is a `pread` of exactly one KvikIO task. KvikIO completes a read of several tasks as soon as one fails, while
the others still write into the buffer (kvikio/detail/parallel_operation.hpp), which the caller may have reused (I2).
With one task, completion means that no byte arrives later.

Known costs of KvikIO 26.10: a thread reads and copies alternately, never both at once; copies run on streams that wait
for the legacy default stream; with cuFile, each read first waits until that stream is idle.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.base import Reader
from kvtier.io.cufile import cufile_state
from kvtier.io.kvikio_files import FAULTS, OpenFile, OpenFiles, Returns, left_behind, load_kvikio
from kvtier.io.ring import CLEAN, FAILED, UNDER_WAY, OpResult, ReadOp

log = logging.getLogger("kvtier")

# H200, tmpfs: 46 GB/s with 16 threads, of 55.6 GB/s over PCIe. A striped file system of 800 MB/s: 99.6 % with 16 reads
# of 4 MiB in flight, 38 % with one at a time, 9 % with KvikIO's defaults.
THREADS, PIECE_BYTES = 16, 4 << 20
IN_FLIGHT_PER_THREAD = 4  # pieces handed to KvikIO per thread; others stay in our queue, where they can be cancelled
QUEUED_PIECES_MAX = 1 << 16  # pieces not yet handed to KvikIO, of all batches
POLL_S = 200e-6  # poll interval of futures, seconds: KvikIO has no wait with a deadline (I10)
CLOSE_INTERVAL_S = 1.0  # interval between attempts to close unused files, seconds


class DeviceBuffer:
    """Device memory as KvikIO takes it: a one-dimensional array of bytes. Does not own the memory."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class _Op:
    def __init__(self, spec: ReadOp, file: OpenFile, piece_bytes: int) -> None:
        self.spec = spec
        self.file = file
        self.n_bytes = spec.slab_bytes * spec.n_slabs
        self.pieces = deque(range(0, self.n_bytes, piece_bytes))  # offsets of pieces not yet handed to KvikIO
        self.in_flight = 0  # pieces that KvikIO has
        self.error = 0
        self.is_done = False


class _Flying(NamedTuple):
    """Piece that KvikIO has."""

    future: Any
    op: _Op
    n_bytes: int


class KvikioBatch:
    """Operations submitted together. As with `ring.Batch`, memory and files must stay until `wait` returns True."""

    def __init__(self, reader: KvikioReader, ops: list[_Op]) -> None:
        self._reader = reader
        self.ops = ops
        self.in_flight: deque[_Flying] = deque()
        self.is_cancelled = False

    def wait(self, timeout_s: float) -> bool:
        return self._reader.wait(self, timeout_s)

    def cancel(self) -> None:
        """Drop the pieces that KvikIO has not got; those in flight complete first."""
        self.is_cancelled = True

    def results(self) -> list[OpResult]:
        """Return one result an operation, without checksums: those are computed on the device."""
        if not self.is_done:
            raise RuntimeError("results of a batch that is not done")
        return [OpResult(op.error, (), (0,) * op.spec.n_slabs) for op in self.ops]

    @property
    def is_done(self) -> bool:
        return all(op.is_done for op in self.ops)


class KvikioReader(Reader):
    """Reader through KvikIO. Thread-safe. All targets are in one buffer of device memory, which must outlive `close`.

    Args:
        buffer: (address, bytes) of that memory.
        piece_bytes: size of one read, and of the pinned bounce buffer of each thread.
        direct: reads bypass the page cache.
        load: imports KvikIO (replaced in tests).

    Raises TierUnavailable when KvikIO cannot be loaded or refuses its settings.
    """

    def __init__(
        self,
        buffer: tuple[int, int],
        threads: int = THREADS,
        piece_bytes: int = PIECE_BYTES,
        *,
        direct: bool = True,
        load: Callable[[], ModuleType] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._n_bytes = buffer
        self._threads, self._piece_bytes = threads, piece_bytes
        if threads <= 0 or piece_bytes <= 0 or piece_bytes % PAGE_BYTES:
            raise ValueError(f"KvikIO with {threads} threads and pieces of {piece_bytes} bytes")
        self._kvikio = (load or load_kvikio)()
        self._returns = Returns()
        self._tune(direct)
        self.state = cufile_state(self._kvikio)
        self._is_registered = self.state.mode == "gds" and self._register()
        self._lock = threading.Lock()
        self.files = OpenFiles(self._kvikio, self._returns, self._lock, clock)
        self._batches: list[KvikioBatch] = []
        self._queued = 0
        self._is_closed = False

    def submit(self, ops: Sequence[ReadOp]) -> KvikioBatch:
        """Start all reads or none. Raises as `Ring.submit` does, and TierUnavailable when a file cannot be opened."""
        pieces = sum(self._pieces(op) for op in ops)
        self.files.close_unused(CLOSE_INTERVAL_S)
        begun: list[_Op] = []
        try:
            for op in ops:
                begun.append(_Op(op, self.files.open(op.fd), self._piece_bytes))
            batch = KvikioBatch(self, begun)
            with self._lock:
                if self._is_closed:
                    raise TierUnavailable("the KvikIO reader is closed")
                if self._queued + pieces > QUEUED_PIECES_MAX:
                    raise TierUnavailable(f"I/O queue: {self._queued} reads wait for KvikIO")
                self._queued += pieces
                self._batches.append(batch)
                self._pump()
        except TierUnavailable:
            with self._lock:
                for lost in begun:
                    self.files.release(lost.file)
            raise
        return batch

    def wait(self, batch: KvikioBatch, timeout_s: float) -> bool:
        """Return True when every operation of `batch` has ended, False after the timeout. Serves all batches."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._pump()
                if batch.is_done:
                    return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))

    def states(self, batches: Sequence[KvikioBatch]) -> list[int]:
        with self._lock:
            self._pump()
            return [
                UNDER_WAY if not batch.is_done else FAILED if any(op.error for op in batch.ops) else CLEAN
                for batch in batches
            ]

    def close(self, timeout_s: float = 1.0) -> bool:
        """Cancel queued pieces, close files and deregister the buffer. May be called again.

        Return False when the buffer must stay allocated: reads hang, or cuFile failed to deregister it.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            batches = list(self._batches)
            for batch in batches:
                batch.cancel()
        for batch in batches:
            self.wait(batch, deadline_s - time.monotonic())
        with self._lock:
            if self._batches:
                left_behind.append(self)
                return False
        self.files.close_all()
        if self._is_registered:
            buffer = DeviceBuffer(self._address, self._n_bytes)
            self._is_registered = not self._returns.give(buffer, lambda: self._kvikio.memory_deregister(buffer))
        # KvikIO would otherwise keep its pinned memory, one piece a thread.
        self._returns.give(self, self._kvikio.bounce_buffer_free)
        return not self._is_registered

    # --- internals ---

    def _tune(self, direct: bool) -> None:
        piece_bytes = self._piece_bytes
        settings = {"num_threads": self._threads, "task_size": piece_bytes, "bounce_buffer_size": piece_bytes}
        # KvikIO would read less than gds_threshold at once, on our thread and under our lock.
        settings |= {"auto_direct_io_read": direct, "gds_threshold": 1}
        try:
            self._kvikio.defaults.set(settings)
        except (KeyError, OSError, *FAULTS) as fault:
            raise TierUnavailable(
                f"KvikIO refuses its settings ({fault}): install kvikio 26.10, or set io.engine to ring"
            ) from fault

    def _register(self) -> bool:
        try:
            self._kvikio.memory_register(DeviceBuffer(self._address, self._n_bytes))
        except (OSError, *FAULTS) as fault:
            log.warning(
                "cuFile cannot register a buffer of %d bytes (%s) and copies inside the device instead: raise "
                "max_device_pinned_mem_size_kb in cufile.json",
                self._n_bytes,
                fault,
            )
            return False
        return True

    def _pieces(self, op: ReadOp) -> int:
        n_bytes = op.slab_bytes * op.n_slabs
        if not op.on_device or op.checksums is not None:
            raise ValueError("KvikIO reads into device memory only, and computes no checksums")
        if n_bytes <= 0 or op.offset < 0 or any(x % PAGE_BYTES for x in (op.offset, op.address, op.slab_bytes)):
            raise ValueError("an operation is not whole, aligned pages")
        if op.address < self._address or op.address + n_bytes > self._address + self._n_bytes:
            raise ValueError("an operation is outside the buffer")
        return -(-n_bytes // self._piece_bytes)

    def _pump(self) -> None:
        """Complete finished pieces, then hand KvikIO more, oldest batch first. Under the lock."""
        for batch in self._batches:
            while batch.in_flight and batch.in_flight[0].future.done():
                _complete(batch.in_flight.popleft())
        room = IN_FLIGHT_PER_THREAD * self._threads - sum(len(batch.in_flight) for batch in self._batches)
        for batch in self._batches:
            for op in batch.ops:
                room -= self._start(batch, op, room)
        self._batches = [batch for batch in self._batches if not batch.is_done]

    def _start(self, batch: KvikioBatch, op: _Op, room: int) -> int:
        """Hand up to `room` pieces of an operation to KvikIO, or drop them if it has failed. Return how many."""
        if op.pieces and batch.is_cancelled:
            op.error = op.error or errno.ECANCELED
        if op.error:
            self._queued -= len(op.pieces)
            op.pieces.clear()
        started = 0
        while op.pieces and started < room and not op.error:
            start = op.pieces.popleft()
            self._queued -= 1
            n_bytes = min(self._piece_bytes, op.n_bytes - start)
            target = DeviceBuffer(op.spec.address + start, n_bytes)
            try:
                future = op.file.handle.pread(target, n_bytes, op.spec.offset + start, n_bytes)
            except (OSError, *FAULTS) as fault:
                op.error = _errno_of(fault)
                return started + self._start(batch, op, 0)
            op.in_flight += 1
            started += 1
            batch.in_flight.append(_Flying(future, op, n_bytes))
        if not op.is_done and not op.pieces and op.in_flight == 0:
            op.is_done = True
            self.files.release(op.file)
        return started


def _complete(piece: _Flying) -> None:
    piece.op.in_flight -= 1
    try:
        n_bytes = piece.future.get()
    except (OSError, *FAULTS) as fault:
        piece.op.error = piece.op.error or _errno_of(fault)
        return
    if n_bytes != piece.n_bytes:
        piece.op.error = piece.op.error or errno.ENODATA


def _errno_of(fault: BaseException) -> int:
    if isinstance(fault, OSError):
        return fault.errno or errno.EIO
    log.warning("a read through KvikIO failed: %s", " ".join(str(fault).split()))
    return errno.ENODATA if "EOF" in str(fault) else errno.EIO
