"""Late saves: chunks that workers refuse until their requests have ended are saved while their blocks hold them, and
never from blocks with other content."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvtier.connectors import late_saves
from kvtier.connectors.kv_events import Added, Announcements, ChunkBlocks
from kvtier.connectors.late_saves import LateSaves
from kvtier.plan import SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.scheduler.save_pacing import WINDOW_MIN
from kvtier.scheduler.store import WantedChunk
from tests.scheduler.test_save_pacing import Scene
from tests.scheduler.test_save_pacing import scene as scene  # a fixture
from tests.support.rig import BLOCK_TOKENS, Engine

SAVED, QUEUE_FULL = SaveOutcome.SAVED, SaveOutcome.QUEUE_FULL


class Contents:
    """Blocks of an engine that keeps what ended requests computed until it gives the blocks to others."""

    def __init__(self, scene: Scene) -> None:
        self._of: dict[int, object | None] = {}
        scene.bridge.saves.late.contents_of = lambda ids: [self._of.setdefault(i, f"content of {i}") for i in ids]

    def give_away(self, *block_ids: int) -> None:
        self._of.update(dict.fromkeys(block_ids))

    def fill_again(self, *block_ids: int) -> None:
        """Another request computed the same tokens."""
        self._of.update({i: "".join(["content of ", str(i)]) for i in block_ids})


def step(scene: Scene, *running: str, ends: Sequence[str] = ()) -> None:
    """A step as vLLM makes it: the end of a request comes before the answers of its last step."""
    for name in running:
        scene.bridge.advance(name, len(scene.tokens[name]), scene.blocks(name))
    planned = scene.bridge.take_step()
    answers = [done for plan in (planned.before, planned.after) for done in scene._worker(plan)]
    for name in ends:
        scene.bridge.finish(name, len(scene.tokens[name]), scene.blocks(name))
    scene.bridge.saved(answers)


def idle_steps(scene: Scene, most: int = 100) -> int:
    """Steps that the engine makes because saves wait, each with room for one more chunk."""
    for number in range(most):
        if not scene.bridge.has_pending_gathers():
            return number
        scene.room += 1
        step(scene)
    return most


def test_a_refusal_that_comes_with_the_end_is_planned_before_the_next_forward(scene: Scene) -> None:
    """Without knowledge of the blocks' contents: until then no other request has the blocks."""
    scene.room = 2
    scene.request("r", 6)
    step(scene, "r", ends=["r"])
    scene.room = 100
    step(scene)
    scene.write()
    assert scene.taken["r"] == list(range(6))
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == scene.counted(names.DROPPED_TAILS) == 0
    assert not scene.bridge.has_pending_gathers()


def test_a_tail_is_taken_bit_by_bit_while_its_blocks_hold_it(scene: Scene) -> None:
    Contents(scene)
    scene.room = 2
    scene.request("r", 12)
    step(scene, "r", ends=["r"])
    assert 10 <= idle_steps(scene) <= 12
    scene.write()
    assert scene.taken["r"] == list(range(12)), "each once, in order"
    assert scene.counted(names.SAVED_LATER) == 10
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == scene.counted(names.DROPPED_TAILS) == 0
    late = scene.bridge.saves.late
    assert not late._kept and not late._due and not late._refused


def test_a_tail_whose_chunks_are_lost_in_two_steps_is_counted_once(scene: Scene) -> None:
    contents = Contents(scene)
    scene.room = 2
    scene.request("r", 8)
    step(scene, "r", ends=["r"])
    for first in (6, 2):
        contents.give_away(scene.blocks("r")[first * scene.size // BLOCK_TOKENS])
        step(scene)
    assert not scene.bridge.has_pending_gathers()
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 6 and scene.counted(names.DROPPED_TAILS) == 1


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_blocks_that_were_given_away_are_not_gathered(scene: Scene, is_filled_again: bool) -> None:
    """Nor when they hold the same tokens again: in between they held others, and may not be filled yet."""
    contents = Contents(scene)
    scene.room = 2
    scene.request("r", 8)
    step(scene, "r", ends=["r"])
    step(scene)
    given = scene.blocks("r")[4 * scene.size // BLOCK_TOKENS]  # the first block of chunk 4
    contents.give_away(given)
    if is_filled_again:
        contents.fill_again(given)
    scene.room = 100
    step(scene)
    assert not scene.bridge.has_pending_gathers()
    assert scene.taken["r"] == [0, 1, 2, 3], "no chunk behind one that is lost"
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 4 and scene.counted(names.DROPPED_TAILS) == 1


def test_the_requests_that_came_first_are_served_first(scene: Scene) -> None:
    contents = Contents(scene)
    for number in range(3):
        scene.request(f"r{number}", 4, 1000 * number)
    scene.room = 0
    step(scene, "r2", "r1", "r0", ends=["r2", "r1", "r0"])
    step(scene)
    scene.room = WINDOW_MIN + 1
    step(scene)
    assert scene.taken == {"r0": [0, 1, 2, 3], "r1": [0, 1, 2, 3]}, "no more than the window"
    contents.give_away(*scene.blocks("r2"))
    step(scene)
    assert "r2" not in scene.taken and scene.counted(names.DROPPED_TAILS) == 1


@pytest.mark.parametrize("is_coming", [True, False])
def test_what_ends_while_a_set_is_made_is_saved_into_it(scene: Scene, is_coming: bool) -> None:
    Contents(scene)
    scene.request("r", 4)
    store = scene.engine.store
    with (
        patch.object(store, "_place_of", return_value=names.SKIPPED_NO_SPACE),
        patch.object(store, "is_set_coming", return_value=is_coming),
    ):
        step(scene, "r", ends=["r"])
        step(scene)
        assert scene.bridge.has_pending_gathers() is is_coming
    step(scene)
    assert scene.taken == ({"r": [0, 1, 2, 3]} if is_coming else {})
    assert scene.counted(names.SKIPPED_NO_SPACE) == (0 if is_coming else 4)


def test_while_a_set_is_made_a_step_tries_no_more_than_a_few_chunks(scene: Scene) -> None:
    Contents(scene)
    scene.request("r", 3 * WINDOW_MIN)
    store = scene.engine.store
    with (
        patch.object(store, "_place_of", return_value=names.SKIPPED_NO_SPACE),
        patch.object(store, "is_set_coming", return_value=True),
        patch.object(store, "select_saves", wraps=store.select_saves) as select,
    ):
        step(scene, "r", ends=["r"])
        for _ in range(4):
            step(scene)
    assert [len(call.args[0]) for call in select.call_args_list] == [3 * WINDOW_MIN] + 3 * [WINDOW_MIN]
    idle_steps(scene)
    assert scene.taken == {"r": list(range(3 * WINDOW_MIN))}


def test_after_a_reset_nothing_is_saved_from_old_blocks(scene: Scene) -> None:
    Contents(scene)
    scene.room = 2
    scene.request("r", 6)
    step(scene, "r", ends=["r"])
    assert scene.bridge.has_pending_gathers()
    scene.bridge.reset(blocks_in_use=False)
    scene.room = 100
    step(scene)
    assert scene.taken["r"] == [0, 1] and not scene.bridge.has_pending_gathers()


def steps_until_none_waits(scene: Scene) -> int:
    """Make steps without work while chunks wait, at most 100; return how many."""
    n_steps = 0
    while scene.bridge.has_pending_gathers() and n_steps < 100:
        step(scene)
        n_steps += 1
    return n_steps


def test_an_engine_without_work_does_not_try_for_ever(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "STEPS_MAX", 20)
    Contents(scene)
    scene.room = 2
    scene.request("r", 6)
    step(scene, "r", ends=["r"])
    assert 20 <= steps_until_none_waits(scene) <= 22
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 4 and scene.counted(names.DROPPED_TAILS) == 1


def test_storage_that_stores_nothing_is_not_waited_for_with_each_request_that_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_saves, "STALLED_STEPS_MAX", 20)
    Contents(scene)
    scene.room = 2

    def idle_until_lost(name: str, first: int) -> int:
        scene.request(name, 6, first)
        step(scene, name, ends=[name])
        return steps_until_none_waits(scene)

    assert 20 <= idle_until_lost("first", 0) <= 22
    assert idle_until_lost("second", 1000) <= 2
    scene.write(1)
    scene.room = 1
    assert 20 <= idle_until_lost("after a chunk was stored", 2000) <= 22


def test_slow_storage_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "STALLED_STEPS_MAX", 20)
    Contents(scene)
    scene.room = 1
    scene.request("r", 6)
    step(scene, "r", ends=["r"])
    n_steps = 0
    while scene.bridge.has_pending_gathers() and n_steps < 200:
        n_steps += 1
        if n_steps % 15 == 0:
            scene.write(1)
        step(scene)
    scene.write()
    assert scene.taken["r"] == list(range(6)) and n_steps == 75


def chunks(*numbers: int) -> list[WantedChunk]:
    return [WantedChunk(bytes([n] * 16), b"", (n,), number=n) for n in numbers]


def test_what_may_be_refused_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "KEPT_MAX", 10)
    late = LateSaves()
    late.keep(0, chunks(*range(30)))
    assert list(late._kept) == [chunk.key for chunk in chunks(*range(10))], "a tail is missing, no head"


def test_what_workers_have_taken_makes_room_for_what_they_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "KEPT_MAX", 10)
    late = LateSaves()
    late.contents_of = lambda block_ids: block_ids
    late.keep(0, chunks(*range(6)))
    late.keep(1, chunks(*range(10, 16)))
    assert len(late._kept) == 10, "the first have no answers yet"
    for _ in range(late_saves.ANSWER_STEPS):
        late.take(0)
    assert all(late.plan_again(chunk.key) for chunk in chunks(0, 1, 3))
    late.refused(bytes([2] * 16))
    assert [chunk.number for chunk in late.take(1)[0].chunks] == [0]
    late.keep(2, chunks(*range(20, 25)))
    numbers = sorted(key[0] for key in late._kept)
    assert numbers == [0, 1, 2, 3, 13, *range(20, 25)], "neither what was refused nor what was planned just now"


def test_a_refusal_of_a_running_requests_chunk_is_not_waited_for() -> None:
    late = LateSaves()
    late.refused(bytes(16))
    assert not late.are_waiting and not late.take(None)


def test_a_chunk_that_was_planned_again_is_not_waited_for() -> None:
    """Nor is there a limit for the chunks of requests that ended since the last step: their blocks are given away."""
    late = LateSaves()
    late.keep(0, chunks(0, 1))
    for chunk in chunks(0, 1):
        late.refused(chunk.key)
        assert late.plan_again(chunk.key)
    assert [chunk.number for chunk in late.take(0)[0].chunks] == [0, 1] and not late.are_waiting


def test_a_fault_while_blocks_are_read_breaks_no_later_step() -> None:
    """The step plans without containing faults: it must find a note of each chunk that is due."""
    late, fault = LateSaves(), ZeroDivisionError
    late.keep(0, chunks(1))
    assert late.plan_again(chunks(1)[0].key)
    with patch.object(late, "contents_of", side_effect=fault), pytest.raises(fault):
        late.keep(1, chunks(1))
    assert [chunk.number for chunk in late.take(None)[0].chunks] == [1]


def test_of_refused_chunks_no_more_are_looked_at_than_the_step_may_plan() -> None:
    """A step has few milliseconds, and thousands of chunks may wait."""
    late, looks = LateSaves(), []
    late.contents_of = lambda block_ids: looks.append(block_ids) or block_ids  # type: ignore[func-returns-value]
    late.keep(0, chunks(*range(200)))
    late.take(None)
    assert all(late.plan_again(chunk.key) for chunk in chunks(*range(200)))
    looks.clear()
    assert [chunk.number for chunk in late.take(8)[0].chunks] == list(range(8)) and len(looks) == 8


def test_of_a_burst_beyond_the_bound_the_newest_lose_their_tails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "KEPT_MAX", 10)
    Contents(scene)
    scene.room = 0
    for number in range(3):
        scene.request(f"r{number}", 6, 1000 * number)
    step(scene, "r0", "r1", "r2", ends=["r0", "r1", "r2"])
    scene.room = 100
    idle_steps(scene)
    scene.write()
    assert scene.taken == {"r0": [0, 1, 2, 3, 4, 5], "r1": [0, 1, 2, 3]}
    assert scene.counted(names.SKIPPED_QUEUE_FULL) == 8 and scene.counted(names.DROPPED_TAILS) == 2


def planned_and_ended(scene: Scene, chunks: int) -> SavePlan | None:
    """Return the plan of a request that ends before its workers answer."""
    Contents(scene)
    scene.request("r", chunks)
    scene.bridge.advance("r", chunks * scene.size, scene.blocks("r"))
    plan = scene.bridge.take_step().after
    scene.bridge.finish("r", chunks * scene.size, scene.blocks("r"))
    return plan


def answers(plan: SavePlan | None, *outcomes: SaveOutcome) -> list[SaveDone]:
    """Return the answers of one rank to a plan."""
    assert plan is not None
    return [SaveDone(c.key, c.set_id, c.slot, outcome) for c, outcome in zip(plan.chunks, outcomes, strict=True)]


def test_what_one_rank_refused_is_planned_again_once_the_other_has_answered(tmp_path: Path) -> None:
    """The engine has no other work, and steps are needed to hear of the other rank."""
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    plan = planned_and_ended(scene, 4)
    assert not scene.bridge.has_pending_gathers()
    scene.bridge.saved(answers(plan, SAVED, SAVED, QUEUE_FULL, QUEUE_FULL))
    assert scene.bridge.has_pending_gathers()
    waiting = scene.bridge.take_step(is_idle=True)
    assert waiting.before is None and waiting.waits_for_room
    scene.bridge.saved(answers(plan, SAVED, SAVED, SAVED, SAVED))
    again = scene.bridge.take_step(is_idle=True)
    assert again.before is not None and [chunk.number for chunk in again.before.chunks] == [2, 3]
    scene.bridge.saved(2 * answers(again.before, SAVED, SAVED))
    assert not scene.bridge.has_pending_gathers()
    assert all(scene.engine.store.is_stored(key) for key in scene.engine.keys(scene.tokens["r"]))
    scene.engine.close()


@pytest.mark.parametrize("is_refusal_last", [False, True])
def test_what_is_stored_late_is_announced(tmp_path: Path, is_refusal_last: bool) -> None:
    """The first answers of the ranks do not matter. A chunk that is not announced now would never be."""
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    told = Announcements(lambda _, chunk: ChunkBlocks((b"%d" % chunk,), None, (), ()), scene.engine.store.index, 1, 2)
    scene.bridge.saves.watcher = told
    plan = planned_and_ended(scene, 2)
    ranks = [answers(plan, SAVED, SaveOutcome.FAILED), answers(plan, QUEUE_FULL, QUEUE_FULL)]
    for done in ranks if is_refusal_last else reversed(ranks):
        scene.bridge.saved(done)
    for _ in range(4):
        plan = scene.bridge.take_step(is_idle=True).before
        scene.bridge.saved([] if plan is None else 2 * answers(plan, *len(plan.chunks) * [SAVED]))
    keys = scene.engine.keys(scene.tokens["r"])
    stored = [b"%d" % chunk for chunk, key in enumerate(keys) if scene.engine.store.is_stored(key)]
    assert stored and [change.blocks.hashes[0] for change in told.take(9) if isinstance(change, Added)] == stored
    scene.engine.close()


@pytest.mark.parametrize("batches", [[[QUEUE_FULL], [SAVED]], [[QUEUE_FULL, SAVED]], [[SAVED], [QUEUE_FULL]]])
def test_a_rank_that_takes_no_chunk_does_not_make_the_other_write_it_a_hundred_times(
    tmp_path: Path, batches: list[list[SaveOutcome]]
) -> None:
    """Each attempt costs a slot of a segment set, so hundreds of them would evict what is stored.

    batches: answers of the two ranks, by the step in which they arrive. One chunk: the first set has a slot for each
    attempt.
    """
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    plan, n_attempts, n_steps = planned_and_ended(scene, 1), 0, 0
    while plan is not None or scene.bridge.has_pending_gathers():
        if plan is not None:
            for number, batch in enumerate(batches):
                if number:
                    assert scene.bridge.take_step(is_idle=True).before is None
                scene.bridge.saved([done for outcome in batch for done in answers(plan, outcome)])
            n_attempts += 1
        plan = scene.bridge.take_step(is_idle=True).before
        n_steps += 1
    assert n_steps > 500 and 20 <= n_attempts <= 24
    scene.engine.close()


@pytest.mark.parametrize("late_steps", [0, 1, 3])
def test_a_rank_that_takes_no_chunk_costs_no_more_slots_if_its_refusals_come_late(
    tmp_path: Path, late_steps: int
) -> None:
    """Engines plan some steps before they have the answers to the first."""
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    scene.request("r", 256)
    n_planned, on_their_way = 0, list[list[SaveDone]]()
    for _ in range(200):
        scene.engine.wait_for_set()
        scene.bridge.advance("r", 256 * scene.size, scene.blocks("r"))
        plan = scene.bridge.take_step().after
        n_chunks = len(plan.chunks) if plan else 0
        n_planned += n_chunks
        on_their_way.append(sum((answers(plan, *n_chunks * [each]) for each in (SAVED, QUEUE_FULL) if plan), []))
        if len(on_their_way) > late_steps:
            scene.bridge.saved(on_their_way.pop(0))
    assert WINDOW_MIN * 8 < n_planned < 200
    scene.engine.close()


def test_a_rank_that_takes_one_chunk_of_each_attempt_is_offered_the_next_soon(tmp_path: Path) -> None:
    """One rank is slower than the other, but not stuck."""
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    plan, n_attempts, n_steps = planned_and_ended(scene, 6), 0, 0
    while plan is not None or scene.bridge.has_pending_gathers():
        if plan is not None:
            n_chunks = len(plan.chunks)
            refusals = answers(plan, SAVED, *(n_chunks - 1) * [QUEUE_FULL])
            scene.bridge.saved(refusals + answers(plan, *n_chunks * [SAVED]))
            n_attempts += 1
        plan = scene.bridge.take_step(is_idle=True).before
        n_steps += 1
    assert all(scene.engine.store.is_stored(key) for key in scene.engine.keys(scene.tokens["r"]))
    assert n_attempts == 6 and n_steps <= 40
    scene.engine.close()


@pytest.mark.parametrize("outcomes", [(SaveOutcome.FAILED, QUEUE_FULL), (QUEUE_FULL, SaveOutcome.FAILED)])
def test_what_one_rank_refused_and_another_failed_to_save_has_failed(
    tmp_path: Path, outcomes: tuple[SaveOutcome, SaveOutcome]
) -> None:
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    plan = planned_and_ended(scene, 1)
    lost = scene.engine.store.saved([done for outcome in outcomes for done in answers(plan, outcome)])
    assert [loss.outcome for loss in lost] == [SaveOutcome.FAILED]
    scene.engine.close()


def test_what_both_ranks_refused_is_planned_again_in_the_next_step(tmp_path: Path) -> None:
    """Both ranks refuse, so no slot is lost, however often they do."""
    scene = Scene(tmp_path, engine=Engine(tmp_path, tensor_size=2))
    plan = planned_and_ended(scene, 4)
    for _ in range(20):
        scene.bridge.saved(2 * answers(plan, *4 * [QUEUE_FULL]))
        plan = scene.bridge.take_step(is_idle=True).before
    scene.bridge.saved(2 * answers(plan, *4 * [SAVED]))
    assert all(scene.engine.store.is_stored(key) for key in scene.engine.keys(scene.tokens["r"]))
    assert not scene.bridge.has_pending_gathers()
    scene.engine.close()


def test_the_chunks_of_an_aborted_request_are_not_planned_again(scene: Scene) -> None:
    Contents(scene)
    scene.room = 0
    scene.request("r", 4)
    scene.bridge.advance("r", 4 * scene.size, scene.blocks("r"))
    plan: Any = scene.bridge.take_step().after
    scene.bridge.finish("r", 0, [])
    scene.bridge.saved(scene._worker(plan))
    assert not scene.bridge.has_pending_gathers() and scene.counted(names.SKIPPED_QUEUE_FULL) == 4
