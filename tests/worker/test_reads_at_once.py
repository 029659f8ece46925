"""Reads of segments that are open begin on the loop's thread; all that may wait is left to threads of the pool."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierUnavailable
from kvtier.io.ring import Batch, Ring
from kvtier.plan import LoadChunk
from kvtier.storage import open_segments
from kvtier.worker import loads
from kvtier.worker.loop import TaskPool
from kvtier.worker.record_reader import RecordReader
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, is_equal


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Engine:
    """An engine without chunks in its arena, whose segments were closed."""
    changes: dict[str, object] = {"host": {"arena_bytes": 8 << 20, "admit": "never"}}
    Engine(tmp_path, changes=changes).save(TOKENS, BLOCKS)
    return Engine(tmp_path, changes=changes)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Tasks that were left to the pool."""
    found, add = list[object](), TaskPool.add

    def noted(self: TaskPool, work: Any, then: Any = None) -> None:
        found.append(work)
        add(self, work, then)

    monkeypatch.setattr(TaskPool, "add", noted)
    return found


def load(engine: Engine) -> None:
    (done,) = engine.load(TOKENS, TARGET)[1]
    assert done.failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), engine.blocks(BLOCKS))


def test_only_the_first_load_opens_segments(engine: Engine, tasks: list[object]) -> None:
    engine.pages[0].layers[0].k[:] = 0
    (done,) = engine.load(TOKENS, BLOCKS)[1]
    assert done.failed_blocks == frozenset() and tasks
    tasks.clear()
    load(engine)
    assert not tasks


def test_a_segment_that_may_have_lost_its_name_is_asked_by_the_pool(
    engine: Engine, tasks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(TOKENS, BLOCKS)
    tasks.clear()
    monkeypatch.setattr(open_segments, "CHECKED_FOR_S", -1.0)
    load(engine)
    assert tasks


def test_a_load_goes_on_where_a_turn_has_begun_enough(
    engine: Engine, tasks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(TOKENS, BLOCKS)
    tasks.clear()
    chunks = engine.transfers[0]._loader._chunks
    monkeypatch.setattr(chunks, "begun_together", 1)
    monkeypatch.setattr(loads, "BEGUN_MAX", 1)
    begin, begun = chunks.begin, list[int]()
    monkeypatch.setattr(chunks, "begin", lambda fetches: begun.append(len(fetches)) or begin(fetches))
    load(engine)
    assert begun == 5 * [1] and not tasks


@pytest.mark.parametrize("room", [0, 2], ids=["no room", "room for two"])
def test_a_queue_without_room_is_asked_again_by_the_pool(
    engine: Engine, tasks: list[object], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(TOKENS, BLOCKS)
    tasks.clear()
    submit_each, n_calls = Ring.submit_each, 0

    def first_is_full(self: Ring, batches: Sequence[Sequence[Any]]) -> list[Batch]:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1 and not room:
            raise TierUnavailable("the queue is full")
        return submit_each(self, batches[:room] if n_calls == 1 else batches)

    monkeypatch.setattr(Ring, "submit_each", first_is_full)
    load(engine)
    assert n_calls > 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_our_own_bug_costs_one_load_and_no_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.load(TOKENS, BLOCKS)
    (transfer,) = engine.transfers
    loader, prepare, raised = transfer._loader, RecordReader._prepare, list[str]()

    def has_bug(self: RecordReader, chunk: LoadChunk, *args: Any) -> Any:
        if chunk.block_ids[0] == TARGET[0]:
            raised.append(threading.current_thread().name)
            raise RuntimeError("a bug")
        return prepare(self, chunk, *args)

    monkeypatch.setattr(RecordReader, "_prepare", has_bug)
    others = [7] * 128
    engine.save(others, BLOCKS[:8])
    with transfer._loop.changed:  # so that both loads are taken in one turn
        engine.begin_load("good", others, [block + 40 for block in TARGET[:8]])
        engine.begin_load("bad", TOKENS, TARGET)
    assert transfer.drain(20)
    failed = {done.request_id: bool(done.failed_blocks) for done in transfer.poll().loads}
    assert raised[0] == "kvtier-loop" and failed == {"good": False, "bad": True}
    arena = transfer._worker.arena
    assert arena.available == arena.n_slots and not loader._fetches
