"""A set that is in no index comes into it with the segments of all its ranks or not at all, whatever fails meanwhile:
registered without one, nobody would look at that one again, and registered without records it would be removed."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import cli
from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.index.base import Index, IndexCounts, Location, NewRecord
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance import rebuild as read_back
from kvtier.maintenance.rebuild import SetRecovery
from kvtier.maintenance.sweep_lease import SWEEP_LEASE
from kvtier.maintenance.sweeper import CLOCK_TOLERANCE_S, ORPHAN_GRACE_S, Sweeper
from kvtier.storage.segments import SegmentFiles, segment_name
from tests.scheduler.test_slow_writers import before, by_hand, once
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, geometry, saved_by_another
from tests.worker.test_faults import flip_payload

HEADER_BYTES = 4096


_opened: list[LmdbIndex] = []


@pytest.fixture(autouse=True)
def indexes_end() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(root: Path, is_rebuilt: bool = True) -> LmdbIndex:
    """Return the root's index, which ends with the test. is_rebuilt: take it for rebuilt."""
    index = LmdbIndex(str(root / "v2" / "index"))
    _opened.append(index)
    index.bind(root / "v2")
    if is_rebuilt:
        index.rebuilt(index.loss())
    return index


def lost(root: Path, ranks: int = 1, is_rebuilt: bool = True) -> tuple[list[Path], list[bytes], LmdbIndex]:
    """Lose the index of a stored set. Return its segments, made to look old, its five keys, and a new, empty index."""
    keys = saved_by_another(root, TOKENS, BLOCKS, tensor_size=ranks)
    paths = sorted(root.glob("v2/*/*.kvseg"))
    assert len(paths) == ranks
    for path in paths:
        os.utime(path, (1, 1))
    shutil.rmtree(root / "v2" / "index")
    return paths, keys, opened(root, is_rebuilt)


def living_writer(root: Path) -> tuple[Engine, Index, tuple[bytes, Location]]:
    """Return an engine that has saved five chunks, its index, and the last record, which the index lacks now."""
    writer = Engine(root)
    writer.save(TOKENS, BLOCKS)
    index = writer.store._keeper._index
    members = [member for info in index.sets() for member in index.members(info.set_id)]
    assert len(members) == 5
    index.retract(*members[4])
    return writer, index, members[4]


def test_what_a_writer_was_refused_long_ago_and_never_cut_off_is_read_back(tmp_path: Path) -> None:
    """A remote index was away when it was written, so it counts as saved, and was lost and rebuilt before it was
    published. Each check said that a rebuild would add it."""
    writer, index, (key, location) = living_writer(tmp_path)
    index.take_over(location.set_id)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    assert keeper.rebuild() is not None and index.resolve([key]) == [], "its writer may still cut it off"
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    os.utime(path, (1, 1))
    assert keeper.rebuild() is not None and len(index.resolve([key])) == 1
    writer.close()


def refuse_once(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The first time that this segment is opened, there are too many open files."""
    open_file, left = SegmentFiles._open_file, [path.name]

    def refuse(self: SegmentFiles, name: tuple[int, int]) -> object:
        if segment_name(*name) in left:
            left.clear()
            raise TierUnavailable("Too many open files")
        return open_file(self, name)

    monkeypatch.setattr(SegmentFiles, "_open_file", refuse)


def test_a_sweep_waits_until_all_of_a_sets_segments_are_old(tmp_path: Path) -> None:
    """The younger one was never taken in: the set was in the index by then."""
    paths, keys, index = lost(tmp_path, ranks=2)
    now_s = time.time()
    os.utime(paths[1], (now_s, now_s))
    Sweeper(index, tmp_path / "v2", "me").sweep()
    assert index.counts().sets == 0
    Sweeper(index, tmp_path / "v2", "me", clock=lambda: now_s + ORPHAN_GRACE_S + 1).sweep()
    assert len(index.resolve(keys)) == 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("doing", ["sweep", "rebuild"])
def test_a_set_of_which_one_segment_cannot_be_read_is_taken_in_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str, rank: int
) -> None:
    """The other one came in alone, and this one never."""
    paths, keys, index = lost(tmp_path, ranks=2)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    refuse_once(monkeypatch, paths[rank])
    if doing == "sweep":
        keeper.sweep()
    else:
        done = keeper.rebuild()
        assert done is not None and len(done.unreadable) == 1 and paths[rank].name in done.unreadable[0]
    assert index.counts().sets == 0
    keeper.sweep()
    assert len(index.resolve(keys)) == 5


def test_a_file_whose_status_cannot_be_read_does_not_end_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre while the OST of a file is down."""
    paths, _, index = lost(tmp_path, ranks=2)
    ask = os.lstat

    def refuse(path: Path) -> os.stat_result:
        if path == paths[0]:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return ask(path)

    refuse_once(monkeypatch, paths[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        done = Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert done is not None and len(done.unreadable) == 1 and paths[0].name in done.unreadable[0]


@pytest.mark.parametrize("gone", [1, 2])
def test_what_goes_while_a_sweep_reads_it_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """An evictor that was slow removes its files, of one rank after the other."""
    paths, keys, index = lost(tmp_path, ranks=2)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    unlink = once(lambda: [path.unlink() for path in paths[:gone]])
    monkeypatch.setattr(index, "create_set", before(index.create_set, unlink))
    keeper.sweep()
    assert index.counts() == IndexCounts(0, 0, 0, 0)
    keeper.sweep()
    assert index.resolve(keys) == [] and index.counts().records == 5 * (2 - gone)


def test_what_is_no_segment_takes_nothing_else_with_it(tmp_path: Path) -> None:
    paths, _, index = lost(tmp_path, ranks=2)
    paths[0].write_bytes(b"x" * HEADER_BYTES)
    os.utime(paths[0], (1, 1))
    keeper = Sweeper(index, tmp_path / "v2", "me")
    keeper.sweep()
    assert [path.exists() for path in paths] == [False, True]
    assert index.counts().records == 5
    keeper.sweep()
    assert paths[1].exists()


def test_a_sweep_beside_a_rebuild_removes_no_segment_that_is_still_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's held no record, so the set was in the index without any when the sweep came by: both went."""
    paths, _, index = lost(tmp_path, ranks=2)
    os.truncate(paths[0], HEADER_BYTES)
    rebuilding, sweeper = Sweeper(index, tmp_path / "v2", "cli"), Sweeper(index, tmp_path / "v2", "engine")
    read = SetRecovery._read_segment

    def sweep_before_the_second(self: SetRecovery, files: SegmentFiles, set_id: int, rank: int) -> object:
        if rank == 1:
            index.release_lease(SWEEP_LEASE, "cli")  # as if it had run out
            sweeper.sweep()
        return read(self, files, set_id, rank)

    monkeypatch.setattr(SetRecovery, "_read_segment", sweep_before_the_second)
    rebuilding.rebuild()
    assert paths[1].exists() and index.counts().records == 5


@pytest.mark.parametrize("doing", ["sweep", "rebuild"])
def test_a_set_that_came_in_by_half_comes_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str) -> None:
    """Its first records came with it, then the index refused: the others stayed unknown, for the set was known."""
    _, keys, index = lost(tmp_path)
    monkeypatch.setattr(read_back, "ADOPTED_MAX", 2)

    def refuse(records: list[NewRecord], **options: bool) -> int:
        monkeypatch.undo()
        raise IndexUnavailable("locked by another process")

    monkeypatch.setattr(index, "publish", refuse)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    with pytest.raises(IndexUnavailable):
        keeper.sweep() if doing == "sweep" else keeper.rebuild()
    keeper.sweep()
    assert len(index.resolve(keys)) == 5


def test_what_was_read_back_is_refused_where_its_set_was_taken_over_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network may deliver the command late: whoever took the set over has cut its files behind the known records."""
    writer, index, last = living_writer(tmp_path)
    publish = index.publish

    def arrive_late(records: list[NewRecord], **options: bool) -> int:
        index.take_over(last[1].set_id)
        return publish(records, **options)

    monkeypatch.setattr(index, "publish", arrive_late)
    Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert last not in index.members(last[1].set_id)


def test_what_a_living_writer_has_is_kept_when_the_index_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, index, _ = living_writer(tmp_path)

    def refuse(records: list[NewRecord], **options: bool) -> int:
        raise IndexUnavailable("locked by another process")

    with monkeypatch.context() as patched:
        patched.setattr(index, "publish", refuse)
        with pytest.raises(IndexUnavailable):
            Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert writer.load(TOKENS, TARGET)[0] == 4


def test_one_at_a_time_looks_after_a_roots_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep cut segments of which a rebuild had read more, and entries pointed behind their ends."""
    _, _, index = lost(tmp_path)
    first, second = Sweeper(index, tmp_path / "v2", "first"), Sweeper(index, tmp_path / "v2", "second")
    outcomes: list[object] = []

    def look() -> None:
        outcomes.append((index.lease_owner(SWEEP_LEASE, time.time()), second.rebuild()))

    reading = first._recovery
    monkeypatch.setattr(reading, "_read_segment", before(reading._read_segment, once(look)))
    done = first.rebuild()
    assert outcomes == [("first", None)] and done is not None and done.records == 5
    assert index.lease_owner(SWEEP_LEASE, time.time()) is None


def test_an_engine_leaves_a_lost_index_to_who_rebuilds_it_already(tmp_path: Path) -> None:
    _, _, index = lost(tmp_path, is_rebuilt=False)
    assert index.acquire_lease(SWEEP_LEASE, "other", time.time(), 60.0)
    engine = Engine(tmp_path)
    keeper = by_hand(engine)
    assert index.was_reset and index.counts().records == 0
    index.release_lease(SWEEP_LEASE, "other")
    keeper.tick()
    assert not index.was_reset
    assert engine.load(TOKENS, TARGET)[0] == 5
    engine.close()


def test_the_command_waits_for_a_sweep_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, index = lost(tmp_path)
    assert index.acquire_lease(SWEEP_LEASE, "killed", time.time(), 0.5)
    assert cli.main(["index", "rebuild", str(tmp_path)]) == 0
    assert "5 records of 1 segment added" in capsys.readouterr().out


def test_the_command_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier.cli import index as command

    monkeypatch.setattr(command, "OTHERS_TIMEOUT_S", 0.2)
    _, _, index = lost(tmp_path)
    assert index.acquire_lease(SWEEP_LEASE, "busy", time.time(), 60.0)
    assert cli.main(["index", "rebuild", str(tmp_path)]) != 0
    assert "busy" in capsys.readouterr().err


def test_a_file_that_was_away_at_a_rebuild_is_read_back_by_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its set was in the index by then, with the other rank's records, and its own were lost until the next rebuild.
    Not while it is young: a writer that was refused a record may cut it."""
    paths, keys, index = lost(tmp_path, ranks=2)
    now_s = time.time()
    keeper = Sweeper(index, tmp_path / "v2", "me", clock=lambda: now_s)
    monkeypatch.setattr(keeper, "_may_be_away", True)
    monkeypatch.setattr(keeper._recovery, "_may_be_away", True)
    away = paths[1].rename(tmp_path / "away")
    assert keeper.rebuild() is not None
    assert index.resolve(keys) == [] and index.counts().records == 5
    away.rename(paths[1])
    os.utime(paths[1], (now_s, now_s))
    keeper.sweep()
    assert index.counts().records == 5
    now_s += ORPHAN_GRACE_S + CLOCK_TOLERANCE_S
    keeper.sweep()
    assert len(index.resolve(keys)) == 5


def test_a_segment_of_which_reads_end_too_soon_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre with a target away. It is in no index, so all that tells it from other files is its header."""
    (path,), keys, index = lost(tmp_path)
    keeper = Sweeper(index, tmp_path / "v2", "me", clock=lambda: time.time() + ORPHAN_GRACE_S + CLOCK_TOLERANCE_S)
    with monkeypatch.context() as patch:
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [memoryview(buffers[0])[:2048]], at))
        keeper.sweep()
        done = keeper.rebuild()
        assert path.exists() and index.counts().sets == 0
        assert done is not None and "is part of the storage down?" in done.unreadable[0]
    keeper.sweep()
    assert len(index.resolve(keys)) == 5


def test_stale_header_pages_of_a_shared_disk_retract_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node's writer has published records that pages read through an older descriptor do not show yet."""
    paths, keys, index = lost(tmp_path)
    now_s = time.time()
    keeper = Sweeper(index, tmp_path / "v2", "me", clock=lambda: now_s)
    assert keeper.rebuild() is not None and len(index.resolve(keys)) == 5
    monkeypatch.setattr(keeper._recovery, "_may_be_away", True)
    pages = SegmentFiles.pages
    monkeypatch.setattr(SegmentFiles, "pages", lambda *args: (page for page in pages(*args) if page[0] < 3))
    now_s += read_back.SETTLED_S + 1
    assert keeper.rebuild() is not None
    assert len(index.resolve(keys)) == 5
    flip_payload(paths[0], 4)
    now_s = time.time()
    for n_left, later_s in ((5, 0), (4, read_back.SETTLED_S + 1)):
        now_s += later_s
        done = keeper.rebuild()
        assert done is not None and done.gone_records == 5 - n_left, "its bytes may be about to arrive"
        assert len(index.resolve(keys)) == n_left


@pytest.mark.parametrize(
    ("is_open", "may_be_away"), [(False, False), (True, True)], ids=["local disk", "open set of a dead writer"]
)
def test_a_sweep_reads_no_file_without_records_back_that_cannot_have_been_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool, may_be_away: bool
) -> None:
    """On a local disk its records were retracted as bad. The file of a dead writer is truncated, with what it was
    refused."""
    _, _, index = lost(tmp_path, ranks=2)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    monkeypatch.setattr(keeper, "_may_be_away", may_be_away)
    monkeypatch.setattr(keeper._recovery, "_may_be_away", may_be_away)
    assert keeper.rebuild() is not None
    (info,) = index.sets()
    left = [NewRecord(key, at, geometry().whole) for key, at in index.members(info.set_id) if at.rank == 0]
    index.remove_set(info.set_id)
    index.create_set(replace(info, is_open=is_open, owner="dead"), left)
    keeper.sweep()
    assert {at.rank for _, at in index.members(info.set_id)} == {0} and index.counts().records == 5
    assert not index.sets()[0].is_open


@pytest.mark.parametrize("gone", [1, 2])
def test_a_file_that_goes_between_its_listing_and_its_reading_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    paths, _, index = lost(tmp_path, ranks=2)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    unlink = once(lambda: [path.unlink() for path in paths[:gone]])
    monkeypatch.setattr(SetRecovery, "_read_segment", before(SetRecovery._read_segment, unlink))
    done = keeper.rebuild()
    assert done is not None and done.records == 5 * (2 - gone) and done.unreadable == ()
