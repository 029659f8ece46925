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
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.calibrate import FREE_SHARE, KEY, RECORD_BYTES, SLAB_BYTES, SLABS, record_buffers, scratch_file
from kvtier.io.ring import AlignedBuffer, FlushOp, ReadOp, Ring, RingSizes, WriteOp
from kvtier.runtime.threads import run_each

PLAIN_BYTES = 4 << 20
ROUNDS = 3
STEPS = ("plain write", "write", "plain read", "read")  # steps of a round, in order
HANGS_S = 60.0  # deadline of one step, seconds


class Trial:
    """One scratch file, and the buffers that go to and from it. flushes: a write ends with fdatasync."""

    def __init__(self, fd: int, records: int, sizes: RingSizes, flushes: bool) -> None:
        self._fd = fd
        self._flushes = flushes
        self._sizes = sizes
        self._buffers = record_buffers(records)
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

        def move(piece: tuple[AlignedBuffer, int, int]) -> None:
            buffer, start, offset = piece
            view = buffer.view[start : min(start + PLAIN_BYTES, RECORD_BYTES)]
            if call(self._fd, [view], offset) != len(view):
                raise OSError(errno.EIO, "the call moved fewer bytes than asked for")

        seconds = run_each(self._sizes.threads, HANGS_S, move, pieces)
        if self._flushes and call is os.pwritev:
            started_s = time.perf_counter()
            os.fdatasync(self._fd)
            seconds += time.perf_counter() - started_s
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
    with scratch_file(folder, direct) as fd, sizes.ring() as ring:
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
