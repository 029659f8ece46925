"""Engines' halves on a striped file system of which one target is away, with the errors that Lustre gave: what the
others hold is loaded and saved, everything ends in time, and nothing is lost."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.index.entry import locations_of
from kvtier.maintenance.record_check import RecordVerdict, judge
from kvtier.plan import SaveOutcome
from kvtier.storage.segments import segment_name
from tests.engines.targets import Targets, targets
from tests.support.rig import Engine
from tests.waiting import wait_until
from tests.worker.test_hung_files import answers, saves

TIMEOUT_S = 3.0  # of an operation; seconds
ANSWER_TIMEOUT_S = 60.0  # for an answer on a machine that runs more than it can; seconds
FIRST, SECOND = list(range(64 * 2)), list(range(5000, 5000 + 64 * 2))
BLOCKS, OTHERS = list(range(8)), list(range(8, 16))


@pytest.fixture
def striped(tmp_path: Path) -> Iterator[Targets]:
    with targets(tmp_path) as made:
        yield made


def engine_on(striped: Targets, **more: object) -> Engine:
    io = {"threads": 4, "timeout_s": TIMEOUT_S, "stripes": 1}  # a set of each target
    never = {"arena_bytes": 8 << 20, "admit": "never"}
    index = {"path": str(striped.below.with_name("index"))}
    return Engine(striped.root, changes={"io": io, "host": never, "index": index, **more})


def two_sets(striped: Targets) -> list[str]:
    """FIRST and SECOND in a segment each, of a target each; their files' names."""
    for tokens, blocks in ((FIRST, BLOCKS), (SECOND, OTHERS)):
        writer = engine_on(striped)
        assert {done.outcome for done in writer.save(tokens, blocks)} == {SaveOutcome.SAVED}
        writer.close()
    return sorted(path.name for path in striped.below.glob("v2/*/*.kvseg"))


@pytest.mark.parametrize("fault", ["fails", "short reads", "hangs"])
def test_what_other_targets_hold_is_loaded_and_nothing_is_lost(
    striped: Targets, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = two_sets(striped)
    reader = engine_on(striped)
    striped.take_away(first, fault)
    reader.begin_load("away", FIRST, BLOCKS)
    for number in range(4):
        reader.begin_load(f"other {number}", SECOND, OTHERS)
    found = answers(reader, 5, ANSWER_TIMEOUT_S)  # the target is away until it is mended below
    assert len(found) == 5
    assert {name for name, done in found.items() if done.failed_blocks} == {"away"}
    for _ in range(20):
        reader.begin_load("again", FIRST, BLOCKS)
        assert answers(reader, 1, ANSWER_TIMEOUT_S)["again"].failed_blocks
    assert sum("recomputed" in line for line in caplog.messages) <= 3, "a line a cause, not a request"
    striped.mend()
    wait_until(lambda: not reader.load(FIRST, BLOCKS)[1][0].failed_blocks, timeout_s=ANSWER_TIMEOUT_S)
    assert len(reader.store.lookup(reader.keys(FIRST)) or ()) == 2
    reader.close()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_save_whose_target_is_away_ends_in_time_and_another_set_is_filled(striped: Targets, fault: str) -> None:
    engine = engine_on(striped, queues={"save_threads": 1})
    engine.wait_for_set()
    first = engine.store._keeper.allocators.common._spares()[0].set_id
    striped.take_away(segment_name(first, 0), fault)
    engine.begin_save(FIRST, BLOCKS)
    done = saves(engine, 2, ANSWER_TIMEOUT_S)
    assert [answer.outcome for answer in done] == [SaveOutcome.FAILED] * 2
    engine.store.saved(done)
    engine.store._keeper.allocators.forget({first})
    engine.transfers[0]._saver.writer.disk.clear()
    engine.wait_for_set()
    engine.begin_save(SECOND, OTHERS)
    assert [answer.outcome for answer in saves(engine, 2, ANSWER_TIMEOUT_S)] == [SaveOutcome.SAVED] * 2
    striped.mend()
    engine.close()


def test_no_thread_ends_with_a_traceback(striped: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    first, _ = two_sets(striped)
    reader = engine_on(striped)
    with_open = reader.load(FIRST, BLOCKS)
    assert not with_open[1][0].failed_blocks
    striped.take_away(first, "fails")  # fstat of an open descriptor says ESHUTDOWN now
    assert reader.load(FIRST, BLOCKS)[1][0].failed_blocks
    reader.transfers[0].tidy()
    assert not reader.load(SECOND, OTHERS)[1][0].failed_blocks
    striped.mend()
    wait_until(lambda: not reader.load(FIRST, BLOCKS)[1][0].failed_blocks, timeout_s=ANSWER_TIMEOUT_S)
    reader.close()
    assert ended == []


@pytest.mark.parametrize("is_open", [False, True])
def test_records_of_which_reads_end_too_soon_for_long_are_not_lost(striped: Targets, is_open: bool) -> None:
    """By its size the file has them, so a target is away and no byte is known to be another."""
    first, _ = two_sets(striped)
    reader = engine_on(striped)
    if is_open:  # else its header cannot be read
        assert not reader.load(FIRST, BLOCKS)[1][0].failed_blocks
    entries = reader.store.lookup(reader.keys(FIRST))
    assert entries is not None and len(entries) == 2
    striped.take_away(first, "short reads")
    reader.begin_load("away", FIRST, BLOCKS)
    assert answers(reader, 1, ANSWER_TIMEOUT_S)["away"].failed_blocks
    files = reader.transfers[0]._worker.files(reader.namespace.id)
    for key, entry in zip(reader.keys(FIRST), entries, strict=True):
        for location in locations_of(entry):
            assert judge(files, key, location) is RecordVerdict.UNKNOWN
    reader.transfers[0]._loader.rechecks._clock = lambda: math.inf  # all are due
    reader.transfers[0]._loader.rechecks.run()
    striped.mend()
    assert len(reader.store.lookup(reader.keys(FIRST)) or ()) == 2
    reader.close()
