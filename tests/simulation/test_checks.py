"""What the simulation's own checks take for a loss, and what they do not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import StaleLease
from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.set_removal import Remover
from kvtier.format.geometry import Extent
from kvtier.index.base import EVICT_LEASE, Location, NewRecord, SetInfo
from kvtier.storage.root import open_namespace
from kvtier.storage.segments import segment_name
from tests.simulation.engine import namespace_of
from tests.simulation.index import IndexWeather, SimIndex
from tests.simulation.recipes import Recipe
from tests.simulation.runtime import Process
from tests.simulation.truth import SHAPE
from tests.simulation.world import World

KEY = b"a chunk's key, 1"
OLD, NEW = 1 << 50, 1 << 51
HALVES = (Extent(0, 2, 0, 1), Extent(0, 2, 1, 1))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Without engines. One half of the chunk lies in the old set, the other one in the new set."""
    world = World(tmp_path, 1, Recipe("calm", kinds=("memory",), engines=0, index=IndexWeather(slow=0.0)))
    real = world.place.index.real
    for rank, set_id in enumerate((OLD, NEW)):
        real.create_set(SetInfo(set_id, namespace_of("w0").id, "engine-1", 4096, 1.0, 1.0, is_open=False))
        at = Location(set_id, rank, 0, 4096, HALVES[rank], (7,))
        world.checks._homes.setdefault(KEY, set()).add(set_id)
        assert real.publish([NewRecord(KEY, at, SHAPE.whole)]) == 1
    assert real.resolve([KEY])
    yield world
    world.close()


def evicting(world: World, name: str = "admin-1") -> Process:
    """Somebody evicts what was used longest ago; it has chosen the old set when this returns, and not removed it."""
    process, place = Process(name), world.place
    index = SimIndex(place.index, process)
    evictor = Evictor(index, place.root.folder, name, clock=lambda: world._runtime.now_s)  # type: ignore[arg-type]

    def evict() -> None:
        evictor.evict(Selection(n_bytes=4096), 1 << 30)

    place.index.weather.slow = 1.0
    world._runtime.spawn(process, "admin", evict)
    assert world._runtime.run_until(lambda: OLD in world.checks._condemned, 60.0)
    assert place.index.real.resolve([KEY])
    return process


def test_a_chunk_that_is_answered_saved_while_its_set_goes_is_evicted(world: World) -> None:
    """As seed 43 of killed_evictors had it: its other half was written into the new set meanwhile."""
    evicting(world)
    world.place.claims.add(KEY)
    world._runtime.run(10_000, 60.0)
    assert not world.place.index.real.resolve([KEY])
    world.checks.look_at_claims()
    assert world._runtime.violations == []


def test_what_a_killed_evictor_chose_is_evicted_by_who_comes_next(world: World) -> None:
    process = evicting(world)
    world._runtime.run_until(lambda: bool(world.place.index.real.notes("evicting/", world._runtime.now_s)), 60.0)
    world._runtime.kill(process)
    world.place.claims.add(KEY)
    assert world.place.index.real.resolve([KEY])
    world.checks.look_at_claims()
    world.sweep()
    world._runtime.run(10_000, 60.0)
    assert not world.place.index.real.resolve([KEY])
    world.checks.look_at_claims()
    assert world._runtime.violations == []


def test_the_budget_is_that_of_segments(world: World) -> None:
    """Seed 10024 of lost_answers was within a page of it, and had two namespaces."""
    place = world.place
    folder = open_namespace(place.root, namespace_of("w0"))
    (folder / segment_name(OLD, 0)).write_bytes(bytes(8192))
    place.capacity_bytes = 8192
    world.checks.look_at_budget(0)
    assert world._runtime.violations == []
    place.capacity_bytes = 4096
    world.checks.look_at_budget(0)
    assert world._runtime.violations == ["segments take 8192 bytes of 4096"]


def test_a_set_that_nobody_chose_is_lost(world: World) -> None:
    world.place.claims.add(KEY)
    SimIndex(world.place.index, Process("engine-1")).remove_set(OLD)
    world.checks.look_at_claims()
    (seen,) = world._runtime.violations
    assert "1 of 1 chunks that were saved are lost" in seen


def test_an_evictor_that_was_refused_excuses_no_loss(world: World) -> None:
    process, real = Process("admin-1"), world.place.index.real
    index = SimIndex(world.place.index, process)
    (info, _) = real.sets()
    token = real.acquire_lease(EVICT_LEASE, "admin-2", world._runtime.now_s, 5.0)
    assert token is not None
    refused = []

    def remove() -> None:
        world.checks.evicting[process] = token - 1
        try:
            Remover(index, world.place.root.folder).remove(info, token - 1)  # type: ignore[arg-type]
        except StaleLease as fault:
            refused.append(fault)

    world._runtime.spawn(process, "admin", remove)
    world._runtime.run(1000, 60.0)
    assert refused
    world.place.claims.add(KEY)
    real.remove_set(OLD)
    world.checks.look_at_claims()
    assert len(world._runtime.violations) == 1
