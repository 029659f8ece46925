"""An address that stands for the primary, and a failover that keeps connections; passwords that are rotated."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.index import IndexSettings
from kvtier.errors import ConfigError, IndexRefused, IndexUnavailable
from kvtier.index.redis.index import RedisIndex
from kvtier.index.redis.wire import RECONNECT_PAUSE_S, ROLE_INTERVAL_S
from tests.redis_server import Server, has_redis, index_settings, sentinel, standalone, wait_until

from counting_proxy import CountingProxy
from index_data import key, record, set_info

pytestmark = has_redis


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    with standalone(tmp_path / "one") as one, standalone(tmp_path / "two") as two:
        for server in (one, two):
            server.cli("config", "set", "repl-diskless-sync-delay", "0")
        follow(two, one)
        yield one, two


def follow(replica: Server, primary: Server) -> None:
    replica.cli("replicaof", "127.0.0.1", str(primary.port))
    wait_until(lambda: "master_link_status:up" in replica.cli("info", "replication"), "the replica")


def fail_over(proxy: CountingProxy, old: Server, new: Server) -> None:
    """Connections that there are stay with the old primary."""
    wait_until(lambda: new.cli("dbsize") == old.cli("dbsize"), "the copy")
    new.cli("replicaof", "no", "one")
    proxy.target = new.port
    follow(old, new)


def test_who_writes_follows_a_failover_that_keeps_connections(pair: tuple[Server, Server]) -> None:
    one, two = pair
    proxy = CountingProxy(target=one.port)
    index = RedisIndex(index_settings(f"redis://127.0.0.1:{proxy.port}/0"))
    index.bind("a root")
    index.create_set(set_info(1))
    assert index.publish([record(0, 1, 0)]) == 1
    fail_over(proxy, one, two)
    assert index.publish([record(1, 1, 1)]) == 1
    assert index.acquire_lease("a", "me", time.time(), 30.0) is not None
    assert len(index.resolve([key(0), key(1)])) == 2
    index.close()


def test_who_reads_does_not_believe_a_demoted_primary(pair: tuple[Server, Server]) -> None:
    """It has lost what it knew, or has not got what is new, and answers all the same."""
    one, two = pair
    proxy = CountingProxy(target=one.port)
    index, other = RedisIndex(index_settings(f"redis://127.0.0.1:{proxy.port}/0")), RedisIndex(index_settings(two.url))
    index.create_set(set_info(1))
    assert index.publish([record(0, 1, 0)]) == 1
    fail_over(proxy, one, two)
    one.cli("config", "set", "replica-serve-stale-data", "yes")
    one.cli("replicaof", "127.0.0.1", "1")  # cut off: from now on it gets nothing
    assert other.publish([record(1, 1, 1)]) == 1
    time.sleep(ROLE_INTERVAL_S)
    assert len(index.resolve([key(0), key(1)])) == 2
    time.sleep(ROLE_INTERVAL_S)
    before = proxy.round_trips
    assert len(index.resolve([key(0), key(1)])) == 2
    assert proxy.round_trips - before == 1, "the role is asked for in the same round trip"
    other.close()
    index.close()


def test_a_server_that_is_read_only_for_good_is_read_and_not_connected_to_again_and_again(
    pair: tuple[Server, Server],
) -> None:
    one, two = pair
    RedisIndex(index_settings(one.url)).create_set(set_info(1))
    wait_until(lambda: two.cli("dbsize") == one.cli("dbsize"), "the copy")
    index = RedisIndex(index_settings(two.url))
    before, began_s = connections(two), time.monotonic()
    for _ in range(50):
        with pytest.raises(IndexRefused):
            index.acquire_lease("a", "me", time.time(), 30.0)
        assert [info.set_id for info in index.sets()] == [1]
    made = connections(two) - before - 1  # but for redis-cli's own
    assert made <= 2 + (time.monotonic() - began_s) / RECONNECT_PAUSE_S
    index.close()


def connections(server: Server) -> int:
    lines = server.cli("info", "stats").splitlines()
    return int(next(line.partition(":")[2] for line in lines if line.startswith("total_connections_received")))


# --- passwords ---


def rotate(server: Server, file: Path, old: str, new: str) -> None:
    """As Kubernetes does: the file first, then the server forgets the old password and its connections."""
    server.cli("acl", "setuser", "kv", f">{new}")
    file.write_text(f"{new}\n")
    server.cli("acl", "setuser", "kv", f"<{old}")
    server.cli("client", "kill", "user", "kv")


def with_user(server: Server, password: str) -> None:
    server.cli("acl", "setuser", "kv", "on", f">{password}", "~*", "&*", "+@all")


def settings_with(url: str, file: Path) -> IndexSettings:
    return index_settings(url).model_copy(update={"username": "kv", "password_file": file})


@pytest.fixture
def protected(tmp_path: Path) -> Iterator[tuple[Server, Path, RedisIndex]]:
    """A server whose user has the password "old", the file with it, and an index of that file."""
    file = tmp_path / "password"
    file.write_text("old\n")
    with standalone(tmp_path / "redis") as server:
        with_user(server, "old")
        index = RedisIndex(settings_with(server.url, file))
        yield server, file, index
        index.close()


def test_a_password_that_is_rotated_is_read_again(protected: tuple[Server, Path, RedisIndex]) -> None:
    server, file, index = protected
    index.bind("a root")
    rotate(server, file, "old", "new")
    assert index.resolve([key(0)]) == []
    server.cli("acl", "setuser", "kv", ">newer", "<new")  # the server first
    server.cli("client", "kill", "user", "kv")
    with pytest.raises(IndexUnavailable, match=f"index.password_file = {file}"):
        index.resolve([key(0)])
    file.write_text("")
    with pytest.raises(IndexUnavailable, match=f"{file}.*empty"):
        index.resolve([key(0)])
    file.write_text("newer\n")
    assert index.resolve([key(0)]) == []


def test_a_start_with_a_wrong_password_names_its_file(protected: tuple[Server, Path, RedisIndex]) -> None:
    _, file, index = protected
    file.write_text("hunter2\n")
    with pytest.raises(ConfigError) as caught:
        index.bind("a root")
    assert caught.value.key == "index.password_file" and caught.value.value == str(file)
    assert "hunter2" not in str(caught.value)


def test_a_sentinels_password_that_is_rotated_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    with sentinel(tmp_path) as ((master, _), watcher):
        with_user(watcher, "old")
        watcher.cli("acl", "setuser", "default", "off")
        settings = index_settings(f"redis+sentinel://127.0.0.1:{watcher.port}/kv").model_copy(
            update={"sentinel_username": "kv", "sentinel_password_file": file}
        )
        index = RedisIndex(settings)
        index.bind("a root")
        watcher.cli("--user", "kv", "--pass", "old", "acl", "setuser", "kv", ">new", "<old")
        watcher.cli("--user", "kv", "--pass", "new", "client", "kill", "type", "normal", "skipme", "yes")
        master.cli("client", "kill", "type", "normal", "skipme", "yes")
        with pytest.raises(IndexUnavailable, match=f"index.sentinel_password_file = {file}"):
            index.resolve([key(0)])
        file.write_text("new\n")
        assert index.resolve([key(0)]) == []
        index.close()
