"""Stream order: with launches that run as late as they may, every event that is left out shows (I2, I3)."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from kvtier.kernels.paged import SlabRun
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.worker.cuda_events import CudaOrder, HostOrder
from tests.support.lazy import FakeEvent, LazyEngine, Left, Stream
from tests.support.rig import is_equal
from tests.support.walks import (
    BLOCKS,
    TARGET,
    TOKENS,
    all_given_back,
    begin_load,
    expected,
    load,
    plan_of,
    save,
    start,
)


@pytest.fixture
def engines() -> Iterator[list[LazyEngine]]:
    with all_given_back() as made:
        yield made


def test_blocks_handed_on_at_once_and_zeroed_ones_loaded(tmp_path: Path, engines: list[LazyEngine]) -> None:
    writer = start(tmp_path, engines)
    assert {done.outcome for done in save(writer)} == {SaveOutcome.SAVED}
    reader = start(tmp_path, engines)
    assert load(reader).failed_blocks == frozenset()
    assert is_equal(reader.blocks(TARGET), expected(reader))
    assert names.CHECKSUM_FAILURES not in reader.transfers[0].metrics.total()


def test_verdicts_are_taken_without_the_stream_of_the_engine(tmp_path: Path, engines: list[LazyEngine]) -> None:
    """The codec's first chunks are compared, too. `all_given_back` finds the operations of the loop on that stream."""
    engine = start(tmp_path, engines, codec="int8")
    assert {done.outcome for done in save(engine)} == {SaveOutcome.SAVED}
    assert load(engine).failed_blocks == frozenset()


def test_a_local_hit_that_ends_inside_a_chunk(tmp_path: Path, engines: list[LazyEngine]) -> None:
    save(start(tmp_path, engines))
    reader = start(tmp_path, engines)
    reader.overwrite(TARGET[:6], 5)  # blocks of others: never written
    assert load(reader, computed=96).failed_blocks == frozenset()
    found, wanted = reader.blocks(TARGET), expected(reader)
    assert is_equal([plane[6:] for plane in found], [plane[6:] for plane in wanted])
    assert all(bool((plane[:6] == 5).all()) for plane in found)


def test_the_host_arena_serves_what_was_saved(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    save(engine)
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))
    totals = engine.transfers[0].metrics.total()
    assert totals[names.HOST_HIT_CHUNKS] == 5 and names.FILE_READ_BYTES not in totals


def test_a_second_hit_is_kept_in_the_host_arena(tmp_path: Path, engines: list[LazyEngine]) -> None:
    save(start(tmp_path, engines))
    reader = start(tmp_path, engines)
    for hits in (0, 0, 5):
        load(reader)
        assert reader.transfers[0].metrics.total().get(names.HOST_HIT_CHUNKS, 0) == hits
        assert is_equal(reader.blocks(TARGET), expected(reader))


def test_a_copy_that_went_bad_in_host_memory_is_read_again(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    save(engine)
    key = engine.keys(TOKENS)[2]
    slot, sources = engine.host.lease(key)  # type: ignore[misc]
    engine.host.slabs(slot, sources[0].cut.slot_offset, 4, sources[0].cut.slab_bytes)[1, 99] ^= 1
    engine.host.release(slot, key)
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))
    totals = engine.transfers[0].metrics.total()
    assert totals[names.CHECKSUM_FAILURES] == 1 and totals[names.FILE_READ_BYTES] > 0


def test_bytes_that_change_on_the_way_to_the_device_are_a_miss(tmp_path: Path, engines: list[LazyEngine]) -> None:
    save(start(tmp_path, engines))
    reader = start(tmp_path, engines)
    sums, bad = reader.worker.sums, reader.keys(TOKENS)[2]

    def flip_in_third_chunk(runs: Sequence[SlabRun]) -> list[tuple[int, ...]]:
        for run in runs:
            if run.key == bad:
                run.slabs.numpy()[1, 5] ^= 1
        return sums(runs)

    object.__setattr__(reader.worker, "sums", flip_in_third_chunk)
    assert load(reader).failed_blocks == frozenset(TARGET[8:])
    assert is_equal([p[:8] for p in reader.blocks(TARGET)], [p[:8] for p in expected(reader)])
    assert reader.store.lookup([bad]) == [], "a bad record is not offered again (I11)"


def test_bytes_that_change_on_the_way_down_are_not_stored(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    bad, copy = engine.keys(TOKENS)[3], engine.order.copy

    def flip_fourth(target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        if next(calls) == 3:
            engine.order.launch(lambda: target[777:778].bitwise_xor_(torch.tensor(2, dtype=torch.uint8)))

    calls = iter(range(100))
    engine.order.copy = flip_fourth  # type: ignore[method-assign]
    outcomes = {done.key: done.outcome for done in save(engine)}
    assert outcomes.pop(bad) is SaveOutcome.FAILED and set(outcomes.values()) == {SaveOutcome.SAVED}
    assert engine.store.lookup([bad]) == []
    assert engine.transfers[0].metrics.total()[names.CHECKSUM_FAILURES] == 1


def test_what_the_host_arena_has_no_slots_for_is_skipped(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    object.__setattr__(engine.worker, "timeout_s", 2.0)  # of the write, too
    taken = [engine.host.reserve() for _ in range(engine.host.n_slots)]
    saver = engine.transfers[0]._saver
    with patch.object(saver, "turn", wraps=saver.turn) as turns:
        outcomes = [done.outcome for done in save(engine)]
    assert outcomes == 5 * [SaveOutcome.QUEUE_FULL]
    assert turns.call_count < 2000, "the loop pauses while it waits for a slot"
    for slot in taken:
        assert slot is not None
        engine.host.discard(slot)


def test_a_closed_queue_gives_no_slot_away_before_its_gather(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines, staging_slots=10)
    engine.wait_for_set()
    engine.jobs.loop.close()
    engine.in_engine(lambda: engine.prefill(TOKENS, BLOCKS))
    engine.transfers[0].save(plan_of(engine))
    engine.store.saved(engine.transfers[0].poll().saves)
    assert engine.order.engine.n_done == len(engine.order.engine.work), "its gather is still to come"


def test_a_late_load_is_not_answered_while_its_chunks_still_move(tmp_path: Path, engines: list[LazyEngine]) -> None:
    engine = start(tmp_path, engines)
    save(engine)
    begin_load(engine)
    (transfer,), worker, now_s = engine.transfers, engine.worker, engine.worker.clock()
    loop = transfer._loop
    while not any(load.n_scattered for load in transfer._loader.work):
        loop.turn().has_moved or loop._pause(None)
    object.__setattr__(worker, "clock", lambda: now_s + worker.timeout_s + 1)
    object.__setattr__(engine.order, "is_done", lambda event: False)
    for _ in range(3):
        loop.turn()
    assert engine.transfers[0].poll().loads == []
    del engine.order.is_done  # type: ignore[method-assign]
    engine.run_all()
    (done,) = engine.transfers[0].poll().loads
    assert done.failed_blocks <= frozenset(TARGET)
    engine.run_all()
    assert engine.transfers[0].poll().loads == []


def test_events_of_saves_hide_no_wait_between_loads(tmp_path: Path, engines: list[LazyEngine]) -> None:
    """Chunks of loads that wait for an earlier chunk hold all slots: one gives up its slot, also while saves run."""
    save(start(tmp_path, engines))
    engine = start(tmp_path, engines, admit="never")
    begin_load(engine)
    loader, saver, loop = engine.transfers[0]._loader, engine.transfers[0]._saver, engine.transfers[0]._loop
    loop.turn()
    engine.jobs.load.drain(10)
    opened, results = loop._posted.popleft()
    opened(results)  # a turn would take them further
    for fetch in loader._fetches.values():
        assert fetch.reads is not None and fetch.reads.batch.wait(10)
    first = engine.keys(TOKENS)[0]
    loader.begin_again(loader._fetches[first])
    taken = []
    while (slot := engine.staging.reserve()) is not None:
        taken.append(slot)
    saver.events.append((FakeEvent(Stream(), 1), lambda value: None, None))
    for _ in range(5):
        loop.turn()
    assert first in loader._fetches and len(loader._fetches) == 4
    saver.events.clear()
    engine.run_all()
    (done,) = engine.transfers[0].poll().loads
    assert done.failed_blocks == frozenset() and is_equal(engine.blocks(TARGET), expected(engine))
    engine.staging.discard(*taken)


@pytest.mark.parametrize("left", ["gathered", "behind_engine", "copied", "scattered"])
def test_an_event_left_out_shows(tmp_path: Path, engines: list[LazyEngine], left: str) -> None:
    out = Left(**{left: True})
    engine = start(tmp_path, engines, out)
    save(engine)
    if left == "gathered":  # zeros, or an older chunk, under a good checksum: the worst that can happen
        engine.run_engine()
    load(engine)
    wrong = not is_equal(engine.blocks(TARGET), expected(engine))
    assert wrong or names.CHECKSUM_FAILURES in engine.transfers[0].metrics.total()


def test_sums_are_not_behind_a_scatter_that_waits_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for sums: behind such a scatter, that wait lasts as long as a forward."""
    used = list[Mock]()
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Mock(priority=priority))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(used.append(stream)))
    order, event = CudaOrder(torch.device("cuda", 0)), Mock()
    order.begin(lambda: None, event)
    with order.launching():
        pass
    scattering, summing = used
    scattering.wait_event.assert_called_once_with(event)
    assert summing is not scattering and not summing.wait_event.called
    assert scattering.priority == summing.priority == -1, "both free slots"


def test_on_the_host_nothing_is_pending() -> None:
    order = HostOrder()
    target, source = torch.zeros(8), torch.arange(8.0)
    order.wait(order.begin_copies_down([(target, source)]))
    assert torch.equal(target, source)
    order.wait(order.begin_copies([(target, source + 1)]))
    assert torch.equal(target, source + 1)


@pytest.mark.parametrize("is_in_host", [True, False], ids=["up", "down"])
def test_copies_that_the_driver_refuses_cost_no_slot(
    tmp_path: Path, engines: list[LazyEngine], is_in_host: bool
) -> None:
    engine = start(tmp_path, engines)
    save(engine)
    if not is_in_host:
        engine = start(tmp_path, engines, admit="always")
    begin_copies = engine.order.begin_copies

    def refuse(pairs: object) -> FakeEvent:
        raise RuntimeError("no copy")

    engine.order.begin_copies = refuse  # type: ignore[method-assign]
    begin_load(engine)
    with pytest.raises(RuntimeError, match="no copy"):
        engine.run_all()
    engine.order.begin_copies = begin_copies  # type: ignore[method-assign]
    engine.run_all()
    (done,) = engine.transfers[0].poll().loads
    assert done.failed_blocks == (set(TARGET) if is_in_host else set())
    assert engine.staging.available == engine.staging.n_slots
    assert load(engine).failed_blocks == frozenset()
    assert is_equal(engine.blocks(TARGET), expected(engine))
