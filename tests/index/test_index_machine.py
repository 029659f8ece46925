"""LmdbIndex and RedisIndex against MemoryIndex: the same calls, the same answers, whatever the order."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtier.errors import StaleLease
from kvtier.format.geometry import Extent
from kvtier.index import entry
from kvtier.index.base import UNOWNED, Index, Location, NewRecord, SetInfo, Use
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.index.redis.index import RedisIndex
from tests.redis_server import has_redis, index_settings, standalone

WHOLE = Extent(0, 2, 0, 4)
EXTENTS = (WHOLE, Extent(0, 2, 0, 2), Extent(0, 2, 2, 2), Extent(0, 1, 0, 4), Extent(1, 1, 0, 4), Extent(0, 2, 1, 3))
KEYS = [bytes([number]) * 16 for number in range(6)]
SET_IDS = st.sampled_from([0, 1, 2, 2**64 - 1])
OWNERS = st.sampled_from(["a", "b", "c"])
NOTES = st.sampled_from(["pin/a", "pin/ab", "quota/tenant/ü"])
LEASES = st.sampled_from(["evict", "writer/ü"])


def removed(index: Index, set_id: int, token: int | None) -> int | None:
    """None when it is refused."""
    try:
        return index.remove_set(set_id, token)
    except StaleLease:
        return None


def location(set_id: int, rank: int, slot: int, extent: Extent) -> Location:
    checksums = tuple(hash((set_id, rank, slot, head)) & (2**64 - 1) for head in range(extent.n_heads))
    return Location(set_id, rank, slot, 4096, extent, checksums)


LOCATIONS = st.builds(location, SET_IDS, st.integers(0, 1), st.integers(0, 3), st.sampled_from(EXTENTS))
RECORDS = st.builds(NewRecord, st.sampled_from(KEYS), LOCATIONS, st.just(WHOLE))
# A slot of a file holds one record, so that no batch has two in one.
BATCHES = st.lists(RECORDS, max_size=5, unique_by=lambda record: entry.place(record.location))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kvtier-index-")
        self.model = MemoryIndex()
        self.index = self.opened()
        self.now_s = 0.0

    def opened(self) -> Index:
        return LmdbIndex(self.folder, map_bytes=16 << 20)

    def teardown(self) -> None:
        self.index.close()
        shutil.rmtree(self.folder)

    @rule(records=BATCHES, into_unowned=st.booleans())
    def publish(self, records: list[NewRecord], into_unowned: bool) -> None:
        assert self.index.publish(records, into_unowned=into_unowned) == self.model.publish(
            records, into_unowned=into_unowned
        )

    @rule(key=st.sampled_from(KEYS), location=LOCATIONS)
    def retract(self, key: bytes, location: Location) -> None:
        assert self.index.retract(key, location) == self.model.retract(key, location)

    @rule(key=st.sampled_from(KEYS), choice=st.integers(0, 10))
    def retract_what_is_there(self, key: bytes, choice: int) -> None:
        there = [one for set_id in self.set_ids() for found, one in self.model.members(set_id) if found == key]
        if there:
            self.retract(key, there[choice % len(there)])

    @rule(set_id=SET_IDS, owner=OWNERS, tenant=st.sampled_from(["", "ü"]), n_bytes=st.integers(0, 2**40))
    def create_set(self, set_id: int, owner: str, tenant: str, n_bytes: int) -> None:
        info = SetInfo(set_id, KEYS[0], owner, n_bytes, self.now_s, self.now_s, tenant=tenant)
        assert self.index.create_set(info) == self.model.create_set(info)

    @rule(set_id=SET_IDS, records=BATCHES)
    def read_back_set(self, set_id: int, records: list[NewRecord]) -> None:
        info = SetInfo(set_id, KEYS[0], UNOWNED, 1, self.now_s, self.now_s, is_open=False)
        mine = [record for record in records if record.location.set_id == set_id]
        assert self.index.create_set(info, mine) == self.model.create_set(info, mine)

    @rule(set_id=SET_IDS)
    def take_over(self, set_id: int) -> None:
        self.index.take_over(set_id)
        self.model.take_over(set_id)

    @rule(set_id=SET_IDS, n_bytes=st.integers(0, 2**40))
    def close_set(self, set_id: int, n_bytes: int) -> None:
        self.index.close_set(set_id, n_bytes)
        self.model.close_set(set_id, n_bytes)

    @rule(set_id=SET_IDS, token=st.none() | st.integers(0, 3))
    def remove_set(self, set_id: int, token: int | None) -> None:
        assert removed(self.index, set_id, token) == removed(self.model, set_id, token)

    @rule(used=st.dictionaries(SET_IDS, st.builds(Use, st.floats(0, 100), st.integers(0, 100))))
    def touch(self, used: dict[int, Use]) -> None:
        self.index.touch(used)
        self.model.touch(used)

    @rule(name=LEASES, owner=OWNERS, ttl_s=st.sampled_from([0.0, 1.0, 5.0]), later_s=st.sampled_from([0.0, 0.5, 1.0]))
    def acquire_lease(self, name: str, owner: str, ttl_s: float, later_s: float) -> None:
        self.now_s += later_s
        token = self.model.acquire_lease(name, owner, self.now_s, ttl_s)
        assert self.index.acquire_lease(name, owner, self.now_s, ttl_s) == token

    @rule(name=LEASES, owner=OWNERS)
    def release_lease(self, name: str, owner: str) -> None:
        self.index.release_lease(name, owner)
        self.model.release_lease(name, owner)

    @rule(name=NOTES, value=st.binary(max_size=9), expires_s=st.none() | st.floats(0, 10))
    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        self.index.put_note(name, value, expires_s)
        self.model.put_note(name, value, expires_s)

    @rule(prefix=st.sampled_from(["", "pin/", "pin/a", "x"]), later_s=st.sampled_from([0.0, 0.5]))
    def notes(self, prefix: str, later_s: float) -> None:
        self.now_s += later_s
        assert list(self.index.notes(prefix, self.now_s).items()) == list(self.model.notes(prefix, self.now_s).items())

    @rule(name=NOTES)
    def drop_note(self, name: str) -> None:
        self.notes("", 0.0)  # expired ones are forgotten at the latest when notes are asked for
        assert self.index.drop_note(name) == self.model.drop_note(name)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.clear()

    @rule()
    def rebuilt(self) -> None:
        self.index.rebuilt(self.index.loss())
        self.model.rebuilt(self.model.loss())

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.index = self.opened()

    @invariant()
    def answers_are_the_same(self) -> None:
        for first in range(len(KEYS)):
            assert self.index.resolve(KEYS[first:]) == self.model.resolve(KEYS[first:])
        assert self.index.sets() == self.model.sets()
        assert self.index.counts() == self.model.counts()
        assert self.index.was_reset == self.model.was_reset
        for set_id in self.set_ids():
            assert self.index.members(set_id) == self.model.members(set_id)
        for name in ("evict", "writer/ü"):
            assert self.index.lease_owner(name, self.now_s) == self.model.lease_owner(name, self.now_s)

        assert self.index.some_sets([1, 2]) == self.model.some_sets([1, 2])

    @invariant()
    def entries_and_members_agree(self) -> None:
        """No entry points to a set that is gone, and each record stands in its set once."""
        members = {(key, entry.place(one)) for set_id in self.set_ids() for key, one in self.index.members(set_id)}
        for key in KEYS:
            for value in self.index.resolve([key]):
                for one in entry.unpack(value):
                    assert (key, entry.place(one)) in members
        assert len(members) == self.index.counts().records

    def set_ids(self) -> list[int]:
        return [info.set_id for info in self.model.sets()]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@has_redis
def test_redis_index_machine(tmp_path: Path) -> None:
    with standalone(tmp_path / "redis") as server:

        class RedisMachine(IndexMachine):
            """Each under a prefix of its own."""

            def opened(self) -> Index:
                index = RedisIndex(index_settings(server.url, prefix=f"kvtier{Path(self.folder).name}"))
                index.bind("a root")
                return index

        bounds = settings(max_examples=25, stateful_step_count=25, deadline=None, database=None)
        run_state_machine_as_test(RedisMachine, settings=bounds)
