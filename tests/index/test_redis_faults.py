"""The index in Redis when Redis is slow, gone, emptied or another's; how often it is asked; what a crash leaves."""

import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvtier.config.index import IndexSettings
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import EVICT_LEASE, UNOWNED, IndexCounts
from kvtier.index.open import open_index
from kvtier.index.redis.index import RedisIndex
from kvtier.index.redis.wire import Request, Wire
from kvtier.storage.root import open_root
from tests.redis_server import (
    Connect,
    Server,
    cluster,
    cluster_url,
    free_port,
    has_openssl,
    has_redis,
    index_settings,
    sentinel,
    standalone,
    tls_and_acl,
    wait_until,
)

from counting_proxy import CountingProxy
from index_data import key, record, set_info

pytestmark = has_redis

N_CHUNKS = 391
SLOW_MS = 150.0


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A cluster for tests that leave its nodes and slots as they are, each under a prefix of its own."""
    with cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


def own_prefix() -> str:
    return f"kvtier-{uuid.uuid4().hex[:8]}"


def keys(n: int) -> list[bytes]:
    """Spread over a cluster's slots, as hashes are."""
    return [uuid.uuid5(uuid.NAMESPACE_OID, str(number)).bytes for number in range(n)]


def fill(index: RedisIndex, wanted: Sequence[bytes], set_id: int = 1) -> None:
    index.create_set(set_info(set_id))
    records = [record(slot, set_id, slot)._replace(key=one) for slot, one in enumerate(wanted)]
    assert index.publish(records) == len(records)


# --- round trips ---


def test_a_prompt_is_one_round_trip(server: Server) -> None:
    proxy = CountingProxy(target=server.port)
    index = RedisIndex(index_settings(f"redis://127.0.0.1:{proxy.port}/0", own_prefix()))
    wanted = keys(N_CHUNKS)
    fill(index, wanted)
    before = proxy.round_trips
    assert len(index.resolve(wanted)) == N_CHUNKS
    assert proxy.round_trips - before == 1
    before = proxy.round_trips
    index.publish([record(slot, 1, slot)._replace(key=one) for slot, one in enumerate(wanted[:200])])
    assert proxy.round_trips - before <= 4
    index.close()
    proxy.close()


def test_a_prompt_is_one_round_trip_to_each_of_three_masters(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:
        proxies = [CountingProxy(target=one.port) for one in servers]
        for proxy, one in zip(proxies, servers, strict=True):
            one.cli("config", "set", "cluster-announce-port", str(proxy.port))
        for one in servers:  # they tell each other, and then their clients
            wait_until(lambda one=one: all(str(p.port) in one.cli("cluster", "slots") for p in proxies), "the proxies")
        index = RedisIndex(index_settings(f"redis+cluster://127.0.0.1:{proxies[0].port}", own_prefix()))
        wanted = keys(N_CHUNKS)
        fill(index, wanted)
        before = [proxy.round_trips for proxy in proxies]
        assert len(index.resolve(wanted)) == N_CHUNKS
        assert [proxy.round_trips - was for proxy, was in zip(proxies, before, strict=True)] == [1, 1, 1]
        index.close()


# --- a shard that lost its memory ---


@pytest.mark.parametrize("is_cluster", [False, True])
def test_what_redis_lost_of_entries_and_counts_is_counted_again(
    connect: Connect, request: pytest.FixtureRequest, is_cluster: bool
) -> None:
    url = cluster_url(request.getfixturevalue("masters")) if is_cluster else ""
    index = RedisIndex(index_settings(url, own_prefix())) if is_cluster else connect()
    wanted = keys(N_CHUNKS)
    fill(index, wanted)
    lost = [index._keys.entry(wanted[0]), *{index._keys.counts(index._keys.tag(one)) for one in wanted[:9]}]
    index._caller.run([Request(name, ("DEL", name)) for name in lost])
    assert index.counts().chunks != N_CHUNKS - 1
    for _ in range(2):
        assert len(list(index.recount())) == N_CHUNKS - 1
        assert (index.counts().chunks, index.counts().records) == (N_CHUNKS - 1, N_CHUNKS - 1)
    index.remove_set(1)
    assert index.counts() == IndexCounts(0, 0, 0, 0)
    index.close()


def test_who_rebuilds_an_index_that_is_emptied_meanwhile_has_not_rebuilt_it(server: Server, connect: Connect) -> None:
    index, other = connect(), connect()
    loss = index.loss()
    server.cli("flushall")
    assert other.was_reset, "which marks it for another"
    assert index.was_reset, "and another thread of this one asks, too"
    index.rebuilt(loss)
    assert index.was_reset and other.was_reset
    other.rebuilt(other.loss())
    assert not index.was_reset


def test_one_emptied_shard_of_three_is_noticed_and_made_whole_again(masters: list[Server]) -> None:
    index = RedisIndex(index_settings(cluster_url(masters), own_prefix()))
    wanted = keys(100)
    assert index.was_reset
    for set_id in range(8):
        fill(index, wanted[10 * set_id : 10 * set_id + 10], set_id)
    index.rebuilt(index.loss())
    assert not index.was_reset
    for lost in masters:
        lost.cli("flushall")
        assert index.was_reset
        assert len(index.resolve(wanted)) < 80
        for set_id in range(8):  # as a rebuild does
            info = set_info(set_id, UNOWNED)
            records = [record(slot, set_id, slot)._replace(key=wanted[10 * set_id + slot]) for slot in range(10)]
            if not index.create_set(info, records):
                assert index.publish(records, into_unowned=True) == 10
        index.rebuilt(index.loss())
        assert not index.was_reset
        assert len(index.resolve(wanted)) == 80
        assert index.counts() == IndexCounts(80, 80, 8, 8 << 20)
        assert all(len(index.members(set_id)) == 10 for set_id in range(8))
    index.close()


# --- slow and gone ---


def test_the_lost_list_of_a_set_of_many_records_is_made_again(server: Server) -> None:
    """Small models have 16,000 records in a set; Lua unpacks no more than 8,000 values."""
    prefix, wanted = own_prefix(), keys(5000)
    index = RedisIndex(index_settings(f"redis://127.0.0.1:{server.port}/0", prefix))
    fill(index, wanted)
    server.cli("del", f"{prefix}:{{{1:016x}}}")
    assert not index.members(1)
    records = [record(slot, 1, slot)._replace(key=one) for slot, one in enumerate(wanted)]
    assert not index.create_set(set_info(1), records)
    assert [found for found, _ in index.members(1)] == wanted
    index.close()


def test_a_paused_redis_costs_a_lookup_its_deadline_and_no_more(tmp_path: Path) -> None:
    with standalone(tmp_path) as server:
        settings = index_settings(server.url, reply_timeout_ms=SLOW_MS)
        index, patient = RedisIndex(settings), RedisIndex(index_settings(server.url))
        fill(patient, keys(5))
        wait_until(lambda: answers(index), "a connection")
        server.pause()

        def deadlines() -> float:
            began = time.monotonic()
            with pytest.raises(IndexUnavailable):
                index.resolve(keys(5))
            return (time.monotonic() - began) / (SLOW_MS / 1000)

        assert deadlines() >= 0.9, "on the connection that there is"
        wait_until(lambda: 0.9 <= deadlines() < 2, "a lookup on a new one that costs one; a busy machine adds to some")
        server.go_on()
        wait_until(lambda: n_found(index, keys(5)) == 5, "the index again")
        patient.close()
        index.close()


def n_found(index: RedisIndex, wanted: Sequence[bytes]) -> int | None:
    """None: it does not answer."""
    try:
        return len(index.resolve(wanted))
    except IndexUnavailable:
        return None


def answers(index: RedisIndex) -> bool:
    return n_found(index, keys(1)) is not None


def test_a_restarted_redis_is_reached_again_at_once(tmp_path: Path) -> None:
    with standalone(tmp_path) as server:
        index = RedisIndex(index_settings(server.url))
        fill(index, keys(3))
        server.kill()
        with pytest.raises(IndexUnavailable):
            index.resolve(keys(3))
        server.start()
        assert index.resolve(keys(3)) == [] and index.was_reset
        fill(index, keys(3))
        assert len(index.resolve(keys(3))) == 3, "also scripts, which the server does not know any more"
        index.close()


def test_another_master_takes_over(tmp_path: Path) -> None:
    with sentinel(tmp_path) as ((master, replica), watcher):
        index = RedisIndex(index_settings(f"redis+sentinel://127.0.0.1:{watcher.port}/kv"))
        index.bind("a root")
        fill(index, keys(20))
        wait_until(lambda: replica.cli("dbsize") == master.cli("dbsize"), "the copy")
        master.kill()
        wait_until(lambda: answers(index), "the index at the new master")
        assert "role:master" in replica.cli("info", "replication")
        assert len(index.resolve(keys(20))) == 20
        index.create_set(set_info(2))
        assert index.publish([record(1, 2, 1)]) == 1
        index.close()


def test_a_slot_that_moves_is_followed(tmp_path: Path) -> None:
    """All slots of one master go to another one while the index is used."""
    with cluster(tmp_path) as servers:
        index = RedisIndex(index_settings(cluster_url(servers[:1])))
        wanted = keys(200)
        fill(index, wanted)
        ids = [one.cli("cluster", "myid") for one in servers]
        moves = f"--cluster-from {ids[0]} --cluster-to {ids[1]} --cluster-slots 3000 --cluster-yes"
        servers[0].cli("--cluster", "reshard", f"127.0.0.1:{servers[0].port}", *moves.split())
        assert len(index.resolve(wanted)) == 200
        assert index.remove_set(1) == 200
        assert index.counts() == IndexCounts(0, 0, 0, 0)
        index.close()


def offsets(servers: Sequence[Server]) -> list[str]:
    """Return how far each has come in its stream of changes."""
    lines = [line for one in servers for line in one.cli("info", "replication").splitlines()]
    return sorted(line for line in lines if line.startswith("master_repl_offset"))


def test_a_replica_of_a_cluster_follows_its_master(tmp_path: Path) -> None:
    with cluster(tmp_path, replicas=1) as servers:
        index = RedisIndex(index_settings(cluster_url(servers[:1])))
        fill(index, keys(100))
        wait_until(lambda: offsets(servers[:3]) == offsets(servers[3:]), "the replicas")
        servers[0].kill()
        wait_until(lambda: n_found(index, keys(100)) == 100, "what its replica has")
        assert index.publish([record(1, 1, 101)]) == 1
        index.close()


def test_a_node_of_a_cluster_that_is_silent_is_passed_over(masters: list[Server], tmp_path: Path) -> None:
    """It was the first one that the settings name."""
    with standalone(tmp_path) as silent:
        silent.pause()
        index = RedisIndex(index_settings(cluster_url([silent, masters[1]]), own_prefix(), reply_timeout_ms=1500.0))
        for _ in range(2):
            assert index.resolve(keys(10)) == []
        silent.go_on()
        index.close()


def test_threads_share_a_cluster_whose_map_is_lost_again_and_again(masters: list[Server]) -> None:
    index = RedisIndex(index_settings(cluster_url(masters), own_prefix()))
    wanted = keys(50)
    fill(index, wanted)
    found: list[int] = []

    def look() -> None:
        for _ in range(40):
            index._wire._is_stale = True  # type: ignore[attr-defined]
            found.append(len(index.resolve(wanted)))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [50] * 160
    index.close()


# --- what a crash leaves ---


class Killed(BaseException):
    pass


class DyingWire:
    """Lets so many batches through, and then dies before the next one."""

    def __init__(self, wire: Wire, batches: int) -> None:
        self._wire = wire
        self._left = batches

    def run(self, requests: Sequence[Request]) -> list[Any]:
        if self._left == 0:
            raise Killed
        self._left -= 1
        return self._wire.run(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)


def dies_after(index: RedisIndex, batches: int) -> None:
    index._caller._wire = DyingWire(index._wire, batches)  # type: ignore[assignment]


def test_an_evictor_that_dies_at_any_step_leaves_a_set_that_the_next_one_removes(
    server: Server, connect: Connect
) -> None:
    steps = 0
    while True:
        prefix = own_prefix()
        index, other = connect(prefix=prefix), connect(prefix=prefix)
        fill(index, keys(10))
        other.create_set(set_info(2))
        token = index.acquire_lease(EVICT_LEASE, "a", 0.0, 1.0)
        dies_after(index, steps)
        try:
            index.remove_set(1, token)
            break
        except Killed:
            steps += 1
        left = [info.set_id for info in other.sets()]
        assert left in ([1, 2], [2])
        assert other.counts().n_bytes == len(left) << 20
        next_token = other.acquire_lease(EVICT_LEASE, "b", 2.0, 1.0)
        for set_id in left:
            other.remove_set(set_id, next_token)
        assert other.counts() == IndexCounts(0, 0, 0, 0)
        names = server.cli("--raw", "keys", f"{prefix}:*").split()
        assert all(name.endswith((":e", ":leases", ":bytes", ":meta")) for name in names), "no list, no entry is left"
    assert steps >= 6


def test_a_publisher_that_dies_at_any_step_leaves_what_the_set_goes_with(connect: Connect) -> None:
    steps = 0
    while True:
        prefix = own_prefix()
        index, other = connect(prefix=prefix), connect(prefix=prefix)
        index.create_set(set_info(1))
        dies_after(index, steps)
        try:
            index.publish([record(number, 1, number) for number in range(10)])
            break
        except Killed:
            steps += 1
        assert len(other.members(1)) in (0, 10) and len(other.resolve([key(n) for n in range(10)])) in (0, 10)
        assert other.publish([record(number, 1, number) for number in range(10)]) == 10, "by whoever comes again"
        other.remove_set(1)
        assert other.counts() == IndexCounts(0, 0, 0, 0)
    assert steps == 3


def act_before_batch(index: RedisIndex, number: int, act: Callable[[], object]) -> None:
    """Act between two of the index's batches."""
    run, count = index._caller._wire.run, 0

    class Beside:
        def run(self, requests: Sequence[Request]) -> list[Any]:
            nonlocal count
            if count == number:
                act()
            count += 1
            return run(requests)

    index._caller._wire = Beside()  # type: ignore[assignment]


@pytest.mark.parametrize("batches", [1, 2])
def test_what_is_published_beside_an_eviction_is_taken_back(server: Server, connect: Connect, batches: int) -> None:
    """The set is evicted after the publisher's first, or its second step."""
    index, other = connect(), connect()
    index.create_set(set_info(1))
    act_before_batch(index, batches, lambda: other.remove_set(1))
    assert index.publish([record(number, 1, number) for number in range(10)]) == 0
    assert other.counts() == IndexCounts(0, 0, 0, 0) and list(other.entries()) == []
    assert server.cli("--raw", "exists", f"kvtier:{{{1:016x}}}") == "0"


def test_what_is_published_beside_a_taking_over_is_taken_back(connect: Connect) -> None:
    index, other = connect(), connect()
    fill(index, [key(0)])
    act_before_batch(index, 1, lambda: other.take_over(1))
    assert index.publish([record(0, 1, 0), record(7, 1, 7)]) == 0
    assert [one for one, _ in other.members(1)] == [key(0)], "what was visible before stays"
    assert other.resolve([key(7)]) == []


# --- what start-up refuses ---


def refusal(settings: IndexSettings) -> ConfigError:
    index = RedisIndex(settings)
    with pytest.raises(ConfigError) as caught:
        index.bind("a root")
    index.close()
    return caught.value


def test_another_roots_index_is_refused(connect: Connect) -> None:
    for _ in range(2):
        connect().bind("a root")
    with pytest.raises(ConfigError, match="index.prefix") as caught:
        connect().bind("another root")
    assert "prefix of its own" in caught.value.fix


def test_until_it_is_known_whose_it_is_nothing_is_asked(tmp_path: Path) -> None:
    """Redis did not answer at start, and when it does it is another root's."""
    port = free_port()
    settings = index_settings(f"redis://127.0.0.1:{port}/0")
    index = RedisIndex(settings)
    with pytest.raises(IndexUnavailable):
        index.bind("a root")
    server = Server(tmp_path, port=port)
    try:
        RedisIndex(settings).bind("another root")
        with pytest.raises(IndexUnavailable, match="prefix of its own"):
            index.retract(key(0), record(0, 1, 0).location)
        server.cli("flushall")
        assert index.resolve([key(0)]) == []
    finally:
        server.kill()


@has_openssl
def test_wrong_logins_are_refused_without_a_word_of_the_password(tmp_path: Path) -> None:
    with tls_and_acl(tmp_path) as (server, good):
        wrong = tmp_path / "wrong"
        wrong.write_text("hunter2\n")
        fault = refusal(good.model_copy(update={"password_file": wrong}))
        assert fault.key == "index.password_file" and "hunter2" not in str(fault)
        given = good.model_copy(update={"password_file": None, "password": SecretStr("hunter2")})
        fault = refusal(given)
        assert (fault.key, fault.value) == ("index.password", "***") and "correct it" in fault.fix
        fault = refusal(good.model_copy(update={"password_file": None, "username": None}))
        assert (fault.key, fault.value) == ("index.password", None) and "set password_file" in fault.fix
        fault = refusal(good.model_copy(update={"prefix": "others"}))
        assert fault.key == "index.username" and "~others:*" in fault.fix
        fault = refusal(good.model_copy(update={"tls_ca_file": None}))
        assert fault.key == "index.tls_ca_file" and "name the authority" in fault.fix
        fault = refusal(good.model_copy(update={"url": f"rediss://localhost:{server.port}/0"}))
        assert fault.key == "index.url" and "as the certificate names it" in fault.fix
        index = RedisIndex(good)
        index.bind("a root")
        index.close()


def test_a_start_with_a_wrong_password_shows_one_reason(tmp_path: Path, server: Server) -> None:
    """A traceback of redis-py stood above the reason."""
    given = index_settings(server.url).model_copy(update={"password": SecretStr("hunter2")})
    settings = Settings(root=tmp_path / "root", index=given)
    with pytest.raises(ConfigError, match="index.password = '\\*\\*\\*': Redis refuses the login") as caught:
        open_index(settings, open_root(settings))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1 and "redis.exceptions" not in shown


def test_a_database_that_the_server_lacks_is_refused(server: Server) -> None:
    """An engine that started with it would cache nothing for good."""
    fault = refusal(index_settings(server.url.removesuffix("/0") + "/99"))
    assert fault.key == "index.url" and "no database of this number" in fault.fix


def test_a_server_of_another_kind_is_refused(server: Server, masters: list[Server]) -> None:
    assert "redis://" in refusal(index_settings(f"redis+cluster://127.0.0.1:{server.port}")).fix
    faults = [refusal(index_settings(one.url, f"p{number}")) for number in range(3) for one in masters]
    assert all("redis+cluster://" in fault.fix for fault in faults)
