"""Measurement of a mount: rates of each engine, in a second or two, and the choice of one.

A file of records is written (which gives the write rate), read back by each candidate, and removed. No fault stops a
start: a full disk, a refused operation or hanging storage gives the default choice, with the fault as the reason.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader
from kvtier.io.base import Reader, Reads
from kvtier.io.calibration import Ask, Calibration, cache_share, default_choice, first_round, pick, second_round
from kvtier.io.engines import EngineChoice, Target, open_engine
from kvtier.io.ring import AlignedBuffer, FlushOp, ReadOp, Ring, WriteOp, sizes_for
from kvtier.runtime.file_descriptors import close_file
from kvtier.runtime.units import size
from kvtier.storage.filesystem import file_system_of

PREFIX = ".calibrate-"  # begins the names of scratch files
LEFT_OVER_S = 3600.0  # age from which on a scratch file is one of a killed process, seconds

SLAB_BYTES, SLABS = 512 << 10, 16  # of a record
RECORD_BYTES = PAGE_BYTES + SLABS * SLAB_BYTES
FILE_BYTES_MAX = 512 << 20  # bytes written directly
BUFFERED_BYTES_MAX = 64 << 20  # bytes written through a cache, which must all be flushed before the rate counts
FREE_SHARE = 4  # one part in this many of the free space is written at most

WRITE_S, READ_S, TOTAL_S = 0.5, 0.1, 2.0  # of writing, of reading with each choice, and of all reading, seconds
WRITES_IN_FLIGHT, READS_IN_FLIGHT, LATENCY_READS = 4, 32, 5  # numbers of operations
HANGS_S = 5.0  # deadline of one operation, seconds
KEY = b"kvtier-calibrate"  # chunk key of the records, 16 bytes

_left_behind: list[object] = []  # buffers, files and engines of hanging reads: late bytes may still land in them


class Makers(NamedTuple):
    """Constructors of the engines, which tests replace. writer: writes the file and reads single pages of it."""

    reader: Callable[[EngineChoice], Reader]
    writer: Callable[[], Ring]


class Hangs(Exception):
    """Deadline of an operation passed. Caught in this module."""


def calibrate(ask: Ask, makers: Makers | None = None, clock: Callable[[], float] = time.perf_counter) -> Calibration:
    """Measure the mount and choose an engine. Never raises: after a fault the default choice is returned."""
    started_s = clock()
    if makers is None:
        makers = Makers(
            lambda choice: open_engine(choice, ask.target, ask.direct, ask.in_memory),
            sizes_for(ask.in_memory).ring,
        )
    run = _Run(ask, makers, clock)
    try:
        sweep(ask.folder)
        run.measure()
    except OSError as fault:
        run.reasons.append(f"calibration stopped: {fault.strerror or fault}")
    except TierUnavailable as fault:
        run.reasons.append(f"calibration stopped: {fault}")
    except Hangs:
        run.reasons.append(f"calibration stopped: no answer from the storage in {HANGS_S:g} s")
        return run.result(clock() - started_s, hangs=True)
    return run.result(clock() - started_s)


def sweep(folder: Path, now_s: float | None = None) -> None:
    """Remove files of killed calibrations from `folder`. Raises OSError when the folder cannot be listed."""
    wall_s = time.time() if now_s is None else now_s
    for entry in os.scandir(folder):
        try:
            if entry.name.startswith(PREFIX) and wall_s - entry.stat(follow_symlinks=False).st_mtime > LEFT_OVER_S:
                os.unlink(entry.path)
        except OSError:
            continue  # another process removed it, or owns it


@contextmanager
def scratch_file(folder: Path, direct: bool) -> Iterator[int]:
    """Open a new file for reading and writing, and remove it in the end. Raises OSError.

    After Hangs the descriptor stays open: the kernel may still use it.
    """
    path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = -1
    hangs = False
    try:
        descriptor = os.open(path, flags, 0o600)
        yield descriptor
    except Hangs:
        hangs = True
        raise
    finally:
        path.unlink(missing_ok=True)  # also when open refused O_DIRECT, which may leave an empty file
        if descriptor >= 0 and not hangs:
            close_file(descriptor)


def record_buffers(count: int) -> list[AlignedBuffer]:
    """Return buffers that each hold a record of KEY. Its slabs are random bytes, which no file system can compress."""
    extent = Extent(0, 1, 0, SLABS)
    header = RecordHeader(KEY, bytes(16), bytes(16), SLAB_BYTES, 256, 1, extent, 0, (0,) * SLABS).pack()
    noise = os.urandom(SLAB_BYTES)
    buffers = [AlignedBuffer(RECORD_BYTES) for _ in range(count)]
    for buffer in buffers:
        buffer.view[:] = header + SLABS * noise
    return buffers


class _Run:
    def __init__(self, ask: Ask, makers: Makers, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._makers = makers
        self._clock = clock
        self._cache_bytes = cache_share(ask)
        self._until_s = clock() + TOTAL_S
        self._rates: dict[EngineChoice, float] = {}
        self._write_bytes_s: float | None = None
        self._latency_s: float | None = None
        self.reasons: list[str] = []

    def measure(self) -> None:
        """Measure writes, latency and reads. Raises OSError, TierUnavailable, Hangs."""
        with scratch_file(self._ask.folder, self._ask.direct) as fd:
            with closing(self._makers.writer()) as writer:
                n_records = self._write(writer, fd)
                self._latency(writer, fd)
            self._try_all(first_round(self._ask, self._cache_bytes), fd, n_records)
            rings = {choice: rate for choice, rate in self._rates.items() if choice.engine == "ring"}
            if rings:
                best = max(rings, key=rings.__getitem__)
                self._try_all(second_round(best, self._ask, self._cache_bytes), fd, n_records)
            self._try_best_again(fd, n_records)

    def result(self, seconds: float, hangs: bool = False) -> Calibration:
        choice = default_choice(self._ask, self._cache_bytes)
        rate = None
        if self._rates and not hangs:
            choice = pick(self._rates, choice)
            rate = self._rates[choice]
            fastest = max(self._rates, key=self._rates.__getitem__)
            why = f"the fastest of {len(self._rates)} tried"
            if choice != fastest:
                why = f"preferred to {why} ({fastest})"
            self.reasons.append(f"{choice} is {why}")
        else:
            self.reasons.append(f"{choice} is the default: {self.reasons[-1] if self.reasons else 'nothing was tried'}")
        return Calibration(choice, rate, self._write_bytes_s, self._latency_s, seconds, tuple(self.reasons), hangs)

    # --- writing ---

    def _write(self, writer: Ring, fd: int) -> int:
        """Write records for WRITE_S seconds. Return how many. Raises OSError, also when not even one fits."""
        disk = os.fstatvfs(fd)
        holds = file_system_of(self._ask.folder).holds_direct_writes
        bytes_max = FILE_BYTES_MAX if self._ask.direct and not holds else BUFFERED_BYTES_MAX
        n_max = min(bytes_max, disk.f_bavail * disk.f_frsize // FREE_SHARE) // RECORD_BYTES
        if n_max < 1:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size(FREE_SHARE * RECORD_BYTES)} must be free")
        buffers = record_buffers(min(WRITES_IN_FLIGHT, n_max))
        flying: deque[Reads] = deque()
        begun = done = error = 0
        started_s = self._clock()
        while True:
            is_over = error or begun == n_max or (begun and self._clock() - started_s > WRITE_S)
            if not is_over and len(flying) < len(buffers):
                address = buffers[begun % len(buffers)].address
                op = WriteOp(fd, begun * RECORD_BYTES, address, SLAB_BYTES, SLABS, KEY, 0, 0)
                flying.append(writer.submit([op]))
                begun += 1
            elif flying:
                error = self._error_of(flying.popleft(), (buffers, writer, flying)) or error
                done += not error
            else:
                break
        if not done:
            _check(error)
        if not self._ask.direct:
            os.fsync(fd)
        elif holds:
            _check(self._error_of(writer.submit([FlushOp(fd)]), (fd, writer)))
        self._write_bytes_s = done * RECORD_BYTES / max(self._clock() - started_s, 1e-9)
        return done

    def _latency(self, writer: Ring, fd: int) -> None:
        """Measure the median time of reading one page. Raises OSError, Hangs."""
        page = AlignedBuffer(PAGE_BYTES)
        taken = []
        for _ in range(LATENCY_READS):
            started_s = self._clock()
            op = ReadOp(fd, PAGE_BYTES, page.address, PAGE_BYTES, 1, KEY, 0, 0, None)
            _check(self._error_of(writer.submit([op]), (page, writer)))
            taken.append(self._clock() - started_s)
        self._latency_s = max(sorted(taken)[len(taken) // 2], 1e-9)

    # --- reading ---

    def _try_all(self, choices: Sequence[EngineChoice], fd: int, n_records: int) -> None:
        for choice in choices:
            if choice in self._rates:
                continue
            if self._rates and self._clock() > self._until_s:
                self.reasons.append(f"{choice}: not tried after {TOTAL_S:g} s")
                continue
            try:
                rate = self._try(choice, fd, n_records)
            except (TierUnavailable, ValueError, OSError) as fault:
                self.reasons.append(f"{choice}: left out: {fault}")
                continue
            self._rates[choice] = rate
            self.reasons.append(f"{choice}: {rate / 1e9:.2f} GB/s")

    def _try_best_again(self, fd: int, n_records: int) -> None:
        """Measure the default and the three fastest choices again: the first ones ran on a cold machine."""
        best = sorted(self._rates, key=lambda choice: -self._rates[choice])[:3]
        usual = default_choice(self._ask, self._cache_bytes)
        for choice in dict.fromkeys([usual, *best]):
            if choice in self._rates and self._clock() <= self._until_s:
                rate = self._try(choice, fd, n_records)
                self.reasons.append(f"{choice}: again {rate / 1e9:.2f} GB/s")
                self._rates[choice] = max(self._rates[choice], rate)

    def _try(self, choice: EngineChoice, fd: int, n_records: int) -> float:
        """Return bytes read a second. Raises TierUnavailable, ValueError, OSError, Hangs."""
        if not self._ask.direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with closing(self._makers.reader(choice)) as reader:
            reading = _Reading(reader, fd, self._ask.target, n_records, self._ask.direct)
            # Not timed: at the first read threads start and KvikIO pins its buffers.
            self._read_for(reading, 0.0)
            started_s = self._clock()
            n_bytes = self._read_for(reading, READ_S)
            return n_bytes / max(self._clock() - started_s, 1e-9)

    def _read_for(self, reading: _Reading, seconds: float) -> int:
        """Read into all places of the target for `seconds`, at least once each. Return the number of bytes read.

        Unless Hangs is raised, no read is in flight when this returns or raises.
        """
        until_s = self._clock() + seconds
        free = deque(range(reading.places))
        flying: deque[tuple[int, Reads]] = deque()
        fault: Exception | None = None
        n_bytes = 0
        while free or flying:
            if free:
                try:
                    flying.append((free[0], reading.begin(free[0])))
                    free.popleft()
                except (TierUnavailable, ValueError) as raised:
                    fault = raised
                    free.clear()  # reads in flight must land before the caller reuses the target
                continue
            place, reads = flying.popleft()
            error = self._error_of(reads, (reading, flying))
            if error:
                fault = fault or OSError(error, os.strerror(error))
            n_bytes += reading.op_bytes
            if fault is None and self._clock() < until_s and reading.has_more():
                free.append(place)
        if fault is not None:
            raise fault
        return n_bytes

    def _error_of(self, reads: Reads, kept: object) -> int:
        """Wait for the operation and return its errno. Raises Hangs at the deadline, and then never frees `kept`."""
        if not reads.wait(HANGS_S):
            reads.cancel()
            _left_behind.append((reads, kept))
            raise Hangs
        return reads.results()[0].error


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


class _Reading:
    """Reads of the records, one after the other, into the places of the target."""

    def __init__(self, reader: Reader, fd: int, target: Target, n_records: int, direct: bool) -> None:
        self._reader = reader
        self._fd = fd
        self._target = target
        self._n_records = n_records
        self._next = 0
        self._is_once = not direct  # a second read would come from the page cache
        self._slabs = min(SLABS, target.n_bytes // SLAB_BYTES)
        if self._slabs < 1:
            raise ValueError(f"the target has {target.n_bytes} bytes; {SLAB_BYTES} are needed")
        self.op_bytes = self._slabs * SLAB_BYTES
        self.places = min(READS_IN_FLIGHT, target.n_bytes // self.op_bytes, n_records)

    def has_more(self) -> bool:
        return not self._is_once or self._next < self._n_records

    def begin(self, place: int) -> Reads:
        offset = self._next % self._n_records * RECORD_BYTES + PAGE_BYTES
        self._next += 1
        address = self._target.address + place * self.op_bytes
        on_device = self._target.ordinal is not None
        op = ReadOp(self._fd, offset, address, SLAB_BYTES, self._slabs, KEY, 0, 0, None, on_device)
        return self._reader.submit([op])
