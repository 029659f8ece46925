"""Bounds and deadlines: full queues skip, hung storage becomes a miss in time."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.errors import IndexUnavailable
from kvtier.io.engines import Engines
from kvtier.kernels.paged import Move, PagedKV
from kvtier.plan import LoadDone, SaveOutcome
from kvtier.scheduler.store import WantedChunk
from kvtier.storage.segments import SegmentFiles
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, geometry, saved_by_another
from tests.waiting import wait_until
from tests.worker.held_ring import HeldRing


def with_hung_ring(engine: Engine) -> HeldRing:
    worker = engine.transfers[0]._worker
    ring = HeldRing(worker.io.ring)
    object.__setattr__(worker, "io", Engines(ring, ring))  # type: ignore[arg-type]
    engine.transfers[0]._loader._chunks.reader.engine = ring
    return ring


def begin_loads(reader: Engine, n: int) -> None:
    """Begin loads of TOKENS into 20 blocks each."""
    for number in range(n):
        reader.begin_load(f"r{number}", TOKENS, range(20 * number, 20 * number + 20))


def test_a_hung_read_is_a_miss_in_time_and_its_slot_comes_back(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path, changes={"io": {"threads": 2, "timeout_s": 0.5}})
    ring = with_hung_ring(reader)
    started = time.monotonic()
    _, (answer,) = reader.load(TOKENS, TARGET)
    assert 0.4 < time.monotonic() - started < 3.0
    assert answer.failed_blocks == frozenset(TARGET)
    arena = reader.transfers[0]._worker.arena
    assert arena.available == arena.n_slots - 5, "slots of hung reads are not given to others (I10)"
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks, "stalled storage is not asked again at once"
    ring.let_go.set()
    assert reader.has_all_slots()
    assert all(not tensor.any() for tensor in reader.blocks(TARGET)), "late bytes reached engine blocks"


def test_a_hung_write_is_given_up_and_published_never(tmp_path: Path) -> None:
    engine = Engine(tmp_path, changes={"io": {"threads": 2, "timeout_s": 0.3}})
    ring = with_hung_ring(engine)
    engine.transfers[0]._saver.writer.disk._pause_s = 60.0  # in which the next save comes, however busy the machine is
    assert {answer.outcome for answer in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.FAILED}
    assert engine.load(TOKENS, TARGET) == (0, [])
    outcomes = {answer.outcome for answer in engine.save(list(range(64)), BLOCKS)}
    assert outcomes == {SaveOutcome.RESTING}, "saving pauses"
    ring.let_go.set()
    assert engine.has_all_slots()


def test_saves_beyond_the_bound_are_refused_without_waiting(tmp_path: Path) -> None:
    engine = Engine(tmp_path, changes={"queues": {"save_chunks_max": 2}})
    ring = with_hung_ring(engine)
    engine.wait_for_set()
    keys = engine.keys(TOKENS)
    plan = engine.plan(TOKENS, BLOCKS)
    started = time.monotonic()
    engine.transfers[0].save(plan)
    assert time.monotonic() - started < 5, "of io.timeout_s"
    skipped = [answer for answer in engine.transfers[0].poll().saves if answer.outcome is SaveOutcome.QUEUE_FULL]
    assert len(skipped) == 3
    assert "skipped_chunks_queue_full" not in engine.transfers[0].metrics.total(), "they are planned again"
    ring.let_go.set()
    lost = engine.store.saved(skipped)
    assert [(one.key, one.outcome) for one in lost] == [(key, SaveOutcome.QUEUE_FULL) for key in keys[2:5]]
    assert not engine.store.is_known(keys[4]) and engine.store.is_known(keys[0])


def test_a_step_of_many_small_chunks_is_saved_whole(tmp_path: Path) -> None:
    """By default the memory alone bounds saves: chunks beyond 256 of a step were refused, however small they were."""
    shape = geometry(layers=1, kv_heads=1, k_head_size=8, v_head_size=8)
    engine = Engine(tmp_path, shape=shape, n_blocks=1200)
    engine.wait_for_set()
    outcomes = [answer.outcome for answer in engine.run_save(engine.plan(range(64 * 300), range(1200)))]
    assert outcomes == 300 * [SaveOutcome.SAVED]


def test_loads_beyond_the_bound_wait(tmp_path: Path) -> None:
    """They were answered as failed, as if the storage were at fault."""
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path, changes={"queues": {"load_requests_max": 1, "load_threads": 1}})
    ring = with_hung_ring(reader)
    n_loads = 5  # at work, queued, and three beyond
    begin_loads(reader, n_loads)
    wait_until(lambda: ring.n_submitted, "the first load at work")
    assert not reader.transfers[0].poll().loads
    ring.let_go.set()
    done: list[LoadDone] = []
    wait_until(lambda: done.extend(reader.transfers[0].poll().loads) or len(done) == n_loads, "all loads")
    assert [load.request_id for load in done] == [f"r{n}" for n in range(n_loads)]
    assert not any(load.failed_blocks for load in done)
    counted = reader.transfers[0].metrics.total()
    assert (counted["load_requests"], counted.get("load_failures", 0)) == (n_loads, 0)


def test_loads_beyond_the_bound_are_answered_by_their_deadline(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    changes = {"queues": {"load_requests_max": 1, "load_threads": 1}, "io": {"threads": 2, "timeout_s": 0.5}}
    reader = Engine(tmp_path, changes=changes)
    ring = with_hung_ring(reader)
    begin_loads(reader, 8)
    done: list[LoadDone] = []
    wait_until(lambda: done.extend(reader.transfers[0].poll().loads) or len(done) == 8, "all answers")
    assert all(len(load.failed_blocks) == 20 for load in done)
    ring.let_go.set()


def test_a_dead_index_is_a_miss_and_saving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)

    def dead(*_: object) -> None:
        raise IndexUnavailable("gone")

    with monkeypatch.context() as patched:
        for name in ("resolve", "publish", "retract"):
            patched.setattr(type(engine.store._keeper._index), name, dead)
        assert engine.load(TOKENS, TARGET) == (0, [])
        assert {answer.outcome for answer in engine.save(list(range(64)), BLOCKS)} == {SaveOutcome.FAILED}
    assert engine.store.metrics.total()["index_errors"] == 1
    assert engine.load(TOKENS, TARGET)[0] == 5


def test_more_chunks_than_the_arena_has_slots_load_all_the_same(tmp_path: Path) -> None:
    tokens = list(range(64 * 20))
    saved_by_another(tmp_path, tokens, range(80), changes={"host": {"arena_bytes": 64 << 20}})
    reader = Engine(tmp_path, changes={"host": {"arena_bytes": 5 * (4096 + (256 << 10)), "admit": "always"}})
    assert reader.transfers[0]._worker.arena.n_slots == 5
    n_chunks, (answer,) = reader.load(tokens, range(100, 180))
    assert n_chunks == 20 and answer.failed_blocks == frozenset()
    assert reader.holds(tokens, range(100, 180))
    reader.transfers[0]._worker.arena.check()


def test_a_hanging_open_is_a_miss_in_time_and_never_stops_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that hangs in open(): reads have deadlines of their own, system calls have not."""
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path, changes={"io": {"threads": 2, "timeout_s": 1.0}})
    transfer, free = reader.transfers[0], threading.Event()
    opened = SegmentFiles._open_file

    def hang(self: SegmentFiles, name: tuple[int, int]) -> object:
        free.wait(20)
        return opened(self, name)

    monkeypatch.setattr(SegmentFiles, "_open_file", hang)
    answers: list[str] = []
    begin_loads(reader, 5)
    deadline = time.monotonic() + 15
    while len(answers) < 5 and time.monotonic() < deadline:
        started = time.monotonic()
        done = transfer.poll().loads
        assert time.monotonic() - started < 0.9, "the engine's thread waited"
        assert all(len(answer.failed_blocks) == 20 for answer in done)
        answers += [answer.request_id for answer in done]
        time.sleep(0.01)
    assert sorted(answers) == [f"r{number}" for number in range(5)]
    free.set()
    assert transfer.drain(10)
    assert transfer.poll().loads == [], "each plan is answered once"
    assert all(not tensor.any() for tensor in reader.blocks(range(100))), "a late thread wrote into engine blocks"
    time.sleep(1.1)
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset(), "storage that is back is used"
    assert reader.has_all_slots()


def test_two_loads_never_wait_for_each_other(tmp_path: Path) -> None:
    """More loads than slots, all of the same prefixes, in an arena of five: all are served, and soon."""
    prompts = [[*range(64 * n), *range(9000, 9000 + 64 * 8)] for n in range(4)]
    writer = Engine(tmp_path, changes={"host": {"arena_bytes": 64 << 20}})
    for prompt in prompts:
        writer.save(prompt, range(len(prompt) // 16))
    writer.close()
    changes = {
        "host": {"arena_bytes": 5 * (4096 + (256 << 10)), "admit": "second_hit"},
        "queues": {"load_threads": 6},
        "io": {"threads": 4, "timeout_s": 60.0},
    }
    reader = Engine(tmp_path, changes=changes, n_blocks=1024)
    for number in range(18):
        prompt = prompts[number % 4]
        reader.begin_load(f"r{number}", prompt, range(50 * number, 50 * number + len(prompt) // 16))
    started = time.monotonic()
    assert reader.transfers[0].drain(60)
    assert time.monotonic() - started < 50, "one waited to the end of its time"
    assert [answer.failed_blocks for answer in reader.transfers[0].poll().loads] == [frozenset()] * 18
    reader.transfers[0]._worker.arena.check()
    assert reader.has_all_slots()


def test_a_long_queue_is_not_taken_for_dead_storage(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path, changes={"queues": {"load_threads": 1}, "io": {"threads": 2, "timeout_s": 1.2}})
    worker = reader.transfers[0]._worker
    decode = worker.codec.decode

    def slow(pages: PagedKV, moves: Sequence[Move]) -> None:
        time.sleep(0.06 * len(moves))
        decode(pages, moves)

    worker.codec.decode = slow  # type: ignore[method-assign]
    begin_loads(reader, 10)
    assert reader.transfers[0].drain(10)
    answers = reader.transfers[0].poll().loads
    assert len(answers) == 10 and 0 < sum(bool(answer.failed_blocks) for answer in answers) < 10
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset(), "a fresh request was refused"


def test_a_gather_that_raises_loses_no_slot_and_no_answer(tmp_path: Path) -> None:
    engine = Engine(tmp_path, changes={"queues": {"save_chunks_max": 4}})
    worker = engine.transfers[0]._worker
    encode, calls = worker.codec.encode, iter(range(100))

    def fail_first(pages: PagedKV, moves: Sequence[Move]) -> None:
        encode(pages, moves[:2])
        if next(calls) == 0:
            raise RuntimeError("an illegal memory access was encountered")
        encode(pages, moves[2:])

    worker.codec.encode = fail_first  # type: ignore[method-assign]
    engine.wait_for_set()
    keys = engine.keys(TOKENS)
    plan = engine.store.plan_save([WantedChunk(key, bytes(16), tuple(range(4))) for key in keys])
    assert plan is not None
    with pytest.raises(RuntimeError):
        engine.transfers[0].save(plan)
    done = engine.transfers[0].poll().saves
    assert [answer.key for answer in done] == keys
    assert [answer.outcome for answer in done] == 4 * [SaveOutcome.FAILED] + [SaveOutcome.QUEUE_FULL]
    assert worker.arena.available == worker.arena.n_slots
    engine.store.saved(done)
    assert len(engine.save(TOKENS, BLOCKS)) == 5
