"""The pure parts: rectangles, shares of ranks, headers, slots of sets, which sets go, queues."""

import itertools
import pickle
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.arena.admission import Admission
from kvtier.errors import ConfigError, Corrupt
from kvtier.format.geometry import Extent, covers, share_of_rank
from kvtier.format.record import RecordHeader, SegmentHeader, is_blank, record_bytes
from kvtier.index.base import Location
from kvtier.plan import LoadChunk, LoadPlan, SaveChunk, SavePlan
from kvtier.runtime.threads import ThreadJobs, Ticker, begin
from kvtier.scheduler.segment_allocator import SET_SETTLE_S, TENANT_IDLE_S, SlotAllocator, SlotAllocators
from kvtier.worker.read_plan import sources_of
from tests.support.no_threads import refuse_threads
from tests.support.rig import geometry

extents = st.builds(Extent, st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))


def cells(extent: Extent) -> set[tuple[int, int]]:
    layers = range(extent.first_layer, extent.end_layer)
    return set(itertools.product(layers, range(extent.first_head, extent.end_head)))


@given(extents, extents)
def test_rectangles_are_sets_of_cells(one: Extent, two: Extent) -> None:
    common = one.intersect(two)
    assert (cells(common) if common else set()) == cells(one) & cells(two)
    rest = [cells(piece) for piece in one.minus(two)]
    assert set().union(*rest) == cells(one) - cells(two)
    assert sum(map(len, rest)) == len(cells(one) - cells(two)), "pieces overlap"
    assert one.contains(two) == (cells(two) <= cells(one))


@given(st.lists(extents, max_size=5), extents)
def test_covering_is_covering_every_cell(parts: list[Extent], whole: Extent) -> None:
    assert covers(parts, whole) == (cells(whole) <= set().union(*map(cells, parts)))


@given(st.lists(extents, min_size=1, max_size=5), extents)
def test_sources_give_every_cell_once(parts: list[Extent], held: Extent) -> None:
    locations = [Location(n, 0, n, 4096, part, (0,) * part.n_heads) for n, part in enumerate(parts)]
    sources = sources_of(locations, held, slot_bytes=1 << 30)
    if sources is None:
        assert not covers(parts, held)
        return
    taken = [cells(source.cut.wanted) for source in sources]
    assert set().union(*taken) == cells(held) and sum(map(len, taken)) == len(cells(held))
    assert all(source.location.extent.contains(source.cut.wanted) for source in sources)
    ranges = sorted((cut.slot_offset, cut.slot_offset + cut.n_bytes) for _, cut, _ in sources)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges)), "reads overlap in the slot"
    assert sources_of(locations, held, slot_bytes=4096) is None, "a slot that is too small is a miss, not an overrun"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_what_ranks_cut_by_heads_wrote_is_read_alone_though_half_is_there_cut_by_layers(order: tuple[int, ...]) -> None:
    """A pipeline stage that ended alone, then two tensor-parallel ranks: with what both have the slot overflowed, each
    time anew, and nobody wrote the chunk again, for it was complete."""
    cut = [Extent(0, 1, 0, 4), Extent(0, 2, 0, 2), Extent(0, 2, 2, 2)]
    locations = [Location(n, 0, 0, 4096 * cut[n].n_layers, cut[n], (0,) * cut[n].n_heads) for n in order]
    sources = sources_of(locations, Extent(0, 2, 0, 4), slot_bytes=4096 + 4 * 2 * 4096)
    assert sources is not None
    assert {source.location.set_id for source in sources} == {1, 2}


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["heads", "mla"])
def test_the_shares_of_all_ranks_write_everything_once(heads: int, ranks: int, kind: str) -> None:
    shape = geometry(kv_heads=1 if kind == "mla" else heads, attention=kind, layers=6)
    stages = [range(2), range(2, 6)]
    shares = [
        share_of_rank(shape, rank, ranks, number * ranks + rank, stage)
        for number, stage in enumerate(stages)
        for rank in range(ranks)
    ]
    written = [cells(share.writes) for share in shares if share.writes]
    assert set().union(*written) == cells(shape.whole)
    assert sum(map(len, written)) == shape.whole.cells
    assert all(share.writes is None or share.reads.contains(share.writes) for share in shares)
    assert covers([share.reads for share in shares], shape.whole)


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        share_of_rank(geometry(kv_heads=4), 0, 3, 0, range(4))
    with pytest.raises(ValueError, match="divide"):
        share_of_rank(geometry(kv_heads=4), 0, 6, 0, range(4))


EXTENT = Extent(1, 2, 3, 4)
SEGMENT = SegmentHeader(bytes(range(16)), 1 << 63, 7, 9, record_bytes(EXTENT, 8192), EXTENT, 8192, 1 << 40, "ä" * 16)
RECORD = RecordHeader(bytes(range(16)), bytes(16), b"n" * 16, 8192, 256, 3, EXTENT, 77, (1, 2, 3, (1 << 64) - 1))


@pytest.mark.parametrize("header", [SEGMENT, RECORD])
def test_a_header_survives_packing_and_no_changed_byte(header: SegmentHeader | RecordHeader) -> None:
    page = header.pack()
    assert len(page) == 4096 and type(header).unpack(page) == header and not is_blank(page)
    for position in [*range(200), 2000, 4095]:
        damaged = bytearray(page)
        damaged[position] ^= 0x40
        with pytest.raises(Corrupt):
            type(header).unpack(bytes(damaged))
    for length in (0, 8, 4095):
        with pytest.raises(Corrupt):
            type(header).unpack(page[:length])
    with pytest.raises(Corrupt):
        (RecordHeader if header is SEGMENT else SegmentHeader).unpack(page)


def test_a_slot_allocator_gives_every_slot_once_and_asks_in_time() -> None:
    allocator = SlotAllocator(slots=4, spares_max=1)
    assert allocator.take(0.0) is None and allocator.wants_set()
    allocator.offer(1)
    taken = [allocator.take(0.0) for _ in range(2)]
    assert allocator.wants_set(), "half of the last set is gone"
    allocator.offer(2)
    taken += [allocator.take(0.0) for _ in range(4)]
    assert taken == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert allocator.take_settled(1.0) == [], "its saves are not answered"
    for slot in range(4):
        allocator.answered(1, slot, is_blank=False)
    assert allocator.take_settled(1.0) == [1] and allocator.take_settled(1.0) == []
    allocator.offer(3)
    assert allocator.abandon() == ([2], [3])


def test_an_answer_asks_the_allocator_of_its_tenant_alone() -> None:
    """There may be a thousand tenants, and a step has hundreds of answers."""
    allocators = SlotAllocators(slots=1, spares_max=8)
    red, blue = (allocators.of(tenant, 0.0) for tenant in ("red", "blue"))
    red.offer(1)
    assert red.take(0.0) == (1, 0)
    blue.answered = None  # type: ignore[method-assign,assignment]
    allocators.answered("gone", 1, 0, is_blank=True)
    assert red.take(0.0) is None
    allocators.answered("red", 1, 0, is_blank=True)
    assert red.take(0.0) == (1, 0)


def test_an_idle_tenant_keeps_its_sets_longer_while_answers_are_missing() -> None:
    allocators = SlotAllocators(slots=2, spares_max=4)
    for tenant, set_id in (("answered", 1), ("busy", 2), ("unused", 3)):
        allocators.of(tenant, 0.0).offer(set_id)
    for tenant, set_id in (("answered", 1), ("busy", 2)):
        assert allocators.of(tenant, 0.0).take(0.0) == (set_id, 0)
    allocators.answered("answered", 1, 0, is_blank=False)
    assert allocators.leave_idle(TENANT_IDLE_S - 1) == ([], [], [])
    assert allocators.leave_idle(TENANT_IDLE_S) == ([1], [], [3])
    assert allocators.leave_idle(TENANT_IDLE_S + SET_SETTLE_S) == ([], [2], []), "they are closed, but not truncated"
    assert allocators.all() == [allocators.common]


def test_a_slot_that_stayed_blank_is_given_again() -> None:
    allocator = SlotAllocator(slots=3, spares_max=1)
    allocator.offer(1)
    assert [allocator.take(0.0) for _ in range(2)] == [(1, 0), (1, 1)]
    allocator.answered(1, 0, is_blank=True)
    allocator.answered(1, 1, is_blank=False)
    assert [allocator.take(0.0) for _ in range(2)] == [(1, 0), (1, 2)]
    allocator.answered(1, 2, is_blank=True)
    assert allocator.set_ids() == {1} and allocator.take_settled(0.0) == []
    assert allocator.take(0.0) == (1, 2), "else refused saves would use up sets that nothing is written to"
    for slot in (0, 2):
        allocator.answered(1, slot, is_blank=False)
    assert allocator.take(0.0) is None and allocator.take_settled(0.0) == [1]


def test_full_sets_with_blank_slots_are_filled_before_new_ones() -> None:
    allocator = SlotAllocator(slots=2, spares_max=2)
    allocator.offer(1)
    allocator.offer(2)
    assert [allocator.take(0.0) for _ in range(3)] == [(1, 0), (1, 1), (2, 0)]
    allocator.answered(1, 0, is_blank=True)
    allocator.answered(1, 1, is_blank=True)
    assert [allocator.take(0.0) for _ in range(4)] == [(2, 1), (1, 1), (1, 0), None]
    allocator.answered(1, 1, is_blank=True)
    assert allocator.forget([1]) == 1 and allocator.take(0.0) is None
    allocator.answered(2, 0, is_blank=True)
    assert allocator.abandon() == ([2], []) and allocator.take(0.0) is None


def test_a_slot_allocator_keeps_as_many_ready_as_it_is_told() -> None:
    allocator = SlotAllocator(slots=2, spares_max=3)
    for set_id in range(1, 4):
        assert allocator.wants_set()
        allocator.offer(set_id)
    assert not allocator.wants_set()
    assert allocator.take(0.0) == (1, 0) and allocator.wants_set(), "half of it is gone"


def test_a_full_set_whose_answers_were_lost_is_closed_after_a_while() -> None:
    allocator = SlotAllocator(slots=1, spares_max=1)
    allocator.offer(1)
    allocator.take(100.0)
    assert allocator.take_settled(101.0) == []
    assert allocator.take_settled(100.0 + 61.0) == [1]


def test_admission_policies() -> None:
    always, never, second = Admission("always"), Admission("never"), Admission("second_hit")
    assert always.keeps_saved() and always.keeps_loaded(b"a")
    assert not never.keeps_saved() and not never.keeps_loaded(b"a")
    assert not second.keeps_saved()
    assert [second.keeps_loaded(key) for key in (b"a", b"b", b"a")] == [False, False, True]


def test_thread_jobs_are_bounded_and_survive_a_job_that_raises() -> None:
    jobs = ThreadJobs("test", threads=1, queued_max=2)
    gate, began, ran = threading.Event(), threading.Event(), []
    assert jobs.submit(lambda: (began.set(), gate.wait())[0])
    assert began.wait(5)
    assert jobs.submit(lambda: ran.append(1))
    assert jobs.submit(lambda: 1 / 0), "queued; it raises in its thread"  # type: ignore[arg-type,return-value]
    assert not jobs.submit(lambda: ran.append(2)), "the queue holds two"
    assert not jobs.drain(0.05), "the deadline of drain holds (I10)"
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        gate.set()
        assert jobs.drain(5.0)
        assert jobs.submit(lambda: ran.append(3)) and jobs.drain(5.0)
    finally:
        threading.excepthook = hook
    assert ran == [1, 3]
    jobs.close()
    assert not jobs.submit(lambda: None)


def test_threads_that_cannot_be_started_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    for start in (
        lambda: ThreadJobs("test", 1, 1),
        lambda: Ticker("test", 60.0, lambda: None),
        lambda: begin("test", lambda: None),
    ):
        with pytest.raises(ConfigError, match="no further thread can be started; raise `ulimit -u`"):
            start()


def test_a_queue_goes_on_where_no_thread_can_be_added(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault ended the thread that watches deadlines, and the thread that was not there counted for good."""
    jobs = ThreadJobs("test", threads=1, queued_max=2)
    gate, began, ran = threading.Event(), threading.Event(), threading.Event()
    assert jobs.submit(lambda: (began.set(), gate.wait())[0])
    assert began.wait(5) and jobs.submit(ran.set)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        jobs.widen(0.0)
    assert "no thread takes over from those that hang" in caplog.text
    jobs.widen(0.0)
    assert ran.wait(5), "a thread was added once there was room for it"
    gate.set()
    assert jobs.drain(5.0)
    jobs.close()


def test_a_ticker_ticks_by_itself_and_at_once_when_woken() -> None:
    ticked = threading.Semaphore(0)
    ticker = Ticker("test", 60.0, ticked.release)
    assert ticked.acquire(timeout=5), "the first tick needs no waking"
    ticker.wake()
    assert ticked.acquire(timeout=5)
    ticker.close(5.0)
    ticker.wake()
    assert not ticked.acquire(timeout=0.05)


@pytest.mark.parametrize("chunk", [LoadChunk(b"k", b"e", (1, 2), 0), SaveChunk(b"k", b"p", 1, 2, (1, 2))], ids=str)
def test_a_plan_is_pickled_without_many_calls(chunk: LoadChunk | SaveChunk) -> None:
    """Engines of several ranks pickle the plans of all loads on the thread that these wait for."""
    n_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    chunks: Any = tuple(chunk._replace(key=bytes([number])) for number in range(100))
    plan = LoadPlan("r", b"n", chunks) if isinstance(chunk, LoadChunk) else SavePlan(b"n", 64, chunks)
    sys.setprofile(count)
    try:
        pickled = pickle.dumps(plan)
    finally:
        sys.setprofile(None)
    assert pickle.loads(pickled) == plan
    assert n_calls < 2 * len(chunks)
