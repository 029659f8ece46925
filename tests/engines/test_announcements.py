"""What is told of chunks in the tier: once each, in order, taken back when they are gone, within bounds."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.kv_events import SETS_AT_ONCE, Added, Announcements, Bounds, Change, ChunkBlocks, Removed
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.errors import IndexUnavailable
from kvtier.format.namespace import chunk_keys
from kvtier.index.base import Index
from kvtier.index.memory import MemoryIndex
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.scheduler.load_threshold import FixedThreshold
from tests.conformance.index_suite import at, keys, put_set, record

from .fakes import FakeStore

SAVED, PRESENT, FAILED = SaveOutcome.SAVED, SaveOutcome.PRESENT, SaveOutcome.FAILED
BLOCKS = 2  # of a chunk
MANY = 1000


def blocks_of(chunk: int, request: str = "r") -> ChunkBlocks:
    """Chunk `chunk` of a request, in blocks of two tokens."""
    names = [f"{request}{number}".encode().ljust(8) for number in range(BLOCKS * chunk - 1, BLOCKS * (chunk + 1))]
    tokens = tuple(range(4 * chunk, 4 * chunk + 4))
    return ChunkBlocks(tuple(names[1:]), names[0] if chunk else None, tokens, (None, None))


class Telling:
    """Announcements over an index in memory. A request's chunk n has the key `keys([n])[0]`.

    stored: chunks of the index's set 1, which is there only with some.
    """

    def __init__(
        self, stored: Iterable[int] = (), writers: int = 1, bounds: Bounds | None = None, index: Index | None = None
    ) -> None:
        self.index = index or MemoryIndex()
        if stored:
            put_set(self.index, 1, stored)
        self.described: list[tuple[str, int]] = []
        self.told = Announcements(self._describe, self.index, BLOCKS, writers, bounds)

    def _describe(self, request_id: str, chunk: int) -> ChunkBlocks | None:
        self.described.append((request_id, chunk))
        return None if request_id == "gone" else blocks_of(chunk, request_id)

    def look_up(self, numbers: Iterable[int], first_chunk: int = 0, request: str = "r") -> None:
        asked = keys(numbers)
        self.told.found(request, first_chunk, asked, self.index.resolve(asked))

    def save(self, chunks: Sequence[int], outcome: SaveOutcome = SAVED, set_id: int = 1) -> None:
        self.told.wanted("r", chunks[0], keys(chunks))
        self.told.saved([SaveDone(key, set_id, slot, outcome) for slot, key in enumerate(keys(chunks))])

    def take(self) -> list[Change]:
        return self.told.take(MANY)


def added(*chunks: int) -> list[Change]:
    return [Added(blocks_of(chunk)) for chunk in chunks]


def removed(*chunks: int) -> list[Change]:
    return [Removed(blocks_of(chunk).hashes) for chunk in chunks]


def test_what_is_found_is_told_once_in_the_order_of_the_prompt() -> None:
    telling = Telling(range(3))
    telling.look_up(range(5))
    telling.look_up(range(5))
    assert telling.take() == added(0, 1, 2) and telling.take() == []
    assert not telling.told.has_waiting
    assert len(telling.described) == 3  # nothing is described for nothing


def test_chunks_behind_a_hit_of_the_engines_own_name_their_parent() -> None:
    telling = Telling(range(4))
    telling.look_up([2, 3], first_chunk=2)
    (second, third) = telling.take()
    assert isinstance(second, Added) and isinstance(third, Added)
    assert second.blocks.parent == blocks_of(1).hashes[-1]
    assert third.blocks.parent == second.blocks.hashes[-1]


def test_what_was_saved_is_told_when_it_was_and_not_before() -> None:
    telling = Telling()
    telling.told.wanted("r", 0, keys([0, 1]))
    assert telling.take() == []
    telling.told.saved([SaveDone(keys([0])[0], 1, 0, SAVED)])
    assert telling.take() == added(0)
    telling.told.saved([SaveDone(keys([1])[0], 1, 1, FAILED)])
    assert telling.take() == []


@pytest.mark.parametrize("first", [SaveOutcome.QUEUE_FULL, FAILED])
def test_a_chunk_that_was_not_saved_is_announced_when_it_is_saved_later(first: SaveOutcome) -> None:
    """Its request may have ended, and nothing is described of it again."""
    telling = Telling(writers=2)
    telling.told.wanted("r", 0, keys([0]))
    for outcome in (SAVED, first):
        telling.told.saved([SaveDone(keys([0])[0], 1, 5, outcome)])
    for expected in ([], added(0)):
        telling.told.saved([SaveDone(keys([0])[0], 1, 6, SAVED)])
        assert telling.take() == expected


@pytest.mark.parametrize("slots", [(0, 0), (5, 6, 6)], ids=["one plan", "an older plan"])
def test_a_chunk_of_several_ranks_is_told_when_all_have_written_it(slots: tuple[int, ...]) -> None:
    """Answers to an older plan do not count for a newer one."""
    telling = Telling(writers=2)
    telling.told.wanted("r", 0, keys([0]))
    for number, slot in enumerate(slots, start=1):
        telling.told.saved([SaveDone(keys([0])[0], 1, slot, SAVED)])
        assert telling.take() == (added(0) if number == len(slots) else [])


def test_what_was_told_as_saved_is_not_told_as_found() -> None:
    telling = Telling()
    telling.save([0])
    put_set(telling.index, 1, [0])
    telling.look_up([0])
    telling.told.wanted("another", 0, keys([0]))
    assert telling.take() == added(0) and telling.described == [("r", 0)]


def test_another_engine_was_quicker_to_save_it() -> None:
    """PRESENT: in a set that only the index knows, which is asked on the thread of its own."""
    telling = Telling()
    telling.save([0, 1], PRESENT)
    put_set(telling.index, 7, [0])
    assert telling.take() == []
    telling.told.check()
    assert telling.take() == added(0)
    telling.index.remove_set(7)
    telling.told.check()
    assert telling.take() == removed(0)


def test_what_the_index_says_of_an_epoch_that_ended_meanwhile_is_not_told() -> None:
    """No lookup asks for it again, so nothing would take it back before its set is evicted."""
    telling = Telling()
    telling.save([0], PRESENT)
    put_set(telling.index, 7, [0])
    find = telling.index.find

    def find_late(asked: Sequence[bytes]) -> list[bytes | None]:
        telling.told.forget()
        return find(asked)

    telling.index.find = find_late  # type: ignore[method-assign]
    telling.told.check()
    assert telling.take() == []


def test_an_evicted_set_takes_back_what_lay_in_it_and_nothing_else() -> None:
    telling = Telling([0, 1])
    put_set(telling.index, 2, [2, 3])
    telling.look_up(range(4))
    telling.told.check()
    assert telling.take() == added(0, 1, 2, 3)
    telling.index.remove_set(1)
    telling.told.check()
    telling.told.check()
    assert sorted(telling.take()) == sorted(removed(0, 1))
    put_set(telling.index, 3, [0, 1])
    telling.look_up(range(4))
    assert telling.take() == added(0, 1)


def test_all_sets_are_asked_for_in_turn() -> None:
    telling = Telling()
    n_sets = SETS_AT_ONCE + 10
    for number in range(n_sets):
        put_set(telling.index, 100 + number, [number])
    telling.look_up(range(n_sets))
    telling.take()
    for number in (0, n_sets - 1):
        telling.index.remove_set(100 + number)
    telling.told.check()
    telling.told.check()
    assert sorted(telling.take()) == sorted(removed(0, n_sets - 1))


def test_a_single_chunk_that_was_lost_is_taken_back_after_a_lookup_missed_it() -> None:
    """As one whose bytes were found bad, and which a worker took out of the index."""
    telling = Telling([0, 1, 2])
    telling.look_up(range(3))
    telling.take()
    assert telling.index.retract(keys([1])[0], at(1, 1))
    telling.told.check()
    assert telling.take() == []  # its set is still there
    telling.look_up(range(3))
    telling.told.check()
    assert telling.take() == removed(1)


def test_a_chunk_that_came_back_in_another_set_stays_told() -> None:
    telling = Telling([0])
    telling.look_up([0])
    telling.index.remove_set(1)
    put_set(telling.index, 2, [0])
    telling.look_up([0])
    telling.told.check()
    assert telling.take() == added(0)
    telling.index.remove_set(2)
    telling.told.check()
    assert telling.take() == removed(0)


@pytest.mark.parametrize("outcome", [SAVED, PRESENT])
def test_chunks_that_are_saved_again_after_an_eviction_stay_announced(outcome: SaveOutcome) -> None:
    """Their request is not looked up again, so nothing else would announce them."""
    telling = Telling([0, 1])
    telling.look_up([0, 1])
    telling.index.remove_set(1)
    telling.look_up([0, 1])
    telling.save([0, 1], outcome, set_id=2)
    put_set(telling.index, 2, [0, 1])
    telling.told.check()
    assert telling.take() == added(0, 1)
    telling.index.remove_set(2)
    telling.told.check()
    assert sorted(telling.take()) == sorted(removed(0, 1))


class SilentIndex(MemoryIndex):
    is_silent = False

    def some_sets(self, set_ids: Any) -> Any:
        if self.is_silent:
            raise IndexUnavailable("silent")
        return super().some_sets(set_ids)


def test_an_index_that_does_not_answer_takes_nothing_back() -> None:
    telling = Telling([0, 1], index=(index := SilentIndex()))
    telling.look_up([0, 1])
    telling.take()
    index.remove_set(1)
    index.is_silent = True
    telling.told.found("r", 0, keys([0, 1]), [])  # a lookup in trouble finds nothing
    telling.told.check()
    assert telling.take() == []
    index.is_silent = False
    telling.told.check()
    assert sorted(telling.take()) == sorted(removed(0, 1))


def test_a_strange_entry_is_not_told() -> None:
    telling = Telling()
    telling.told.found("r", 0, keys([0]), [b"\x01"])
    assert telling.take() == []


def test_a_request_that_the_engine_does_not_have_any_more_is_not_told() -> None:
    telling = Telling([0])
    telling.look_up([0], request="gone")
    telling.told.wanted("gone", 0, keys([5]))
    telling.told.saved([SaveDone(keys([5])[0], 1, 0, SAVED)])
    assert telling.take() == []
    telling.look_up([0])
    assert telling.take() == added(0)


def test_after_a_reset_all_is_taken_back_and_nothing_late_is_told() -> None:
    telling = Telling([0, 1])
    telling.look_up([0, 1])
    telling.told.wanted("r", 2, keys([2]))
    telling.save([3], PRESENT)
    telling.told.forget()
    telling.told.saved([SaveDone(keys([2])[0], 1, 2, SAVED)])
    telling.told.check()
    assert telling.take() == added(0, 1) + removed(0, 1)


# --- bounds ---


def test_a_step_takes_no_more_than_it_asks_for() -> None:
    telling = Telling(range(10))
    telling.look_up(range(10))
    assert telling.told.take(4) == added(0, 1, 2, 3) and telling.told.has_waiting
    assert telling.told.take(MANY) == added(4, 5, 6, 7, 8, 9) and not telling.told.has_waiting


def test_beyond_what_is_remembered_the_longest_unused_is_taken_back() -> None:
    telling = Telling(range(4), bounds=Bounds(announced=3))
    telling.look_up(range(3))
    telling.look_up([0])
    telling.look_up([3], first_chunk=3)
    assert telling.take() == added(0, 1, 2, 3) + removed(1)


def test_while_nobody_takes_changes_no_more_are_told_of_and_they_are_told_later() -> None:
    telling = Telling(range(4), bounds=Bounds(waiting=2))
    telling.look_up(range(4))
    assert telling.take() == added(0, 1)
    telling.look_up(range(4))
    assert telling.take() == added(2, 3)


def test_what_never_is_answered_does_not_pile_up() -> None:
    telling = Telling(bounds=Bounds(expected=2))
    telling.save(range(4))
    assert telling.take() == added(2, 3)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_of_the_expected_chunks_one_that_is_wanted_again_or_answered_is_forgotten_last(is_wanted: bool) -> None:
    """Chunks of an ended request are planned again without being described again: only answers tell of them."""
    telling = Telling(bounds=Bounds(expected=2))
    telling.told.wanted("r", 0, keys([0, 1]))
    if is_wanted:
        telling.told.wanted("another", 0, keys([0]))
    else:
        telling.told.saved([SaveDone(keys([0])[0], 1, 0, SaveOutcome.QUEUE_FULL)])
    telling.told.wanted("r", 2, keys([2]))
    telling.told.saved([SaveDone(key, 1, slot, SAVED) for slot, key in enumerate(keys(range(3)))])
    assert telling.take() == added(0, 2)


def test_doubts_do_not_pile_up() -> None:
    telling = Telling(bounds=Bounds(doubted=2))
    telling.save(range(4), PRESENT)
    put_set(telling.index, 1, range(4))
    telling.told.check()
    assert telling.take() == added(2, 3)


# --- what the bridge tells ---


class Recorder:
    """A Watcher that notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None:
        self.notes.append(("found", request_id, first_chunk, list(keys), len(entries)))

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None:
        self.notes.append(("wanted", request_id, first_chunk, list(keys)))

    def saved(self, done: Sequence[SaveDone]) -> None:
        self.notes.append(("saved", list(done)))

    def forget(self) -> None:
        self.notes.append(("forget",))


@pytest.mark.parametrize("computed", [0, 64, 96])
def test_the_bridge_tells_chunks_by_their_number_in_the_prompt(computed: int) -> None:
    store = FakeStore()
    bridge = SchedulerBridge(store, BlockShape(64, 16), FixedThreshold(64), 2.0, Faults())  # type: ignore[arg-type]
    bridge.saves.watcher = recorder = Recorder()
    tokens = list(range(300))
    bridge.track(RequestView("r", tokens, {}, may_load=True, may_save=True))
    own = chunk_keys(store.namespace_id, tokens, 64, {})
    store.stored.update(own[:3])
    bridge.hit_tokens("r", computed)
    bridge.advance("r", 260, list(range(20)))
    bridge.take_step()
    bridge.finish("r", 300, list(range(20)))
    done = [SaveDone(own[3], 1, 0, SAVED)]
    bridge.saved(done)
    bridge.reset(blocks_in_use=False)
    first = computed // 64
    assert recorder.notes == [
        ("found", "r", first, own[first:], 3 - first),
        ("wanted", "r", 3, own[3:]),
        ("saved", done),
        ("forget",),
    ]


def test_a_watcher_that_fails_ends_no_request() -> None:
    """It is our bug then, on the engine's scheduler thread, where nothing may be raised (I9)."""

    class Failing(Recorder):
        def _fail(self, *what: Any) -> None:
            raise RuntimeError("a bug")

        found = wanted = saved = _fail

    store, faults = FakeStore(), Faults()
    bridge = SchedulerBridge(store, BlockShape(64, 16), FixedThreshold(64), 2.0, faults)  # type: ignore[arg-type]
    bridge.saves.watcher = Failing()
    bridge.track(RequestView("r", list(range(300)), {}, may_load=True, may_save=True))
    assert bridge.hit_tokens("r", 0) == 0
    bridge.advance("r", 140, list(range(20)))
    during = bridge.take_step()
    bridge.finish("r", 300, list(range(20)))
    bridge.saved([])
    at_end = bridge.take_step()
    assert faults.take() == 4 and during.after is not None and at_end.before is not None


def test_one_record_more_than_the_set_had_is_found_too() -> None:
    """A set that is still being filled: chunks of it are told as they come."""
    telling = Telling([0])
    telling.look_up([0, 1])
    assert telling.index.publish([record(1, at(1, 1))]) == 1
    telling.look_up([0, 1])
    assert telling.take() == added(0, 1)
