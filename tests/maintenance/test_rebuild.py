"""The index is a hint: lost, damaged or stale, it is made anew from the segments' header pages (I5)."""

import os
import shutil
import time
from pathlib import Path

import pytest

from kvtier import cli
from kvtier.errors import ConfigError
from kvtier.index.base import Location, NewRecord
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import stats, verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import find_root
from tests.damage import write
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, saved_by_another
from tests.waiting import wait_until


def test_a_lost_index_is_read_back_at_the_next_start(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS, tensor_size=2)
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = Engine(tmp_path)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 5)
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset()
    assert not verify(find_root(tmp_path), reader.store._keeper._index).bad
    assert {info.owner for info in reader.store._keeper._index.sets() if not info.is_open} == {""}


def test_rebuild_adds_what_is_missing_and_drops_what_no_file_has(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    other = Engine(tmp_path)
    index, keys = other.store._keeper._index, other.keys(TOKENS)
    members = {key: location for info in index.sets() for key, location in index.members(info.set_id)}
    index.retract(keys[1], members[keys[1]])
    wrong = Location(*members[keys[2]][:5], checksums=(1, 2, 3, 4))
    index.retract(keys[2], members[keys[2]])
    assert index.publish([NewRecord(keys[2], wrong, other.shape.whole)]) == 1
    done = Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert (done.segments, done.records, done.unreadable) == (1, 2, ())
    again = {key: location for info in index.sets() for key, location in index.members(info.set_id)}
    assert again == members
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    path.unlink()
    assert Sweeper(index, tmp_path / "v2", "me").rebuild().removed_sets == 1
    assert other.load(TOKENS, TARGET) == (0, [])


def test_a_damaged_record_header_is_left_out_and_said(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    write(path, 4096 + 10, b"\xff\xff")
    engine.close()
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = Engine(tmp_path)
    index = reader.store._keeper._index
    wait_until(lambda: not index.was_reset)
    assert reader.load(TOKENS, TARGET) == (0, []), "the first chunk is gone, so is the prefix"
    assert index.counts().chunks == 4


def test_one_damaged_namespace_stops_nothing_else(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    other = Engine(tmp_path, weights="other")
    other.save(TOKENS, BLOCKS)
    other.close()
    (tmp_path / "v2" / other.namespace.id.hex() / "namespace.json").write_text("{}")
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = Engine(tmp_path)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 5)
    assert {answer.outcome.value for answer in reader.save(list(range(64)), BLOCKS)} == {"saved"}


def test_a_copied_or_moved_root_takes_its_index_with_it(tmp_path: Path) -> None:
    """An absolute path in owner.json made `rebuild` of a copy empty the original's index."""
    saved_by_another(tmp_path / "a", TOKENS, BLOCKS)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "moved")
    for path in tmp_path.glob("b/v2/*/*.kvseg"):
        path.unlink()
    assert cli.main(["index", "rebuild", str(tmp_path / "b")]) == 0
    assert cli.main(["verify", str(tmp_path / "moved")]) == 0
    assert not (tmp_path / "a").exists()
    reader = Engine(tmp_path / "moved")
    assert reader.load(TOKENS, TARGET)[0] == 5


def test_one_index_for_two_roots_stops_start_up(tmp_path: Path) -> None:
    """They would take each other's segments for lost."""
    writer = Engine(tmp_path / "a")
    writer.save(TOKENS, BLOCKS)
    shared = {"index": {"path": str(tmp_path / "a" / "v2" / "index")}}
    with pytest.raises(ConfigError, match="it is the index of") as fault:
        Engine(tmp_path / "b", changes=shared)
    assert fault.value.key == "index.path"
    assert writer.load(TOKENS, TARGET)[0] == 5


def test_a_namespace_without_its_description_is_said_and_counted(tmp_path: Path) -> None:
    writer = Engine(tmp_path)
    writer.save(TOKENS, BLOCKS)
    folder = tmp_path / "v2" / writer.namespace.id.hex()
    (folder / "namespace.json").unlink()
    root, index = find_root(tmp_path), writer.store._keeper._index
    assert verify(root, index).bad[-1].segment.endswith("namespace.json")
    found = stats(root, index)
    assert found.n_bytes > 0 and len(found.unreadable) == 1
    done = Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert done.removed_sets == 0 and len(done.unreadable) == 1


@pytest.mark.parametrize("behind_s", [0.0, 7200.0])
def test_a_set_of_a_lost_index_was_last_used_when_it_was_last_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_s: float
) -> None:
    """The set counted as old as its creation, so after a reboot capacity.ttl_s removed what had been saved shortly
    before. behind_s: by how much the clock of the file system's server is behind."""
    monkeypatch.setattr(Sweeper, "_disk_s", lambda sweeper: sweeper.clock() - behind_s)
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    (path,), index = tmp_path.glob("v2/*/*.kvseg"), MemoryIndex()
    began_s = time.time()
    os.utime(path, (began_s + 3600.0 - behind_s,) * 2)
    Sweeper(index, tmp_path / "v2", "me", lambda: began_s + 7200.0).rebuild()
    (info,) = index.sets()
    assert info.created_s < began_s and info.used_s == pytest.approx(began_s + 3600.0, abs=1e-3)
