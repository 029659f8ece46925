"""A rebuild that takes long or fails half way says that it is not done, shows signs of life, leaves no file open."""

import os
import shutil
import time
from pathlib import Path

import pytest

from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.index.base import Location
from kvtier.maintenance import rebuild as read_back
from kvtier.maintenance.record_check import RecordVerdict
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.segments import SegmentFiles, parse_segment_name, segment_name
from tests.maintenance.test_delayed_sweeps import StallingClock
from tests.maintenance.test_rebuild_sets import indexes_end as indexes_end
from tests.maintenance.test_rebuild_sets import lost, opened
from tests.maintenance.test_record_saved_twice import BAD, saved_again_in_an_older_set
from tests.scheduler.test_slow_writers import after
from tests.support.rig import BLOCKS, TOKENS, saved_by_another
from tests.worker.test_faults import flip_payload


@pytest.mark.parametrize("where", ["members", "create_set", "some_sets"])
def test_who_may_have_lost_the_lease_has_not_rebuilt_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of a set that the index knows in part nothing was added, and it was called whole all the same."""
    _, _, index = lost(tmp_path)
    clock = StallingClock(time.time())
    keeper = Sweeper(index, tmp_path / "v2", "me", clock)
    keeper.rebuild()
    (info,) = index.sets()
    for member in index.members(info.set_id)[:3]:
        index.retract(*member)
    with monkeypatch.context() as patched:
        patched.setattr(index, where, after(getattr(index, where), clock.stall))
        assert keeper.rebuild() is None
    again = keeper.rebuild()
    assert again is not None and again.records == 3 and len(index.members(info.set_id)) == 5


def test_a_segment_that_fails_late_holds_up_no_other_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on storage a part of which answers after its own timeout only. The next set was called held up each time, so
    no rebuild was ever done."""
    for tokens in (TOKENS[64:], TOKENS):
        saved_by_another(tmp_path, tokens, BLOCKS)
    shutil.rmtree(tmp_path / "v2" / "index")
    index = opened(tmp_path)
    clock = StallingClock(time.time())
    keeper = Sweeper(index, tmp_path / "v2", "me", clock)
    newest = max(path.name for path in tmp_path.glob("v2/*/*.kvseg"))
    read = SegmentFiles._open_file

    def fail_late(self: SegmentFiles, name: tuple[int, int]) -> object:
        if segment_name(*name) == newest:
            clock.stall()
            raise TierUnavailable("Input/output error")
        return read(self, name)

    monkeypatch.setattr(SegmentFiles, "_open_file", fail_late)
    rebuilt = keeper.rebuild()
    assert rebuilt is not None and len(rebuilt.unreadable) == 1 and rebuilt.records == 4


@pytest.mark.parametrize("fails", [0, 1])
def test_a_segment_that_fails_late_holds_up_no_other_of_its_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The rest of its set was called held up each time."""
    saved_by_another(tmp_path, TOKENS, BLOCKS, changes={"io": {"stripes": 2}})
    index = opened(tmp_path)
    clock = StallingClock(time.time())
    keeper = Sweeper(index, tmp_path / "v2", "me", clock)
    (info,) = index.sets()
    of_part = {part: [m for m in index.members(info.set_id) if m[1].part == part] for part in (0, 1)}
    for key, location in of_part[1 - fails]:
        index.retract(key, location)
    read = SegmentFiles._open_file

    def fail_late(self: SegmentFiles, name: tuple[int, int]) -> object:
        if name[1] == fails:
            clock.stall()
            raise TierUnavailable("Input/output error")
        return read(self, name)

    monkeypatch.setattr(SegmentFiles, "_open_file", fail_late)
    rebuilt = keeper.rebuild()
    assert rebuilt is not None and len(rebuilt.unreadable) == 1
    assert rebuilt.records == len(of_part[1 - fails]) > 0


def open_segments() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the listing's own
            continue
    return [name for name in found if ".kvseg" in name]


@pytest.mark.parametrize("call", ["find", "members", "publish", "create_set"])
def test_a_rebuild_that_fails_leaves_no_segment_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Evicted ones kept their space as long as the process lived."""

    def refuse(*arguments: object, **options: object) -> None:
        raise IndexUnavailable("away")

    _, _, index = lost(tmp_path, ranks=4)
    before = open_segments()
    with monkeypatch.context() as patched:
        patched.setattr(index, call, refuse)
        with pytest.raises(IndexUnavailable):
            Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert open_segments() == before


def test_who_reads_what_lies_there_twice_gives_signs_of_life_and_reads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_again_in_an_older_set(tmp_path)
    older, newer = sorted(tmp_path.glob("v2/*/*.kvseg"))
    flip_payload(newer, BAD)  # back to what it was
    shutil.rmtree(tmp_path / "v2" / "index")
    index = opened(tmp_path)
    told: list[tuple[int, int]] = []
    told_before: list[int] = []
    plain = read_back.judge

    def look(files: SegmentFiles, key: bytes, location: Location) -> RecordVerdict:
        told_before.append(len(told))
        return plain(files, key, location)

    monkeypatch.setattr(read_back, "judge", look)
    keeper = Sweeper(index, tmp_path / "v2", "me")
    assert keeper.rebuild(lambda done, total: told.append((done, total))) is not None
    assert told_before == [3] and told == [(0, 2), (1, 2), (2, 2), (2, 2)], "each segment, the look, the end"
    name = parse_segment_name(older.name)
    assert name is not None and keeper._lease.take()
    assert keeper._recovery.read_set(SegmentFiles(older.parent, direct=False), name[0], [0], {}) == 0
    assert len(told_before) == 1
    assert keeper.rebuild() is not None and len(told_before) == 2, "it may be bad by now"
