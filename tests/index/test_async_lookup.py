"""Lookups beside the scheduler's thread."""

import threading
import time
from collections.abc import Sequence

import pytest

from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.errors import IndexUnavailable
from kvtier.index import async_lookup
from kvtier.index.async_lookup import (
    ANSWER_KEPT_S,
    PENDING_MAX,
    WAIT_BURST_S,
    WAIT_S,
    WAIT_SHARE,
    InBackground,
    LookupResult,
    Lookups,
)
from kvtier.index.memory import MemoryIndex
from kvtier.runtime.threads import ThreadJobs
from kvtier.scheduler.load_threshold import FixedThreshold
from tests.engines.fakes import FakeStore
from tests.manual_jobs import ManualJobs
from tests.support.clock import Clock


class SlowIndex(MemoryIndex):
    """Answers when it is let, with an entry for every key."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.delay_s = delay_s
        self.asked = 0
        self.is_down = False

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        self.asked += 1
        time.sleep(self.delay_s)
        assert self.may_answer.wait(10)
        if self.is_down:
            raise IndexUnavailable("down")
        return list(keys)


KEYS = [b"a", b"b", b"c"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timeouts of the waits of this thread, measured where they are made, for the machine may be busy."""
    found: list[float] = []
    wait = threading.Event.wait

    def measured(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and timeout is not None:
            found.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", measured)
    return found


def test_a_slow_index_never_holds_the_scheduler(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """Some waits of WAIT_S, then none."""
    index = SlowIndex()
    lookups = InBackground(index, ThreadJobs("lookup", 4, 64), Clock())
    for number in range(50):
        for _ in range(10):
            assert lookups.resolve([bytes([number])]) is None
    assert waits == [WAIT_S] * 5 and sum(waits) == pytest.approx(WAIT_BURST_S)
    monkeypatch.undo()
    index.may_answer.set()
    deadline = time.monotonic() + 10
    for number in range(50):
        while (found := lookups.resolve([bytes([number])])) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert found.entries == [bytes([number])]
    assert index.asked == 50, "each was asked once"
    lookups.close()


def test_the_scheduler_waits_again_for_a_share_of_the_time(waits: list[float]) -> None:
    """An index that was slow once, or whose thread came late to the interpreter lock, is not taken for slow forever."""
    clock, jobs = Clock(), ManualJobs(1000)
    lookups = InBackground(SlowIndex(), jobs, clock)
    for number in range(1000):
        clock.now_s += 0.01
        lookups.resolve([number.to_bytes(2, "big")])
    assert sum(waits) == pytest.approx(WAIT_BURST_S + WAIT_SHARE * 10, abs=2 * WAIT_S)


def test_a_quick_index_answers_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAIT_S", "WAIT_BURST_S"):  # a busy machine takes more than 2 ms to start the other thread
        monkeypatch.setattr(async_lookup, name, 10.0)
    index = SlowIndex()
    index.may_answer.set()
    lookups = InBackground(index, ThreadJobs("lookup", 1, 8))
    answers = [lookups.resolve([bytes([number])]) for number in range(100)]
    assert None not in answers
    lookups.close()


def test_an_answer_is_given_once_and_not_when_it_is_old() -> None:
    index, clock, jobs = SlowIndex(), Clock(), ManualJobs(100)
    index.may_answer.set()
    lookups = InBackground(index, jobs, clock)
    assert lookups.resolve(KEYS) is None and lookups.resolve(KEYS) is None
    assert jobs.pending() == 1
    jobs.run()
    assert lookups.resolve(KEYS) == LookupResult(KEYS, 0.0)
    assert lookups.resolve(KEYS) is None, "the next one asks anew"
    jobs.run()
    clock.now_s = ANSWER_KEPT_S + 0.1
    assert lookups.resolve(KEYS) is None, "nobody came for that one in time"
    clock.now_s += 0.5
    jobs.run()
    assert lookups.resolve(KEYS) == LookupResult(KEYS, 0.5)


class Asking:
    """A request of four chunks, whose lookups are answered when `jobs` are run."""

    def __init__(self) -> None:
        self.index, self.clock, self.jobs, self.store = SlowIndex(), Clock(), ManualJobs(100), FakeStore()
        self.index.may_answer.set()
        lookups = InBackground(self.index, self.jobs, self.clock)

        def lookup(keys: Sequence[bytes], asker: str) -> list[bytes] | None:
            found = lookups.resolve(keys, asker)
            return None if found is None else found.entries

        self.store.lookup = lookup  # type: ignore[method-assign]
        store, shape = self.store, BlockShape(64, 16)
        self.bridge = SchedulerBridge(store, shape, FixedThreshold(64), 0.5, Faults(), self.clock)  # type: ignore[arg-type]
        self.bridge.track(RequestView("r", list(range(300)), {}, True, True))

    def hit_tokens(self, now_s: float, computed_tokens: int = 0) -> int | None:
        self.clock.now_s = now_s
        return self.bridge.hit_tokens("r", computed_tokens)

    def answer(self, now_s: float) -> None:
        self.clock.now_s = now_s
        self.jobs.run()


def test_an_answer_waits_for_an_engine_whose_step_takes_seconds() -> None:
    """Asked for again after the deadline of lookups, it is there: the engine was slow, and the index was not."""
    asking = Asking()
    assert asking.hit_tokens(0.0) is None
    asking.answer(0.003)
    assert asking.hit_tokens(5.0) == 256 and asking.index.asked == 1 and not asking.store.given_up


def test_a_request_that_the_engine_comes_back_to_after_long_asks_anew_and_waits_anew() -> None:
    """Behind others' prefills, say: the index answered in time, only nobody came for that."""
    asking = Asking()
    assert asking.hit_tokens(0.0) is None
    asking.answer(0.003)
    later_s = ANSWER_KEPT_S + 10
    assert asking.hit_tokens(later_s) is None and not asking.store.given_up
    asking.answer(later_s + 0.003)
    assert asking.hit_tokens(later_s + 5) == 256 and asking.index.asked == 2


def test_what_the_engine_computes_meanwhile_for_others_changes_no_question() -> None:
    """Its own hit grows from step to step, and each was another question, not answered yet: given up."""
    asking = Asking()
    assert asking.hit_tokens(0.0) is None
    asking.answer(0.003)
    assert asking.hit_tokens(5.0, 64) == 192 and asking.index.asked == 1
    offer = asking.bridge._requests["r"].offer
    assert offer is not None and offer.first_chunk == 1
    assert list(offer.entries) == asking.bridge._requests["r"].keys_to(4, 64)[1:], "of the chunks behind it"
    assert asking.hit_tokens(5.5, 128) == 128 and asking.index.asked == 1
    assert asking.hit_tokens(5.6, 0) is not None, "what the engine lost again is known too"


def test_an_index_that_stays_silent_is_given_up_whatever_the_engine_computes() -> None:
    asking = Asking()
    assert asking.hit_tokens(0.0) is None and asking.hit_tokens(0.4, 64) is None
    assert asking.hit_tokens(0.6, 64) == 0 and asking.store.given_up == [3]
    assert asking.hit_tokens(0.7) == 0 and asking.jobs.pending() == 1


def test_what_came_too_late_for_one_request_is_not_told_another() -> None:
    index, jobs = SlowIndex(), ManualJobs(100)
    index.may_answer.set()
    index.is_down = True
    lookups = InBackground(index, jobs, Clock())
    assert lookups.resolve(KEYS, "gave up") is None
    jobs.run()
    index.is_down = False
    assert lookups.resolve(KEYS, "asks later") is None
    jobs.run()
    assert lookups.resolve(KEYS, "asks later") == LookupResult(KEYS, 0.0)


def test_a_failed_lookup_is_no_answer_and_what_finds_no_room_asks_again() -> None:
    index, jobs = SlowIndex(), ManualJobs(1)
    index.may_answer.set()
    index.is_down = True
    lookups = InBackground(index, jobs, Clock())
    assert lookups.resolve([b"a"]) is None
    assert lookups.resolve([b"b"]) is None, "a full queue is no fault of the index"
    jobs.run()
    assert lookups.resolve([b"a"]) == LookupResult([], 0.0, is_answer=False)
    assert lookups.resolve([b"b"]) is None and jobs.pending() == 1
    assert Lookups(index, Clock()).resolve([b"a"]) == LookupResult([], 0.0, is_answer=False)


def test_questions_nobody_comes_back_for_are_bounded() -> None:
    jobs = ManualJobs(10 * PENDING_MAX)
    lookups = InBackground(SlowIndex(), jobs, Clock())
    lookups._is_quick = False
    for number in range(3 * PENDING_MAX):
        lookups.resolve([number.to_bytes(4, "big")])
    assert len(lookups._lookups) == PENDING_MAX


def test_answers_that_nobody_comes_for_go_in_time() -> None:
    index, clock, jobs = SlowIndex(), Clock(), ManualJobs(100)
    index.may_answer.set()
    lookups = InBackground(index, jobs, clock)
    for number in range(5):
        lookups.resolve(KEYS, f"ended {number}")
    jobs.drain(0.0)
    clock.now_s = ANSWER_KEPT_S + 0.1
    lookups.resolve(KEYS, "asks later")
    assert [name[0] for name in lookups._lookups] == ["asks later"]


def test_an_answer_that_comes_while_one_looks_is_not_given_again() -> None:
    lookups = InBackground(SlowIndex(), ManualJobs(100), Clock())
    assert lookups.resolve(KEYS) is None
    (question,) = lookups._lookups.values()
    question.found = LookupResult(KEYS, 0.0)  # the next thing that its thread does is to say so
    assert lookups.resolve(KEYS) == LookupResult(KEYS, 0.0)
    assert lookups.resolve(KEYS) is None, "the next one asks anew"


def test_a_request_that_waits_for_blocks_does_not_ask_again() -> None:
    store, clock = FakeStore(), Clock()
    bridge = SchedulerBridge(store, BlockShape(64, 16), FixedThreshold(64), 2.0, Faults(), clock)  # type: ignore[arg-type]
    bridge.track(RequestView("r", list(range(300)), {}, True, True))
    asked: list[int] = []
    lookup = store.lookup

    def counted(keys: Sequence[bytes], asker: str) -> list[bytes] | None:
        asked.append(len(keys))
        return lookup(keys, asker)

    store.lookup = counted  # type: ignore[method-assign]
    store.answers = False
    assert bridge.hit_tokens("r", 0) is None
    store.answers = True
    store.stored.update(bridge._requests["r"].keys_to(3, 64))
    for _ in range(5):
        assert bridge.hit_tokens("r", 0) == 192
    assert len(asked) == 2
    clock.now_s = 1.5
    assert bridge.hit_tokens("r", 0) == 192 and len(asked) == 3
    clock.now_s = 100.0
    store.answers = False
    assert bridge.hit_tokens("r", 0) is None, "its time begins anew, for this is another wait"
