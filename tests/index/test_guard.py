"""The guard around an index that is slow or gone: what passes, what waits, and when it is tried again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from kvtier.config.index import BreakerSettings
from kvtier.errors import IndexRefused, IndexUnavailable, StaleLease
from kvtier.index.base import EVICT_LEASE, NewRecord
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.memory import MemoryIndex
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from tests.waiting import wait_until

from index_data import key, record, set_info

PLAN = BreakerSettings(failures=3, pause_first_ms=1000, pause_max_ms=8000)


class Flaky(MemoryIndex):
    """An index that is down while it is told so. `calls`: that reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.calls = 0

    def _ask(self) -> None:
        self.calls += 1
        if self.is_down:
            raise IndexUnavailable("down")

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        self._ask()
        return super().resolve(keys)

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        self._ask()
        return super().publish(records, from_files, into_unowned)

    @property
    def was_reset(self) -> bool:
        self._ask()
        return False


@dataclass
class Scene:
    now_s: float = 0.0
    bounds: QueueBounds = QueueBounds(100, 1 << 20)
    index: Flaky = field(default_factory=Flaky)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.breaker = Breaker(PLAN, random.Random(5))
        self.guard = GuardedIndex(self.index, self.breaker, self.bounds, self.metrics, lambda: self.now_s)
        self.guard.create_set(set_info(1))

    def fail(self, times: int = PLAN.failures) -> None:
        self.index.is_down = True
        for _ in range(times):
            with pytest.raises(IndexUnavailable):
                self.guard.resolve([key(0)])

    def count(self, name: str) -> float:
        return self.metrics.total().get(name, 0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def raises_unavailable(work: Callable[[], object]) -> bool:
    try:
        work()
    except IndexUnavailable:
        return True
    return False


def test_failures_in_a_row_open_it_and_then_nothing_reaches_the_index(scene: Scene) -> None:
    scene.fail(2)
    scene.index.is_down = False
    scene.guard.resolve([key(0)])  # an answer: they are not in a row
    scene.fail(3)
    calls = scene.index.calls
    for _ in range(10):
        with pytest.raises(IndexUnavailable, match="no calls of the index"):
            scene.guard.resolve([key(0)])
    assert scene.index.calls == calls
    assert (scene.count(names.INDEX_PAUSES), scene.count(names.INDEX_FAST_FAILS)) == (1, 10)


def test_after_the_pause_one_call_tries_and_the_pause_doubles_up_to_the_longest(scene: Scene) -> None:
    scene.fail()
    pauses = []
    for _ in range(7):
        pauses.append(scene.breaker.left_s(scene.now_s))
        scene.now_s += pauses[-1] - 1e-6
        assert not scene.breaker.allows(scene.now_s)
        scene.now_s += 2e-6
        calls = scene.index.calls
        assert raises_unavailable(lambda: scene.guard.resolve([key(0)]))
        assert raises_unavailable(lambda: scene.guard.resolve([key(0)]))
        assert scene.index.calls == calls + 1
    for pause, longest in zip(pauses, (1, 2, 4, 8, 8, 8, 8), strict=True):
        assert longest / 2 <= pause <= longest
    assert len(set(pauses[3:])) > 1, "with a random part"
    scene.index.is_down = False
    scene.now_s += 8
    scene.guard.resolve([key(0)])
    scene.fail()
    assert scene.breaker.left_s(scene.now_s) <= 1, "the first pause again"


def test_while_one_tries_the_others_fail_at_once() -> None:
    breaker = Breaker(BreakerSettings(failures=1, pause_first_ms=1000, pause_max_ms=1000), random.Random(1))
    assert breaker.allows(0.0) and breaker.failed(0.0, 0.0)
    assert breaker.allows(2.0)
    assert not breaker.allows(2.0) and not breaker.allows(100.0)
    assert breaker.worked() and breaker.allows(100.0) and breaker.allows(100.0)


def test_calls_that_fall_into_one_silence_are_one_failure() -> None:
    """A server that was not heard of for a moment costs those who asked then, not all who come in a pause after it."""
    breaker = Breaker(BreakerSettings(failures=2, pause_first_ms=1000, pause_max_ms=1000), random.Random(1))
    for began_s in (0.0, 0.1, 0.2):
        assert breaker.allows(began_s)
    assert not any(breaker.failed(began_s, began_s + 0.3) for began_s in (0.0, 0.1, 0.2)) and not breaker.is_open
    assert breaker.failed(0.35, 0.65), "it was asked after the first failure, and was silent still"
    assert breaker.allows(2.0), "one tries"
    assert not breaker.failed(0.4, 2.1), "old news say nothing of how that ends"
    assert not breaker.allows(2.2) and breaker.worked() and breaker.allows(2.3)


def test_an_answer_that_is_a_fault_is_an_answer(scene: Scene) -> None:
    scene.fail(2)
    with pytest.raises(StaleLease):
        scene.guard.remove_set(1, 77)
    scene.fail(2)
    assert not scene.breaker.is_open
    assert scene.guard.acquire_lease(EVICT_LEASE, "a", 0.0, 1.0) == 1


def test_an_index_that_refuses_writes_is_asked_on_and_what_is_published_waits() -> None:
    class Full(Flaky):
        def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
            raise IndexRefused("full")

    scene = Scene(index=Full())
    for number in range(2 * PLAN.failures):
        assert scene.guard.publish([record(number, 1, number)]) == 1
        scene.guard.tick()
    assert scene.guard.n_waiting == 2 * PLAN.failures
    assert not scene.breaker.is_open and scene.guard.resolve([key(0)]) == []


def test_what_is_published_meanwhile_waits_and_goes_out_when_it_is_back(scene: Scene) -> None:
    scene.fail()
    assert scene.guard.publish([record(n, 1, n) for n in range(40)]) == 40
    assert scene.guard.n_waiting == 40
    scene.guard.tick()
    assert scene.guard.n_waiting == 40 and scene.count(names.PUBLISH_SENT_LATE) == 0
    scene.index.is_down = False
    scene.now_s += 2
    scene.guard.tick()
    assert scene.guard.n_waiting == 0
    assert len(scene.guard.resolve([key(n) for n in range(40)])) == 40
    assert (scene.count(names.PUBLISH_QUEUED), scene.count(names.PUBLISH_SENT_LATE)) == (40, 40)


def test_a_record_of_a_set_that_went_meanwhile_is_refused_in_the_end(scene: Scene) -> None:
    scene.fail()
    scene.guard.publish([record(0, 1, 0)])
    scene.index.remove_set(1)
    scene.index.is_down = False
    scene.now_s += 2
    scene.guard.tick()
    assert scene.guard.n_waiting == 0 and scene.count(names.PUBLISH_SENT_LATE) == 0
    assert scene.guard.resolve([key(0)]) == []


@pytest.mark.parametrize("bounds", [QueueBounds(30, 1 << 20), QueueBounds(1000, 30 * (480 + 2 * 44))])
def test_the_queue_is_bounded_and_the_oldest_go(bounds: QueueBounds) -> None:
    scene = Scene(bounds=bounds)
    scene.fail()
    for number in range(50):
        scene.guard.publish([record(number, 1, number)])
    assert scene.guard.n_waiting == 30 and scene.count(names.PUBLISH_DROPPED) == 20
    scene.index.is_down = False
    scene.now_s += 2
    scene.guard.tick()
    assert scene.guard.resolve([key(19)]) == [] and len(scene.guard.resolve([key(n) for n in range(20, 50)])) == 30


def test_what_is_read_from_files_does_not_wait(scene: Scene) -> None:
    scene.fail()
    with pytest.raises(IndexUnavailable):
        scene.guard.publish([record(0, 1, 0)], from_files=True)
    assert scene.guard.n_waiting == 0


@pytest.mark.parametrize("sender", ["closing", "a thread of its own"])
def test_queued_records_are_published_without_a_tick(scene: Scene, sender: str) -> None:
    scene.fail(1)
    scene.guard.publish([record(0, 1, 0)])
    scene.index.is_down = False
    if sender != "closing":
        scene.guard.start()
        wait_until(lambda: not scene.guard.n_waiting)
    scene.guard.close()
    assert len(scene.index.resolve([key(0)])) == 1
