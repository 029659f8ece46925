"""Segments are flushed before their records are published, once a batch and file, where other nodes need that."""

import errno
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.index.base import NewRecord
from kvtier.index.memory import MemoryIndex
from kvtier.io.ring import FlushOp, OpResult, WriteOp
from kvtier.maintenance import sweep_lease
from kvtier.maintenance.rebuild import SetRecovery
from kvtier.maintenance.sweep_lease import SweepLease
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from kvtier.storage.filesystem import file_system_of
from kvtier.storage.segments import SegmentFiles
from tests.support.rig import BLOCKS, TOKENS, Engine
from tests.waiting import wait_until


class Watched:
    """The calls of one engine's saves: `events` has the kinds of operations of each batch, and "publish". faults: the
    errno of the next flushes."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[Any] = []
        self.flushed: list[int] = []
        self.written: set[int] = set()
        self.faults: list[int] = []
        worker = engine.transfers[0]._worker
        self._submit, self._publish = worker.io.ring.submit, worker.index.publish
        worker.io.ring.submit = self.submit  # type: ignore[method-assign]
        worker.index.publish = self.publish  # type: ignore[method-assign]

    def submit(self, ops: Sequence[Any]) -> Any:
        self.events.append({type(op) for op in ops})
        self.flushed += [op.fd for op in ops if isinstance(op, FlushOp)]
        self.written |= {op.fd for op in ops if isinstance(op, WriteOp)}
        batch = self._submit(ops)
        if ops and isinstance(ops[0], FlushOp) and self.faults:
            assert batch.wait(10.0)
            fault = OpResult(self.faults.pop(), (), ())
            return SimpleNamespace(wait=batch.wait, cancel=batch.cancel, results=lambda: [fault for _ in ops])
        return batch

    def publish(self, records: Sequence[NewRecord], **options: bool) -> int:
        self.events.append("publish")
        return self._publish(records, **options)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, changes={"io": {"threads": 4, "timeout_s": 10.0, "fdatasync": "always"}})


def test_each_file_of_a_batch_is_flushed_once_and_before_it_is_published(engine: Engine) -> None:
    watched = Watched(engine)
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    assert watched.events == [{WriteOp}, {FlushOp}, "publish"]
    assert sorted(watched.flushed) == sorted(watched.written)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(errno.EIO, SaveOutcome.FAILED), (errno.ENOSPC, SaveOutcome.NO_SPACE), (errno.EDQUOT, SaveOutcome.NO_SPACE)],
)
def test_what_could_not_be_flushed_is_not_published(engine: Engine, fault: int, outcome: SaveOutcome) -> None:
    watched = Watched(engine)
    watched.faults.append(fault)
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {outcome}
    assert engine.store.lookup(engine.keys(TOKENS)) == []


def test_a_write_that_failed_is_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Where each write or flush failed, the log said nothing. Only a counter showed that nothing was saved."""
    Watched(engine).faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    (line,) = [record.getMessage() for record in caplog.records if "a save failed" in record.getMessage()]
    assert ".kvseg: Input/output error" in line


def test_what_could_not_be_flushed_is_not_found_by_a_rebuild(engine: Engine) -> None:
    """It was answered as failed, and some of its bytes may be lost behind a whole header."""
    watched = Watched(engine)
    watched.faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    watched.faults.append(0)
    other = list(range(5000, 5000 + 64 * 5))
    wait_until(lambda: {done.outcome for done in engine.save(other, BLOCKS)} == {SaveOutcome.SAVED}, "the pause's end")
    segments = engine.transfers[0]._saver.writer.segments
    wait_until(lambda: not segments.unpublished, "erasing")
    index = engine.store._keeper.index
    rebuilt = Sweeper(index, engine.root / "v2", "other").rebuild()
    assert rebuilt is not None and rebuilt.records == 0
    assert engine.store.lookup(engine.keys(TOKENS)) == [] and len(engine.store.lookup(engine.keys(other)) or ()) == 5


def test_what_a_rebuild_published_meanwhile_is_not_erased(engine: Engine) -> None:
    """Its record stood in the index with a blank header (seeds 700004 and 700033 of the simulation)."""
    watched = Watched(engine)
    watched.faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments = engine.transfers[0]._saver.writer.segments
    assert segments.unpublished
    keeper = engine.store._keeper
    rebuilt = Sweeper(keeper._index, engine.root / "v2", "other").rebuild()
    assert rebuilt is not None and rebuilt.records == 5
    segments.erase_unpublished()
    assert not segments.unpublished
    assert len(engine.store.lookup(engine.keys(TOKENS)) or ()) == 5
    again = Sweeper(MemoryIndex(), engine.root / "v2", "third").rebuild()
    assert again is not None and again.records == 5, "their headers are whole"


def test_nothing_is_erased_while_another_process_reads_files_back(engine: Engine) -> None:
    """It would publish what it read before (seed 10357 of the simulation, recipe slow_disk)."""
    watched = Watched(engine)
    watched.faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments, index = engine.transfers[0]._saver.writer.segments, engine.store._keeper.index
    rebuild = SweepLease(index, "other", time.time)
    assert rebuild.take()
    segments.erase_unpublished()
    assert segments.unpublished
    rebuild.release()
    segments.erase_unpublished()
    assert not segments.unpublished
    again = Sweeper(MemoryIndex(), engine.root / "v2", "third").rebuild()
    assert again is not None and again.records == 0


def test_nobody_reads_files_back_while_records_are_erased(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of the erasure expired at once, because its times were of the monotonic clock."""
    Watched(engine).faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments, index = engine.transfers[0]._saver.writer.segments, engine.store._keeper.index
    erase, found = SegmentFiles.erase, []

    def interrupted(*arguments: Any) -> bool:
        found.append(Sweeper(index, engine.root / "v2", "other").rebuild())
        return erase(*arguments)

    monkeypatch.setattr(SegmentFiles, "erase", interrupted)
    segments.erase_unpublished()
    assert set(found) == {None}
    assert not segments.unpublished
    assert not index.resolve(engine.keys(TOKENS))


def test_a_second_erasure_does_not_end_the_lease_of_the_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save of the same set fails while the storage is slow."""
    Watched(engine).faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments, index = engine.transfers[0]._saver.writer.segments, engine.store._keeper.index
    erase, found, another = SegmentFiles.erase, list[Any](), segments.unpublished[0]

    def interrupted(*arguments: Any) -> bool:
        if not found:
            segments.unpublished.append(another)
            found.append("")
            segments.erase_unpublished()
            found.append(Sweeper(index, engine.root / "v2", "other").rebuild())
        return erase(*arguments)

    monkeypatch.setattr(SegmentFiles, "erase", interrupted)
    segments.erase_unpublished()
    assert found == ["", None]
    segments.erase_unpublished()
    assert not segments.unpublished


def test_what_a_rebuild_published_during_a_slow_erasure_is_retracted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage held the erasure up for longer than the lease lasts (seed 54 of the simulation, recipe random, where
    sets with free slots are filled again)."""
    Watched(engine).faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments, index = engine.transfers[0]._saver.writer.segments, engine.store._keeper.index
    erase, found = SegmentFiles.erase, []

    def slow(*arguments: Any) -> bool:
        if not found:
            time.sleep(0.2)
            monkeypatch.undo()
            found.append(Sweeper(index, engine.root / "v2", "other").rebuild())
        return erase(*arguments)

    monkeypatch.setattr(sweep_lease, "LEASE_TTL_S", 0.1)
    monkeypatch.setattr(SegmentFiles, "erase", slow)
    segments.erase_unpublished()
    assert found[0] is not None and found[0].records == 5
    segments.erase_unpublished()
    visible = index.resolve(engine.keys(TOKENS))
    again = Sweeper(MemoryIndex(), engine.root / "v2", "third").rebuild()
    assert again is not None and len(visible) <= again.records < 5, "no visible record is blank"


def test_what_a_rebuild_publishes_after_a_slow_erasure_is_retracted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebuild had read the records before they were erased."""
    Watched(engine).faults.append(errno.EIO)
    engine.save(TOKENS, BLOCKS)
    segments, index = engine.transfers[0]._saver.writer.segments, engine.store._keeper.index
    erase, publish, found = SegmentFiles.erase, SetRecovery._add_missing, list[Any]()
    has_read, is_erased = Event(), Event()
    rebuild = Thread(target=lambda: found.append(Sweeper(index, engine.root / "v2", "other").rebuild()))

    def publish_late(*arguments: Any) -> int:
        has_read.set()
        assert is_erased.wait(10.0)
        return publish(*arguments)

    def erase_late(*arguments: Any) -> bool:
        time.sleep(0.2)
        if not has_read.is_set():
            monkeypatch.setattr(sweep_lease, "LEASE_TTL_S", 60.0)
            rebuild.start()
            assert has_read.wait(10.0)
        return erase(*arguments)

    monkeypatch.setattr(sweep_lease, "LEASE_TTL_S", 0.1)
    monkeypatch.setattr(SegmentFiles, "erase", erase_late)
    monkeypatch.setattr(SetRecovery, "_add_missing", publish_late)
    segments.erase_unpublished()
    is_erased.set()
    rebuild.join(10.0)
    assert found[0] is not None and found[0].records == 5
    segments.erase_unpublished()
    assert not segments.unpublished and not segments._blanked
    visible = index.resolve(engine.keys(TOKENS))
    again = Sweeper(MemoryIndex(), engine.root / "v2", "third").rebuild()
    assert again is not None and len(visible) <= again.records < 5, "no visible record is blank"


@pytest.mark.parametrize("fdatasync", ["auto", "never"])
def test_local_disks_are_not_flushed(tmp_path: Path, fdatasync: str) -> None:
    assert file_system_of(tmp_path).visibility.name == "LOCAL"
    engine = Engine(tmp_path, changes={"io": {"threads": 4, "timeout_s": 10.0, "fdatasync": fdatasync}})
    watched = Watched(engine)
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    assert watched.events == [{WriteOp}, "publish"]
