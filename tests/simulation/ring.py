"""The I/O ring as its contract says (kvtier.io.ring), on virtual time and a disk that fails: operations are slow, hang,
land after their deadline, end too soon, are torn, and outlive the process that asked for them."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import RecordHeader, is_blank
from kvtier.io.base import Reader
from kvtier.io.native import slab_checksums
from kvtier.io.ring import FlushOp, OpResult, ReadOp, WriteOp
from tests.simulation.disk import Disk
from tests.simulation.runtime import Process, Runtime, Task

Op = ReadOp | WriteOp | FlushOp
CANCELLED = OpResult(errno.ECANCELED, (), ())


class _Held(NamedTuple):
    """What belongs to an operation until it is over. content: of its memory as it was submitted; opened: its descriptor
    as the disk knows it."""

    op: Op
    content: bytes
    opened: object


class SimBatch:
    """See `kvtier.io.ring.Batch`."""

    def __init__(self, runtime: Runtime, ops: Sequence[Op], let_go: Callable[[Op], None]) -> None:
        self._runtime = runtime
        self._waiters: list[Task] = []
        self._ops = ops
        self._let_go = let_go
        self.found: list[OpResult | None] = [None] * len(ops)
        self.begun = [False] * len(ops)
        self.n_left = len(ops)

    def end(self, number: int, result: OpResult) -> None:
        self._let_go(self._ops[number])
        self.found[number] = result
        self.n_left -= 1
        if not self.n_left:
            self._runtime.wake(self._waiters)

    def wait(self, timeout_s: float) -> bool:
        if self.n_left and timeout_s > 0:
            self._runtime.wait(self._waiters, timeout_s)
        return not self.n_left

    def cancel(self) -> None:
        for number, has_begun in enumerate(self.begun):
            if not has_begun and self.found[number] is None:
                self.end(number, CANCELLED)

    def results(self) -> list[OpResult]:
        assert not self.n_left
        return [result for result in self.found if result is not None]


class SimRing(Reader):
    """See `kvtier.io.ring.Ring`. An operation is done in one moment, somewhere between when it was submitted and when
    it is over: what its memory holds then is what counts."""

    never_waits = True

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._runtime = disk.runtime
        self._is_closed = False
        self._held: dict[int, _Held] = {}
        process.closing.append(self._end_with_the_process)

    def submit(self, ops: Sequence[Op]) -> SimBatch:
        if self._process.is_dead:
            self._runtime.die()
        if self._is_closed:
            raise TierUnavailable("the I/O ring is closed")
        self._runtime.pause()
        batch = SimBatch(self._runtime, ops, self._let_go)
        for number, op in enumerate(ops):
            self._hold(op)
            begins_s, lands_s = self._times()
            if lands_s == 0.0:
                self._land(batch, number, op)
                continue
            if begins_s == 0.0:
                batch.begun[number] = True
            else:
                self._runtime.call_at(self._runtime.now_s + begins_s, lambda n=number: self._begin(batch, n))
            self._runtime.call_at(self._runtime.now_s + lands_s, lambda n=number, op=op: self._land(batch, n, op))
        return batch

    def close(self, timeout_s: float = 1.0) -> bool:
        self._is_closed = True
        return not self._held

    def _times(self) -> tuple[float, float]:
        """After how long the kernel has it, and when it is done."""
        weather, rng = self._disk.weather, self._runtime.rng
        if self._runtime.tries("a read or write hangs", weather.hang):
            return 0.0, weather.hang_s * (1 + rng.random())
        if self._runtime.tries("a read or write is slow", weather.slow):
            waits_s = rng.random() * weather.slow_s
            return waits_s * rng.choice([0, 0.5]), waits_s
        return 0.0, 0.0

    @staticmethod
    def _begin(batch: SimBatch, number: int) -> None:
        batch.begun[number] = True

    def _hold(self, op: Op) -> None:
        for other, _, _ in self._held.values():
            if isinstance(op, FlushOp) or isinstance(other, FlushOp):
                continue
            if other.address <= op.address < other.address + _bytes_of(other):
                what = "read" if isinstance(other, ReadOp) else "write"
                self._runtime.violate(f"memory was given to somebody while a {what} of it is under way (I3, I10)")
        content = _memory(op.address, PAGE_BYTES + _bytes_of(op)) if isinstance(op, WriteOp) else b""
        self._held[id(op)] = _Held(op, content, self._disk.descriptors.get(op.fd))

    def _let_go(self, op: Op) -> None:
        self._held.pop(id(op), None)

    def _land(self, batch: SimBatch, number: int, op: Op) -> None:
        held = self._held.get(id(op))
        if self._process.is_dead or held is None:
            return
        if held.opened is None or self._disk.descriptors.get(op.fd) is not held.opened:
            self._runtime.violate("a segment was closed while a read or write of it was under way (I3)")
            batch.end(number, OpResult(errno.EBADF, (), (0,) * getattr(op, "n_slabs", 0)))
        else:
            self._process.moves += 1
            batch.begun[number] = True
            act = {ReadOp: self._read, WriteOp: self._write, FlushOp: self._flush}[type(op)]
            batch.end(number, act(op))  # type: ignore[operator]

    def _flush(self, op: FlushOp) -> OpResult:
        if self._runtime.tries("a flush fails (EIO)", self._disk.weather.error):
            return OpResult(errno.EIO, (), ())
        self._disk.flush(op.fd)
        return OpResult(0, (), ())

    def _read(self, op: ReadOp) -> OpResult:
        weather, n_bytes = self._disk.weather, _bytes_of(op)
        target = (ctypes.c_char * n_bytes).from_address(op.address)
        n_read = os.preadv(op.fd, [memoryview(target).cast("B")], op.offset)
        self._disk.hide(op.fd, op.offset, memoryview(target).cast("B")[:n_read])
        if self._runtime.tries("a read fails (EIO)", weather.error):
            return OpResult(errno.EIO, (), (0,) * op.n_slabs)
        if n_read < n_bytes or self._runtime.tries("a read ends too soon", weather.short):
            self._note_damage(op)
            return OpResult(errno.ENODATA, (), (0,) * op.n_slabs)
        if self._runtime.tries("a page that is read is another one", weather.torn):
            self._note_damage(op)
            page = self._runtime.rng.randrange(n_bytes // PAGE_BYTES) * PAGE_BYTES
            target[page : page + PAGE_BYTES] = self._runtime.rng.randbytes(PAGE_BYTES)
        sums = slab_checksums(op.address, op.slab_bytes, op.n_slabs, op.key, op.first_head, op.first_layer)
        bad = () if op.checksums is None else tuple(n for n in range(op.n_slabs) if sums[n] != op.checksums[n])
        return OpResult(0, bad, sums)

    def _write(self, op: WriteOp) -> OpResult:
        disk, rng = self._disk, self._runtime.rng
        n_bytes = PAGE_BYTES + _bytes_of(op)
        record = _memory(op.address, n_bytes)
        if record != self._held[id(op)].content:
            self._runtime.violate("a slot was given to somebody while it was written from (I3)")
        if self._runtime.tries("no space is left (ENOSPC)", 0.5 if disk.is_full else 0.0):
            return self._tear(op, record, OpResult(errno.ENOSPC, (), (0,) * op.n_slabs))
        if self._runtime.tries("a write fails (EIO)", disk.weather.error):
            return self._tear(op, record, OpResult(errno.EIO, (), (0,) * op.n_slabs))
        address = op.address + PAGE_BYTES
        sums = slab_checksums(address, op.slab_bytes, op.n_slabs, op.key, op.first_head, op.first_layer)
        bad = () if op.checksums is None else tuple(n for n in range(op.n_slabs) if sums[n] != op.checksums[n])
        if bad:
            return OpResult(0, bad, sums)
        if not is_blank(os.pread(op.fd, PAGE_BYTES, op.offset)) and not self._is_damaged(op):
            self._runtime.violate("a record was written where one lies already: nothing is ever rewritten in place")
        header = replace(RecordHeader.unpack(record[:PAGE_BYTES]), checksums=sums).pack()
        os.pwrite(op.fd, record[PAGE_BYTES:], op.offset + PAGE_BYTES)
        os.pwrite(op.fd, header, op.offset)
        if self._runtime.tries("a page of a write is lost, and nobody is told", disk.weather.torn):
            self._note_damage(op)
            page = rng.randrange(n_bytes // PAGE_BYTES) * PAGE_BYTES
            os.pwrite(op.fd, rng.choice([bytes(PAGE_BYTES), rng.randbytes(PAGE_BYTES)]), op.offset + page)
        disk.wrote(op.fd, op.offset, n_bytes)
        disk.stamp(op.fd)
        return OpResult(0, (), sums)

    def _tear(self, op: WriteOp, record: bytes, result: OpResult | None) -> OpResult:
        """Some of the record reaches the disk; its header, which is written last, does not."""
        n_pages = self._runtime.rng.randrange(len(record) // PAGE_BYTES)
        os.pwrite(op.fd, record[PAGE_BYTES : PAGE_BYTES + n_pages * PAGE_BYTES], op.offset + PAGE_BYTES)
        self._disk.stamp(op.fd)
        return result or CANCELLED

    def _end_with_the_process(self) -> None:
        """Writes that the kernel had are done, or torn, or never begun."""
        for op, content, opened in self._held.values():
            if isinstance(op, WriteOp) and self._disk.descriptors.get(op.fd) is opened:
                fate = self._runtime.rng.random()
                if fate < 0.3:
                    self._write(op)
                elif fate < 0.7:
                    self._runtime.tried["a write is torn as its process is killed"] += 1
                    self._tear(op, content, None)
        self._held.clear()
        self._disk.write_back(self._process)

    def _note_damage(self, op: ReadOp | WriteOp) -> None:
        segment = self._disk.descriptors[op.fd][1]
        if segment is not None:
            self._disk.damaged.add(segment)

    def _is_damaged(self, op: ReadOp | WriteOp) -> bool:
        return self._disk.descriptors[op.fd][1] in self._disk.damaged


def _bytes_of(op: ReadOp | WriteOp) -> int:
    return op.n_slabs * op.slab_bytes


def _memory(address: int, n_bytes: int) -> bytes:
    return ctypes.string_at(address, n_bytes)
