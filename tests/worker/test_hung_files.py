"""Storage of which one file hangs, as on a striped file system with a target away: saves and loads of it end in time,
and those of other files go on."""

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.index.entry import first_set
from kvtier.io.ring import Batch, WriteOp
from kvtier.plan import LoadDone, SaveDone, SaveOutcome
from kvtier.runtime.threads import begin
from kvtier.storage import open_segments
from kvtier.storage import segments as segments_module
from kvtier.storage.open_segments import Name
from kvtier.storage.stuck_files import HUNG_FILES_MIN, StuckFiles
from kvtier.worker import loads
from kvtier.worker import transfer as transfer_module
from kvtier.worker.record_writer import SaveBatch, SaveState
from kvtier.worker.transfer import CLOSE_TIMEOUT_S
from tests.support.clock import Clock
from tests.support.rig import Engine, saved_by_another
from tests.waiting import wait_until

TIMEOUT_S = 2.0
FIRST, SECOND = list(range(64 * 2)), list(range(5000, 5000 + 64 * 2))
BLOCKS, OTHERS = list(range(8)), list(range(8, 16))


class Hang:
    """Has calls of `os` that concern files of these names wait until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.n_hanging = 0
        self._go_on = threading.Event()
        self._patch = monkeypatch

    def of(self, module: object, name: str) -> None:
        call = getattr(module, name)

        def wait_first(what: object, *args: object, **options: object) -> object:
            if self._name_of(what) in self.names:
                self.n_hanging += 1
                self._go_on.wait(30)
                self.n_hanging -= 1
            return call(what, *args, **options)

        self._patch.setattr(module, name, wait_first)

    def go_on(self) -> None:
        self.names.clear()
        self._go_on.set()

    def _name_of(self, what: object) -> str:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)  # type: ignore[call-overload]
        return os.path.basename(path)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang(monkeypatch)
    yield made
    made.go_on()


def changes(**more: object) -> dict[str, object]:
    return {"io": {"threads": 2, "timeout_s": TIMEOUT_S}, "queues": {"save_threads": 1, "load_threads": 1}, **more}


READS = changes(host={"arena_bytes": 8 << 20, "admit": "never"})  # of an engine that reads files each time


def segment_files(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("v2/*/*.kvseg"))


def answers(engine: Engine, n: int, timeout_s: float) -> dict[str, LoadDone]:
    """As an engine's steps take them."""
    found: dict[str, LoadDone] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < deadline_s:
        found.update((done.request_id, done) for done in engine.transfers[0].poll(0.01).loads)
    return found


def saves(engine: Engine, n: int, timeout_s: float) -> list[SaveDone]:
    found: list[SaveDone] = []
    deadline_s = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < deadline_s:
        found += engine.transfers[0].poll(0.01).saves
    return found


@pytest.fixture
def two_sets(tmp_path: Path) -> Path:
    """FIRST and SECOND, in a segment set each."""
    for tokens, blocks in ((FIRST, BLOCKS), (SECOND, OTHERS)):
        saved_by_another(tmp_path, tokens, blocks)
    assert len(segment_files(tmp_path)) == 2
    return tmp_path


def test_an_open_that_hangs_holds_up_no_load_of_other_files(two_sets: Path, hang: Hang) -> None:
    reader = Engine(two_sets, changes=READS)
    hang.names = {segment_files(two_sets)[0]}
    hang.of(os, "open")
    reader.begin_load("hangs", FIRST, BLOCKS)
    wait_until(lambda: hang.n_hanging)
    reader.begin_load("follows", FIRST, range(100, 108))
    started_s = time.monotonic()
    for number in range(3):
        reader.begin_load(f"other {number}", SECOND, OTHERS)
    found = answers(reader, 5, 10)
    took_s = time.monotonic() - started_s
    assert {name for name, done in found.items() if done.failed_blocks} == {"hangs", "follows"}
    assert len(found) == 5 and took_s < TIMEOUT_S + 2
    reader.begin_load("later", FIRST, BLOCKS)
    assert answers(reader, 1, TIMEOUT_S / 2)["later"].failed_blocks, "nobody waits for a file that is known to hang"
    reader.begin_load("other later", SECOND, OTHERS)
    assert not answers(reader, 1, 10)["other later"].failed_blocks, "one file is not the storage"
    hang.go_on()
    wait_until(lambda: not reader.load(FIRST, BLOCKS)[1][0].failed_blocks, timeout_s=20)
    assert reader.has_all_slots()


def test_a_set_that_hangs_holds_up_nobody_who_wants_what_lies_before_it_in_a_prompt(two_sets: Path, hang: Hang) -> None:
    both = [*FIRST, *SECOND]
    saved_by_another(two_sets, both, range(16))
    reader = Engine(two_sets, changes=READS)
    entries = reader.store.lookup(reader.keys(both))
    assert entries is not None
    sets = [first_set(entry) for entry in entries]
    assert sets[0] == sets[1] != sets[2] == sets[3]
    hang.names = {segments_module.segment_name(sets[2], 0)}
    hang.of(os, "open")
    reader.begin_load("hangs", both, range(16))
    wait_until(lambda: hang.n_hanging)
    reader.begin_load("before", FIRST, range(100, 108))
    assert not answers(reader, 1, TIMEOUT_S / 2)["before"].failed_blocks
    assert answers(reader, 1, 10)["hangs"].failed_blocks == set(range(8, 16)), "what lies before it has landed"
    hang.go_on()


def test_loads_behind_an_open_that_hangs_give_way_to_others(
    two_sets: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but time tells that the load is held up: no read is under way, and no slot is lacking."""
    monkeypatch.setattr(loads, "WINDOW_MIN", 4)
    monkeypatch.setattr(loads, "WINDOW_MAX", 4)
    third, both = list(range(9000, 9000 + 64 * 2)), [*FIRST, *SECOND]
    for tokens, blocks in ((both, range(16)), (third, BLOCKS)):
        saved_by_another(two_sets, tokens, blocks)
    long = {"io": {"threads": 2, "timeout_s": 20.0}}
    reader = Engine(two_sets, changes=READS | long)
    entries = reader.store.lookup(reader.keys(both))
    assert entries is not None
    hang.names = {segments_module.segment_name(first_set(entries[0]), 0)}
    hang.of(os, "open")
    reader.begin_load("hangs", both, range(16))
    wait_until(lambda: hang.n_hanging)
    reader.begin_load("other", third, range(100, 108))
    assert not answers(reader, 1, 18)["other"].failed_blocks, "a quarter of the time-out has passed"
    hang.go_on()
    assert set(answers(reader, 1, 30)) == {"hangs"}


@pytest.mark.parametrize("call", ["open", "fallocate"])
def test_a_save_that_hangs_ends_in_time_and_others_go_on(tmp_path: Path, hang: Hang, call: str) -> None:
    engine = Engine(tmp_path, changes=changes())
    engine.wait_for_set()
    arena = engine.transfers[0]._worker.arena
    first = engine.store._keeper.allocators.common._spares()[0].set_id
    hang.names = {segments_module.segment_name(first, 0)}
    hang.of(os if call == "open" else segments_module, call)
    writer = engine.transfers[0]._saver.writer
    started_s = time.monotonic()
    engine.begin_save(FIRST, BLOCKS)
    done = saves(engine, 2, 10)
    assert {answer.outcome for answer in done} == {SaveOutcome.FAILED} and len(done) == 2
    assert TIMEOUT_S * 0.9 < time.monotonic() - started_s < TIMEOUT_S + 2 and hang.n_hanging == 1
    assert arena.available == arena.n_slots, "its slots are free"
    engine.store.saved(done)
    engine.store._keeper.allocators.forget({first})
    writer.disk.clear()
    engine.wait_for_set()
    engine.begin_save(SECOND, OTHERS)
    outcomes = {answer.outcome for answer in saves(engine, 2, 10)}
    assert outcomes == {SaveOutcome.SAVED}, "another thread took its place, and another set its own"
    hang.go_on()
    wait_until(lambda: not writer._batches)
    assert engine.transfers[0].poll().saves == [] and arena.available >= arena.n_slots - 2
    assert engine.load(FIRST, range(100, 108)) == (0, []), "what came late was not published"


@pytest.mark.parametrize("call", ["open", "fstat"])
def test_a_save_that_hangs_holds_up_no_save_of_another_set(tmp_path: Path, hang: Hang, call: str) -> None:
    engine = Engine(tmp_path, changes=changes())
    engine.wait_for_set()
    first = engine.store._keeper.allocators.common._spares()[0].set_id
    if call == "fstat":  # the file is open, and is asked for its name
        engine.save(range(3000, 3064), range(16, 20))
    hang.names = {segments_module.segment_name(first, 0)}
    hang.of(os, call)
    engine.begin_save(FIRST, BLOCKS)
    wait_until(lambda: hang.n_hanging)
    engine.store._keeper.allocators.forget({first})
    engine.wait_for_set()
    engine.begin_save(SECOND, OTHERS)
    by_key = {answer.key: answer.outcome for answer in saves(engine, 4, 10)}
    assert list(by_key) == [*engine.keys(SECOND), *engine.keys(FIRST)], "the others are answered first"
    assert [by_key[key] for key in engine.keys(SECOND)] == [SaveOutcome.SAVED] * 2
    assert [by_key[key] for key in engine.keys(FIRST)] == [SaveOutcome.FAILED] * 2
    hang.go_on()


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_file_that_hangs_holds_up_no_other_file_of_its_set(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    io = {"threads": 2, "timeout_s": 3 * TIMEOUT_S, "stripes": 2}
    engine = Engine(tmp_path, changes=changes() | {"io": io})
    engine.wait_for_set()
    worker, writer = engine.transfers[0]._worker, engine.transfers[0]._saver.writer
    first = engine.store._keeper.allocators.common._spares()[0].set_id
    hang.names = {segments_module.segment_name(first, 0)}
    if call == "write":
        submit, returned = worker.io.ring.submit, threading.Event()

        def hang_first(ops: Sequence[WriteOp]) -> object:
            batch = submit(ops)
            if hang._name_of(ops[0].fd) not in hang.names:
                return batch
            hang.n_hanging += 1
            return SimpleNamespace(wait=returned.wait, cancel=batch.cancel, results=batch.results)

        monkeypatch.setattr(worker.io.ring, "submit", hang_first)
    else:
        hang.of(os, "open")
    tokens, blocks = list(range(64 * 4)), list(range(16))
    engine.begin_save(tokens, blocks)
    keys = engine.keys(tokens)
    found = saves(engine, 2, 10)
    assert {done.key: done.outcome for done in found} == dict.fromkeys(keys[1::2], SaveOutcome.SAVED)
    wait_until(lambda: all(batch.slow_s < time.monotonic() for batch in writer._batches))
    more = list(range(9000, 9000 + 64 * 4))
    engine.begin_save(more, range(16, 32))
    found = saves(engine, 2, 10)
    assert {done.key: done.outcome for done in found} == dict.fromkeys(engine.keys(more)[1::2], SaveOutcome.SAVED)
    assert hang.n_hanging == 1, "chunks of the file wait and hang no further thread"
    failed = saves(engine, 4, 30)
    assert {done.outcome for done in failed} == {SaveOutcome.FAILED} and len(failed) == 4
    engine.begin_save(SECOND, OTHERS)
    by_key = {done.key: done.outcome for done in saves(engine, 2, 10)}
    assert list(by_key.values()) == [SaveOutcome.FAILED, SaveOutcome.SAVED], "saving does not pause"
    hang.go_on()
    if call == "write":
        returned.set()
    wait_until(lambda: not writer._batches and engine.has_all_slots())
    assert engine.load(tokens, range(100, 116)) == (0, []), "what came late was not published"


def test_saves_that_are_queued_behind_one_that_hangs_do_not_follow_it(tmp_path: Path, hang: Hang) -> None:
    engine = Engine(tmp_path, changes=changes())
    engine.wait_for_set()
    hang.names = {segments_module.segment_name(engine.store._keeper.allocators.common._spares()[0].set_id, 0)}
    hang.of(os, "open")
    started_s = time.monotonic()
    for number in range(4):
        engine.begin_save(range(9000 * number, 9000 * number + 64), range(4 * number, 4 * number + 4))
        wait_until(lambda: hang.n_hanging)
    done = saves(engine, 4, 10)
    assert [answer.outcome for answer in done] == [SaveOutcome.FAILED] + [SaveOutcome.RESTING] * 3
    assert time.monotonic() - started_s < TIMEOUT_S + 2
    hang.go_on()


def test_closing_waits_for_no_storage_that_hangs(tmp_path: Path, hang: Hang) -> None:
    engine = Engine(tmp_path, changes=changes())
    engine.save(FIRST, BLOCKS)
    hang.names = set(segment_files(tmp_path))
    hang.of(os, "ftruncate")
    hang.of(os, "lstat")
    hang.of(os, "open")
    started_s = time.monotonic()
    engine.transfers[0].drain(1)
    engine.transfers[0].close()
    assert time.monotonic() - started_s < 5
    started_s = time.monotonic()
    engine.store.close()
    assert time.monotonic() - started_s < 12
    hang.go_on()


def test_reads_that_are_slow_while_others_end_say_nothing_of_the_storage() -> None:
    clock = Clock(100.0)
    stuck = StuckFiles(10.0, clock)
    names = [(number, 0) for number in range(HUNG_FILES_MIN)]
    for number in range(20):
        clock.now_s = 100.0 + number
        stuck.answered()
    stuck.note_read(names, begun_s=105.0)
    assert "0000000000000000-0000" in stuck.why_not(names) and stuck.why_not([(99, 0)]) == ""
    clock.now_s += 10.0
    assert stuck.why_not(names) == "", "asked again"


def test_a_storage_of_which_nothing_answers_is_left_as_a_whole() -> None:
    clock = Clock(100.0)
    stuck = StuckFiles(10.0, clock)
    stuck.answered()
    clock.now_s = 111.0
    for number in range(HUNG_FILES_MIN):
        assert stuck.why_not([(99, 0)]) == ""
        stuck.note_read([(number, 0)], begun_s=101.0)
    assert stuck.why_not([(99, 0)]) == "the storage did not answer lately"


def test_a_read_that_had_waited_for_its_turn_says_nothing() -> None:
    clock = Clock(100.0)
    stuck = StuckFiles(10.0, clock)
    stuck.note_read([(1, 0)], begun_s=96.0)
    assert not stuck.has_any


@pytest.mark.parametrize("call", ["fstat", "close"])
def test_a_file_that_hangs_keeps_no_other_file_open(two_sets: Path, hang: Hang, call: str) -> None:
    """Files that were unlinked, of which one hangs as it is asked for its name or closed."""
    reader = Engine(two_sets, changes=READS)
    for tokens, blocks in ((FIRST, BLOCKS), (SECOND, OTHERS)):
        assert not reader.load(tokens, blocks)[1][0].failed_blocks
    files = reader.transfers[0]._worker.files(reader.namespace.id)
    first, second = (segments_module.segment_name(*name) for name in files._open)
    hang.names = {first, f"{first} (deleted)"}
    hang.of(os, call)
    if call == "fstat":
        wait_until(lambda: hang.n_hanging)
        (path,) = two_sets.glob(f"v2/*/{second}")
        path.unlink()
    else:
        for path in two_sets.glob("v2/*/*.kvseg"):
            path.unlink()
        wait_until(lambda: hang.n_hanging)

    def is_open(name: str) -> bool:
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                if f"/{name}" in os.readlink(f"/proc/self/fd/{fd}"):
                    return True
        return False

    wait_until(lambda: not is_open(second), timeout_s=20)
    assert hang.n_hanging == 1 and is_open(first)
    hang.go_on()
    reader.close()


def test_loads_go_on_beside_an_open_that_hangs_while_another_file_does(two_sets: Path, hang: Hang) -> None:
    third = list(range(9000, 9000 + 64 * 2))
    saved_by_another(two_sets, third, BLOCKS)
    reader = Engine(two_sets, changes=READS)
    assert not reader.load(SECOND, OTHERS)[1][0].failed_blocks
    entries = reader.store.lookup([*reader.keys(FIRST), *reader.keys(SECOND)])
    assert entries is not None
    hang.names = {segments_module.segment_name(first_set(entry), 0) for entry in entries}
    hang.of(os, "fstat")
    wait_until(lambda: hang.n_hanging)
    hang.of(os, "open")
    reader.begin_load("hangs", FIRST, BLOCKS)
    wait_until(lambda: hang.n_hanging == 2)
    reader.begin_load("other", third, range(100, 108))
    found = answers(reader, 2, 10)
    assert found["hangs"].failed_blocks and not found["other"].failed_blocks
    hang.go_on()
    reader.close()


def test_a_batch_is_split_once_although_its_thread_opens_the_next_file(tmp_path: Path) -> None:
    """No chunk is lost or written twice, whenever in the turn of the loop the thread names the next file."""

    class GoesOn(SaveBatch):
        """Names the second file from the `switch_at`-th time on that it is asked."""

        __slots__ = ("asked", "switch_at")

        @property
        def opening(self) -> Name | None:
            self.asked += 1
            return (1, 0) if self.asked <= self.switch_at else (2, 0)

        @opening.setter
        def opening(self, value: Name | None) -> None:
            self.asked = 0

    engine = Engine(tmp_path, changes=changes())
    writer = engine.transfers[0]._saver.writer
    staged = [SimpleNamespace(file=(number, 0)) for number in (1, 1, 2, 2)]
    for switch_at in range(12):
        batch = GoesOn(b"", list(staged), SaveState.OPENING, 0.0)  # type: ignore[arg-type]
        batch.switch_at = switch_at
        writer.ready = []
        writer._split(batch)
        both = [*writer.ready, *batch.staged]
        assert sorted(map(id, both)) == sorted(map(id, staged)), f"after {switch_at} questions"
    writer.ready = []


@pytest.mark.parametrize("how", ["read", "open"])
def test_no_byte_of_a_load_that_hung_reaches_the_pages_after_close(
    two_sets: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    reader = Engine(two_sets, changes=READS)
    worker, hangs = reader.transfers[0]._worker, threading.Event()
    if how == "read":  # the bytes come, but the ring does not say so before `hangs` is set
        states, n_asked = worker.io.reader.states, itertools.count()

        def hang_first(batches: Sequence[Batch]) -> bytes:
            next(n_asked)
            return states(batches) if hangs.is_set() else bytes(len(batches))

        monkeypatch.setattr(worker.io.reader, "states", hang_first)
    else:
        hang.names = set(segment_files(two_sets))
        hang.of(os, "open")
    reader.begin_load("hangs", FIRST, BLOCKS)
    wait_until(lambda: hang.n_hanging if how == "open" else next(n_asked) > 5)
    started_s = time.monotonic()
    reader.transfers[0].close()
    assert time.monotonic() - started_s < 5
    (done,) = reader.transfers[0].poll().loads
    assert done.failed_blocks == set(BLOCKS), "it is answered, so nobody waits for it"
    before = reader.blocks(BLOCKS)
    hangs.set()
    hang.go_on()
    wait_until(lambda: not any(jobs.pending() for jobs in reader.transfers[0]._jobs))
    time.sleep(0.1)
    assert all(map(torch.equal, reader.blocks(BLOCKS), before))


def test_a_load_that_comes_while_loads_are_stopped_is_answered(two_sets: Path) -> None:
    """On a tier of objects any thread may ask for one."""
    reader = Engine(two_sets, changes=READS | {"io": {"threads": 2}})
    assert reader.transfers[0]._loader.stop(1.0)
    reader.begin_load("late", FIRST, BLOCKS)
    assert answers(reader, 1, TIMEOUT_S)["late"].failed_blocks == set(BLOCKS)


def test_close_waits_for_a_scatter_under_way(two_sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Engine(two_sets, changes=READS)
    (transfer,) = reader.transfers
    may_scatter, has_begun, decode = threading.Event(), threading.Event(), type(transfer._worker.codec).decode

    def slow(*args: Any) -> None:
        has_begun.set()
        may_scatter.wait(10)
        decode(*args)

    monkeypatch.setattr(type(transfer._worker.codec), "decode", slow)
    reader.begin_load("slow", FIRST, BLOCKS)
    assert has_begun.wait(10)
    closed = begin("close", transfer.close)
    time.sleep(CLOSE_TIMEOUT_S + 0.5)
    assert not closed.done()
    may_scatter.set()
    closed.result(10)
    before = reader.blocks(BLOCKS)
    (done,) = transfer.poll().loads
    time.sleep(0.1)
    assert all(map(torch.equal, reader.blocks(BLOCKS), before)) and len(done.failed_blocks) < len(BLOCKS)


def test_a_scatter_that_hangs_does_not_hold_up_close(
    two_sets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a launch on a GPU that hangs: the lock that is held then was waited for without end."""
    reader = Engine(two_sets, changes=READS)
    (transfer,) = reader.transfers
    goes_on, has_begun = threading.Event(), threading.Event()

    def hang_in_launch(*args: Any) -> None:
        has_begun.set()
        goes_on.wait(60)

    monkeypatch.setattr(type(transfer._worker.codec), "decode", hang_in_launch)
    monkeypatch.setattr(loads, "LAUNCH_TIMEOUT_S", 0.2)
    reader.begin_load("hangs", FIRST, BLOCKS)
    assert has_begun.wait(10)
    begin("close", transfer.close).result(20)
    assert "do not free its memory" in caplog.text and transfer._worker in transfer_module._outlived
    goes_on.set()
    wait_until(lambda: not any(jobs.pending() for jobs in transfer._jobs))


def test_a_close_that_hangs_holds_up_no_load(two_sets: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load closes files that have not been used for long, to open its own."""
    third = list(range(9000, 9000 + 64 * 2))
    saved_by_another(two_sets, third, BLOCKS)
    monkeypatch.setattr(open_segments, "OPEN_FILES_MAX", 1)
    long = {"io": {"threads": 2, "timeout_s": 60.0}}
    reader = Engine(two_sets, changes=READS | long)
    assert not reader.load(FIRST, BLOCKS)[1][0].failed_blocks
    files = reader.transfers[0]._worker.files(reader.namespace.id)
    (first,) = (segments_module.segment_name(*name) for name in files._open)
    hang.names = {first}
    hang.of(os, "close")
    for tokens in (SECOND, third, SECOND):
        reader.begin_load("other", tokens, OTHERS)
        found = answers(reader, 1, TIMEOUT_S / 2)
        assert found and not found["other"].failed_blocks
    wait_until(lambda: hang.n_hanging)
    wait_until(lambda: len(files._open) + len(files.released) == 1, timeout_s=20)
    assert hang.n_hanging == 1
    hang.go_on()
    reader.close()
