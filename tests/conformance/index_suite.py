"""What every index must do. A subclass gives the fixture `index`: an empty one."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvtier.errors import StaleLease
from kvtier.format.geometry import Extent
from kvtier.index import entry
from kvtier.index.base import EVICT_LEASE, UNOWNED, Index, IndexCounts, Location, NewRecord, SetInfo, Use

WHOLE = Extent(0, 4, 0, 8)
LOWER, UPPER = Extent(0, 4, 0, 4), Extent(0, 4, 4, 4)
NAMESPACE = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def at(set_id: int, slot: int, extent: Extent = WHOLE, rank: int = 0) -> Location:
    checksums = tuple((set_id << 40) + (slot << 20) + (rank << 8) + head for head in range(extent.n_heads))
    return Location(set_id, rank, slot, 8192, extent, checksums)


def record(number: int, location: Location) -> NewRecord:
    return NewRecord(key(number), location, WHOLE)


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def set_info(set_id: int, owner: str = "engine-1", n_bytes: int = 1 << 30) -> SetInfo:
    return SetInfo(set_id, NAMESPACE, owner, n_bytes, created_s=100.5, used_s=100.5)


def put_set(index: Index, set_id: int, numbers: Iterable[int] = ()) -> None:
    """A set whose slots hold whole records of these chunks."""
    assert index.create_set(set_info(set_id))
    records = [record(number, at(set_id, slot)) for slot, number in enumerate(numbers)]
    assert index.publish(records) == len(records)


class IndexSuite:
    @pytest.fixture
    def index(self) -> Index:
        raise NotImplementedError

    def test_an_empty_index_has_nothing(self, index: Index) -> None:
        assert index.resolve(keys(range(3))) == []
        assert index.resolve([]) == []
        assert index.sets() == []
        assert index.members(1) == []
        assert index.counts() == IndexCounts(0, 0, 0, 0)

    def test_resolve_gives_the_entries_of_the_longest_prefix(self, index: Index) -> None:
        put_set(index, 1, [0, 1, 3])
        found = index.resolve(keys(range(5)))
        assert [entry.unpack(value) for value in found] == [[at(1, 0)], [at(1, 1)]]
        assert index.resolve(keys([2, 0])) == []
        assert len(index.resolve(keys([3, 0, 1]))) == 3

    def test_find_gives_the_entry_of_each_key(self, index: Index) -> None:
        put_set(index, 1, [0, 3])
        assert index.publish([record(1, at(1, 1, LOWER, rank=1))]) == 1
        found = index.find(keys([2, 3, 1, 0, 3]))
        assert [entry.locations_of(value) for value in found] == [[], [at(1, 1)], [], [at(1, 0)], [at(1, 1)]]
        assert found[2] is None and index.find([]) == []

    def test_a_chunk_is_found_when_all_its_heads_are_there(self, index: Index) -> None:
        put_set(index, 1)
        assert index.publish([record(0, at(1, 0, LOWER, rank=0))]) == 1
        assert index.resolve([key(0)]) == []
        assert index.publish([record(0, at(1, 0, UPPER, rank=1))]) == 1
        (value,) = index.resolve([key(0)])
        assert entry.unpack(value) == [at(1, 0, LOWER, rank=0), at(1, 0, UPPER, rank=1)]

    def test_layers_must_be_covered_as_well_as_heads(self, index: Index) -> None:
        put_set(index, 1)
        stages = [Extent(first, 1, 0, 8) for first in range(4)]
        for rank, stage in enumerate(stages):
            assert index.resolve([key(0)]) == []
            assert index.publish([record(0, at(1, 0, stage, rank))]) == 1
        assert len(index.resolve([key(0)])) == 1

    def test_the_first_writer_of_an_extent_wins(self, index: Index) -> None:
        put_set(index, 1, [0])
        put_set(index, 2)
        assert index.publish([record(0, at(2, 0))]) == 0
        assert index.publish([record(0, at(2, 0, UPPER))]) == 0
        assert entry.unpack(index.resolve([key(0)])[0]) == [at(1, 0)]
        assert index.members(2) == []

    def test_a_wider_record_joins_narrower_ones(self, index: Index) -> None:
        put_set(index, 1)
        put_set(index, 2)
        assert index.publish([record(0, at(1, 0, LOWER))]) == 1
        assert index.publish([record(0, at(2, 0))]) == 1
        assert entry.unpack(index.resolve([key(0)])[0]) == [at(1, 0, LOWER), at(2, 0)]

    def test_records_of_one_call_are_published_one_after_another(self, index: Index) -> None:
        put_set(index, 1)
        lower, upper, again = at(1, 0, LOWER), at(1, 0, UPPER, rank=1), at(1, 1)
        records = [record(0, lower), record(0, upper), record(0, lower), record(1, lower), record(0, again)]
        assert index.publish(records) == 3, "the place of the fourth is taken, and the fifth is covered"
        assert [entry.locations_of(value) for value in index.find(keys([0, 1]))] == [[lower, upper], []]
        assert sorted(index.members(1)) == [(key(0), lower), (key(0), upper)]

    def test_publishing_the_same_record_again_changes_nothing(self, index: Index) -> None:
        put_set(index, 1, [0])
        before = index.resolve([key(0)])
        assert index.publish([record(0, at(1, 0))]) == 1
        assert index.resolve([key(0)]) == before
        assert index.counts().records == 1

    def test_a_slot_holds_one_chunk(self, index: Index) -> None:
        put_set(index, 1, [0])
        assert index.publish([record(1, at(1, 0))]) == 0
        assert index.resolve([key(1)]) == []
        assert index.members(1) == [(key(0), at(1, 0))]

    def test_a_record_outside_of_its_chunk_is_refused(self, index: Index) -> None:
        put_set(index, 1)
        assert index.publish([record(0, at(1, 0, Extent(0, 5, 0, 8)))]) == 0
        assert index.publish([record(0, at(1, 0, LOWER)), NewRecord(key(0), at(1, 1, LOWER), LOWER)]) == 1
        assert index.counts().records == 1

    def test_a_set_that_is_not_registered_takes_no_records(self, index: Index) -> None:
        assert index.publish([record(0, at(1, 0))]) == 0
        put_set(index, 2, [5])
        index.remove_set(2)
        assert index.publish([record(6, at(2, 1))]) == 0
        assert index.counts() == IndexCounts(0, 0, 0, 0)

    def test_a_set_that_was_taken_over_takes_what_its_files_hold_and_nothing_else(self, index: Index) -> None:
        put_set(index, 1, [0])
        put_set(index, 2)
        index.take_over(1)
        index.take_over(9)
        assert [info.owner for info in index.sets()] == [UNOWNED, "engine-1"]
        assert [info.is_open for info in index.sets()] == [True, True]
        assert index.publish([record(1, at(1, 1)), record(2, at(2, 0))]) == 1
        assert index.resolve([key(1)]) == []
        assert index.publish([record(1, at(1, 1))], from_files=True) == 0
        assert index.publish([record(1, at(1, 1))], into_unowned=True) == 1
        assert len(index.resolve(keys([0, 1]))) == 2
        index.close_set(2, 10)
        assert index.publish([record(3, at(2, 1))]) == 1, "what its own writer has still on its way"

    def test_a_set_that_is_read_back_comes_with_its_records(self, index: Index) -> None:
        info = replace(set_info(1, owner=UNOWNED), is_open=False)
        assert index.create_set(info, [record(0, at(1, 0)), record(1, at(1, 1))])
        assert index.sets() == [info]
        assert index.members(1) == [(key(0), at(1, 0)), (key(1), at(1, 1))]
        assert not index.create_set(info, [record(2, at(1, 2))])
        assert index.resolve([key(2)]) == [] and len(index.resolve(keys([0, 1]))) == 2

    def test_publish_counts_what_it_takes(self, index: Index) -> None:
        put_set(index, 1, [0])
        records = [record(0, at(9, 0)), record(1, at(1, 1)), record(1, at(1, 2)), record(2, at(1, 3))]
        assert index.publish(records) == 2
        assert index.publish([]) == 0

    def test_a_large_publish_and_removal(self, index: Index) -> None:
        put_set(index, 1, range(1500))
        assert len(index.resolve(keys(range(1500)))) == 1500
        assert [key_of for key_of, _ in index.members(1)] == keys(range(1500))
        assert index.remove_set(1) == 1500
        assert index.counts() == IndexCounts(0, 0, 0, 0)

    def test_retract_takes_one_location(self, index: Index) -> None:
        put_set(index, 1)
        put_set(index, 2)
        index.publish([record(0, at(1, 0, LOWER)), record(0, at(2, 7))])
        assert index.retract(key(0), at(2, 7))
        assert index.resolve([key(0)]) == []
        assert index.members(1) == [(key(0), at(1, 0, LOWER))]
        assert index.members(2) == []
        assert index.retract(key(0), at(1, 0, LOWER))
        assert index.counts() == IndexCounts(0, 0, 2, 2 << 30)

    def test_retract_never_touches_another_location(self, index: Index) -> None:
        put_set(index, 1, [0])
        for other in (at(1, 1), at(2, 0), at(1, 0, rank=1)):
            assert not index.retract(key(0), other)
        assert not index.retract(key(1), at(1, 0))
        assert len(index.resolve([key(0)])) == 1

    def test_a_retracted_chunk_can_be_published_anew(self, index: Index) -> None:
        put_set(index, 1, [0])
        assert index.retract(key(0), at(1, 0))
        assert not index.retract(key(0), at(1, 0))
        assert index.publish([record(0, at(1, 9))]) == 1
        assert entry.unpack(index.resolve([key(0)])[0]) == [at(1, 9)]

    def test_removing_a_set_takes_its_records_and_no_others(self, index: Index) -> None:
        put_set(index, 1, [0, 1])
        put_set(index, 2, [2])
        index.publish([record(3, at(1, 5, LOWER)), record(3, at(2, 5))])
        assert index.remove_set(1) == 3
        assert index.resolve([key(0)]) == [] and index.resolve([key(1)]) == []
        assert entry.unpack(index.resolve([key(3)])[0]) == [at(2, 5)]
        assert [info.set_id for info in index.sets()] == [2]
        assert index.members(1) == []
        assert index.remove_set(1) == 0

    def test_sets_are_remembered_as_given(self, index: Index) -> None:
        first = replace(set_info(2**64 - 1, "machine:pid:ü"), tenant="ä" * 16, uses=2**40)
        second = set_info(0, "", 0)
        assert index.create_set(first) and index.create_set(second)
        assert index.sets() == [second, first]

    def test_some_sets_are_found_by_id(self, index: Index) -> None:
        for set_id in (1, 5, 2**63):
            put_set(index, set_id)
        assert [info.set_id for info in index.some_sets([2**63, 1, 7, 1])] == [1, 2**63]
        assert index.some_sets({5}) == [set_info(5)]
        assert index.some_sets([]) == []

    def test_a_set_id_is_taken_once(self, index: Index) -> None:
        assert index.create_set(set_info(1, "a"))
        assert not index.create_set(set_info(1, "b"))
        assert index.sets() == [set_info(1, "a")]

    def test_closing_a_set(self, index: Index) -> None:
        put_set(index, 1, [0])
        index.close_set(1, 4096)
        index.close_set(99, 4096)
        (info,) = index.sets()
        assert (info.is_open, info.n_bytes) == (False, 4096)
        assert index.counts() == IndexCounts(1, 1, 1, 4096)
        assert len(index.resolve([key(0)])) == 1

    def test_touch_raises_recency_and_never_lowers_it(self, index: Index) -> None:
        put_set(index, 1)
        put_set(index, 2)
        index.touch({1: Use(200.25, 3), 2: Use(50.0, 1), 99: Use(300.0, 1)})
        index.touch({1: Use(150.0, 2)})
        index.touch({})
        assert [info.used_s for info in index.sets()] == [200.25, 100.5]
        assert [info.uses for info in index.sets()] == [5, 1]
        assert [info.created_s for info in index.sets()] == [100.5, 100.5]

    def test_uses_and_tenant_stay_through_a_sets_life(self, index: Index) -> None:
        info = replace(set_info(1), tenant="alpha", uses=7)
        assert index.create_set(info)
        index.close_set(1, 50)
        index.take_over(1)
        wanted = replace(info, owner=UNOWNED, is_open=False, n_bytes=50)
        assert index.sets() == [wanted] == index.some_sets([1])

    def test_a_lease_has_one_owner(self, index: Index) -> None:
        assert index.lease_owner("evict", 10.0) is None
        assert index.acquire_lease("evict", "a", 10.0, 5.0) is not None
        assert index.acquire_lease("evict", "b", 14.999, 5.0) is None
        assert index.lease_owner("evict", 14.999) == "a"
        assert index.lease_owner("evict", 15.0) is None
        assert index.acquire_lease("other", "b", 14.0, 5.0) is not None

    def test_fencing_grows_with_each_new_owner(self, index: Index) -> None:
        first = index.acquire_lease("evict", "a", 0.0, 5.0)
        assert first is not None
        assert index.acquire_lease("evict", "a", 4.0, 5.0) == first
        assert index.acquire_lease("evict", "b", 8.999, 5.0) is None
        second = index.acquire_lease("evict", "b", 9.0, 5.0)
        assert second is not None and second > first
        third = index.acquire_lease("evict", "a", 14.0, 5.0)
        assert third is not None and third > second

    def test_a_released_lease_is_free_at_once_and_its_fencing_stays(self, index: Index) -> None:
        first = index.acquire_lease("evict", "a", 0.0, 5.0)
        index.release_lease("evict", "b")
        assert index.lease_owner("evict", 1.0) == "a"
        index.release_lease("evict", "a")
        index.release_lease("unknown", "a")
        assert index.lease_owner("evict", 1.0) is None
        second = index.acquire_lease("evict", "b", 1.0, 5.0)
        assert first is not None and second is not None and second > first

    def test_who_was_replaced_as_evictor_removes_nothing_more(self, index: Index) -> None:
        put_set(index, 1, [0, 1])
        put_set(index, 2, [2])
        stale = index.acquire_lease(EVICT_LEASE, "a", 0.0, 5.0)
        assert index.remove_set(2, stale) == 1
        token = index.acquire_lease(EVICT_LEASE, "b", 6.0, 5.0)
        with pytest.raises(StaleLease):
            index.remove_set(1, stale)
        assert len(index.resolve(keys([0, 1]))) == 2 and [info.set_id for info in index.sets()] == [1]
        index.release_lease(EVICT_LEASE, "b")
        assert index.remove_set(1, token) == 2, "nobody has taken it since"
        assert index.remove_set(1, token) == 0
        put_set(index, 3, [3])
        assert index.remove_set(3) == 1, "who has the root for himself needs no token"

    def test_a_token_is_none_before_the_first_lease(self, index: Index) -> None:
        put_set(index, 1, [0])
        with pytest.raises(StaleLease):
            index.remove_set(1, 1)
        assert len(index.resolve([key(0)])) == 1

    def test_notes_are_kept_by_name_until_they_expire(self, index: Index) -> None:
        index.put_note("pin/b", b"\x00\xff", None)
        index.put_note("pin/a", b"first", 50.0)
        index.put_note("worker/ü:1", b"", 60.0)
        assert list(index.notes("pin/", 49.9).items()) == [("pin/a", b"first"), ("pin/b", b"\x00\xff")]
        assert index.notes("worker/", 49.9) == {"worker/ü:1": b""}
        assert list(index.notes("", 49.9)) == ["pin/a", "pin/b", "worker/ü:1"]
        assert index.notes("quota/", 49.9) == {}
        assert index.notes("pin", 50.0) == {"pin/b": b"\x00\xff"}
        assert list(index.notes("", 60.0)) == ["pin/b"]

    def test_a_note_replaces_the_one_before(self, index: Index) -> None:
        index.put_note("worker/1", b"old, and longer", 10.0)
        index.put_note("worker/1", b"new", 20.0)
        assert index.notes("worker/", 15.0) == {"worker/1": b"new"}
        index.put_note("worker/1", b"for ever", None)
        assert index.notes("worker/", 1e12) == {"worker/1": b"for ever"}

    def test_a_note_can_be_dropped(self, index: Index) -> None:
        index.put_note("pin/1", b"x", None)
        assert index.drop_note("pin/1")
        assert not index.drop_note("pin/1") and not index.drop_note("pin/2")
        assert index.notes("", 0.0) == {}

    def test_clear_forgets_everything_but_leases_and_notes(self, index: Index) -> None:
        put_set(index, 1, [0, 1])
        index.put_note("pin/1", b"x", None)
        token = index.acquire_lease("rebuild", "a", 0.0, 5.0)
        index.clear()
        assert index.counts() == IndexCounts(0, 0, 0, 0)
        assert index.resolve([key(0)]) == [] and index.members(1) == [] and index.some_sets([1]) == []
        assert index.acquire_lease("rebuild", "a", 1.0, 5.0) == token
        assert index.notes("pin/", 0.0) == {"pin/1": b"x"}
        put_set(index, 1, [0])
        assert len(index.resolve([key(0)])) == 1

    def test_the_whole_index_can_be_read(self, index: Index) -> None:
        put_set(index, 1, range(300))
        index.publish([record(300, at(1, 300, LOWER))])
        found = dict(index.entries())
        assert sorted(found) == keys(range(301))
        assert [entry.unpack(found[key(0)]), entry.unpack(found[key(300)])] == [[at(1, 0)], [at(1, 300, LOWER)]]
        index.remove_set(1)
        assert list(index.entries()) == []

    def test_threads_share_it(self, index: Index) -> None:
        """Eight threads race to publish the same chunks: each chunk gets one location, and every publish counts."""
        for set_id in range(8):
            put_set(index, set_id)
        taken = [0] * 8

        def write(set_id: int) -> None:
            for slot in range(40):
                taken[set_id] += index.publish([record(slot, at(set_id, slot))])
                index.resolve(keys(range(40)))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        assert sum(taken) == 40
        assert [len(index.members(set_id)) for set_id in range(8)] == taken
        assert all(len(entry.unpack(value)) == 1 for value in index.resolve(keys(range(40))))
