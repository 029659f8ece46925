"""The bridge without an engine: what it offers, plans, gathers and answers, and what it makes of faults."""

import logging
import pickle
import sys
from collections.abc import Sequence
from typing import Any, Self
from unittest.mock import patch

import pytest

from kvtier.connectors.bridge import ANSWER_GOOD_S, IDLE_WAIT_S, AnswerPace, SchedulerBridge, Step, WorkerBridge
from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.lookup_deadline import TURNS_MAX
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.format.namespace import chunk_keys
from kvtier.plan import LoadChunk, LoadDone, LoadPlan, SaveOutcome, SavePlan
from kvtier.runtime import switch_interval
from kvtier.runtime.repeated_log import INTERVAL_FIRST_S
from kvtier.scheduler.load_threshold import FixedThreshold
from kvtier.worker.transfer import Progress
from tests.support.clock import Clock

from .fakes import FakeStore, FakeTransfer, answer_to_save

CHUNK, BLOCK = 64, 16
SHAPE = BlockShape(CHUNK, BLOCK)
BLOCKS = list(range(100, 140))


class Scene:
    """A bridge over a fake store, and one request of `n` tokens."""

    def __init__(self, n_tokens: int = 300, min_load_tokens: int = 64, **view: Any) -> None:
        self.store, self.clock, self.faults = FakeStore(), Clock(), Faults()
        self.bridge = SchedulerBridge(self.store, SHAPE, FixedThreshold(min_load_tokens), 2.0, self.faults, self.clock)  # type: ignore[arg-type]
        self.tokens = list(range(n_tokens))
        allowed = {"extras": {}, "may_load": True, "may_save": True} | view
        self.bridge.track(RequestView("r", self.tokens, **allowed))

    def keys(self) -> list[bytes]:
        return chunk_keys(self.store.namespace_id, self.tokens, CHUNK, {})

    def store_chunks(self, count: int) -> None:
        self.store.stored.update(self.keys()[:count])

    def loading(self, count: int = 4) -> Self:
        """Have the request begin to load so many chunks."""
        self.store_chunks(count)
        assert self.bridge.hit_tokens("r", 0) == count * CHUNK
        self.bridge.begin_load("r", BLOCKS, count * CHUNK)
        return self


def blocks_of(plan: SavePlan | LoadPlan | None) -> list[tuple[int, ...]]:
    return [] if plan is None else [chunk.block_ids for chunk in plan.chunks]


def test_a_hit_is_the_longest_stored_prefix() -> None:
    scene = Scene()
    assert scene.bridge.hit_tokens("r", 0) == 0
    scene.store_chunks(3)
    scene.clock.now_s += ANSWER_GOOD_S
    assert scene.bridge.hit_tokens("r", 0) == 192
    scene.bridge.begin_load("r", BLOCKS, 192)
    (plan,) = scene.bridge.take_step().loads
    assert [chunk.key for chunk in plan.chunks] == scene.keys()[:3]
    assert blocks_of(plan) == [(100, 101, 102, 103), (104, 105, 106, 107), (108, 109, 110, 111)]


def test_the_switch_interval_is_short_from_a_hit_until_its_load_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, noted = Scene(), list[float]()
    monkeypatch.setattr(switch_interval, "_holders", 0)
    monkeypatch.setattr(sys, "setswitchinterval", noted.append)
    own_s = sys.getswitchinterval()
    scene.loading()
    assert len(noted) == 1 and noted[0] <= own_s
    assert scene.bridge.take_step().loads and len(noted) == 1, "workers begin the load after this step is planned"
    scene.bridge.take_step()
    assert noted[1:] == [own_s]
    scene.bridge.take_step()
    assert len(noted) == 2


def test_a_hit_that_finds_no_room_among_the_loads_waits_and_is_asked_for_again() -> None:
    """A worker takes so many loads; to those beyond it answered as if the storage had failed."""
    scene = Scene()
    scene.bridge.active_loads.loads_max = 2
    scene.store_chunks(3)
    for name in ("a", "b", "c"):
        scene.bridge.track(RequestView(name, scene.tokens, {}, may_load=True, may_save=True))
    for name in ("r", "a"):
        assert scene.bridge.hit_tokens(name, 0) == 192
        scene.bridge.begin_load(name, BLOCKS, 192)
    asked = scene.store.n_lookups
    for _ in range(50):
        assert scene.bridge.hit_tokens("b", 0) is None and scene.bridge.hit_tokens("c", 0) is None
        scene.clock.now_s += 1.0
    assert scene.store.n_lookups == asked + 2, "who waits for room does not ask the index in every step"
    assert scene.bridge.hit_tokens("b", 192) == 0, "a miss waits for nothing"
    scene.bridge.finish("a", 0, BLOCKS)  # aborted: its load is on its way until the worker says otherwise
    assert scene.bridge.hit_tokens("b", 0) is None
    scene.bridge.loads_ended(["a"], frozenset())
    assert scene.bridge.hit_tokens("b", 0) == 192
    assert scene.store.n_lookups == asked + 3, "what it learned long ago is asked for once more"
    scene.bridge.begin_load("b", BLOCKS, 192)
    assert scene.bridge.hit_tokens("c", 0) is None
    assert len(scene.bridge.take_step().loads) == 3


def test_an_answer_serves_a_hit_that_grows_but_none_that_shrinks() -> None:
    """The engine's own cache may lose blocks while the request waits."""
    scene = Scene()
    scene.store_chunks(4)
    assert [scene.bridge.hit_tokens("r", own) for own in (64, 128, 0)] == [192, 128, 256]
    assert scene.store.n_lookups == 2
    scene.tokens += range(64)  # it was preempted, with generated tokens
    scene.store_chunks(5)
    assert scene.bridge.hit_tokens("r", 0) == 320


def test_a_pending_lookup_serves_no_hit_that_shrank_meanwhile() -> None:
    scene = Scene()
    scene.store_chunks(4)
    scene.store.answers = False
    assert scene.bridge.hit_tokens("r", 64) is None
    scene.store.answers = True
    assert scene.bridge.hit_tokens("r", 0) == 256


def test_chunks_of_a_failed_load_are_saved_again() -> None:
    scene = Scene().loading()
    with patch.object(scene.store, "forget_lost") as forget_lost:
        scene.bridge.loads_ended(["r"], {100})
    assert list(forget_lost.call_args.args[0]) == scene.keys()


def test_a_local_hit_inside_a_chunk_moves_only_the_first_token() -> None:
    """The engine has 96 tokens: the load takes the second chunk whole, and leaves its first 32 tokens alone."""
    scene = Scene()
    scene.store_chunks(4)
    assert scene.bridge.hit_tokens("r", 96) == 256 - 96
    scene.bridge.begin_load("r", BLOCKS, 160)
    (plan,) = scene.bridge.take_step().loads
    assert [chunk.first_token for chunk in plan.chunks] == [32, 0, 0]
    assert plan.chunks[0].block_ids == (104, 105, 106, 107)


@pytest.mark.parametrize(
    ("n_tokens", "least", "computed", "expected"),
    [
        *[(300, 129, computed, hit) for computed, hit in ((0, 256), (64, 192), (128, 0), (256, 0), (288, 0))],
        (300, 64, 7, 0),  # it would begin within a block
        (300, 64, 16, 240),
        (256, 64, 0, 256),  # all of the prompt
    ],
)
def test_hits_that_are_offered(n_tokens: int, least: int, computed: int, expected: int) -> None:
    scene = Scene(n_tokens, min_load_tokens=least)
    scene.store_chunks(4)
    assert scene.bridge.hit_tokens("r", computed) == expected


def test_a_prompt_shorter_than_a_chunk_asks_nobody() -> None:
    scene = Scene(n_tokens=63)
    scene.store.answers = False
    assert scene.bridge.hit_tokens("r", 0) == 0


def test_requests_may_switch_loading_and_saving_off() -> None:
    scene = Scene(may_load=False, may_save=False)
    scene.store_chunks(4)
    assert scene.bridge.hit_tokens("r", 0) == 0
    assert not scene.bridge.chunks_pending("r", 300)
    scene.store.stored.clear()
    scene.bridge.advance("r", 300, BLOCKS)
    assert scene.bridge.take_step() == Step()
    scene.bridge.finish("r", 300, BLOCKS)
    assert scene.bridge.take_step() == Step()


def test_extras_are_in_the_keys() -> None:
    plain, salted = Scene(), Scene(extras={0: b"tenant"})
    salted.store.stored.update(plain.keys())
    assert salted.bridge.hit_tokens("r", 0) == 0


def test_an_unanswered_lookup_is_asked_again_until_its_deadline() -> None:
    scene = Scene()
    scene.store.answers = False
    assert scene.bridge.hit_tokens("r", 0) is None
    scene.clock.now_s = 1.9
    assert scene.bridge.hit_tokens("r", 0) is None
    scene.clock.now_s = 2.1
    assert scene.bridge.hit_tokens("r", 0) == 0 and len(scene.store.given_up) == 1
    scene.store.answers = True
    scene.store_chunks(4)
    assert scene.bridge.hit_tokens("r", 0) == 0, "once per request"
    assert len(scene.store.given_up) == 1


def test_a_lookup_waits_its_turn_while_the_index_answers_others() -> None:
    """1,750 of 2,500 stored prompts were computed, for their lookups had waited in a queue for too long."""
    scene = Scene()
    scene.store.answers = False
    assert scene.bridge.hit_tokens("r", 0) is None
    for number in range(2 * TURNS_MAX):
        other = RequestView(f"other-{number}", scene.tokens, {}, may_load=True, may_save=True)
        scene.bridge.track(other)
        scene.store.answers = True
        scene.bridge.hit_tokens(other.request_id, 0)
        scene.store.answers = False
        scene.clock.now_s += 1.9
        if scene.bridge.hit_tokens("r", 0) == 0:
            break
    assert scene.clock.now_s == pytest.approx(TURNS_MAX * 2.0, abs=2.0), "it has a deadline all the same"
    slow = Scene()
    slow.bridge.track(RequestView("other", slow.tokens, {}, may_load=True, may_save=True))
    slow.bridge.hit_tokens("other", 0)
    slow.store.answers = False
    assert slow.bridge.hit_tokens("r", 0) is None
    slow.bridge.take_step()
    slow.clock.now_s += 3.0
    assert slow.bridge.hit_tokens("r", 0) is None, "the engine's step took long, not the index"
    slow.bridge.take_step()
    slow.clock.now_s += 3.0
    assert slow.bridge.hit_tokens("r", 0) == 0
    again = Scene()
    again.store.answers = False
    assert again.bridge.hit_tokens("r", 0) is None
    again.clock.now_s = 2.1
    assert again.bridge.hit_tokens("r", 0) == 0, "an index that answers nothing is not waited for"


def test_chunks_are_saved_once_as_the_frontier_moves() -> None:
    scene = Scene()
    scene.bridge.advance("r", 63, BLOCKS)
    assert scene.bridge.take_step().after is None
    assert scene.bridge.chunks_pending("r", 64) and not scene.bridge.chunks_pending("r", 63)
    scene.bridge.advance("r", 130, BLOCKS)
    step = scene.bridge.take_step()
    assert blocks_of(step.after) == [(100, 101, 102, 103), (104, 105, 106, 107)]
    assert [w.parent for w in scene.store.wanted] == [scene.store.namespace_id, scene.keys()[0]]
    scene.bridge.advance("r", 191, BLOCKS)
    assert scene.bridge.take_step().after is None
    scene.bridge.advance("r", 192, BLOCKS)
    assert blocks_of(scene.bridge.take_step().after) == [(108, 109, 110, 111)]


def test_generated_tokens_extend_the_keys() -> None:
    """The view is live: tokens that the engine appends are hashed as chunks become whole."""
    scene = Scene(n_tokens=100)
    scene.bridge.advance("r", 100, BLOCKS)
    scene.tokens += range(1000, 1030)
    scene.bridge.advance("r", 129, BLOCKS)
    assert [w.key for w in scene.store.wanted] == []
    scene.bridge.take_step()
    assert [w.key for w in scene.store.wanted] == chunk_keys(scene.store.namespace_id, scene.tokens, CHUNK, {})[:2]


def test_keys_of_generated_chunks_continue_those_of_the_prompt() -> None:
    scene = Scene(n_tokens=100)
    for n_more in (0, 100):
        scene.tokens += range(1000, 1000 + n_more)
        scene.bridge.advance("r", len(scene.tokens), BLOCKS)
        scene.bridge.take_step()
    assert [w.key for w in scene.store.wanted] == scene.keys()


def test_an_ended_request_is_gathered_before_the_next_step() -> None:
    scene = Scene()
    scene.bridge.advance("r", 64, BLOCKS)
    scene.bridge.take_step()
    scene.bridge.finish("r", 299, BLOCKS)
    assert scene.bridge.has_pending_gathers() and not scene.bridge.chunks_pending("r", 299)
    step = scene.bridge.take_step()
    assert step.after is None
    assert len(blocks_of(step.before)) == 3
    assert not scene.bridge.has_pending_gathers()


def test_chunks_for_which_a_set_is_coming_are_taken_in_a_later_step_or_at_the_end() -> None:
    for ends in (False, True):
        scene = Scene()
        scene.store.set_is_coming = True
        for frontier in (130, 131):
            scene.bridge.advance("r", frontier, BLOCKS)
            assert scene.bridge.take_step().after is None and scene.bridge.chunks_pending("r", frontier)
        if ends:
            scene.bridge.finish("r", 131, BLOCKS)
            plan = scene.bridge.take_step().before
        else:
            scene.store.set_is_coming = False
            scene.bridge.advance("r", 132, BLOCKS)
            plan = scene.bridge.take_step().after
        assert blocks_of(plan) == [(100, 101, 102, 103), (104, 105, 106, 107)]
        assert not scene.faults.take()


def test_nothing_is_gathered_from_blocks_that_the_request_does_not_have() -> None:
    """A preempted or aborted request comes with fewer blocks than its tokens would need."""
    scene = Scene()
    scene.bridge.finish("r", 300, BLOCKS[:7])
    assert len(blocks_of(scene.bridge.take_step().before)) == 1


def test_a_request_that_ends_while_it_loads_saves_nothing() -> None:
    """Its blocks are being written by the load."""
    scene = Scene().loading(2)
    scene.store.stored.clear()
    scene.bridge.advance("r", 300, BLOCKS)
    assert scene.bridge.take_step().after is None
    scene.bridge.finish("r", 128, BLOCKS)
    assert scene.bridge.take_step().before is None
    scene.bridge.loads_ended({"r"}, frozenset())


def test_a_failed_load_is_never_tried_again() -> None:
    """I11, also when the block fails in an earlier step than the request is reported."""
    scene = Scene().loading()
    scene.bridge.take_step()
    scene.bridge.loads_ended((), {105})
    scene.bridge.loads_ended({"r"}, frozenset())
    assert scene.bridge.hit_tokens("r", 0) == 0


def test_another_requests_failure_is_not_ours() -> None:
    scene = Scene().loading()
    scene.bridge.loads_ended({"r", "unknown"}, {7, 8})
    assert scene.bridge.hit_tokens("r", 0) == 256


def test_a_load_that_cannot_be_planned_is_refused_not_forgotten() -> None:
    """The engine waits already: the workers must answer, with every block past what was computed."""
    scene = Scene()
    scene.store_chunks(4)
    assert scene.bridge.hit_tokens("r", 96) == 160
    scene.store.plan_load = None  # type: ignore[assignment, method-assign]
    scene.bridge.begin_load("r", BLOCKS[:19], 160)
    step = scene.bridge.take_step()
    assert step.loads == ()
    assert step.refused == (LoadDone("r", frozenset(BLOCKS[6:19])),)
    assert scene.faults.take() == 1
    scene.bridge.loads_ended({"r"}, step.refused[0].failed_blocks)
    assert scene.bridge.hit_tokens("r", 96) == 0


@pytest.mark.parametrize("n_tokens", [64, 999])
def test_a_load_of_another_length_than_was_offered_is_refused(n_tokens: int) -> None:
    scene = Scene()
    scene.store_chunks(4)
    scene.bridge.hit_tokens("r", 0)
    scene.bridge.begin_load("r", BLOCKS[:16], n_tokens)
    step = scene.bridge.take_step()
    assert (step.loads, step.refused) == ((), (LoadDone("r", frozenset(BLOCKS[:16])),))


def test_reset_keeps_what_is_in_the_engine_out_of_the_new_epoch() -> None:
    scene = Scene()
    scene.bridge.finish("gone", 0, [])
    scene.bridge.advance("r", 64, BLOCKS)
    assert scene.bridge.reset(blocks_in_use=False)
    assert scene.store.epoch == 1
    assert not scene.bridge.chunks_pending("r", 300)
    scene.bridge.track(RequestView("new", scene.tokens, {}, True, True))
    scene.bridge.advance("new", 64, BLOCKS)
    scene.bridge.take_step()
    assert scene.store.wanted[-1].parent == bytes([1]) * 16


def test_after_a_reset_nothing_that_was_planned_before_is_gathered() -> None:
    for of in ("advance", "finish"):
        scene = Scene()
        getattr(scene.bridge, of)("r", 300, BLOCKS)
        assert scene.bridge.reset(blocks_in_use=False)
        assert scene.bridge.take_step() == Step()


def test_if_a_steps_blocks_are_not_known_ended_requests_are_not_gathered() -> None:
    scene = Scene()
    scene.bridge.finish("r", 300, BLOCKS)
    assert scene.bridge.take_step(rewritten=None).before is None and not scene.bridge.has_pending_gathers()


def test_reset_during_a_load_says_so() -> None:
    scene = Scene().loading()
    assert not scene.bridge.reset(blocks_in_use=False)


def test_a_reset_that_fails_stops_the_tier_instead_of_mixing_weights() -> None:
    scene = Scene()
    scene.store_chunks(4)
    scene.store.reset = None  # type: ignore[assignment, method-assign]
    assert not scene.bridge.reset(blocks_in_use=False)
    scene.bridge.track(RequestView("new", scene.tokens, {}, True, True))
    assert scene.bridge.hit_tokens("new", 0) == 0
    assert not scene.bridge.chunks_pending("new", 300)


def test_blocks_of_local_hits_are_never_reported_as_failed() -> None:
    """They are other requests' too. Here the engine waits for a load that nobody offered."""
    scene = Scene()
    assert scene.bridge.hit_tokens("r", 96) == 0
    scene.bridge.begin_load("r", BLOCKS[:19], 64)
    assert scene.bridge.take_step().refused == (LoadDone("r", frozenset(BLOCKS[6:19])),)


def test_a_step_travels() -> None:
    scene = Scene()
    scene.bridge.advance("r", 300, BLOCKS)
    step = scene.bridge.take_step()
    assert pickle.loads(pickle.dumps(step)) == step


def load_plan(request_id: str = "r", first_token: int = 32) -> LoadPlan:
    chunks = (LoadChunk(b"a" * 16, b"", (1, 2, 3, 4), first_token), LoadChunk(b"b" * 16, b"", (5, 6, 7, 8), 0))
    return LoadPlan(request_id, b"n" * 16, chunks)


def worker() -> tuple[WorkerBridge, FakeTransfer]:
    transfer = FakeTransfer()
    return WorkerBridge(transfer, SHAPE, Faults(), AnswerPace(0.1)), transfer  # type: ignore[arg-type]


def test_every_load_is_answered_once() -> None:
    bridge, transfer = worker()
    bridge.start_loads(Step(loads=(load_plan(),)))
    assert bridge.poll() == []
    transfer.answer("r", [5])
    transfer.answer("r")
    transfer.answer("stranger")
    assert bridge.poll() == [LoadDone("r", frozenset({5}))]
    assert bridge.poll() == []


class Loading:
    """Loads under way in a worker whose steps take the times that `step` is told."""

    def __init__(self, *request_ids: str, longest_s: float = 0.1) -> None:
        self.now_s = 100.0
        self._transfer = FakeTransfer()
        pace = AnswerPace(longest_s, lambda: self.now_s)
        self.bridge = WorkerBridge(self._transfer, SHAPE, Faults(), pace)  # type: ignore[arg-type]
        self.bridge.start_loads(Step(loads=tuple(map(load_plan, request_ids))))

    def step(self, seconds: float, *ended: str, decodes: bool = True, failed: Sequence[int] = ()) -> list[str]:
        """Return the requests that are answered in a step, in which some loads end. failed: blocks of each."""
        self.bridge.before_forward(Step(decodes=decodes))
        self.now_s += seconds
        for request_id in ended:
            self._transfer.answer(request_id, failed)
        return [done.request_id for done in self.bridge.poll()]


def test_loads_that_end_beside_decoding_requests_are_answered_in_groups() -> None:
    loading = Loading(*"abcdef")
    assert loading.step(0.04, "a") == ["a"]
    assert loading.step(0.01, "b") == []
    assert loading.step(0.04, "c") == []  # computes the last tokens of a
    assert loading.step(0.04) == ["b", "c"]  # twice its time has passed since a was answered
    assert loading.step(0.03, "d") == []  # the steps before count until there is a longer one
    assert loading.step(0.03) == []
    assert loading.step(0.03) == ["d"]
    assert loading.step(5.0, "e") == ["e"]
    assert loading.step(0.01, "f") == ["f"]  # no other load is under way


def test_answers_wait_at_most_for_so_long() -> None:
    loading = Loading(*"abc")
    assert loading.step(1.0, "a") == ["a"]
    assert loading.step(0.09, "b") == []
    assert loading.step(0.01) == ["b"]


def test_answers_need_not_wait() -> None:
    loading = Loading(*"abc", longest_s=0.0)
    assert loading.step(0.04, "a") == ["a"]
    assert loading.step(0.01, "b") == ["b"]


def test_a_failed_load_is_answered_at_once() -> None:
    """It may have ended at its deadline: nothing is to make it later (I10)."""
    loading = Loading(*"abcd")
    assert loading.step(0.04, "a") == ["a"]
    assert loading.step(0.01, "b") == []
    assert loading.step(0.01, "c", failed=[5]) == ["b", "c"]


def test_answers_wait_only_beside_decoding_requests() -> None:
    loading = Loading(*"abcd")
    assert loading.step(0.04, "a") == ["a"]
    assert loading.step(0.01, "b", decodes=False) == ["b"]
    assert loading.step(3600.0, decodes=False) == []  # the engine has nothing to do
    assert loading.step(0.01, "c") == ["c"]


def test_a_request_may_load_again_later() -> None:
    bridge, transfer = worker()
    for _ in range(2):
        bridge.start_loads(Step(loads=(load_plan(),)))
        transfer.answer("r")
        assert [done.request_id for done in bridge.poll()] == ["r"]


def test_a_load_that_cannot_start_fails_past_what_was_computed() -> None:
    bridge, transfer = worker()
    transfer.load = None  # type: ignore[assignment, method-assign]
    bridge.start_loads(Step(loads=(load_plan(first_token=32),)))
    assert bridge.poll() == [LoadDone("r", frozenset({3, 4, 5, 6, 7, 8}))]


def test_refused_loads_are_answered() -> None:
    bridge, _ = worker()
    done = LoadDone("r", frozenset({1}))
    bridge.start_loads(Step(refused=(done,)))
    assert bridge.poll() == [done]


def test_saves_go_before_and_after_the_forward() -> None:
    bridge, transfer = worker()
    early, late = SavePlan(b"1" * 16, 1, ()), SavePlan(b"2" * 16, 1, ())
    step = Step(before=early, after=late)
    bridge.before_forward(step)
    assert transfer.saves == [early]
    bridge.after_forward(step)
    assert transfer.saves == [early, late]


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("waits_for_room", [True, False])
def test_only_an_idle_engine_waits_a_moment_for_room(is_idle: bool, waits_for_room: bool) -> None:
    bridge, transfer = worker()
    bridge.before_forward(Step(is_idle=is_idle, waits_for_room=waits_for_room))
    with patch.object(transfer, "poll", wraps=transfer.poll) as poll:
        bridge.poll()
    poll.assert_called_once_with(IDLE_WAIT_S if is_idle and waits_for_room else 0.0)


def test_an_idle_step_right_after_answers_does_not_wait() -> None:
    """vLLM's asynchronous scheduling takes the answers up only after that step."""
    bridge, transfer = worker()
    bridge.start_loads(Step(loads=(load_plan("a"), load_plan("b"))))
    waits = []
    with patch.object(transfer, "poll", wraps=transfer.poll) as poll:
        for answered in ("a", None, None, "b", None):
            if answered is not None:
                transfer.answer(answered)
            bridge.before_forward(Step(is_idle=True))
            assert [done.request_id for done in bridge.poll()] == [answered] * (answered is not None)
            waits.append(poll.call_args.args[0])
    assert waits == [IDLE_WAIT_S, 0.0, IDLE_WAIT_S, IDLE_WAIT_S, 0.0]


def test_answers_to_saves_are_passed_on_once() -> None:
    bridge, transfer = worker()
    done = answer_to_save(b"a" * 16, SaveOutcome.SAVED)
    transfer.progress = Progress([], [done], [])
    bridge.poll()
    assert bridge.take_saves() == [done]
    assert bridge.take_saves() == []


def test_the_bridge_of_a_new_kv_cache_answers_for_the_earlier_one() -> None:
    """The engine waits for these loads without end: none of the earlier bridge's answers was taken after it closed."""
    (before, transfer), (bridge, _) = worker(), worker()
    before.start_loads(Step(loads=(load_plan(),)))
    transfer.answer("r", [5])
    done = answer_to_save(b"a" * 16, SaveOutcome.FAILED)
    transfer.progress = transfer.progress._replace(saves=[done])
    bridge.take_over(before)
    assert bridge.poll() == [LoadDone("r", frozenset({5}))] and bridge.take_saves() == [done]


def test_a_closed_bridge_holds_no_answers_back() -> None:
    loading, (bridge, _) = Loading(*"abc"), worker()
    assert loading.step(0.04, "a") == ["a"] and loading.step(0.01, "b") == []
    loading.bridge.close(0.0)
    bridge.take_over(loading.bridge)
    assert [done.request_id for done in bridge.poll()] == ["b"]
    assert loading._transfer.is_closed


class Broken:
    """Hooks that raise `fault`."""

    def __init__(self, fault: BaseException, clock: Clock | None = None) -> None:
        self._faults = Faults(clock or Clock())
        self._fault = fault

    @catch_faults("a save", default=7)
    def save(self) -> int:
        raise self._fault

    @catch_faults("a lookup", default=lambda self, keys: [False] * len(keys))
    def lookup(self, keys: list[bytes]) -> list[bool]:
        raise self._fault


def test_faults_are_counted_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    broken = Broken(OSError("the disk is gone"), clock)
    with caplog.at_level(logging.ERROR, "kvtier"):
        assert [broken.save() for _ in range(5)] == [7] * 5
        assert len(caplog.records) == 1 and "a save failed; going on without" in caplog.text
        assert broken.lookup([b"a", b"b"]) == broken.lookup(keys=[b"a", b"b"]) == [False, False]
        assert len(caplog.records) == 2, "another kind"
        clock.now_s = INTERVAL_FIRST_S
        broken.save()
        assert len(caplog.records) == 3
    assert broken._faults.take() == 8
    assert broken._faults.take() == 0


def test_what_is_no_exception_is_not_swallowed() -> None:
    broken = Broken(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        broken.save()
    assert broken._faults.take() == 0
