"""Room on disks that are full in ways statvfs does not show, or that give space back late: saving goes on, and the root
is never emptied for space that is on its way."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.eviction.room import LATE_S, PROBE_INTERVAL_S, SETTLE_FIRST_S, Room
from kvtier.eviction.set_removal import Remover
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import Sweeper
from kvtier.scheduler.segment_allocator import SlotAllocators
from kvtier.storage import segments
from kvtier.storage.filesystem import RESERVED_FILES, FreeSpace
from kvtier.worker.record_writer import FULL_PAUSE_S
from tests.engines.disk import Disk, disk
from tests.eviction.test_capacity import BLOCKS, SEGMENT_BYTES, tokens_of
from tests.storage.test_removed_sets import bytes_on, engine_on, silly_files
from tests.support.rig import Engine
from tests.waiting import wait_until

MIB = 1 << 20
PACE_S = 0.2  # time between two prompts where their share counts: a refusal stops saves for REST_S, seconds


@contextmanager
def faulty_disk(folder: Path, mib: int, silly_renames: bool = False) -> Iterator[Disk]:
    with disk(folder, mib * MIB, silly_renames) as made:
        if made.flags is None or made.n_bytes is None:
            pytest.skip("no FUSE here, or no tmpfs may be mounted")
        yield made


def save_some(engine: Engine, numbers: range, pause_s: float = 0.05) -> Counter[str]:
    """Save five chunks of each prompt; those for which no set is ready in a second are "not tried"."""
    seen: Counter[str] = Counter()
    for number in numbers:
        time.sleep(pause_s)
        try:
            engine.wait_for_set(1.0)
        except AssertionError:
            seen["not tried"] += 5
            continue
        done = engine.save(tokens_of(number), BLOCKS)
        seen.update(answer.outcome.name for answer in done)
        seen["not tried"] += 5 - len(done)
    return seen


@pytest.mark.parametrize("says_enospc", [False, True], ids=["quota", "project quota"])
def test_a_quota_that_statvfs_does_not_show_is_learned_and_saving_goes_on(
    says_enospc: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_disk(tmp_path / "disk", 256) as place, caplog.at_level(logging.WARNING, logger="kvtier"):
        place.set("quota of MiB", 40)
        place.set("quota says ENOSPC", says_enospc)
        engine = engine_on(place, sets=100)
        first = save_some(engine, range(40))
        fits, index = bytes_on(place), engine.store._keeper._index
        fewest, later = fits, Counter[str]()
        for number in range(40, 65):
            later += save_some(engine, range(number, number + 1), PACE_S)
            fewest = min(fewest, index.counts().n_bytes)
        assert later["SAVED"] >= 0.7 * 5 * 25, (first, later)
        assert fewest > fits / 2, (fewest, fits)
        assert sum("a quota of this user" in record.getMessage() for record in caplog.records) == 1
        engine.close()
        second = engine_on(place, sets=100)  # started on what is full
        again = save_some(second, range(100, 120), PACE_S)
        assert again["SAVED"] >= 0.6 * 5 * 20, again
        second.close()


def test_a_quota_that_was_raised_is_used_again(tmp_path: Path) -> None:
    room = Room()
    room.bytes_for_sets(0.0, 50, 1000, 10)
    assert room.refused(0.0, 50, 1000, 10) and room.bytes_for_sets(1.0, 50, 1000, 10) == 40
    limits = [room.bytes_for_sets(n * PROBE_INTERVAL_S, 40, 1000, 10) for n in range(1, 5)]
    assert limits == [50, 70, 110, 190]
    assert room.refused(5 * PROBE_INTERVAL_S, 190, 1000, 10), "a set that did not fit"
    assert room.bytes_for_sets(5 * PROBE_INTERVAL_S, 190, 1000, 10) == 180


def test_refusals_soon_after_an_eviction_are_no_news() -> None:
    room = Room()
    room.bytes_for_sets(0.0, 100, 0, 10)
    assert room.refused(1.0, 100, 0, 10)
    room.bytes_for_sets(1.0, 80, 0, 10)  # evicted
    assert not any(room.refused(1.0 + n / 2, 80, 0, 10) for n in range(int(2 * SETTLE_FIRST_S)))
    assert room.bytes_for_sets(30.0, 80, 0, 10) == 90
    assert room.refused(30.0, 80, 0, 10) and not room.refused(30.0 + 2 * SETTLE_FIRST_S, 70, 0, 10)
    room.bytes_for_sets(31.0, 70, 0, 10)
    assert room.bytes_for_sets(32.0, 70, 30, 10) == 100, "statvfs said that the disk was full, and now has room"
    assert room.bytes_for_sets(32.0 + LATE_S, 70, 20, 10) == 90


def test_sets_that_found_no_room_are_not_taken_for_evictions_for_good() -> None:
    """A set whose files found no room counts until it is closed. Each such end was taken for an eviction whose space
    was on its way, so on a disk that others had filled nothing was evicted, nor saved."""
    room = Room()
    room.bytes_for_sets(0.0, 70, 0, 3)
    news_s = []
    for tick in range(60):
        room.bytes_for_sets(tick, 73, 0, 3)  # the set is offered, and its file cannot be made
        room.bytes_for_sets(tick + 0.5, 70, 0, 3)  # it is closed, without a byte
        if room.refused(tick + 0.5, 70, 0, need_bytes=3):
            news_s.append(tick)
    assert news_s == [5, 15, 35] and room.limit_bytes == 67


def test_the_end_of_a_set_that_found_no_room_frees_none() -> None:
    room = Room()
    assert room.bytes_for_sets(0.0, 73, 5, 3) == 78  # of them 3 of a set whose file cannot be made
    room.overbooked(3)
    assert room.bytes_for_sets(1.0, 70, 5, 3) == 75
    assert room.bytes_for_sets(2.0, 60, 5, 3) == 75, "evicted, and the space is on its way"
    assert room.bytes_for_sets(3.0, 63, 5, 3) == 75
    room.overbooked(3)
    assert room.bytes_for_sets(4.0, 60, 5, 3) == 75, "the eviction stays in mind"
    assert room.bytes_for_sets(2.0 + LATE_S, 60, 5, 3) == 65


def test_a_refusal_long_ago_makes_none_after_an_eviction_news() -> None:
    room = Room()
    room.bytes_for_sets(0.0, 90, 0, 3)
    assert room.refused(0.0, 90, 0, need_bytes=3)
    room.bytes_for_sets(40.0, 90, 0, 3)
    room.bytes_for_sets(40.5, 70, 0, 3)  # evicted, and the space is on its way
    assert not room.refused(41.0, 70, 0, need_bytes=3)


def test_what_is_saved_beyond_a_limit_lifts_it_once_nothing_is_refused() -> None:
    room = Room()
    room.bytes_for_sets(0.0, 50, 1000, 10)
    assert room.refused(0.0, 50, 1000, 10)
    room.worked(1.0, 60, 10)
    assert room.limit_bytes == 40, "it may have been a segment that was made before"
    room.worked(SETTLE_FIRST_S, 60, 10)
    assert room.limit_bytes == 70


def test_where_space_is_known_to_come_late_nothing_more_is_evicted_for_it() -> None:
    """MooseFS frees the space of removed files after minutes; each refusal until then cost a further set."""
    counts = {}
    for reclaim_s in (0.0, 900.0):
        room, n_bytes = Room(reclaim_s), 100
        room.bytes_for_sets(0.0, n_bytes, 0, 10)
        for second in range(1, 600):
            room.refused(float(second), n_bytes, 0, 10)
            n_bytes = min(n_bytes, room.bytes_for_sets(float(second), n_bytes, 0, 10) // 10 * 10)
        counts[reclaim_s] = n_bytes
    assert counts[900.0] == 90 and counts[0.0] < 50, counts
    assert room.is_waiting(600.0, 0) and not Room().is_waiting(600.0, 0)
    room.refused(1000.0, 90, 0, 10)
    assert room.bytes_for_sets(1000.0, 90, 0, 10) == 80, "what did not come in that time is someone else's"
    assert room.is_waiting(1001.0, 9) and not room.is_waiting(1001.0, 10), "it shows"


def test_two_engines_evict_once_between_them_where_space_comes_late() -> None:
    """The second engine on a full MooseFS took the first one's evictions for a smaller disk, and evicted again."""
    rooms, n_bytes = (Room(1200.0), Room(1200.0)), 100
    for room in rooms:
        room.bytes_for_sets(0.0, n_bytes, 5, 10)
    for now_s in range(1, 600):
        for room in rooms:
            room.bytes_for_sets(float(now_s), n_bytes, 5, 10)
            room.refused(float(now_s), n_bytes, 5, 10)
            n_bytes = min(n_bytes, room.bytes_for_sets(float(now_s), n_bytes, 5, 10) // 10 * 10)
    assert n_bytes == 90
    assert all(room.is_waiting(1200.0, 5) for room in rooms)
    assert not rooms[1].is_waiting(1201.0, 5), "from the eviction on, not from the last refusal"


def test_a_record_in_a_segment_made_before_does_not_end_the_wait_for_space() -> None:
    """Each such save ended it, so the next refusal evicted again, until a root on MooseFS was empty."""
    room, n_bytes = Room(1200.0), 100
    room.bytes_for_sets(0.0, n_bytes, 5, 10)
    for begin_s in range(1, 1200, 2 * int(SETTLE_FIRST_S)):
        room.refused(float(begin_s), n_bytes, 5, 10)
        n_bytes = min(n_bytes, room.bytes_for_sets(float(begin_s), n_bytes, 5, 10) // 10 * 10)
        room.worked(begin_s + SETTLE_FIRST_S, n_bytes, 10)
    assert n_bytes == 90
    room.worked(1190.0, n_bytes, 10)
    assert room.is_waiting(1190.0, 14) and not room.is_waiting(1190.0, 15), "until it shows"


def test_inodes_are_room_too(tmp_path: Path) -> None:
    assert FreeSpace(1000, None).for_sets(10, 2) == 1000
    assert FreeSpace(1000, RESERVED_FILES + 7).for_sets(10, 2) == 30
    assert FreeSpace(1000, RESERVED_FILES - 1).for_sets(10, 2) == 0
    assert "inodes" in FreeSpace(1000, 0).why_full(10) and "is full" in FreeSpace(5, 100).why_full(10)
    with faulty_disk(tmp_path / "disk", 256) as place:
        place.set("files at most", 40)
        engine = engine_on(place, sets=100)
        seen = save_some(engine, range(60))
        assert seen["SAVED"] >= 0.9 * 5 * 60, seen
        assert engine.store._keeper._index.counts().sets > 15
        engine.close()


def test_inodes_that_a_file_system_does_not_count() -> None:
    """CephFS answers how many files exist and -1 for those that may be made; btrfs answers 0 and 0."""
    for n_files, n_left, counted in ((6, -1, None), (0, 0, None), (100, 40, 40)):
        answer = SimpleNamespace(f_bavail=413, f_frsize=4 << 20, f_files=n_files, f_favail=n_left)
        assert FreeSpace.of(answer) == FreeSpace(413 * (4 << 20), counted)


def test_space_that_comes_late_empties_nothing(tmp_path: Path) -> None:
    """Gluster and Ceph free space seconds after an unlink; here 5 s."""
    with faulty_disk(tmp_path / "disk", 64) as place:
        place.set("free after tenths of a second", 50)
        engine = engine_on(place, sets=200)
        save_some(engine, range(50), 0.0)
        index, most, fewest = engine.store._keeper._index, 64 * MIB, 64 * MIB
        ends_s, number, seen = time.monotonic() + 9, 50, Counter[str]()
        while time.monotonic() < ends_s:
            seen += save_some(engine, range(number, number + 1))
            number, fewest = number + 1, min(fewest, index.counts().n_bytes)
        assert fewest > most / 2, fewest
        assert seen["SAVED"] >= 5 * 5, seen
        engine.close()


def test_saving_resumes_soon_after_the_disk_has_room(tmp_path: Path) -> None:
    with faulty_disk(tmp_path / "disk", 64) as place:
        engine = engine_on(place, sets=200)
        save_some(engine, range(3))
        place.fill()
        ends_s, number = time.monotonic() + 5, 10
        while time.monotonic() < ends_s:  # long enough for pauses that double
            place.fill()
            save_some(engine, range(number, number + 1))
            number += 1
        rests = engine.transfers[0]._saver.writer.disk.is_resting
        assert not rests(engine.transfers[0]._worker.clock() + 2 * FULL_PAUSE_S), "its pauses double"
        place.free()
        others = count(number)
        wait_until(lambda: save_some(engine, range(first := next(others), first + 1), 0.0)["SAVED"])
        engine.close()


def test_sets_kept_ready_are_an_eighth_of_what_there_is_room_for() -> None:
    allocators = SlotAllocators(4, 8)
    tenant = allocators.of("red", 0.0)
    for set_id in range(8):
        allocators.common.offer(set_id)
    for set_id in range(8, 10):
        tenant.offer(set_id)
    assert allocators.common.take(0.0) == (0, 0), "one of them is filled"
    assert sorted(allocators.bound_spares(3)) == [4, 5, 6, 7, 9]
    assert allocators.n_unused == 4 and not allocators.bound_spares(8)
    assert allocators.want_sets(0.0)


def test_files_that_other_processes_keep_open_count_until_they_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the same client closes them when it next compares with the index."""
    monkeypatch.setattr(segments, "close_in_process", lambda folder, set_id: None)
    with faulty_disk(tmp_path / "disk", 160, silly_renames=True) as place:
        engine = engine_on(place, sets=8)
        most = 0
        for number in range(30):
            save_some(engine, range(number, number + 1), 0.0)
            most = max(most, bytes_on(place))
        assert engine.store.metrics.total()["evicted_bytes"] > 0
        assert most <= 9 * SEGMENT_BYTES, most
        engine.close()


def test_held_files_are_measured_and_given_up_after_a_while(tmp_path: Path) -> None:
    now_s = [100.0]
    with faulty_disk(tmp_path / "disk", 64, silly_renames=True) as place:
        engine = engine_on(place, sets=8)
        engine.save(tokens_of(1), BLOCKS)
        (path,) = place.root.glob("v2/*/*.kvseg")
        index = engine.store._keeper._index
        held = path.open("rb")
        n_bytes = path.stat().st_blocks * 512
        remover = Remover(index, place.root / "v2", lambda: now_s[0])
        assert remover.held_bytes() == 0
        remover.remove(index.some_sets([int(path.name[:16], 16)])[0])
        assert len(silly_files(place)) == 1 and remover.held_bytes() == n_bytes
        now_s[0] += LATE_S
        assert remover.held_bytes() == 0, "a process that hangs keeps nothing from being saved"
        held.close()
        engine.close()


def test_a_sweep_removes_what_crashed_nodes_left_open(tmp_path: Path) -> None:
    folder = tmp_path / "v2" / ("0" * 32)
    folder.mkdir(parents=True)
    names = (".nfs000000000012ab3400000001", ".fuse_hidden0000000200000001", ".nfs-notes", "nfs00000001")
    for name in names:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    Sweeper(MemoryIndex(), tmp_path / "v2", "me").sweep()
    assert len(list(folder.iterdir())) == 4, "renamed just now: a read may be under way"
    Sweeper(MemoryIndex(), tmp_path / "v2", "me", clock=lambda: time.time() + 1200).sweep()
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[2:])
