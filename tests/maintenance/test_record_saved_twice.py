"""A chunk was found bad and saved again, and then the index is lost. The bad record's header page is as good as ever:
the rebuild looks at what is below it before it lets that stand in the good one's way."""

import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier.cli import main
from kvtier.index.base import Location
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance import record_check
from kvtier.maintenance.record_check import RecordVerdict, judge
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.segments import SegmentFiles, parse_segment_name
from tests.scheduler.test_slow_writers import sweeper
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, is_equal, saved_by_another
from tests.waiting import wait_until
from tests.worker.test_faults import flip_payload

BAD = 1


def saved_again_in_an_older_set(root: Path) -> list[torch.Tensor]:
    """What is good lies in the set of an engine that began before the one whose record is bad. Its blocks."""
    older = Engine(root)
    older.wait_for_set()
    newer = Engine(root)
    newer.save(TOKENS, BLOCKS)
    (bad,) = root.glob("v2/*/*.kvseg")
    flip_payload(bad, BAD)
    assert older.load(TOKENS, TARGET)[1][0].failed_blocks
    wait_until(lambda: older.load(TOKENS, TARGET)[0] == BAD, "what is bad is not offered again")
    older.save(TOKENS, BLOCKS)
    (good,) = set(root.glob("v2/*/*.kvseg")) - {bad}
    assert good.name < bad.name, "an older set"
    expected = older.blocks(BLOCKS)
    newer.close()
    older.close()
    return expected


def saved_again_in_a_newer_set(root: Path) -> list[torch.Tensor]:
    saved_by_another(root, TOKENS, BLOCKS)
    (path,) = root.glob("v2/*/*.kvseg")
    flip_payload(path, BAD)
    writer = Engine(root)
    assert writer.load(TOKENS, TARGET)[1][0].failed_blocks
    wait_until(lambda: writer.load(TOKENS, TARGET)[0] == BAD, "what is bad is not offered again")
    writer.save(TOKENS, BLOCKS)
    expected = writer.blocks(BLOCKS)
    writer.close()
    return expected


@pytest.mark.parametrize("save", [saved_again_in_a_newer_set, saved_again_in_an_older_set])
def test_the_good_one_comes_back(tmp_path: Path, save: Callable[[Path], list[torch.Tensor]]) -> None:
    expected = save(tmp_path)
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = Engine(tmp_path)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 5)
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 5 and answer.failed_blocks == frozenset()
    assert is_equal(reader.blocks(TARGET), expected)


def test_of_two_good_ones_the_first_stays(tmp_path: Path) -> None:
    """Nothing is taken out for being there twice."""
    saved_again_in_an_older_set(tmp_path)
    bad = max(tmp_path.glob("v2/*/*.kvseg"))
    flip_payload(bad, BAD)  # back to what it was
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = Engine(tmp_path)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 5)
    index = reader.store._keeper._index
    held = {info.set_id: len(index.members(info.set_id)) for info in index.sets() if not info.is_open}
    newer = parse_segment_name(bad.name)
    assert newer is not None and held[newer[0]] == 5 and sum(held.values()) == 5
    before = list(index.entries())
    rebuilt = sweeper(reader).rebuild()
    assert rebuilt is not None and rebuilt.records == 0 and list(index.entries()) == before


def test_a_rebuild_says_how_many_records_it_took_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_again_in_an_older_set(tmp_path)
    shutil.rmtree(tmp_path / "v2" / "index")
    for bad_records in (1, 0):
        assert main(["index", "rebuild", "--json", str(tmp_path)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["gone_records"], found["bad_records"]) == (0, bad_records)


@pytest.mark.parametrize("is_other_good", [True, False])
def test_where_reads_may_be_stale_a_bad_record_goes_only_if_a_good_one_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_other_good: bool
) -> None:
    saved_again_in_an_older_set(tmp_path)
    if not is_other_good:
        flip_payload(min(tmp_path.glob("v2/*/*.kvseg")), 0)
    keeper = Sweeper(MemoryIndex(), tmp_path / "v2", "me")
    monkeypatch.setattr(keeper._recovery, "_may_be_away", True)
    done = keeper.rebuild()
    assert done is not None and done.bad_records == is_other_good


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SegmentFiles, Path, bytes, Location]:
    """A segment, and the key and place of its second record."""
    writer = Engine(tmp_path)
    writer.save(TOKENS, BLOCKS)
    index = writer.store._keeper._index
    members = [member for info in index.sets() for member in index.members(info.set_id)]
    ((key, location),) = [(key, location) for key, location in members if location.slot == BAD]
    writer.close()
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    return SegmentFiles(path.parent, direct=False), path, key, location


@pytest.mark.parametrize("piece_bytes", [4 << 20, 12288], ids=["at once", "by pieces"])
def test_a_record_is_compared_with_its_sums(
    saved: tuple[SegmentFiles, Path, bytes, Location], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path, key, location = saved
    monkeypatch.setattr(record_check, "PIECE_BYTES", piece_bytes)
    assert judge(files, key, location) is RecordVerdict.AS_SUMMED
    assert judge(files, bytes(16), location) is not RecordVerdict.AS_SUMMED
    assert judge(files, key, location._replace(slot=0)) is not RecordVerdict.AS_SUMMED
    assert judge(files, key, location._replace(slot=1 << 30)) is not RecordVerdict.AS_SUMMED
    assert judge(files, key, location._replace(slab_bytes=2 * location.slab_bytes)) is not RecordVerdict.AS_SUMMED
    assert judge(files, key, location._replace(set_id=1)) is not RecordVerdict.AS_SUMMED, "there is no such segment"
    flip_payload(path, BAD)
    assert judge(files, key, location) is not RecordVerdict.AS_SUMMED
    flip_payload(path, BAD)
    assert judge(files, key, location) is RecordVerdict.AS_SUMMED
    with path.open("r+b") as file:
        file.truncate(4096 + 4096)
    assert judge(files, key, location) is not RecordVerdict.AS_SUMMED
    path.rename(path.with_name("elsewhere"))
    files.close()
    shutil.move(path.parent, path.parent.with_name("away"))
    assert judge(files, key, location) is RecordVerdict.UNKNOWN, "of a mount that is away nothing is known"


def test_a_read_that_gives_less_goes_on(
    saved: tuple[SegmentFiles, Path, bytes, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good record was taken out for it."""
    files, _, key, location = saved
    plain, sizes = os.preadv, []

    def short(fd: int, buffers: list[mmap.mmap] | list[memoryview], offset: int) -> int:
        (buffer,) = buffers
        if isinstance(buffer, mmap.mmap):  # of a header page
            return plain(fd, buffers, offset)
        sizes.append(len(buffer))
        return plain(fd, [buffer[:4096]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", short)
        assert judge(files, key, location) is RecordVerdict.AS_SUMMED
    assert max(sizes) > 4096
    files.close()
