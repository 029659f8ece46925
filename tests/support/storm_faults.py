"""What a storm does to the bytes: reads that are slow, hang or fail, and records that change on disk or in memory."""

import errno
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import Corrupt, IndexUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import SegmentHeader
from kvtier.index.base import Index
from kvtier.io.base import Reader, Reads
from kvtier.io.ring import OpResult, ReadOp
from kvtier.storage.segments import SegmentFiles
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import CudaEvent
from tests.damage import SegmentDamage, header_of, write


class LateReads:
    """Begins only when its time has come and somebody asks: the kernel had it all along, and cannot be called back."""

    def __init__(self, reader: Reader, ops: Sequence[ReadOp], begins_s: float, is_failing: bool) -> None:
        self._reader = reader
        self._ops = ops
        self._begins_s = begins_s
        self._is_failing = is_failing
        self._inner: Reads | None = None
        self._lock = threading.Lock()

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while (pause_s := self._begins_s - time.monotonic()) > 0:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
        with self._lock:
            if self._inner is None:
                self._inner = self._reader.submit(self._ops)
        return self._inner.wait(max(0.0, deadline_s - time.monotonic()))

    def cancel(self) -> None:
        """Too late."""

    def results(self) -> list[OpResult]:
        assert self._inner is not None
        results = self._inner.results()
        if self._is_failing:
            results[-1] = OpResult(errno.EIO, (), results[-1].checksums)
        return results


class StormyReader(Reader):
    """A reader of which some reads are slow, a few take longer than a load may, and some end with EIO.

    broken: what was seen of memory that was given to somebody while late bytes may land in it (I10).
    """

    never_waits = True

    def __init__(self, inner: Reader, rng: random.Random, timeout_s: float) -> None:
        self._inner = inner
        self.rng = rng
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._filling: dict[int, Callable[[], bool]] = {}
        self.is_calm = False
        self.n_hung = self.n_failed = 0
        self.broken: list[str] = []

    def submit(self, ops: Sequence[ReadOp]) -> Reads:
        with self._lock:
            reads = LateReads(self._inner, ops, *self._fate())
            for op in ops:
                self._fill(op.address, partial(reads.wait, 0.0))
        reads.wait(0.0)
        return reads

    def note_copy(self, address: int, is_done: Callable[[], bool]) -> None:
        """Something else than a read fills this memory."""
        with self._lock:
            self._fill(address, is_done)

    def close(self, timeout_s: float = 1.0) -> bool:
        return self._inner.close(timeout_s)

    def _fill(self, address: int, is_done: Callable[[], bool]) -> None:
        if not self._filling.get(address, lambda: True)():
            self.broken.append("a slot was given to somebody while bytes of another may land in it")
        self._filling[address] = is_done

    def _fate(self) -> tuple[float, bool]:
        """When a read begins, and whether it ends with EIO."""
        chance, fraction, luck = (self.rng.random() for _ in range(3))
        if self.is_calm or chance < 0.5:
            return 0.0, False
        if chance > 0.998:
            self.n_hung += 1
            return time.monotonic() + 1.5 * self.timeout_s, False
        self.n_failed += luck < 0.02
        return time.monotonic() + fraction * (0.1 if chance > 0.97 else 0.01), luck < 0.02


def hang_in_open(files: SegmentFiles, reader: StormyReader) -> None:
    """A few opens take longer than a load may: no deadline of reads helps there."""
    opened = files._open_file

    def hang(name: tuple[int, int]) -> tuple[int, SegmentHeader] | None:
        if reader.rng.random() < 0.03 and not reader.is_calm:
            time.sleep(2 * reader.timeout_s)
        return opened(name)

    files._open_file = hang


def lose_answers(index: Index, reader: StormyReader) -> None:
    """Now and then the index does not answer (I5)."""

    def unless_gone(call: Callable[[Any], Any], asked: Any) -> Any:
        if reader.rng.random() < 0.02 and not reader.is_calm:
            raise IndexUnavailable("gone")
        return call(asked)

    index.resolve = partial(unless_gone, index.resolve)  # type: ignore[method-assign]
    index.publish = partial(unless_gone, index.publish)  # type: ignore[method-assign]
    retract = index.retract
    index.retract = lambda key, place: unless_gone(lambda _: retract(key, place), None)  # type: ignore[method-assign]


def watch_copies(worker: WorkerContext, reader: StormyReader) -> None:
    """Copies from the host arena land in the same slots as reads."""
    order, begin_copies = worker.order, worker.order.begin_copies

    def watched(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CudaEvent:
        event = begin_copies(pairs)
        for target, _ in pairs:
            reader.note_copy(target.data_ptr(), partial(order.is_done, event))
        return event

    order.begin_copies = watched  # type: ignore[method-assign]


def flip_in_memory(arena: ChunkArena, rng: random.Random) -> bool:
    """Changes one byte of a cached chunk that nobody is reading."""
    with arena._lock:
        idle = [entry for entry in arena._cached.values() if not entry.leases]
        if not idle:
            return False
        entry = rng.choice(idle)
        source = rng.choice(entry.content)
        arena.record(entry.slot, arena.slot_bytes - PAGE_BYTES)[
            source.cut.slot_offset - PAGE_BYTES + rng.randrange(source.cut.n_bytes)
        ] ^= 1 << rng.randrange(8)
        return True


def flip_entry(entries: Sequence[bytes], rng: random.Random) -> list[bytes]:
    """What an index says, with one bit of it changed: where a record is, what it holds, or what it sums to."""
    changed = [bytearray(entry) for entry in entries]
    entry = rng.choice(changed)
    entry[rng.randrange(len(entry))] ^= 1 << rng.randrange(8)
    return [bytes(entry) for entry in changed]


class Vandal(SegmentDamage):
    """Does one kind of damage at a time to segments that may be in use, or gone any moment."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        super().__init__(rng)
        self._root = root
        self.done: set[str] = set()

    def strike(self) -> None:
        paths = sorted(self._root.glob("v2/*/*.kvseg"))
        damage = self._rng.choice(
            [
                self.flip,
                self.flip,
                self.zero_record,
                self.copy_record,
                self.copy_record,
                self.shorten,
                self.swap,
                self.replace,
                self.zero_header,
                self.unlink,
            ]
        )
        try:
            path = self._rng.choice(paths)
            damage(path, header_of(path), self._rng.choice(paths))
            self.done.add(damage.__name__)
        except (FileNotFoundError, Corrupt, IndexError):
            return  # evicted meanwhile, or struck before

    def replace(self, path: Path, header: SegmentHeader, other: Path) -> None:
        """Another segment's records under this one's header, in a new file."""
        spare = self._root / "spare"
        shutil.copyfile(other, spare)
        write(spare, 0, header.pack())
        spare.rename(path)

    def zero_header(self, path: Path, header: SegmentHeader, _: Path) -> None:
        write(path, 0, bytes(PAGE_BYTES))
