"""Transfer loop: its tasks and their results."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import TierUnavailable
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker import loop as loop_module
from kvtier.worker.loading import State
from kvtier.worker.loads import Loader
from kvtier.worker.loop import (
    DECODE_PAUSE_S,
    FASTEST_BYTES_S,
    QUEUED_BYTES,
    QUEUED_PAUSE_S,
    TaskPool,
    TransferLoop,
    Turn,
)
from tests.manual_jobs import ManualJobs
from tests.waiting import wait_until

TIMEOUT_S = 0.4


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    jobs = ThreadJobs("loop", 1, 1)
    worker: Any = SimpleNamespace(clock=time.monotonic, timeout_s=TIMEOUT_S, order=None)
    made = TransferLoop(worker, jobs)
    part: Any = SimpleNamespace(work=(), events=[], due_s=float("inf"))
    made.parts.append(part)
    yield made
    jobs.close()


@pytest.fixture
def pool(loop: TransferLoop) -> Iterator[TaskPool]:
    jobs = ThreadJobs("pool", 1, 4)
    yield loop.pool(jobs)
    jobs.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_task_that_raises_holds_up_none_behind_it(loop: TransferLoop, pool: TaskPool) -> None:
    told: list[object] = []
    may_raise, has_run = threading.Event(), threading.Event()

    def fail() -> None:
        may_raise.wait(10)
        raise RuntimeError("a bug")

    pool.add(fail, told.append)
    pool.add(has_run.set)
    assert not loop.drain(0.0)
    may_raise.set()
    assert has_run.wait(10)
    assert loop.drain(10) and not loop.n_tasks
    assert [type(result) for result in told] == [TierUnavailable]


def test_a_post_does_not_wait_while_the_loop_polls_for_the_device(
    loop: TransferLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may come while a gather waits for a forward of the engine."""
    monkeypatch.setattr(loop_module, "PAUSE_MAX_S", 3600.0)
    ended, told = threading.Event(), list[object]()

    def is_done(event: object) -> bool:
        loop._pause_s = 30.0
        return ended.is_set()

    loop._worker.order = SimpleNamespace(is_done=is_done)  # type: ignore[misc]
    loop.parts[0].events.append(("gather", told.append, "gathered"))
    loop.post(None)
    wait_until(lambda: loop._pause_s > 20, "a pause", 10)
    ended.set()
    loop.post(told.append, "load")
    assert loop.drain(10) and told == ["load", "gathered"]


def test_tasks_run_beside_one_that_hangs(loop: TransferLoop, pool: TaskPool) -> None:
    told: list[object] = []
    let_go = threading.Event()
    pool.add(let_go.wait, told.append)
    pool.add(lambda: "the next", told.append)

    def has_next() -> bool:
        loop.check_deadlines()
        return told == ["the next"]

    wait_until(has_next, "the next task runs", 10)
    let_go.set()
    assert loop.drain(10)
    assert told == ["the next", True]


def test_a_task_that_its_pool_refuses_is_answered(loop: TransferLoop) -> None:
    told: list[object] = []
    jobs = ManualJobs(1)
    pool = loop.pool(jobs)
    for _ in range(2):
        pool.add(lambda: None, told.append)
    wait_until(lambda: told, "the answer", 10)
    jobs.run()
    jobs.close()
    pool.add(lambda: None, told.append)
    pool.add(lambda: None)
    assert loop.drain(10)
    full = "the queue of tasks is full: 1 of them for 1 threads"
    assert list(map(str, told)) == [full, "None", "the worker is closed"]


def test_a_part_whose_work_has_ended_is_not_looked_at_again(loop: TransferLoop) -> None:
    """A save that ends before its turn, as one of chunks that are stored, leaves its deadline behind."""
    n_turns, turn = 0, loop.turn

    def counted() -> Any:
        nonlocal n_turns
        n_turns += 1
        return turn()

    loop.turn = counted  # type: ignore[method-assign]
    loop.parts[0].due_s = time.monotonic() - 1
    for _ in range(5):
        loop.check_deadlines()
        assert loop.drain(10)
    assert n_turns == 1


def test_a_load_that_has_landed_is_answered_before_the_next_launches(loop: TransferLoop) -> None:
    """Launches wait for the interpreter lock, and the engine for the answer."""
    noted = list[str]()
    arrived, load = object(), SimpleNamespace(n_pending=1, waiting=[], deadline_s=float("inf"))
    landed = SimpleNamespace(n_pending=0, waiting=[], deadline_s=float("inf"))
    states: dict[State, list[object]] = {state: [] for state in State} | {State.ARRIVED: [arrived]}
    loader: Any = Loader.__new__(Loader)
    loader._worker, loader._loop, loader._together = loop._worker, loop, 1
    loader._chunks = SimpleNamespace(in_state=states, verify=lambda fetches: noted.append("verify"))
    loader._end = lambda ended: noted.append("answer")
    loader.work = [landed, load]
    loop._worker.arena = SimpleNamespace(slot_bytes=1)  # type: ignore[misc]
    assert loader.turn().has_moved
    assert noted == ["answer", "verify"] and loader.work == [load]
    states[State.ARRIVED].clear()
    states[State.READING].append(SimpleNamespace(reads=None))
    loader._chunks.take_reads = lambda: False
    loader.work.append(landed)
    assert loader.turn().has_moved, "an answer counts although no read has ended"
    load.n_pending = 0
    assert loader.turn() == Turn(True) and not loader.work and loader.due_s == float("inf")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copies_that_begin_while_the_loop_gives_up_are_waited_for(loop: TransferLoop) -> None:
    """A chunk that lands may be copied into the host arena: its slots are leased until then."""
    order, ended = SimpleNamespace(wait=lambda event: None, is_done=lambda event: event == "copy"), list[str]()
    loop._worker.order = order  # type: ignore[misc]
    (part,) = loop.parts

    def landed(value: str) -> None:
        loop.when_done(part, "copy", ended.append, value)

    def fail() -> Any:
        part.work = ()  # type: ignore[misc]
        raise RuntimeError("a bug")

    part.work, part.turn, part.give_up = ["a chunk"], fail, lambda: None  # type: ignore[method-assign,misc]
    part.events.append(("scatter", landed, "copied"))
    loop.post(None)
    assert loop.drain(10)
    assert ended == ["copied"]


@pytest.mark.parametrize(("decodes", "pause_s"), [(False, QUEUED_PAUSE_S), (True, DECODE_PAUSE_S)])
def test_the_pause_is_longer_while_requests_decode(
    loop: TransferLoop, decodes: bool, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never so long that half of the I/O may have ended."""
    pauses = list[float]()
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(sleep=pauses.append))
    loop.step_begins(computes=False, decodes=decodes)
    for n_bytes in (QUEUED_BYTES, 4 * QUEUED_BYTES):
        loop._give_way(n_bytes)
    assert pauses == [min(pause_s, QUEUED_BYTES / 2 / FASTEST_BYTES_S), pause_s]


def test_no_turn_is_made_while_the_engine_launches_a_forward(
    loop: TransferLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much I/O is queued, and a turn would take the interpreter lock from the engine."""
    monkeypatch.setattr(loop_module, "LAUNCH_PAUSE_MAX_S", 1800.0)
    monkeypatch.setattr(loop_module, "FASTEST_BYTES_S", 1e15)  # the I/O may end before the forward is launched
    (part,) = loop.parts
    n_turns = 0

    def turn() -> Turn:
        nonlocal n_turns
        n_turns += 1
        if n_turns == 3:
            monkeypatch.setattr(loop_module, "FASTEST_BYTES_S", QUEUED_BYTES / 3600)
        return Turn(has_moved=True, n_bytes=QUEUED_BYTES) if part.work else Turn()

    part.work, part.turn = ["a chunk"], turn  # type: ignore[method-assign,misc]
    loop.step_begins(computes=True, decodes=False)
    loop.post(None)
    wait_until(lambda: n_turns == 3, "turns although the forward goes on", 10)
    time.sleep(20 * QUEUED_PAUSE_S)
    assert n_turns == 3
    loop.forward_is_launched()
    wait_until(lambda: n_turns > 5, "turns behind the forward", 10)
    part.work = ()  # type: ignore[misc]
    assert loop.drain(10)
