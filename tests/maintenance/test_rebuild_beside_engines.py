"""An index that was lost lists only some of the root's sets while an engine reads them back, and after that engine was
killed. Other engines made sets by the sum of these, and exceeded capacity_bytes; the older sets were evicted then."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.index.base import NewRecord
from kvtier.maintenance import rebuild as read_back
from kvtier.maintenance.sweep_lease import SWEEP_LEASE, SweepLease
from kvtier.scheduler.background import Keeper
from tests.redis_server import GENEROUS_MS, has_redis, standalone
from tests.scheduler.test_slow_writers import after, by_hand, once, tokens_of
from tests.support.rig import Engine
from tests.waiting import wait_until
from tests.worker.test_trimming import RECORD_BYTES, engine_of

CAPACITY_SETS, STORED_SETS, SLOTS = 8, 6, 6
SET_BYTES = 4096 + SLOTS * RECORD_BYTES


class Killed(BaseException):
    """The end of a process."""


class Place:
    """A root for CAPACITY_SETS sets. lose: have its index forget everything."""

    def __init__(self, root: Path, index: dict[str, object], lose: Callable[[], object]) -> None:
        self.root = root
        self.lose = lose
        self._index = index
        self._open: list[Engine] = []

    def engine(self) -> tuple[Engine, Keeper]:
        """Return an engine and its keeper, which ticks only when it is told to."""
        changes = {"index": self._index, "capacity_bytes": CAPACITY_SETS * SET_BYTES, "writer_lease_s": 60.0}
        one = engine_of(self.root, SLOTS, **changes)
        self._open.append(one)
        return one, by_hand(one)

    def close(self) -> None:
        for one in self._open:
            one.close()

    @property
    def segments(self) -> set[Path]:
        return set(self.root.glob("v2/*/*.kvseg"))

    @property
    def sets_on_disk(self) -> float:
        return sum(path.stat().st_blocks * 512 for path in self.segments) / SET_BYTES


@pytest.fixture(params=["lmdb", pytest.param("redis", marks=has_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root = tmp_path / "kv"
    if request.param == "lmdb":
        place = Place(root, {}, lambda: shutil.rmtree(root / "v2" / "index"))
        yield place
        place.close()
        return
    with standalone(tmp_path / "redis") as server:
        times = {"reply_timeout_ms": GENEROUS_MS, "connect_timeout_ms": GENEROUS_MS}
        place = Place(root, {"kind": "redis", "url": server.url, **times}, lambda: server.cli("flushall"))
        yield place
        place.close()


def save(one: Engine, number: int) -> int:
    """Save a prompt that fills one set, if there is a set. Return how many of its chunks became visible."""
    blocks = list(range(SLOTS * one.chunk_blocks))
    tokens = tokens_of(number, SLOTS)
    one.prefill(tokens, blocks)
    plan = one.plan_if_new(tokens, blocks)
    if plan is not None:
        one.run_save(plan)
    return n_stored(one, number)


def n_stored(one: Engine, number: int) -> int:
    return len(one.store._keeper.index.resolve(one.keys(tokens_of(number, SLOTS))))


def fill(place: Place) -> tuple[Engine, Keeper]:
    one, keeper = place.engine()
    for number in range(STORED_SETS):
        assert save(one, number) == SLOTS
        keeper.tick()
    return one, keeper


def kill_in_rebuild(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the engine in its rebuild, when the records of two sets are back, and some of the third one's."""
    index, calls = keeper.index, list[object]()
    publish = index.publish

    def publish_or_end(records: list[NewRecord], **options: bool) -> int:
        calls.append(records)
        if len(calls) > 2:
            raise Killed
        return publish(records, **options)

    with monkeypatch.context() as patched:
        patched.setattr(read_back, "ADOPTED_MAX", 2)
        patched.setattr(index, "publish", publish_or_end)
        patched.setattr(SweepLease, "release", lambda self: None)
        with pytest.raises(Killed):
            keeper.tick()


@pytest.mark.parametrize("starts", [False, True], ids=["runs", "starts"])
def test_none_is_made_or_evicted_before_a_killed_rebuild_was_completed(
    place: Place, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    running = None if starts else place.engine()
    _, keeper = fill(place)
    segments = place.segments
    place.lose()
    kill_in_rebuild(keeper, monkeypatch)
    other, others = running or place.engine()
    known = {info.set_id for info in others.index.sets()}
    assert len(known) == 3 and len(segments) == STORED_SETS
    for number in range(10, 10 + CAPACITY_SETS):
        others.tick()
        assert save(other, number) == 0
    assert {info.set_id for info in others.index.sets()} == known
    assert place.segments >= segments and place.sets_on_disk <= CAPACITY_SETS
    others.index.release_lease(SWEEP_LEASE, keeper._plan.owner)  # as if it had run out
    others.tick()
    assert [n_stored(other, number) for number in range(STORED_SETS)] == [SLOTS] * STORED_SETS
    wait_until(lambda: others.tick() or not others.allocators.common.wants_set(), "a segment set")
    for number in range(20, 20 + CAPACITY_SETS):
        assert save(other, number) == SLOTS
        others.tick()
        assert place.sets_on_disk <= CAPACITY_SETS


def test_a_set_that_was_made_while_the_index_was_lost_is_not_used(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss comes between the question whether there was one and the registration."""
    other, others = place.engine()
    fill(place)
    save(other, 10)  # it wants another set now
    lose = once(place.lose)
    with monkeypatch.context() as patched:
        patched.setattr(others._evictor, "make_room", after(others._evictor.make_room, lose))
        others.tick()
    assert others.index.was_reset and not others.index.sets() and others.allocators.common.wants_set()
