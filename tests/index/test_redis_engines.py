"""Engines that share a root and a Redis, over the real Store and Transfer: what one saves the others load, and what a
Redis that is paused, killed or emptied costs them."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import SetInfo
from kvtier.index.redis.index import RedisIndex
from kvtier.runtime import metrics as names
from kvtier.storage.segments import SegmentFiles
from tests.redis_server import GENEROUS_MS, Server, cluster, cluster_url, free_port, has_redis, standalone
from tests.support.rig import Engine
from tests.waiting import wait_until

pytestmark = has_redis

CHUNK, PER = 64, 4
LEASE_S = 6.0  # of the test that is about it
BUSY_S = 30.0  # what a busy machine may add
REPLY_MS, CONNECT_MS = 300.0, 300.0  # of the test that is about them


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with standalone(tmp_path / "redis") as server:
        yield server


def engine(root: Path, url: str, segment_bytes: int = 4 << 20, lease_s: float = 30.0, **changes: object) -> Engine:
    breaker = {"failures": 2, "pause_first_ms": 100.0, "pause_max_ms": 400.0}
    index = {"kind": "redis", "url": url, "reply_timeout_ms": GENEROUS_MS, "connect_timeout_ms": GENEROUS_MS}
    index |= {"breaker": breaker, **changes}
    return Engine(root, changes={"index": index, "writer_lease_s": lease_s, "segment_bytes": segment_bytes})


def prompt(number: int, chunks: int = 3) -> list[int]:
    return [1000 * number + token for token in range(CHUNK * chunks)]


def hits(one: Engine, tokens: list[int], first_block: int = 100) -> int:
    """Chunks that are loaded; their blocks are what this prefix's KV is, or this fails (I2)."""
    blocks = list(range(first_block, first_block + len(tokens) // 16))
    n_chunks, done = one.load(tokens, blocks)
    if n_chunks:
        assert all(not answer.failed_blocks for answer in done)
        assert one.holds(tokens, blocks[: n_chunks * PER])
    return n_chunks


def test_what_any_engine_saves_all_load(server: Server, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    engines = [engine(root, server.url) for _ in range(3)]
    for number, one in enumerate(engines):
        assert len(one.save(prompt(number), list(range(12)))) == 3
    for one in engines:
        assert [hits(one, prompt(number)) for number in range(3)] == [3, 3, 3]
    for one in engines:
        one.close()
    with pytest.raises(ConfigError, match="index is in Redis"):
        Engine(root)


def test_an_engine_starts_without_redis_and_uses_it_when_it_comes(tmp_path: Path) -> None:
    port = free_port()
    one = engine(tmp_path / "kv", f"redis://127.0.0.1:{port}/0")
    assert hits(one, prompt(0)) == 0
    server = Server(tmp_path / "redis", port=port)
    try:
        assert len(one.save(prompt(0), list(range(12)))) == 3
        wait_until(lambda: hits(one, prompt(0)) == 3, "a hit")
        one.close()
    finally:
        server.kill()


def test_a_paused_redis_costs_misses_and_what_is_saved_meanwhile_comes_in_afterwards(
    server: Server, tmp_path: Path
) -> None:
    times = {"reply_timeout_ms": REPLY_MS, "connect_timeout_ms": CONNECT_MS}
    one, other = (engine(tmp_path / "kv", server.url, **times) for _ in range(2))
    wait_until(lambda: saves_all(one, 0), "a save")
    one.wait_for_set()
    server.pause()
    longest_s = 0.0
    for _ in range(30):
        began = time.monotonic()
        keys = one.keys(prompt(0))
        while (entries := one.store.lookup(keys)) is None:
            time.sleep(0.001)
        assert entries == []
        longest_s = max(longest_s, time.monotonic() - began)
    assert longest_s < (REPLY_MS + CONNECT_MS) / 1000 + BUSY_S
    assert one.store.metrics.total()[names.INDEX_FAST_FAILS] > 0
    done = one.save(prompt(1), list(range(20, 32)))
    assert [answer.outcome.value for answer in done] == ["saved"] * 3, "its bytes are there, its entries wait"
    server.go_on()
    wait_until(lambda: hits(other, prompt(1)) == 3 and hits(other, prompt(0)) == 3, "both prompts")
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        (("config", "set", "maxmemory", "1mb"), ("config", "set", "maxmemory", "0")),
        (("acl", "setuser", "default", "-evalsha", "-eval"), ("acl", "setuser", "default", "+@all")),
        (("acl", "setuser", "default", "-hset", "-set"), ("acl", "setuser", "default", "+@all")),
    ],
    ids=["full", "no-scripts", "no-writes-in-scripts"],
)
def test_a_redis_that_refuses_writes_is_asked_on_and_takes_what_waited_afterwards(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, refuse: tuple[str, ...], allow: tuple[str, ...]
) -> None:
    """Hits stay, also for an engine that starts then."""
    one = engine(tmp_path / "kv", server.url)
    one.save(prompt(0), list(range(12)))
    one.wait_for_set()
    server.cli(*refuse)
    other = engine(tmp_path / "kv", server.url)
    assert [answer.outcome.value for answer in one.save(prompt(1), list(range(20, 32)))] == ["saved"] * 3
    for _ in range(2):
        time.sleep(0.8)  # meanwhile, all that is asked of it is refused
        assert hits(other, prompt(0)) == hits(one, prompt(0)) == 3
    for half in (one.store, *one.transfers):
        assert names.INDEX_PAUSES not in half.metrics.total()
    assert sum("'make sets' failed" in line for line in caplog.messages) <= 2, "once for each engine"
    server.cli(*allow)
    wait_until(lambda: hits(other, prompt(1)) == 3, "what waited")
    one.close()
    other.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_an_emptied_redis_is_filled_again_by_one_engine(server: Server, tmp_path: Path, restarts: bool) -> None:
    engines = [engine(tmp_path / "kv", server.url) for _ in range(2)]
    for number, one in enumerate(engines):
        one.save(prompt(number), list(range(12)))
    if restarts:
        server.kill()
        assert hits(engines[0], prompt(1)) == 0
        server.start()
    else:
        server.cli("flushall")
    for one in engines:
        wait_until(lambda one=one: [hits(one, prompt(number)) for number in range(2)] == [3, 3], "all hits again")
    for number, one in enumerate(engines, 2):
        wait_until(lambda one=one, number=number: saves_all(one, number), "a save in a new set")
    wait_until(lambda: [hits(engines[0], prompt(3)), hits(engines[1], prompt(2))] == [3, 3], "what both saved")
    for one in engines:
        one.close()


def saves_all(one: Engine, number: int) -> bool:
    """An engine notices within a few seconds that its sets are gone; until then its saves are refused."""
    return [answer.outcome.value for answer in one.save(prompt(number), list(range(40, 52)))] in (["saved"] * 3, [])


@pytest.mark.parametrize("has_writer", [True, False])
def test_a_shard_that_lost_its_memory_costs_no_chunk_and_no_save(tmp_path: Path, has_writer: bool) -> None:
    """Lists of sets that other shards know were lost, or entries of records that lists on other shards name."""
    with cluster(tmp_path / "redis") as servers:
        root, url, numbers = tmp_path / "kv", cluster_url(servers), range(12)
        one = engine(root, url, 1 << 20)
        for number in numbers:
            one.save(prompt(number), list(range(12)))
        if not has_writer:  # its sets are read back, and have no owner
            one.close()
            for server in servers:
                server.cli("flushall")
            one = engine(root, url, 1 << 20)
            wait_until(lambda: all(hits(one, prompt(number)) == 3 for number in numbers), "the first rebuild")
        for round_, server in enumerate(servers, 1):
            server.cli("flushall")
            wait_until(lambda: all(hits(one, prompt(number)) == 3 for number in numbers), "all hits again")
            saved = 100 * round_
            wait_until(lambda saved=saved: saves_all(one, saved) and hits(one, prompt(saved)) == 3, "a save")
        one.close()


def test_lists_that_redis_lost_alone_cost_no_set(server: Server, tmp_path: Path) -> None:
    """As by a maxmemory-policy that evicts keys, or a failover. A sweep took such sets for empty and removed them."""
    one, other = (engine(tmp_path / "kv", server.url, 1 << 20) for _ in range(2))
    for number in range(3):
        one.save(prompt(number), list(range(12)))
    lists = "for _, k in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', k) end"
    server.cli("eval", lists, "0", "kvtier:{" + 16 * "?" + "}")
    one.store._keeper._due.renew_s = 0.0
    wait_until(lambda: saves_all(one, 3) and hits(other, prompt(3)) == 3, "a save in a new set")
    one.close()
    other.store._keeper._sweeper.sweep()
    assert [hits(other, prompt(number)) for number in range(4)] == [3] * 4
    index = other.store._keeper._index
    assert index.without_list([info.set_id for info in index.sets() if not info.is_open]) == set()
    other.close()


def test_a_lost_list_is_made_whole_although_redis_fails_in_between(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there again without its records, and the next sweep took its set for empty and unlinked the files."""
    one = engine(tmp_path / "kv", server.url, 1 << 20)
    one.save(prompt(0), list(range(12)))
    one.close()
    other = engine(tmp_path / "kv", server.url, 1 << 20)
    keeper = other.store._keeper
    (info,) = [info for info in keeper._index.sets() if keeper._index.members(info.set_id)]
    server.cli("del", f"kvtier:{{{info.set_id:016x}}}")
    with monkeypatch.context() as failing, pytest.raises(IndexUnavailable):
        failing.setattr(RedisIndex, "publish", lambda *arguments: refuse())
        keeper._sweeper.sweep()
    keeper._sweeper.sweep()
    assert hits(other, prompt(0)) == 3
    other.close()


def refuse() -> int:
    raise IndexUnavailable("Redis was stopped")


@pytest.mark.parametrize("key", ["sets", "bytes"])
def test_saving_goes_on_where_redis_lost_the_table_of_sets_or_their_sum(
    server: Server, tmp_path: Path, key: str
) -> None:
    """The sum counted sets that are in no table, and nothing could be evicted for it: no set was made any more."""
    one = engine(tmp_path / "kv", server.url, 1 << 20)
    one.save(prompt(0), list(range(12)))
    index, keeper = one.store._keeper._index, one.store._keeper
    server.cli("incrby", "kvtier:{kvtier}:bytes", str(one.settings.capacity_bytes))
    server.cli("del", "kvtier:{kvtier}:" + key)
    keeper._due.renew_s = 0.0
    keeper._due.sweep.want()
    wait_until(lambda: saves_all(one, 1) and hits(one, prompt(1)) == 3, "a save in a new set")
    wait_until(lambda: index.counts().n_bytes == sum(info.n_bytes for info in index.sets()), "the sum")
    one.close()


def test_a_redis_that_starts_from_an_old_snapshot_gets_all_records_again(server: Server, tmp_path: Path) -> None:
    """It says that it is whole, names sets that were evicted since, and has sets open that were closed."""
    engines = [engine(tmp_path / "kv", server.url, 1 << 20, LEASE_S) for _ in range(2)]
    for number in range(8):
        if number == 4:
            server.cli("save")
            time.sleep(LEASE_S / 2)
        if number == 6:
            index = engines[0].store._keeper._index
            gone = next(info for info in index.sets() if index.members(info.set_id))
            index.remove_set(gone.set_id)
            SegmentFiles(tmp_path / "kv/v2" / gone.namespace.hex(), direct=False).unlink_set(gone.set_id)
        engines[number % 2].save(prompt(number), list(range(12)))
    before = [hits(engines[0], prompt(number)) for number in range(8)]
    assert 12 < sum(before) < 24
    for one in engines:
        one.store._keeper._due.renew_s = 0.0
    wait_until(lambda: all(one.store._keeper._due.renew_s for one in engines), "signs of life after the snapshot")
    server.kill()
    time.sleep(LEASE_S / 2)  # a start may take longer than the lease lasts
    server.start()
    engines[0].save(prompt(8), list(range(12)))  # refused: its set is not known
    for one in engines:
        one.store._keeper._due.renew_s = 0.0
    keys = [engines[0].keys(prompt(number)) for number in range(8)]

    def found() -> list[int]:
        with suppress(IndexUnavailable):  # it rests after failures
            return [len(index.resolve(of_prompt)) for of_prompt in keys]
        return []

    def hits_of_the_other() -> list[int]:  # its index rests for a time of its own
        return [hits(engines[1], prompt(number)) for number in range(8)]

    wait_until(lambda: found() == before, "all records")
    wait_until(lambda: hits_of_the_other() == before, "hits of the other engine")

    def is_held(info: SetInfo) -> bool:
        return any(info.set_id in one.store._keeper.allocators.set_ids() for one in engines)

    wait_until(lambda: all(is_held(info) for info in index.sets() if info.is_open), "no set stays open for nothing")
    for one in engines:
        one.close()
