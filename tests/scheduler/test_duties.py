"""Duties of a keeper in one tick: the time that each is told, what the log says of one that failed, and what the end
of a set leaves."""

import errno
import logging
import os
import random
from pathlib import Path

import pytest

from kvtier.errors import IndexUnavailable
from kvtier.eviction.evictor import Evictor
from kvtier.index import entry
from kvtier.index.base import Location, SetInfo, Use, writer_lease
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import Sweeper
from kvtier.scheduler.background import FAULTS_MAX, LIMITS_INTERVAL_S, Keeper, KeeperPlan
from kvtier.scheduler.segment_allocator import TENANT_IDLE_S
from kvtier.storage.filesystem import FreeSpace
from tests.support.rig import geometry, namespace


@pytest.fixture
def now() -> list[float]:
    return [1e9]


@pytest.fixture
def keeper(tmp_path: Path, now: list[float]) -> Keeper:
    """A keeper that ticks when it is told to, over an index in memory that was not lost. now: its clock."""
    index = MemoryIndex()
    index.rebuilt(index.loss())
    plan = KeeperPlan("me", 4, 100, 100_000, 1e9, 5.0, lambda space: None)
    sweeper = Sweeper(index, tmp_path, "me", lambda: now[0])
    evictor = Evictor(index, tmp_path, "me", clock=lambda: now[0])
    return Keeper(namespace(geometry()), plan, index, sweeper, evictor, random.Random(1))


def test_a_duty_behind_a_long_sweep_is_told_the_present_time(
    keeper: Keeper, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits after a sweep of minutes were kept by the time of its begin, and an eviction seen then was dated with
    it, so its space counted as late for too short a time."""

    def sweep(_: Sweeper) -> None:
        now[0] += 300.0

    monkeypatch.setattr(Sweeper, "sweep", sweep)
    keeper._due.sweep.want()
    keeper.tick()
    assert now[0] == 1e9 + 300.0 and keeper._due.limits_s == now[0] + LIMITS_INTERVAL_S


def test_an_index_that_is_only_down_is_not_said_to_be_rebuilt(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(_: MemoryIndex) -> None:
        raise IndexUnavailable("no answer in 50 ms")

    monkeypatch.setattr(MemoryIndex, "loss", down)
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        keeper.tick()
    said = [record.getMessage() for record in caplog.records]
    assert any("task 'check index' failed and is tried again: no answer in 50 ms" in text for text in said)
    assert not any("rebuil" in text or "lost" in text for text in said), said


def test_nothing_is_evicted_while_a_file_system_says_that_it_has_no_space_at_all(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MooseFS answers statfs with zeros while its servers are away. A tenth of the root was evicted."""
    keeper.tick()
    add_sets(keeper, *range(1, 11))
    for set_id in range(1, 11):
        keeper._index.close_set(set_id, 100)
    zeros = os.statvfs_result([4096, 4096, *[0] * 8])
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: zeros)
        keeper._due.limits_s = 0.0
        keeper.tick()
    assert len(keeper._index.some_sets(range(1, 11))) == 10
    assert "says that it has no space at all; are its servers up?" in caplog.text


def test_a_closed_set_without_files_leaves_no_room(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes were taken for an eviction's, whose space was on its way: for a minute, sets were made for them."""
    monkeypatch.setattr(Sweeper, "free_space", lambda _: FreeSpace(150, None))
    keeper.tick()
    taken = [keeper.allocators.common.take(1e9) for _ in range(4)]
    assert keeper._capacity_bytes(1e9) == 150 + 100, "its files may be about to be made"
    for place in taken:
        assert place is not None
        keeper.allocators.answered("", *place, is_blank=False)
    keeper.tick()
    assert keeper._capacity_bytes(1e9) == 150


def test_a_refusal_after_another_engine_evicted_evicts_nothing(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several engines that met a full disk at once evicted for itself, down from what the others had left."""
    monkeypatch.setattr(Sweeper, "free_space", lambda _: FreeSpace(50, None))
    keeper.tick()
    add_sets(keeper, *range(1, 11))
    for set_id in range(1, 11):
        keeper._index.close_set(set_id, 100)
    keeper._capacity_bytes(1e9)
    keeper._index.remove_set(1)
    keeper.report_full_disk()
    keeper.tick()
    assert keeper._space.room.limit_bytes is None
    assert len(keeper._index.some_sets(range(1, 11))) == 9


def test_a_full_disk_evicts_though_a_set_without_files_was_closed_before(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end must not look like an eviction of another engine, whose space is waited for."""
    monkeypatch.setattr(Sweeper, "free_space", lambda _: FreeSpace(150, None))
    keeper.tick()
    taken = [keeper.allocators.common.take(1e9) for _ in range(4)]
    assert keeper._capacity_bytes(1e9) == 150 + 100
    for place in taken:
        assert place is not None
        keeper.allocators.answered("", *place, is_blank=False)
    keeper.report_full_disk()
    keeper.tick()
    assert keeper._space.room.limit_bytes is not None


def test_a_set_without_files_that_is_closed_early_leaves_no_room(keeper: Keeper) -> None:
    """A keeper closes the set of a tenant without new chunks early. Its files may have found no room before."""
    keeper.tick()
    (info, *_) = keeper._index.sets()
    keeper._sweeper.close_early(info.set_id)
    assert keeper._sweeper.take_overbooked() == info.n_bytes == 100
    assert keeper._sweeper.take_overbooked() == 0


def add_sets(keeper: Keeper, *set_ids: int) -> None:
    """Register open sets of this engine that its allocators do not have."""
    for set_id in set_ids:
        keeper._index.create_set(SetInfo(set_id, keeper._epoch[0].id, "me", 100, 1e9, 1e9))


def open_sets(keeper: Keeper, *set_ids: int) -> set[int]:
    return {info.set_id for info in keeper._index.some_sets(set_ids) if info.is_open}


def test_a_set_that_an_index_from_an_earlier_time_shows_open_is_closed(keeper: Keeper) -> None:
    """No other engine closes the sets of one that lives, and an open set is not evicted."""
    keeper.tick()
    add_sets(keeper, 1)
    keeper._index.release_lease(writer_lease("me"), "me")
    keeper._due.renew_s = 0.0
    keeper.tick()
    assert open_sets(keeper, 1) == set()
    assert open_sets(keeper, *keeper.allocators.set_ids()) == keeper.allocators.set_ids() != set()


@pytest.mark.parametrize("failing", ["close_set", "close_early"])
def test_a_set_that_cannot_be_closed_keeps_no_other_waiting(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The storage of one namespace's folder may be down, for example."""
    keeper.tick()
    add_sets(keeper, 1, 2, 3)
    plain = getattr(Sweeper, failing)

    def fail(sweeper: Sweeper, set_id: int) -> None:
        if set_id == 1:
            raise OSError(errno.EIO, "Input/output error")
        plain(sweeper, set_id)

    with monkeypatch.context() as patched:
        patched.setattr(Sweeper, failing, fail)
        keeper._pending.to_trim += [1, 2] if failing == "close_early" else []
        keeper._pending.to_close += [3] if failing == "close_early" else [1, 2, 3]
        keeper.tick()
        keeper.tick()
        assert open_sets(keeper, 1, 2, 3) == {1}
    keeper.tick()
    assert open_sets(keeper, 1, 2, 3) == set()


@pytest.mark.parametrize(
    ("fault", "took_s", "tried"),
    [
        (OSError(errno.EIO, "Input/output error"), 0.0, [1, 2, 3, 4]),
        (OSError(errno.EIO, "Input/output error"), 0.3, [1, 2]),  # the lease must be renewed in time
        (IndexUnavailable("no answer"), 0.0, [1]),  # the others would fail too
    ],
)
def test_one_tick_tries_further_sets_after_those_that_cannot_be_closed(
    keeper: Keeper, now: list[float], monkeypatch: pytest.MonkeyPatch, fault: Exception, took_s: float, tried: list[int]
) -> None:
    """Each set that could not be closed delayed the later ones by a tick."""
    keeper.tick()
    add_sets(keeper, 1, 2, 3, 4)
    calls: list[int] = []
    plain = Sweeper.close_set

    def fail(sweeper: Sweeper, set_id: int) -> None:
        calls.append(set_id)
        now[0] += took_s
        if set_id < 4:
            raise fault
        plain(sweeper, set_id)

    monkeypatch.setattr(Sweeper, "close_set", fail)
    keeper._pending.to_close += [1, 2, 3, 4]
    keeper.tick()
    assert calls == tried and set(keeper._pending.to_close) == {1, 2, 3, 4} - ({4} & {*calls})


def test_uses_that_the_index_did_not_take_are_recorded_later(
    keeper: Keeper, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uses were lost, so after a pause of the index the sets with the most hits were evicted first."""
    keeper.tick()
    add_sets(keeper, 1)
    shape = geometry().whole
    value = entry.add(None, Location(1, 0, 0, 4096, shape, (0,) * shape.n_heads), shape)
    assert value is not None

    def refuse(_: MemoryIndex, used: dict[int, Use]) -> None:
        raise IndexUnavailable("no answer in 50 ms")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryIndex, "touch", refuse)
        keeper.book_load([value], 1e9 + 1)
        now[0] += 5.0
        keeper.tick()
    keeper.book_load([value], 1e9 + 6)
    for _ in range(2):
        now[0] += 5.0
        keeper.tick()
    (info,) = keeper._index.some_sets([1])
    assert (info.uses, info.used_s) == (2, 1e9 + 6)


def test_a_set_was_last_used_when_its_last_chunk_was_saved(
    keeper: Keeper, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set counted as old as its creation. If an engine saved little, its set was evicted, once full, before others
    whose chunks were stored earlier, and at once where capacity.ttl_s is shorter than it took to fill the set."""
    closed: list[SetInfo] = []
    monkeypatch.setattr(Sweeper, "close_set", lambda _, set_id: closed.extend(keeper._index.some_sets([set_id])))
    keeper.tick()
    for _ in range(keeper.allocators.slots):
        now[0] += 600.0
        taken = keeper.allocators.common.take(now[0])
        assert taken is not None
        keeper.allocators.common.answered(*taken, is_blank=False)
    now[0] += 1.0
    keeper.tick()
    assert [(info.set_id, info.uses, info.used_s) for info in closed] == [(taken[0], 0, 1e9 + 2400.0)]


@pytest.mark.parametrize("leaving", ["the epoch", "the tenant"])
def test_saves_into_sets_whose_allocator_is_dropped_are_dated_too(
    keeper: Keeper, now: list[float], monkeypatch: pytest.MonkeyPatch, leaving: str
) -> None:
    """A set that had been ready for long, and got its chunks just before, was closed as old as its creation."""
    closed: list[SetInfo] = []
    for name in ("close_set", "close_early"):
        monkeypatch.setattr(Sweeper, name, lambda _, set_id: closed.extend(keeper._index.some_sets([set_id])))
    keeper.tick()
    keeper.allocators.of("a", now[0])
    keeper.tick()
    now[0] += 86_400.0
    keeper._due.touch_s = now[0] + 1e6
    taken = keeper.allocators.of("a", now[0]).take(now[0])
    assert taken is not None
    keeper.allocators.answered("a", *taken, is_blank=False)
    saved_s = now[0]
    if leaving == "the epoch":
        keeper.begin_epoch()
    else:
        now[0] += TENANT_IDLE_S
    keeper.tick()
    assert [(info.set_id, info.uses, info.used_s) for info in closed] == [(taken[0], 0, saved_s)]


def test_one_tick_tries_few_of_many_sets_that_cannot_be_closed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try asks the index, which all engines share."""
    keeper.tick()
    calls: list[int] = []

    def fail(_: Sweeper, set_id: int) -> None:
        calls.append(set_id)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Sweeper, "close_set", fail)
    keeper._pending.to_close += range(1, 2 * FAULTS_MAX)
    keeper.tick()
    keeper.tick()
    assert calls == [*range(1, 2 * FAULTS_MAX), 1]
