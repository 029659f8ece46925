"""A Redis at its maxmemory: it refuses what is new, and lets evicting through, for only so it gets room again."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.index import BreakerSettings
from kvtier.errors import ConfigError, IndexRefused
from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import Evictor
from kvtier.index import entry
from kvtier.index.base import EVICT_LEASE, IndexCounts, NewRecord, Use
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.redis.index import RedisIndex
from kvtier.runtime.metrics import INDEX_FAST_FAILS, INDEX_PAUSES, PUBLISH_SENT_LATE, Metrics
from tests.redis_server import Server, cluster, cluster_url, has_redis, index_settings, standalone

from index_data import key, record, set_info

pytestmark = has_redis

CHUNKS = 20


@pytest.fixture(scope="module", params=["standalone", "cluster"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        is_cluster = request.param == "cluster"
        yield stack.enter_context(cluster(folder)) if is_cluster else [stack.enter_context(standalone(folder))]


@pytest.fixture
def servers(started: list[Server]) -> Iterator[list[Server]]:
    yield started
    for server in started:
        server.cli("config", "set", "maxmemory", "0")
        server.cli("flushall")


def records(set_id: int) -> list[NewRecord]:
    return [record(100 * set_id + slot, set_id, slot) for slot in range(CHUNKS)]


def test_a_full_redis_lets_evicting_through_and_nothing_new(servers: list[Server], tmp_path: Path) -> None:
    url = servers[0].url if len(servers) == 1 else cluster_url(servers)
    index = RedisIndex(index_settings(url))
    index.bind("a root")
    for set_id in (1, 2):
        assert index.create_set(set_info(set_id)) and index.publish(records(set_id)) == CHUNKS
        index.close_set(set_id, 1 << 20)
    for server in servers:
        server.cli("config", "set", "maxmemory", "1")
    for new in (lambda: index.create_set(set_info(3)), lambda: index.publish([record(7, 2, 30)])):
        with pytest.raises(IndexRefused, match="maxmemory"):
            new()
    assert index.acquire_lease("writer/me", "me", 10.0, 5.0) is not None, "an engine is not taken for dead"
    index.touch({2: Use(20.0, 1)})
    done = Evictor(index, tmp_path, "me", clock=lambda: 30.0).evict(Selection(n_bytes=1), 1 << 30)
    assert done is not None and [info.set_id for info in done.sets] == [1]
    assert index.counts() == IndexCounts(CHUNKS, CHUNKS, 1, 1 << 20)
    assert index.lease_owner(EVICT_LEASE, 30.0) is None and index.notes("", 30.0) == {}
    assert index.retract(key(200), index.members(2)[0][1]) and len(index.members(2)) == CHUNKS - 1
    index.take_over(2)
    assert index.remove_set(2) == CHUNKS - 1 and index.counts() == IndexCounts(0, 0, 0, 0)
    index.close()


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_redis_that_takes_nothing_costs_no_hits(servers: list[Server], fault: str) -> None:
    """Refused writes are answers: they wait, and lookups go on."""
    refuse, allow = {
        "full": (("config", "set", "maxmemory", "1"), ("config", "set", "maxmemory", "0")),
        "read-only": (("acl", "setuser", "default", "-@write"), ("acl", "setuser", "default", "+@all")),
    }[fault]
    url = servers[0].url if len(servers) == 1 else cluster_url(servers)
    index, metrics = RedisIndex(index_settings(url)), Metrics()
    index.bind("a root")
    guard = GuardedIndex(
        index,
        Breaker(BreakerSettings(failures=1, pause_first_ms=60000, pause_max_ms=60000), random.Random(1)),
        QueueBounds(99, 1 << 20),
        metrics,
    )
    assert guard.create_set(set_info(1)) and guard.publish(records(1)) == CHUNKS
    keys = [each.key for each in records(1)]
    for server in servers:
        server.cli(*refuse)
    new = [record(1000 + slot, 1, CHUNKS + slot) for slot in range(5)]
    for each in new:
        assert guard.publish([each]) == 1
        with pytest.raises(IndexRefused):
            guard.create_set(set_info(2))
        guard.tick()
        assert len(guard.resolve(keys)) == CHUNKS
    assert guard.n_waiting == len(new) and guard.resolve([new[0].key]) == []
    for server in servers:
        server.cli(*allow)
    guard.tick()
    assert all(entry.is_complete(found) for found in guard.resolve([each.key for each in new]))
    told = metrics.total()
    assert told[PUBLISH_SENT_LATE] == len(new) and not {INDEX_PAUSES, INDEX_FAST_FAILS} & told.keys()
    guard.close()


def test_a_redis_that_is_too_old_is_named_at_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse the scripts that a full server runs, in words that nobody understands."""
    with standalone(tmp_path) as server:
        index = RedisIndex(index_settings(server.url))
        run = index._wire.run

        def as_an_old_one(requests: Any) -> list[Any]:
            answers = run(requests)
            hello = answers[-1]
            hello[hello.index(b"version") + 1] = b"6.2.14"
            return answers

        monkeypatch.setattr(index._wire, "run", as_an_old_one)
        for ask in (lambda: index.bind("a root"), index.look):
            with pytest.raises(ConfigError, match=r"Redis 6\.2\.14: the index needs Redis 7"):
                ask()
        index.close()
