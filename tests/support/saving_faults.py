"""What a storm does to saves: writes that are slow, land late or fail, an index that takes its time, full disks, ends
without a word, and a note of what was evicted, which nobody can ask for any more."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.eviction.evictor import EvictionResult, Evictor
from kvtier.eviction.set_removal import Remover
from kvtier.format.record import SegmentHeader
from kvtier.index.base import Index, SetInfo
from kvtier.io.ring import OpResult, Ring, WriteOp
from kvtier.storage.segments import SegmentFiles
from tests.support.rig import Engine
from tests.support.storm_faults import LateReads


class LateWrites(LateReads):
    """Writes that begin when their time has come; the last of them may end with an error, though it was written."""

    def __init__(self, ring: Ring, ops: Sequence[WriteOp], begins_s: float, error: int) -> None:
        super().__init__(ring, ops, begins_s, False)  # type: ignore[arg-type]
        self._error = error
        self._is_cut_off = False

    def wait(self, timeout_s: float) -> bool:
        try:
            return super().wait(timeout_s)
        except TierUnavailable:  # its process was killed before they began
            self._is_cut_off = True
            return True

    def results(self) -> list[OpResult]:
        if self._is_cut_off:
            return [OpResult(errno.ECANCELED, (), ()) for _ in self._ops]
        results = super().results()
        if self._error and results:
            results[-1] = OpResult(self._error, (), results[-1].checksums)
        return results


class StormyRing:
    """A ring of which some writes are slow, some outlive their deadline and land later, and some fail."""

    def __init__(self, inner: Ring, rng: random.Random, timeout_s: float) -> None:
        self._inner = inner
        self._rng = rng
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def submit(self, ops: Sequence[WriteOp]) -> LateWrites:
        with self._lock:
            chance, fraction, luck = (self._rng.random() for _ in range(3))
        begins_s, error = 0.0, 0
        if chance > 0.99:
            begins_s = time.monotonic() + 1.5 * self._timeout_s
        elif chance > 0.6:
            begins_s = time.monotonic() + fraction * 0.05
        if luck < 0.02:
            error = errno.EIO if luck < 0.015 else errno.ENOSPC
        writes = LateWrites(self._inner, ops, begins_s, error)
        writes.wait(0.0)
        return writes

    def close(self, timeout_s: float = 1.0) -> bool:
        return self._inner.close(timeout_s)


class SlowIndex:
    """An index whose answers, and whose changes, take a moment on their way; none of a dead engine arrives."""

    SLOW = ("publish", "members", "remove_set", "close_set", "create_set", "sets")

    def __init__(self, inner: Index, rng: random.Random, is_dead: threading.Event) -> None:
        self._inner = inner
        self._rng = rng
        self._is_dead = is_dead

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self.SLOW:
            return method

        def slow(*args: object, **options: object) -> object:
            self._pause()
            if self._is_dead.is_set():
                raise IndexUnavailable("its process was killed")
            answer = method(*args, **options)
            self._pause()
            return answer

        return slow

    def _pause(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * 0.02)


class Evictions:
    """When the removal of each evicted set ended, by its id; while it is under way: never. Within the context only."""

    def __init__(self) -> None:
        self.ended_s: dict[int, float] = {}
        self._thread = threading.local()
        self._plain = Evictor._remove, Remover.remove

    def __enter__(self) -> Evictions:
        evict, remove = self._plain

        def noting_eviction(evictor: Evictor, victims: Sequence[SetInfo], token: int) -> EvictionResult:
            self._thread.is_evicting = True
            try:
                return evict(evictor, victims, token)
            finally:
                self._thread.is_evicting = False

        def noting_removal(remover: Remover, info: SetInfo, token: int | None = None) -> int:
            is_evicting = getattr(self._thread, "is_evicting", False)
            if is_evicting:
                self.ended_s[info.set_id] = float("inf")
            removed = remove(remover, info, token)
            if is_evicting:
                self.ended_s[info.set_id] = time.monotonic()
            return removed

        Evictor._remove, Remover.remove = noting_eviction, noting_removal  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Evictor._remove, Remover.remove = self._plain  # type: ignore[method-assign]


class FullDisk:
    """Refuses new segments for a while, when it is told to; and a few all along, half made."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._until_s = 0.0

    def refuse_for(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds

    def look(self) -> None:
        if time.monotonic() < self._until_s or self._rng.random() < 0.01:
            raise TierUnavailable("No space left on device", is_full=True)


@contextmanager
def refuse_files(rng: random.Random) -> Iterator[FullDisk]:
    disk, create = FullDisk(rng), SegmentFiles.create

    def limited(files: SegmentFiles, header: SegmentHeader) -> None:
        disk.look()
        create(files, header)

    SegmentFiles.create = limited  # type: ignore[method-assign]
    try:
        yield disk
    finally:
        SegmentFiles.create = create  # type: ignore[method-assign]


def cut_off(engine: Engine) -> None:
    """Ends an engine's threads and lets go of its files, without any of what `close` does on disk and in the index."""
    ticker = engine.store._keeper._ticker
    assert ticker is not None
    ticker.close(5.0)
    for transfer in engine.transfers:
        for ticker in transfer._tickers:
            ticker.close(1.0)
        for jobs in transfer._jobs:
            jobs.close()
        transfer._worker.io.close()
    for transfer in engine.transfers:
        transfer.drain(5.0)
        transfer._worker.files.close()
        transfer._worker.index.close()
    engine.store._keeper._index.close()
