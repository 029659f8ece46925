"""What others put into Redis, by mistake or not: fields that are none of ours, another root's index."""

import math
import struct

import pytest
import redis

from kvtier.errors import IndexUnavailable
from kvtier.index.base import EVICT_LEASE, IndexCounts, Use
from kvtier.index.redis.index import RedisIndex
from tests.redis_server import Connect, Server, has_redis

from index_data import key, record, set_info

pytestmark = has_redis

SHARED = "kvtier:{kvtier}:"


def put(server: Server, name: str, field: bytes, value: bytes) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.hset(name, field, value)  # type: ignore[arg-type]


@pytest.fixture
def index(connect: Connect) -> RedisIndex:
    index = connect()
    index.bind("a root")
    return index


@pytest.mark.parametrize("field", [b"odd", struct.pack(">Q", 7)], ids=["of no set", "of a set"])
@pytest.mark.parametrize("value", [b"", b"x", bytes(50) + b"\xff", bytes(51) + b"\xff", b"\0" + b"\xff" * 60])
def test_a_field_that_is_no_set_hides_no_other(server: Server, index: RedisIndex, field: bytes, value: bytes) -> None:
    assert index.create_set(set_info(1)) and index.publish([record(1, 1, 0)]) == 1
    put(server, SHARED + "sets", field, value)
    assert [info.set_id for info in index.sets()] == [1]
    assert [info.set_id for info in index.some_sets([1, 7])] == [1]
    index.touch({1: Use(5.0, 1), 7: Use(5.0, 1)})
    index.close_set(7, 5)
    index.take_over(7)
    index.remove_set(7)
    assert index.create_set(set_info(2)) and index.remove_set(2) == 0
    assert index.some_sets([1])[0].uses == 1 and index.resolve([key(1)])


@pytest.mark.parametrize("value", [b"", b"x", struct.pack("<Qd", 3, math.inf) + b"\xff"])
def test_a_damaged_lease_is_nobodys(server: Server, index: RedisIndex, value: bytes) -> None:
    put(server, SHARED + "leases", EVICT_LEASE.encode(), value)
    assert index.lease_owner(EVICT_LEASE, 10.0) is None
    token = index.acquire_lease(EVICT_LEASE, "me", 10.0, 5.0)
    assert token is not None and index.lease_owner(EVICT_LEASE, 10.0) == "me"
    assert index.create_set(set_info(1)) and index.remove_set(1, token) == 0 and not index.sets()


def test_what_is_no_note_is_forgotten(server: Server, index: RedisIndex) -> None:
    index.put_note("pin/mine", b"it", None)
    for name, value in ((b"pin/short", b"x"), (b"pin/none", b""), (b"\xff", struct.pack("<d", math.inf))):
        put(server, SHARED + "notes", name, value)
    for _ in range(2):
        assert index.notes("", 10.0) == {"pin/mine": b"it"}


def test_a_sum_that_is_no_number_is_said(server: Server, index: RedisIndex) -> None:
    server.cli("set", SHARED + "bytes", "abc")
    with pytest.raises(IndexUnavailable, match="is no number"):
        index.counts()


def test_an_emptied_redis_that_became_another_roots_is_left_alone(
    server: Server, index: RedisIndex, connect: Connect
) -> None:
    """Both roots were given the same prefix. What this one would sweep or evict there is the other's."""
    ours, theirs = index, connect()
    assert ours.was_reset
    ours.rebuilt(ours.loss())
    assert not ours.was_reset and ours.create_set(set_info(1)) and ours.publish([record(1, 1, 0)]) == 1
    server.cli("flushall")
    theirs.bind("another root")
    assert theirs.was_reset
    theirs.rebuilt(theirs.loss())
    assert theirs.create_set(set_info(2)) and theirs.publish([record(1, 2, 0)]) == 1
    with pytest.raises(IndexUnavailable, match="another root"):
        _ = ours.was_reset
    for ask in (ours.sets, lambda: ours.resolve([key(1)]), lambda: ours.remove_set(2)):
        with pytest.raises(IndexUnavailable, match="another root"):
            ask()
    assert [info.set_id for info in theirs.sets()] == [2] and theirs.resolve([key(1)])
    server.cli("flushall")
    assert ours.was_reset and ours.create_set(set_info(3)), "it is free again"


def test_an_emptied_redis_that_another_root_takes_first(server: Server, index: RedisIndex, connect: Connect) -> None:
    """It was asked to say again whose it is, and by then it was another's."""
    server.cli("flushall")
    connect().bind("another root")
    for ask in (lambda: index.was_reset, lambda: index.was_reset, index.sets):
        with pytest.raises(IndexUnavailable, match="another root"):
            ask()


@pytest.mark.parametrize("more", ["e", "e:a", "e:ab", "e:" + "a" * 14, "e:e"])
def test_an_index_whose_prefix_goes_on_where_another_ends_is_left_alone(connect: Connect, more: str) -> None:
    """Names of its keys look as if they were those of the other's entries; clearing that one took them along."""
    outer, inner = (connect(prefix=prefix) for prefix in ("x", f"x:{more}"))
    for number, index in enumerate((outer, inner)):
        index.bind(f"root {number}")
        index.rebuilt(index.loss())
        assert index.create_set(set_info(1)) and index.publish([record(1, 1, 0)]) == 1
        assert index.acquire_lease(EVICT_LEASE, "me", 10.0, 5.0) is not None
        index.put_note("pin/mine", b"it", None)
    before = (inner.counts(), inner.sets(), list(inner.entries()))
    assert list(outer.entries()) == before[2], "one each"
    outer.clear()
    assert outer.counts() == IndexCounts(0, 0, 0, 0)
    assert (inner.counts(), inner.sets(), list(inner.entries())) == before and not inner.was_reset
    assert inner.lease_owner(EVICT_LEASE, 10.0) == "me" and inner.notes("", 10.0) == {"pin/mine": b"it"}
    inner.clear()
    assert inner.counts() == IndexCounts(0, 0, 0, 0)
