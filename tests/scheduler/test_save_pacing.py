"""Chunks that workers refuse are planned again in order, and in the end only tails of prompts are missing."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.pending_saves import FAILURES_MAX
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.plan import SaveChunk, SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.scheduler.load_threshold import FixedThreshold
from kvtier.scheduler.save_pacing import PAUSE_MAX, PAUSE_STORING_MAX, WINDOW_MAX, WINDOW_MIN, SavePacing
from tests.support.rig import BLOCK_TOKENS, Engine

SAVED, QUEUE_FULL, FAILED = SaveOutcome.SAVED, SaveOutcome.QUEUE_FULL, SaveOutcome.FAILED


class Scene:
    """A bridge over a real store whose index and sets are real, and a worker that takes `room` chunks.

    taken: numbers of the chunks that it took, by request, in order.
    """

    def __init__(self, folder: Any, room: int = 1 << 30, engine: Engine | None = None) -> None:
        self.engine = engine or Engine(folder)
        self.engine.wait_for_set()
        self.room = room
        self.size = self.engine.shape.chunk_tokens
        self.faults = Faults()
        shape = BlockShape(self.size, BLOCK_TOKENS)
        self.bridge = SchedulerBridge(self.engine.store, shape, FixedThreshold(1), 2.0, self.faults)
        self.taken: dict[str, list[int]] = {}
        self.numbers: dict[bytes, tuple[str, int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.fails: dict[tuple[str, int], SaveOutcome] = {}
        self.planned = 0
        self._waiting: list[SaveChunk] = []

    def request(self, name: str, chunks: int, first: int = 0) -> None:
        tokens = list(range(first, first + chunks * self.size))
        self.tokens[name] = tokens
        for number, key in enumerate(self.engine.keys(tokens)):
            self.numbers.setdefault(key, (name, number))
        self.bridge.track(RequestView(name, tokens, {}, may_load=False, may_save=True))

    def blocks(self, name: str) -> list[int]:
        return list(range(len(self.tokens[name]) // BLOCK_TOKENS))

    def step(self, *running: str, ends: Sequence[str] = ()) -> None:
        """A step of the engine in which these requests are computed whole; then some end."""
        for name in running:
            frontier = len(self.tokens[name])
            if self.bridge.chunks_pending(name, frontier):
                self.bridge.advance(name, frontier, self.blocks(name))
        step = self.bridge.take_step()
        self.bridge.saved([done for plan in (step.before, step.after) for done in self._worker(plan)])
        for name in ends:
            self.bridge.finish(name, len(self.tokens[name]), self.blocks(name))

    def write(self, count: int | None = None) -> None:
        """The worker has written so many of the chunks that it took."""
        written, self._waiting = self._waiting[:count], [] if count is None else self._waiting[count:]
        self.bridge.saved([SaveDone(c.key, c.set_id, c.slot, SAVED) for c in written])

    def counted(self, name: str) -> float:
        return self.engine.store.metrics.total().get(name, 0)

    def _worker(self, plan: SavePlan | None) -> list[SaveDone]:
        done = []
        for chunk in () if plan is None else plan.chunks:
            self.planned += 1
            owner, number = self.numbers[chunk.key]
            outcome = self.fails.get((owner, number))
            if outcome is None and len(self._waiting) >= self.room:
                outcome = QUEUE_FULL
            if outcome is not None:
                done.append(SaveDone(chunk.key, chunk.set_id, chunk.slot, outcome))
            else:
                self._waiting.append(chunk)
                self.taken.setdefault(owner, []).append(number)
        return done


@pytest.fixture
def scene(tmp_path: Any) -> Any:
    made = Scene(tmp_path)
    yield made
    assert not made.faults.take()
    made.engine.close()


def test_what_the_queue_refused_is_saved_in_later_steps(scene: Scene) -> None:
    scene.room = 3
    scene.request("r", 12)
    for _ in range(10):
        scene.step("r")
        scene.write(2)
    scene.write()
    assert scene.taken["r"] == list(range(12)), "each once, in order"
    assert scene.counted(names.SAVED_LATER) == 9
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == scene.counted(names.DROPPED_TAILS) == 0


def test_what_is_left_is_saved_at_the_end(scene: Scene) -> None:
    scene.room = 3
    scene.request("r", 8)
    scene.step("r", ends=["r"])
    scene.room = 100
    scene.step()
    scene.write()
    assert scene.taken["r"] == list(range(8)) and scene.counted(names.SAVED_LATER) == 5


def test_a_tail_that_nobody_takes_is_dropped_and_counted(scene: Scene) -> None:
    scene.room = 5
    scene.request("r", 8)
    scene.step("r", ends=["r"])
    scene.step()
    assert scene.taken["r"] == list(range(5))
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 3, "each once, however often it was refused"
    assert scene.counted(names.DROPPED_TAILS) == 1


def test_the_newest_lose_their_tails(scene: Scene) -> None:
    """All end at once, the newest first: the oldest are served first all the same."""
    scene.room = 10
    for number in range(4):
        scene.request(f"r{number}", 4, 1000 * number)
    scene.room = 0
    scene.step("r3", "r2", "r1", "r0", ends=["r3", "r2", "r1", "r0"])
    scene.room = 10
    scene.step()
    assert scene.taken == {"r0": [0, 1, 2, 3], "r1": [0, 1, 2, 3], "r2": [0, 1]}
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 6 and scene.counted(names.DROPPED_TAILS) == 2


def test_running_requests_are_served_in_the_order_in_which_they_came(scene: Scene) -> None:
    for number in range(4):
        scene.request(f"r{number}", 4, 1000 * number)
    scene.room = 0
    scene.step("r3", "r1", "r0", "r2")
    scene.room = 100
    scene.step("r3", "r1", "r0", "r2")
    assert sum(map(len, scene.taken.values())) == WINDOW_MIN and list(scene.taken) == ["r0", "r1"]


def test_a_full_queue_is_not_asked_for_hundreds_of_chunks_in_each_step(scene: Scene) -> None:
    scene.room = 0
    scene.request("r", 15)
    scene.step("r")
    assert scene.planned == 15
    for _ in range(10):
        scene.step("r")
    assert scene.planned == 15 + 10 * WINDOW_MIN


def test_no_chunk_behind_a_hole_is_planned(scene: Scene) -> None:
    """Chunk 2 fails at first: until it is taken, nothing new behind it is."""
    scene.request("r", 6)
    scene.fails["r", 2] = FAILED
    frontier = 4 * scene.size
    scene.bridge.advance("r", frontier, scene.blocks("r"))
    scene.bridge.saved(scene._worker(scene.bridge.take_step().after))
    assert scene.taken["r"] == [0, 1, 3], "3 was planned with it"
    del scene.fails["r", 2]
    scene.step("r")
    assert scene.taken["r"] == [0, 1, 3, 2, 4, 5]


def test_behind_a_chunk_that_the_codec_refuses_nothing_is_planned(scene: Scene) -> None:
    scene.request("r", 6)
    scene.fails["r", 2] = SaveOutcome.REFUSED
    scene.bridge.advance("r", 3 * scene.size, scene.blocks("r"))
    scene.bridge.saved(scene._worker(scene.bridge.take_step().after))
    assert not scene.bridge.chunks_pending("r", 6 * scene.size)
    scene.step("r", ends=["r"])
    scene.step()
    assert scene.taken["r"] == [0, 1]
    scene.request("again", 6)  # the same prompt
    scene.step("again", ends=["again"])
    scene.step()
    assert scene.taken == {"r": [0, 1]}


def test_a_chunk_that_fails_again_and_again_is_given_up(scene: Scene) -> None:
    scene.request("r", 6)
    scene.fails["r", 2] = FAILED
    for _ in range(10):
        scene.step("r")
    assert not scene.bridge.chunks_pending("r", 6 * scene.size)
    assert scene.planned == 6 + FAILURES_MAX


def test_a_job_of_many_chunks_that_fails_once_costs_nothing(scene: Scene) -> None:
    scene.request("r", 8)
    scene.fails.update({("r", number): FAILED for number in range(8)})
    scene.step("r")
    scene.fails.clear()
    scene.step("r")
    assert scene.taken["r"] == list(range(8))


def test_a_chunk_that_another_request_could_not_save_is_saved_at_the_end(scene: Scene) -> None:
    """Both have the prompt: the first plans all of it, is refused its tail, and ends."""
    scene.request("first", 4)
    scene.request("second", 4)
    scene.room = 2
    scene.bridge.advance("first", 4 * scene.size, scene.blocks("first"))
    scene.bridge.advance("second", 4 * scene.size, scene.blocks("second"))
    step = scene.bridge.take_step()
    scene.bridge.finish("first", 0, [])  # aborted: its blocks are gone
    scene.bridge.saved(scene._worker(step.after))
    scene.room = 4
    scene.step("second", ends=["second"])
    scene.step()
    assert scene.taken["first"] == [0, 1, 2, 3]


@pytest.mark.parametrize("later_s", [1.1, -3600.0])
def test_resting_storage_is_tried_again_after_the_rest(scene: Scene, later_s: float) -> None:
    """Or when the node's clock was set back: it had rested for as long as that."""
    now = [1e9]
    scene.engine.store._clock = lambda: now[0]
    scene.request("r", 4)
    scene.fails.update({("r", number): SaveOutcome.RESTING for number in range(4)})
    scene.step("r")
    scene.fails.clear()
    scene.step("r")
    assert scene.planned == 4, "none while it rests"
    now[0] += later_s
    scene.step("r")
    assert scene.taken["r"] == [0, 1, 2, 3]
    assert scene.counted(names.SKIPPED_RESTING) == 0


def test_nothing_is_left_of_requests_that_ended(scene: Scene) -> None:
    scene.room = 2
    for number in range(3):
        scene.request(f"r{number}", 4, 1000 * number)
    scene.step("r0", "r1", "r2", ends=["r0", "r1", "r2"])
    scene.step()
    saves = scene.bridge.saves
    assert not saves._advanced and not saves._ended and not scene.bridge.has_pending_gathers()
    assert all(known.wanted is None or not known.wanted.block_ids for known in scene.engine.store._known.values())


def test_the_window_opens_again() -> None:
    pacing = SavePacing()
    assert pacing.next_window() is None
    pacing.refused()
    windows = [pacing.next_window() for _ in range(4)]
    assert windows == [WINDOW_MIN, 2 * WINDOW_MIN, 4 * WINDOW_MIN, 8 * WINDOW_MIN]
    pacing.refused()
    assert pacing.next_window() == WINDOW_MIN
    while (window := pacing.next_window()) is not None:
        assert window <= 2 * WINDOW_MAX


def test_after_a_slot_was_lost_steps_pause_ever_longer() -> None:
    pacing = SavePacing()
    for pause in (1, 3, 7, 15, PAUSE_MAX, PAUSE_MAX):
        pacing.slot_lost()
        assert [pacing.next_window() for _ in range(pause + 1)] == pause * [0] + [WINDOW_MIN]
    while pacing.next_window() is not None:
        pass
    pacing.slot_lost()
    assert [pacing.next_window() for _ in range(2)] == [0, WINDOW_MIN]


def test_after_a_pause_a_step_waits_for_the_answers_to_the_last_one() -> None:
    pacing = SavePacing()
    pacing.planned([b"before a slot was lost"])
    pacing.slot_lost()
    assert [pacing.next_window() for _ in range(2)] == [0, WINDOW_MIN]
    pacing.planned([b"1", b"2"])
    pacing.answered(b"1")
    assert [pacing.next_window() for _ in range(3)] == [0, 0, 0]
    pacing.answered(b"2")
    assert pacing.next_window() == 2 * WINDOW_MIN
    pacing.planned([b"whose answer never comes"])
    assert [pacing.next_window() for _ in range(PAUSE_MAX + 1)] == PAUSE_MAX * [0] + [4 * WINDOW_MIN]
    assert pacing.next_window() == 8 * WINDOW_MIN, "it is waited for once"


def test_while_chunks_are_stored_pauses_stay_short() -> None:
    pacing = SavePacing()
    for pause in (1, 3, PAUSE_STORING_MAX, PAUSE_STORING_MAX):
        pacing.slot_lost()
        pacing.stored()
        assert [pacing.next_window() for _ in range(pause + 1)] == pause * [0] + [WINDOW_MIN]
