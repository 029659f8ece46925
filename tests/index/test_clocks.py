"""Nodes whose clocks differ by more than a lease is long: leases, notes and the times of sets go by the server's."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.eviction import pins
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Rules
from kvtier.index.base import EVICT_LEASE, SetInfo, Use, writer_lease
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.redis.clock import ASKED_EVERY_S, TOLERATED_S, ServerClock
from kvtier.index.redis.index import RedisIndex
from kvtier.index.redis.wire import open_wire
from kvtier.maintenance import sweeper
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.segments import segment_name
from tests.redis_server import Connect, Server, has_redis, index_settings

from index_data import NAMESPACE, record, set_info

pytestmark = has_redis

FAR_S, LEASE_S = 3600.0, 30.0
DAY_S = 86400.0


def clock_off_by(seconds: float) -> Callable[[], float]:
    return lambda: time.time() + seconds


Nodes = tuple[tuple[RedisIndex, Callable[[], float]], tuple[RedisIndex, Callable[[], float]]]


@pytest.fixture(params=[-8 * DAY_S, 365 * DAY_S])
def nodes(connect: Connect, request: pytest.FixtureRequest) -> Nodes:
    """Return two indexes and the clocks of their nodes; the first clock is far off."""
    clock = clock_off_by(request.param)
    return (connect(clock), clock), (connect(), time.time)


def test_an_engine_whose_clock_is_far_off_is_alive_for_others(nodes: Nodes) -> None:
    """Its open sets were taken over with each sweep, and its report was not seen."""
    (far, clock), (other, _) = nodes
    assert far.acquire_lease("writer/far", "far", clock(), LEASE_S) is not None
    far.put_note("report/far", b"alive", clock() + LEASE_S)
    for index, now in nodes:
        assert index.lease_owner("writer/far", now()) == "far"
        assert index.lease_owner("writer/far", now() + LEASE_S + TOLERATED_S) is None
        assert index.notes("report/", now()) == {"report/far": b"alive"}
    assert other.notes("report/", time.time() + LEASE_S + TOLERATED_S) == {}


def test_nobody_takes_a_lease_that_another_node_holds(nodes: Nodes) -> None:
    (far, clock), (other, _) = nodes
    token = other.acquire_lease(EVICT_LEASE, "other", time.time(), LEASE_S)
    assert token is not None and far.acquire_lease(EVICT_LEASE, "far", clock(), LEASE_S) is None
    later_s = LEASE_S + TOLERATED_S
    assert far.acquire_lease(EVICT_LEASE, "far", clock() + later_s, LEASE_S) == token + 1
    assert other.acquire_lease(EVICT_LEASE, "other", time.time() + later_s, LEASE_S) is None


def test_what_a_node_uses_whose_clock_is_far_off_stays_as_long_as_what_others_use(nodes: Nodes, tmp_path: Path) -> None:
    """Eight days behind, its sets went at once; a year ahead, they stayed for a year."""
    for set_id, (index, now) in enumerate(nodes, start=1):
        made_s = now()
        index.create_set(SetInfo(set_id, bytes(16), "gone", 100, made_s, made_s))
        index.touch({set_id: Use(made_s, 1)})
        index.close_set(set_id, 100)
    for index, now in nodes:
        seen = [time_s for info in index.sets() for time_s in (info.created_s, info.used_s)]
        assert seen == pytest.approx([now()] * 4, abs=TOLERATED_S + 60), "each node sees its own time"
    for days, left in ((6, [1, 2]), (8, [])):
        for index, now in nodes:
            later = lambda now=now, days=days: now() + days * DAY_S  # noqa: E731
            Evictor(index, tmp_path, "evictor", Rules(ttl_s=7 * DAY_S), clock=later).keep_limits(10**9)
            assert [info.set_id for info in index.sets()] == left


def test_a_set_is_missing_for_as_long_as_one_clock_says(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node, an hour ahead of the one that looked first, took it out of the index at once."""
    monkeypatch.setattr(sweeper, "file_system_of", lambda _: FileSystem("nfs4", True, "/"))
    (tmp_path / "v2").mkdir()
    _, (other, _) = nodes
    other.create_set(SetInfo(1, bytes(16), "gone", 100, time.time(), time.time()))
    other.publish([record(1, 1, 0)])
    other.close_set(1, 100)
    for after_s, left in ((0.0, [1]), (290.0, [1]), (580.0, [1]), (601.0, [])):
        for index, now in nodes:
            Sweeper(index, tmp_path / "v2", "keeper", lambda now=now, s=after_s: now() + s).sweep()  # type: ignore[misc]
        assert [info.set_id for info in other.sets()] == left


def test_a_clock_that_is_set_ahead_removes_no_set_whose_files_are_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded index has no clock but the node's: an outage of seconds counted as one of an hour."""
    monkeypatch.setattr(sweeper, "file_system_of", lambda _: FileSystem("nfs4", True, "/"))
    (tmp_path / "v2").mkdir()
    index = LmdbIndex(str(tmp_path / "v2" / "index"))
    index.bind(tmp_path / "v2")
    index.rebuilt(index.loss())
    began_s = time.time()
    index.create_set(SetInfo(1, bytes(16), "gone", 100, began_s, began_s))
    index.publish([record(1, 1, 0)])
    index.close_set(1, 100)
    left = []
    for after_s in (0.0, 10.0, FAR_S, FAR_S + 60.0, FAR_S + 3 * 60.0, FAR_S + 6 * 60.0):
        Sweeper(index, tmp_path / "v2", "keeper", lambda after_s=after_s: began_s + after_s).sweep()  # type: ignore[misc]
        left.append(len(index.sets()))
    assert left == [1, 1, 1, 1, 1, 0], "it is removed when it has been missing for ten minutes of looks"
    index.close()


def test_a_node_whose_clock_is_ahead_leaves_young_files_alone(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a closed set wait at its living writer, and its files, a moment old, were taken for old ones."""
    clock = clock_off_by(DAY_S)
    monkeypatch.setattr(sweeper, "file_system_of", lambda _: FileSystem("nfs4", True, "/"))
    monkeypatch.setattr(sweeper, "time", SimpleNamespace(time=clock))
    far, other = connect(clock), connect()
    folder = tmp_path / "v2" / NAMESPACE.hex()
    folder.mkdir(parents=True)
    names = [segment_name(set_id, 0) for set_id in (1, 2)]  # of the second set the index knows nothing yet
    for name in (*names, ".nfs" + 24 * "0"):
        (folder / name).write_bytes(bytes(4096))
    other.rebuilt(other.loss())
    other.create_set(set_info(1, "writer"))
    other.close_set(1, 4096)
    other.acquire_lease(writer_lease("writer"), "writer", time.time(), LEASE_S)
    Sweeper(far, tmp_path / "v2", "keeper", clock).sweep()
    assert [info.set_id for info in other.sets()] == [1]
    assert len(list(folder.iterdir())) == 3


def test_a_use_while_the_clock_was_wrong_for_a_moment_is_one_now(connect: Connect) -> None:
    index = connect()
    made_s = time.time()
    index.create_set(SetInfo(1, bytes(16), "gone", 100, made_s, made_s))
    index.touch({1: Use(made_s + 365 * DAY_S, 1)})  # booked when the clock was set right
    (info,) = index.sets()
    assert info.uses == 1 and made_s <= info.used_s <= time.time()


def test_a_pin_is_as_long_for_all_nodes(nodes: Nodes) -> None:
    (far, clock), (other, _) = nodes
    expires_s = clock() + DAY_S
    pin = pins.Pin("a", bytes(16), None, "", far.shared_s(clock()), far.shared_s(expires_s))
    far.put_note(pin.name, pin.pack(), expires_s)
    for index, now in nodes:
        assert [found.pin_id for found in pins.pins_in(index, now() + 0.9 * DAY_S)] == ["a"]
        assert far.local_s(far.shared_s(5.0)) == pytest.approx(5.0, abs=0.01)
    assert pins.pins_in(other, time.time() + 1.1 * DAY_S) == []


def test_a_clock_that_is_set_is_noticed_at_once_and_the_server_is_asked_now_and_then(server: Server) -> None:
    wire, wall, steady = open_wire(index_settings(server.url)), [time.time()], [100.0]
    clock = ServerClock(wire, b"any", lambda: wall[0], lambda: steady[0])
    assert clock.of(5.0) == 5.0, "it is kept together with the server's"
    wall[0] -= FAR_S
    assert clock.of(5.0) == pytest.approx(5.0 + FAR_S, abs=TOLERATED_S)
    before = commands(server)
    steady[0] += ASKED_EVERY_S / 2
    clock.of(5.0)
    assert commands(server) == before
    steady[0] += ASKED_EVERY_S / 2
    assert clock.of(5.0) == pytest.approx(5.0 + FAR_S, abs=TOLERATED_S), "the other clock ran ahead of the server's"
    assert commands(server) == before + 1
    wire.close()


def commands(server: Server) -> int:
    """How often it was asked for the time."""
    stats = server.cli("info", "commandstats").splitlines()
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in stats if line.startswith("cmdstat_time:"))


def test_a_user_who_may_not_ask_for_the_time_goes_by_the_own_clock(server: Server, connect: Connect) -> None:
    server.cli("acl", "setuser", "default", "-time")
    index = connect(clock_off_by(FAR_S))
    assert index.acquire_lease("a lease", "me", 10.0, 5.0) is not None
    assert index.lease_owner("a lease", 14.0) == "me" and index.lease_owner("a lease", 16.0) is None
