"""Rates of writing and reading records on a mount, compared with plain system calls of as many threads.

Both move the same bytes of one scratch file in turns, so that a storage whose rate varies favours neither. The ring
additionally computes and compares the checksum of every slab.
"""

import errno
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader
from kvtier.io.calibrate import scratch_file
from kvtier.io.ring import AlignedBuffer, FlushOp, ReadOp, Ring, RingSizes, WriteOp
from kvtier.runtime.threads import ThreadJobs

SLAB_BYTES, SLABS = 512 << 10, 16
RECORD_BYTES = PAGE_BYTES + SLABS * SLAB_BYTES
PLAIN_BYTES = 4 << 20
ROUNDS = 3
STEPS = ("plain write", "write", "plain read", "read")  # steps of a round, in order
HANGS_S = 60.0  # deadline of one step, seconds
FREE_SHARE = 4  # at most a fourth of the free space is written
KEY = b"kvtier-bench-key"


class Trial:
    """One scratch file, and the buffers that go to and from it. flushes: a write ends with fdatasync."""

    def __init__(self, fd: int, records: int, sizes: RingSizes, flushes: bool) -> None:
        self._fd = fd
        self._flushes = flushes
        self._sizes = sizes
        self._buffers = [AlignedBuffer(RECORD_BYTES) for _ in range(records)]
        header = RecordHeader(
            KEY, bytes(16), bytes(16), SLAB_BYTES, 256, 1, Extent(0, 1, 0, SLABS), 0, (0,) * SLABS
        ).pack()
        noise = os.urandom(SLAB_BYTES)  # a file system that compresses finds nothing in it
        for buffer in self._buffers:
            buffer.view[:] = header + SLABS * noise
        self._sums: list[tuple[int, ...]] = []
        self.n_bytes = records * RECORD_BYTES

    def write(self, ring: Ring) -> float:
        """Write all records. Return bytes a second. Raises OSError, TierUnavailable."""
        ops = [
            WriteOp(self._fd, number * RECORD_BYTES, buffer.address, SLAB_BYTES, SLABS, KEY, 0, 0)
            for number, buffer in enumerate(self._buffers)
        ]
        seconds, self._sums = _run(ring, ops)
        if self._flushes:
            seconds += _run(ring, [FlushOp(self._fd)])[0]
        return self.n_bytes / seconds

    def read(self, ring: Ring) -> float:
        """Read, and compare every slab with its written checksum. Return bytes a second."""
        ops = []
        for number, (buffer, sums) in enumerate(zip(self._buffers, self._sums, strict=True)):
            offset, address = number * RECORD_BYTES + PAGE_BYTES, buffer.address + PAGE_BYTES
            ops.append(ReadOp(self._fd, offset, address, SLAB_BYTES, SLABS, KEY, 0, 0, sums))
        return self.n_bytes / _run(ring, ops)[0]

    def plain(self, call: Callable[[int, list[memoryview], int], int]) -> float:
        """Return bytes a second of plain calls. call: os.pwritev or os.preadv."""
        pieces = [
            (buffer, start, number * RECORD_BYTES + start)
            for number, buffer in enumerate(self._buffers)
            for start in range(0, RECORD_BYTES, PLAIN_BYTES)
        ]
        faults: list[OSError] = []

        def move(buffer: AlignedBuffer, start: int, offset: int) -> None:
            view = buffer.view[start : min(start + PLAIN_BYTES, RECORD_BYTES)]
            try:
                if call(self._fd, [view], offset) != len(view):
                    raise OSError(errno.EIO, "the call moved fewer bytes than asked for")
            except OSError as fault:
                faults.append(fault)

        jobs = ThreadJobs("bench", self._sizes.threads, len(pieces))
        started_s = time.perf_counter()
        for piece in pieces:
            jobs.submit(lambda piece=piece: move(*piece))  # type: ignore[misc]
        ended = jobs.drain(HANGS_S)
        if ended and self._flushes and call is os.pwritev:
            os.fdatasync(self._fd)
        seconds = time.perf_counter() - started_s
        jobs.close()
        if faults or not ended:
            raise faults[0] if faults else OSError(errno.ETIMEDOUT, f"no answer in {HANGS_S:g} s")
        return self.n_bytes / seconds


def measure(
    folder: Path, sizes: RingSizes, direct: bool, flushes: bool, n_bytes: int, tell: Callable[[], None]
) -> tuple[dict[str, float], int]:
    """Return the rate of each of STEPS, bytes a second, and the bytes that a step moves.

    A rate is the median over the rounds. Plain system calls serve as the ceiling: their rate is that of the best round.

    direct: bypass the page cache. flushes: a write ends with fdatasync. tell: called after each step. Raises OSError,
    TierUnavailable.
    """
    disk = os.statvfs(folder)
    records = min(n_bytes, disk.f_bavail * disk.f_frsize // FREE_SHARE) // RECORD_BYTES
    if records < 1:
        raise OSError(errno.ENOSPC, f"{folder}: no room for {FREE_SHARE * RECORD_BYTES} bytes")
    found: dict[str, list[float]] = {name: [] for name in STEPS}
    with (
        scratch_file(folder, direct) as fd,
        Ring(sizes.threads, sizes.piece_bytes, write_piece_bytes=sizes.write_piece_bytes) as ring,
    ):
        trial = Trial(fd, records, sizes, flushes)
        steps: tuple[Callable[[], float], ...] = (
            lambda: trial.plain(os.pwritev),
            lambda: trial.write(ring),
            lambda: trial.plain(os.preadv),
            lambda: trial.read(ring),
        )
        trial.write(ring)  # the first write allocates, and threads start
        for _ in range(ROUNDS):
            for name, step in zip(STEPS, steps, strict=True):
                if not direct:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                found[name].append(step())
                tell()
    summed = {
        name: max(rates) if name.startswith("plain") else statistics.median(rates) for name, rates in found.items()
    }
    return summed, records * RECORD_BYTES


def _run(ring: Ring, ops: list[WriteOp] | list[ReadOp] | list[FlushOp]) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds taken, and the checksums of each record."""
    started_s = time.perf_counter()
    batch = ring.submit(ops)
    if not batch.wait(HANGS_S):
        batch.cancel()
        raise TierUnavailable(f"the storage gave no answer in {HANGS_S:g} s")
    seconds = time.perf_counter() - started_s
    results = batch.results()
    for result in results:
        if result.error:
            raise OSError(result.error, os.strerror(result.error))
        if result.bad_slabs:
            raise TierUnavailable("the data read differ from the data written: the storage is broken")
    return seconds, [result.checksums for result in results]
