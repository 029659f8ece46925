"""Engines that share a root sweep it for one another: not each of them every minute, and at once where one lacks
room."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.eviction.evictor import Evictor
from kvtier.index.base import writer_lease
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweep_schedule import AT_ONCE_AFTER_S, SWEEP_INTERVAL_S, SWEEP_SPREAD_S
from kvtier.maintenance.sweeper import SWEPT_NOTE, Sweeper
from kvtier.scheduler.background import SET_BACK_S, Keeper, KeeperPlan
from tests.support.rig import geometry, namespace

ENGINES = 6
TICK_S = 0.5


class Cluster:
    """Keepers of engines that save nothing, on a clock that is moved by hand; `sweeps`: who swept, and when."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e9
        self.sweeps: list[tuple[str, float]] = []
        self.index = MemoryIndex()
        self.index.rebuilt(self.index.loss())
        self.keepers = [self._keeper(f"engine-{n}", self.index, folder, monkeypatch) for n in range(ENGINES)]

    def _keeper(self, owner: str, index: MemoryIndex, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
        plan = KeeperPlan(owner, 4, 100, 100_000, 1e9, 5.0, lambda space: None)
        sweeper = Sweeper(index, folder, owner, lambda: self.now_s)
        sweep = sweeper.sweep

        def noted() -> None:
            self.sweeps.append((owner, self.now_s))
            sweep()

        monkeypatch.setattr(sweeper, "sweep", noted)  # not of the class: other tests' stores sweep in threads
        evictor = Evictor(index, folder, owner, clock=lambda: self.now_s)
        return Keeper(namespace(geometry()), plan, index, sweeper, evictor, random.Random(owner))

    def run(self, seconds: float, keepers: Sequence[Keeper]) -> list[str]:
        """Who swept meanwhile."""
        before = len(self.sweeps)
        for _ in range(int(seconds / TICK_S)):
            self.now_s += TICK_S
            for keeper in keepers:
                keeper.tick()
        return [owner for owner, _ in self.sweeps[before:]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_one_engine_sweeps_for_all(cluster: Cluster) -> None:
    """Each used to, every minute: a hundred readings of the whole root."""
    swept = cluster.run(600, cluster.keepers)
    assert 600 // (SWEEP_INTERVAL_S + SWEEP_SPREAD_S) <= len(swept) <= 600 // SWEEP_INTERVAL_S + 1
    assert len(set(swept[1:])) == 1, "the same one, so that it comes to look into all sets"


def test_when_it_is_gone_another_one_does(cluster: Cluster) -> None:
    (first, *_, usual) = cluster.run(200, cluster.keepers)
    left = [keeper for keeper in cluster.keepers if keeper._plan.owner not in (first, usual)]
    swept = cluster.run(2 * (SWEEP_INTERVAL_S + SWEEP_SPREAD_S), left)
    assert swept and not {first, usual} & set(swept)


def test_who_has_no_room_has_it_swept_at_once_and_once_for_all(cluster: Cluster) -> None:
    cluster.run(10, cluster.keepers)
    for keeper in cluster.keepers:
        keeper._due.sweep.want()
    assert len(cluster.run(TICK_S, cluster.keepers)) == 1
    assert cluster.run(30, cluster.keepers) == []


def test_a_sweep_of_a_moment_ago_does_not_do_for_who_has_no_room_since(cluster: Cluster) -> None:
    """A writer may have been taken for dead only then."""
    assert len(cluster.run(TICK_S, cluster.keepers)) == 1
    keeper = cluster.keepers[3]
    cluster.now_s += TICK_S
    keeper._due.sweep.want()
    assert cluster.run(AT_ONCE_AFTER_S - 3 * TICK_S, cluster.keepers) == []
    assert cluster.run(3 * TICK_S, cluster.keepers) == [keeper._plan.owner]


def test_a_clock_far_ahead_keeps_nobody_from_sweeping(cluster: Cluster) -> None:
    cluster.run(TICK_S, cluster.keepers)
    cluster.index.put_note(SWEPT_NOTE, struct.pack("<d", cluster.now_s + 1e6), None)
    cluster.keepers[1]._due.sweep.want()
    assert cluster.run(TICK_S, cluster.keepers[1:])


def test_an_engine_whose_clock_is_set_back_goes_on_with_its_duties(tmp_path: Path, cluster: Cluster) -> None:
    """It gave no sign of life for as long, and made no set where it had just been refused one."""
    keeper = cluster.keepers[0]
    cluster.run(1.0, [keeper])
    keeper.allocators.forget(keeper.allocators.set_ids())
    keeper.allocators.all()[0].backoff.refused(cluster.now_s)
    cluster.index.release_lease(writer_lease("engine-0"), "engine-0")
    cluster.now_s -= 3600.0
    assert cluster.index.lease_owner(writer_lease("engine-0"), cluster.now_s) is None
    swept = cluster.run(1.0, [keeper])
    assert cluster.index.lease_owner(writer_lease("engine-0"), cluster.now_s) == "engine-0"
    assert keeper.allocators.set_ids() and swept == ["engine-0"]
    cluster.now_s -= SET_BACK_S / 2
    assert cluster.run(1.0, [keeper]) == [], "by a little it is only set right"
