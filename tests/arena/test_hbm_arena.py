"""The hbm arena: what stays in the slots that gather and scatter work on, and that nothing waits for it. Launches run
as late as they may (tests.support.lazy)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvtier.config.settings import HbmSettings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.kernels.paged import Move, PagedKV
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.runtime.units import exact
from kvtier.worker.arenas import ARENA_SLOTS_MIN, HBM_SPARE_BYTES, hbm_slots
from tests.support.lazy import FakeEvent, LazyEngine, Left, Stream
from tests.support.rig import is_equal
from tests.support.walks import (
    TARGET,
    TOKENS,
    all_given_back,
    begin_save,
    expected,
    load,
    save,
    start,
)

OTHERS = list(range(5000, 5000 + 64 * 5))
SLOT_BYTES = 8 << 20
GIB = 1 << 30


@pytest.fixture
def engines() -> Iterator[list[LazyEngine]]:
    with all_given_back() as made:
        yield made


def totals(engine: LazyEngine) -> dict[str, float]:
    return dict(engine.transfers[0].metrics.total())


def flip(engine: LazyEngine, key: bytes) -> None:
    """A bit of the chunk changes in the hbm arena."""
    slot, sources = engine.staging.lease(key)  # type: ignore[misc]
    engine.staging.slabs(slot, sources[0].cut.slot_offset, 4, sources[0].cut.slab_bytes)[1, 99] ^= 1
    engine.staging.release(slot, key)


def is_cached(engine: LazyEngine, key: bytes) -> bool:
    leased = engine.staging.lease(key)
    if leased is not None:
        engine.staging.release(leased[0], key)
    return leased is not None


def test_what_was_saved_is_loaded_from_the_hbm_arena(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines, hbm_slots=5, hbm_admit="saved")
    assert {done.outcome for done in save(engine)} == {SaveOutcome.SAVED}
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))
    found = totals(engine)
    assert found[names.ARENA_HIT_CHUNKS] == 5
    assert names.HOST_HIT_CHUNKS not in found and names.FILE_READ_BYTES not in found


def test_what_was_loaded_a_second_time_stays_there_and_in_the_host_arena(
    tmp_path: Path, engines: list[LazyEngine]
) -> None:
    save(start(tmp_path, engines))
    reader = start(tmp_path, engines, hbm_slots=5, hbm_admit="second_hit")
    for hits in (0, 0, 5):
        assert load(reader).failed_blocks == frozenset()
        assert is_equal(reader.blocks(TARGET), expected(reader))
        assert totals(reader).get(names.ARENA_HIT_CHUNKS, 0) == hits
    assert names.HOST_HIT_CHUNKS not in totals(reader)
    for key in reader.keys(TOKENS):
        reader.staging.drop(key)
    load(reader)
    assert is_equal(reader.blocks(TARGET), expected(reader))
    assert totals(reader)[names.HOST_HIT_CHUNKS] == 5


def test_a_slot_is_not_given_away_while_it_is_copied_down(tmp_path: Path, engines: list[LazyEngine]) -> None:
    save(start(tmp_path, engines))
    reader = start(tmp_path, engines, hbm_slots=5, hbm_admit="second_hit")
    load(reader)
    staging = reader.staging

    def overwrite_others_then_copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> FakeEvent:
        def work() -> None:
            taken = list(iter(staging.reserve, None))
            for slot in taken:
                staging.record(slot, 4096).fill_(7)
                staging.discard(slot)
            for target, source in pairs:
                target.copy_(source)

        return FakeEvent(Stream([work]), 1)

    reader.order.begin_copies = overwrite_others_then_copy  # type: ignore[method-assign]
    load(reader)
    del reader.order.begin_copies  # type: ignore[method-assign]
    for key in reader.keys(TOKENS):
        reader.staging.drop(key)
    load(reader)
    assert is_equal(reader.blocks(TARGET), expected(reader))
    found = totals(reader)
    assert found[names.HOST_HIT_CHUNKS] == 5 and names.CHECKSUM_FAILURES not in found


def test_what_came_from_the_host_arena_may_stay_too(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines, hbm_slots=5, hbm_admit="always")
    save(engine)
    for key in engine.keys(TOKENS):
        engine.staging.drop(key)
    for hits in (0, 5):
        load(engine)
        assert is_equal(engine.blocks(TARGET), expected(engine))
        assert totals(engine).get(names.ARENA_HIT_CHUNKS, 0) == hits
    assert totals(engine)[names.HOST_HIT_CHUNKS] == 5


def test_without_it_nothing_stays(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    save(engine)
    load(engine)
    load(engine)
    assert engine.staging.used_slots == 0


def test_a_slot_is_not_given_away_while_its_scatter_is_to_come(tmp_path: Path, engines: list[LazyEngine]) -> None:
    """While a load's scatter is launched and has not run, a save of other chunks wants slots."""
    engine = start(tmp_path, engines, staging_slots=10, hbm_slots=5, hbm_admit="saved")
    save(engine)
    taken = [engine.staging.reserve() for _ in range(8)]  # two are free, five hold the prompt
    begin, others = engine.order.begin, iter([OTHERS])

    def begin_then_save(work: Callable[[], None], *after: FakeEvent) -> FakeEvent:
        event = begin(work, *after)
        for tokens in others:
            begin_save(engine, tokens)
        return event

    engine.order.begin = begin_then_save  # type: ignore[method-assign]
    outcomes: list[SaveOutcome] = []
    answered = engine.transfers[0]._saver._answer
    engine.transfers[0]._saver._answer = lambda chunks, outcome: (  # type: ignore[method-assign]
        outcomes.extend(len(chunks) * [outcome]),
        answered(chunks, outcome),
    )
    assert load(engine).failed_blocks == frozenset()
    assert sorted(outcome.value for outcome in outcomes) == 3 * ["queue_full"] + 2 * ["saved"]
    assert is_equal(engine.blocks(TARGET), expected(engine))
    assert totals(engine)[names.ARENA_HIT_CHUNKS] == 5
    for slot in taken:
        assert slot is not None
        engine.staging.discard(slot)


def test_the_least_recently_used_goes_when_a_slot_is_needed(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines, staging_slots=10, hbm_slots=1, hbm_admit="always")
    save(start(tmp_path, engines))
    load(engine)
    save(start(tmp_path, engines), OTHERS)
    load(engine, tokens=OTHERS)  # ten of eleven slots hold chunks now
    load(engine)
    assert totals(engine)[names.ARENA_HIT_CHUNKS] == 5
    begin_save(engine, list(range(9000, 9000 + 64 * 3)))
    keys, others = engine.keys(TOKENS), engine.keys(OTHERS)
    assert all(is_cached(engine, key) for key in keys)
    assert [is_cached(engine, key) for key in others] == [False, False, True, True, True]
    engine.run_all()


def test_a_copy_that_went_bad_there_is_read_again(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines, admit="never", hbm_slots=5, hbm_admit="saved")
    save(engine)
    flip(engine, engine.keys(TOKENS)[2])
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))
    found = totals(engine)
    assert found[names.CHECKSUM_FAILURES] == 1 and found[names.FILE_READ_BYTES] > 0
    load(engine)
    assert totals(engine)[names.CHECKSUM_FAILURES] == 1, "the bad copy is found again"


def test_what_is_not_published_does_not_stay(
    tmp_path: Path, engines: list[LazyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tmp_path, engines, hbm_slots=5, hbm_admit="saved")

    def dead(*_: object) -> None:
        raise IndexUnavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(type(engine.worker.index), "publish", dead)
        assert {done.outcome for done in save(engine)} == {SaveOutcome.FAILED}
    assert not any(is_cached(engine, key) for key in engine.keys(TOKENS))
    engine.transfers[0]._saver.writer.disk.clear()  # saving rests
    save(engine, OTHERS)
    assert all(is_cached(engine, key) for key in engine.keys(OTHERS))


def test_slow_storage_takes_no_slot_from_the_next_steps(tmp_path: Path, engines: list[LazyEngine]) -> None:
    """Nothing is written: what waits above for its record takes the slots of the hbm arena and no others."""
    engine = start(tmp_path, engines, staging_slots=10, hbm_slots=3, hbm_admit="saved")
    for step in range(5):
        begin_save(engine, list(range(1000 * step, 1000 * step + 64 * 5)))
        engine.jobs.loop.drain(10)
        assert engine.transfers[0].poll().saves == [], "a chunk was skipped"
        free = engine.staging.available
        assert free == engine.staging.n_slots - 3, "loads miss slots"
    engine.run_all()
    done = engine.transfers[0].poll().saves
    engine.store.saved(done)
    assert [answer.outcome for answer in done] == 25 * [SaveOutcome.SAVED]


def test_a_full_arena_takes_no_slot_from_saves_and_loads(tmp_path: Path, engines: list[LazyEngine]) -> None:
    save(start(tmp_path, engines))
    engine = start(tmp_path, engines, staging_slots=10, hbm_slots=2, hbm_admit="always")
    for number in range(4):
        tokens = list(range(3000 * number + 2000, 3000 * number + 2000 + 64 * 5))
        assert {done.outcome for done in save(engine, tokens)} == {SaveOutcome.SAVED}
        assert sum(is_cached(engine, key) for key in engine.keys(tokens)) == 2
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))


def test_chunks_that_are_all_there_move_in_one_launch(tmp_path: Path, engines: list[LazyEngine]) -> None:
    tokens = list(range(1000, 1000 + 64 * 30))
    engine = start(tmp_path, engines, staging_slots=60, hbm_slots=30, hbm_admit="saved")
    save(engine, tokens)
    decode, launches = engine.worker.codec.decode, []

    def count(pages: PagedKV, moves: Sequence[Move]) -> None:
        launches.append(len(moves))
        decode(pages, moves)

    engine.worker.codec.decode = count  # type: ignore[method-assign]
    assert load(engine, tokens=tokens).failed_blocks == frozenset()
    assert launches == [30]


def test_saves_and_loads_on_threads_that_push_each_other_out(tmp_path: Path, engines: list[LazyEngine]) -> None:
    prompts = [list(range(2000 * n, 2000 * n + 64 * 5)) for n in range(1, 13)]
    writer = start(tmp_path, engines)
    save(writer)
    engine = start(tmp_path, engines, staging_slots=10, hbm_slots=3, hbm_admit="always")
    engine.on_threads()
    transfer = engine.transfers[0]
    keys = engine.keys(TOKENS)
    for tokens in prompts:
        begin_save(engine, tokens)
        entries = engine.store.lookup(keys)
        for request, first in (("a", TARGET[0]), ("b", TARGET[0] + 30)):
            transfer.load(engine.store.plan_load(request, keys, entries, range(first, first + 20), 0))
        assert transfer.drain(20)
        progress = transfer.poll()
        engine.store.saved(progress.saves)
        assert [done.failed_blocks for done in progress.loads] == 2 * [frozenset()]
        wanted = expected(engine)
        for first in (TARGET[0], TARGET[0] + 30):
            assert is_equal(engine.blocks(range(first, first + 20)), wanted)
            engine.overwrite(range(first, first + 20), 0)
        engine.run_engine()
    found = totals(engine)
    assert names.CHECKSUM_FAILURES not in found and 0 < found[names.ARENA_HIT_CHUNKS] < 2 * 5 * len(prompts)


@pytest.mark.parametrize("left", ["gathered", "behind_engine", "scattered"])
def test_an_event_left_out_shows(tmp_path: Path, engines: list[LazyEngine], left: str) -> None:
    engine = start(tmp_path, engines, Left(**{left: True}), hbm_slots=5, hbm_admit="saved")
    save(engine)
    if left == "gathered":
        engine.run_engine()
    load(engine)
    wrong = not is_equal(engine.blocks(TARGET), expected(engine))
    assert wrong or names.CHECKSUM_FAILURES in totals(engine)


def test_what_does_not_fit_beside_the_engine_is_told_with_the_arithmetic() -> None:
    hbm = HbmSettings(staging_bytes=128 * SLOT_BYTES, arena_bytes=4 * GIB)
    slots = hbm_slots(hbm, SLOT_BYTES, step_chunks=32)
    assert (slots.staging, slots.arena) == (128, 512)
    needed = 640 * SLOT_BYTES + HBM_SPARE_BYTES
    slots.within(hbm, needed).check_fits(hbm, needed, 100 * GIB)
    with pytest.raises(ConfigError) as told:
        slots.within(hbm, needed - 1).check_fits(hbm, needed - 1, 100 * GIB)
    assert (told.value.key, told.value.value) == ("hbm.arena_bytes", 4 * GIB)
    assert "512 of the hbm arena" in told.value.fix and "are 5.5 GiB" in told.value.fix
    assert f"at most {exact(511 * SLOT_BYTES)}" in told.value.fix and "lower by 0.01" in told.value.fix
    hbm_slots(HbmSettings(arena_bytes=511 * SLOT_BYTES), SLOT_BYTES, 32).check_fits(hbm, needed - 1, 100 * GIB)


def test_staging_of_the_default_size_shrinks_to_what_the_engine_leaves() -> None:
    """vLLM's default share of an H100 left 3.9 GiB beside a model with steps of 16,384 tokens, which want 7.5 GiB."""
    hbm = HbmSettings()
    wanted = hbm_slots(hbm, SLOT_BYTES, step_chunks=64)
    assert wanted.staging == 3 * 64 + 32
    slots = wanted.within(hbm, GIB)
    assert slots.staging == (GIB - HBM_SPARE_BYTES) // SLOT_BYTES
    slots.check_fits(hbm, GIB, 80 * GIB)
    assert wanted.within(hbm, 2 * GIB).staging == 2 * GIB * 2 // 3 // SLOT_BYTES < wanted.staging
    assert wanted.within(hbm, 80 * GIB) == wanted
    least = wanted.within(hbm, HBM_SPARE_BYTES)
    assert least.staging == ARENA_SLOTS_MIN
    with pytest.raises(ConfigError, match="hbm.staging_bytes"):
        least.check_fits(hbm, HBM_SPARE_BYTES, 80 * GIB)


def test_when_not_even_staging_fits_that_is_told() -> None:
    hbm = HbmSettings(staging_bytes=GIB, arena_bytes=4 * GIB)
    with pytest.raises(ConfigError, match="hbm.arena_bytes to 0") as told:
        hbm_slots(hbm, SLOT_BYTES, 32).within(hbm, GIB).check_fits(hbm, GIB, 100 * GIB)
    assert told.value.key == "hbm.staging_bytes" and exact(ARENA_SLOTS_MIN * SLOT_BYTES) in told.value.fix


def test_an_arena_of_less_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError) as told:
        hbm_slots(HbmSettings(arena_bytes=SLOT_BYTES - 1), SLOT_BYTES, 32)
    assert told.value.key == "hbm.arena_bytes" and exact(SLOT_BYTES) in told.value.fix
    assert hbm_slots(HbmSettings(), SLOT_BYTES, 32).arena == 0
