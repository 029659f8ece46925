"""Whether index and segments agree, on a root where much does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.eviction.set_removal import Remover
from kvtier.index.base import NewRecord
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance import consistency_check, scrub
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import find_root, namespace_folders
from kvtier.storage.segments import segment_name
from tests.eviction.test_capacity import BLOCKS, tiny, tokens_of
from tests.scheduler.test_slow_writers import before, once
from tests.support.rig import Engine, saved_by_another


def test_folders_are_listed_once_for_each_look_however_many_sets_are_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(tmp_path, sets=8)
    for number in range(5):
        engine.save(tokens_of(number), BLOCKS)
    engine.close()
    listed: list[Path] = []

    def list_them(folder: Path) -> list[Path]:
        listed.append(folder)
        return namespace_folders(folder)

    monkeypatch.setattr(consistency_check, "namespace_folders", list_them)
    found = consistency_check.check_consistency(find_root(tmp_path), MemoryIndex(), wait=lambda seconds: None)
    assert found.n_disagreements == found.records == 25 and found.segments > 2
    assert {row.what for row in found.disagreements} == {"no segment set of the index"}
    assert len(listed) == 2


def test_a_second_record_of_a_part_is_counted_apart_from_one_of_a_part_that_is_missing(tmp_path: Path) -> None:
    """The first writer wins of a part too, and no rebuild would add the second one (seed 10886 of the simulation's
    calm)."""
    index, places = MemoryIndex(), []
    for _ in range(2):
        engine = Engine(tmp_path, tensor_size=2)
        engine.save(tokens_of(1)[:64], BLOCKS[: engine.chunk_blocks])
        own = engine.store._keeper._index
        (info,) = [info for info in own.sets() if own.members(info.set_id)]
        places.append(sorted(own.members(info.set_id), key=lambda member: member[1].rank))
        for key, at in places[-1]:
            own.retract(key, at)
        index.create_set(replace(info, is_open=False))
        engine.close()
    key, at = places[0][0]
    assert index.publish([NewRecord(key, at, engine.shape.whole)]) == 1 and not index.resolve([key])
    found = consistency_check.check_consistency(find_root(tmp_path), index, wait=lambda seconds: None)
    assert (found.records, found.indexed, found.second, found.unnamed, found.is_clean) == (4, 1, 1, 2, True)
    missing = {segment_name(at.set_id, at.part) for _, (_, at) in places}
    assert {(row.segment, row.what) for row in found.unnamed_places} == {(name, "not in the index") for name in missing}


def test_a_record_is_no_disagreement_once_the_other_record_of_its_chunk_was_evicted(tmp_path: Path) -> None:
    index, places = MemoryIndex(), []
    for _ in range(2):  # two engines that do not see each other's records, as when both save at the same time
        engine = Engine(tmp_path)
        engine.save(tokens_of(1)[:64], BLOCKS[: engine.chunk_blocks])
        own = engine.store._keeper._index
        (info,) = [info for info in own.sets() if own.members(info.set_id)]
        places += own.members(info.set_id)
        own.remove_set(info.set_id)
        index.create_set(replace(info, is_open=False))
        engine.close()
    (key, first), (other_key, second) = places
    assert key == other_key and first.set_id != second.set_id
    assert index.publish([NewRecord(key, at, first.extent) for at in (first, second)]) == 1
    folder = find_root(tmp_path)
    found = consistency_check.check_consistency(folder, index, wait=lambda seconds: None)
    assert (found.records, found.indexed, found.second, found.unnamed) == (2, 1, 1, 0)
    Remover(index, folder.folder).remove(index.some_sets([first.set_id])[0])
    found = consistency_check.check_consistency(folder, index, wait=lambda seconds: None)
    assert (found.records, found.indexed, found.unnamed, found.n_disagreements) == (1, 0, 1, 0) and found.is_clean
    assert [row.segment for row in found.unnamed_places] == [segment_name(second.set_id, second.part)]


def checked(root: Path, index: MemoryIndex) -> consistency_check.ConsistencyReport:
    return consistency_check.check_consistency(find_root(root), index, wait=lambda seconds: None)


def test_a_record_that_a_set_s_own_list_lacks_is_a_disagreement(tmp_path: Path) -> None:
    """It would stay in its chunk's entry when the set is removed."""
    saved_by_another(tmp_path, tokens_of(1), BLOCKS)
    index = MemoryIndex()
    assert Sweeper(index, tmp_path / "v2", "me").rebuild() is not None and checked(tmp_path, index).is_clean
    (info,) = index.sets()
    del index._members[info.set_id][0, 4]
    found = checked(tmp_path, index)
    assert [row.what for row in found.disagreements] == [
        "5 of its records are in chunks' entries, but 4 in its own list"
    ]


def test_records_that_are_about_to_be_published_and_segments_without_a_header_are_no_disagreement(
    tmp_path: Path,
) -> None:
    saved_by_another(tmp_path, tokens_of(1), BLOCKS)
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    path.with_name(segment_name(99, 0)).write_bytes(bytes(1 << 20))
    index = MemoryIndex()
    assert Sweeper(index, tmp_path / "v2", "me").rebuild() is not None
    (info,) = index.sets()
    index.remove_set(info.set_id)
    index.create_set(replace(info, is_open=True, owner="living"))
    found = checked(tmp_path, index)
    assert (found.records, found.unpublished, found.unnamed, found.is_clean) == (5, 5, 0, True)
    assert found.segments == 2


def test_another_record_at_the_place_of_an_entry_is_a_disagreement(tmp_path: Path) -> None:
    saved_by_another(tmp_path, tokens_of(1), BLOCKS)
    index = MemoryIndex()
    assert Sweeper(index, tmp_path / "v2", "me").rebuild() is not None
    (info,) = index.sets()
    (key, at), *_ = index.members(info.set_id)
    index.retract(key, at)
    other = at._replace(checksums=(1,) * len(at.checksums))
    assert index.publish([NewRecord(key, other, at.extent)], into_unowned=True) == 1
    found = checked(tmp_path, index)
    assert [row.what for row in found.disagreements] == ["is not the record that the index names there"]
    assert found.indexed == 4


def test_a_bad_entry_is_reported_once(tmp_path: Path) -> None:
    """The second check of doubtful sets reported it again."""
    engine = tiny(tmp_path)
    engine.save(tokens_of(1), BLOCKS)
    engine.close()
    index = MemoryIndex()
    index.entries = lambda: iter([(b"key", b"no entry")])  # type: ignore[method-assign]
    found = consistency_check.check_consistency(find_root(tmp_path), index, wait=lambda seconds: None)
    assert sum(row.what.startswith("chunk ") for row in found.disagreements) == 1


def test_records_behind_a_link_are_missing(tmp_path: Path) -> None:
    """`verify` reads no folder that is a link."""
    engine = tiny(tmp_path)
    engine.save(tokens_of(1), BLOCKS)
    (folder,) = {path.parent for path in tmp_path.glob("v2/*/*.kvseg")}
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert scrub.verify(find_root(tmp_path), engine.store._keeper._index).bad


def test_a_segment_that_is_created_while_verify_runs_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(tmp_path)
    engine.save(tokens_of(1), BLOCKS)
    save = once(lambda: engine.save(tokens_of(2), BLOCKS))  # after the folders were listed
    monkeypatch.setattr(scrub._Verifier, "_expected", before(scrub._Verifier._expected, save))
    found = scrub.verify(find_root(tmp_path), engine.store._keeper._index)
    assert found.bad == () and found.segments < len(list(tmp_path.glob("v2/*/*.kvseg")))
