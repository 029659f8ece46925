"""A root that is gone while engines use it: made anew as at a start, but never in the place of its file system."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvtier.config.settings import Settings
from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.plan import SaveOutcome
from kvtier.storage import root as root_module
from kvtier.storage.root import Root, is_in_place, open_again, open_root
from kvtier.storage.root_owner import OWNER_FILE
from tests.support.rig import Engine, settings
from tests.waiting import wait_until

Mount = Callable[[Path, str], None]
TOKENS, BLOCKS, TARGET = list(range(64 * 3)), list(range(12)), list(range(100, 112))


def remove_at_once(root: Path) -> None:
    """An engine may make it anew while it is being removed file by file."""
    gone = root.with_name("gone")
    root.rename(gone)
    shutil.rmtree(gone)


def test_one_that_was_removed_is_made_anew_by_an_engine(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    engine.save(TOKENS, BLOCKS)
    before = (tmp_path / "kv/v2" / OWNER_FILE).read_bytes()
    remove_at_once(tmp_path / "kv")
    assert engine.load(TOKENS, TARGET)[0] == 0
    wait_until(lambda: next(tmp_path.glob("kv/v2/*/namespace.json"), None) is not None)
    assert (tmp_path / "kv/v2" / OWNER_FILE).read_bytes() == before
    assert engine.load(TOKENS, TARGET)[0] == 0, "the index answers, and knows nothing"
    wait_until(lambda: bool(engine.save(TOKENS, BLOCKS)))
    n_chunks, (answer,) = engine.load(TOKENS, TARGET)
    assert (n_chunks, answer.failed_blocks) == (3, frozenset())


def test_one_whose_index_lies_elsewhere_is_made_anew_too(tmp_path: Path) -> None:
    """Nothing was: the index went on, and room for a set was asked of a folder that was not there."""
    engine = Engine(tmp_path / "kv", changes={"index": {"path": str(tmp_path / "index")}})
    engine.save(TOKENS, BLOCKS)
    remove_at_once(tmp_path / "kv")
    others = count(1000, 64)

    def is_saved() -> bool:
        first = next(others)
        return [done.outcome for done in engine.save(range(first, first + 64), BLOCKS[:4])] == [SaveOutcome.SAVED]

    wait_until(is_saved)
    assert (tmp_path / "kv/v2" / OWNER_FILE).exists()


def test_upkeep_leaves_a_root_of_others_alone(tmp_path: Path) -> None:
    """By what is in it, the sets of all engines would be booked as empty, and others' segments taken in."""
    engine = Engine(tmp_path / "kv", changes={"index": {"path": str(tmp_path / "index")}})
    engine.save(TOKENS, BLOCKS)
    index, upkeep = engine.store._keeper._index, engine.store._keeper._sweeper
    engine.store._keeper._ticker.close(10)  # type: ignore[union-attr]
    before = index.sets()
    v2 = tmp_path / "kv/v2"
    theirs = json.loads((v2 / OWNER_FILE).read_text())
    v2.rename(tmp_path / "away")
    v2.mkdir()
    (v2 / OWNER_FILE).write_text(json.dumps(theirs | {"node": {"host": "other", "machine": "other"}}))
    upkeep.clock = lambda: time.time() + 1e6  # the engine is long gone, by this
    for duty in (upkeep.sweep, upkeep.rebuild, upkeep.free_space, lambda: upkeep.close_set(before[0].set_id)):
        with pytest.raises(TierUnavailable, match="it belongs to node other"):
            duty()
    assert index.sets() == before


@pytest.mark.parametrize("duty", ["sweep", "rebuild"])
def test_a_root_that_goes_while_upkeep_lists_it_takes_nothing_with_it(tmp_path: Path, duty: str) -> None:
    engine = Engine(tmp_path / "kv", changes={"index": {"path": str(tmp_path / "index")}})
    engine.save(TOKENS, BLOCKS)
    index, upkeep = engine.store._keeper._index, engine.store._keeper._sweeper
    engine.store._keeper._ticker.close(10)  # type: ignore[union-attr]
    before, members = index.sets(), [index.members(info.set_id) for info in index.sets()]
    v2, looks = tmp_path / "kv/v2", iter(range(9))

    def look_at_root() -> None:
        if next(looks):
            raise TierUnavailable("another one lies there now")
        v2.rename(tmp_path / "away")
        v2.mkdir()

    upkeep.look_at_root = look_at_root
    upkeep.clock = lambda: time.time() + 1e6  # the engine is long gone, by this
    with pytest.raises(TierUnavailable):
        getattr(upkeep, duty)()
    assert index.sets() == before and [index.members(info.set_id) for info in before] == members


def test_a_root_of_several_nodes_is_known_by_its_id(tmp_path: Path) -> None:
    """Folders on one disk, and file systems that were made alike, have the same numbers."""
    folder = tmp_path / "kv/v2"
    folder.mkdir(parents=True)
    (folder / OWNER_FILE).write_text(json.dumps({"root_id": "ours"}))
    root = Root(folder.parent, folder, None, "ours", folder.stat().st_dev, folder.stat().st_ino)
    assert is_in_place(root)
    (folder / OWNER_FILE).write_text(json.dumps({"root_id": "theirs"}))
    assert not is_in_place(root)
    (folder / OWNER_FILE).unlink()
    assert not is_in_place(root), "nobody has made it a root again"
    alone = replace(root, root_id="")
    assert is_in_place(alone) and is_in_place(replace(alone, device=1)) and is_in_place(replace(alone, inode=1))
    assert not is_in_place(replace(alone, device=1, inode=1))
    shutil.rmtree(folder)
    assert not is_in_place(alone)


@pytest.mark.parametrize("below", ["nothing", "a root of its own"])
def test_what_lies_below_a_mount_point_is_not_the_root(tmp_path: Path, mount_tmpfs: Mount, below: str) -> None:
    """The file system goes while an engine runs, and comes back. Meanwhile all is a miss, and nothing is written."""
    mount, store = tmp_path / "mnt", tmp_path / "store"
    for folder in (mount, store):
        folder.mkdir()
    if below == "a root of its own":  # of a day when nobody required a mount
        Engine(mount / "kv").close()
    seen = sorted(mount.rglob("*"))
    mount_tmpfs(store, "size=64m")
    subprocess.run(["mount", "--bind", str(store), str(mount)], check=True)
    engine = Engine(mount / "kv", changes={"require_mount": below == "a root of its own"})
    engine.save(TOKENS, BLOCKS)
    subprocess.run(["umount", "-l", str(mount)], check=True)
    try:
        for _ in range(3):
            n_chunks, answers = engine.load(TOKENS, TARGET)
            assert n_chunks == 0 or answers[0].failed_blocks == frozenset(TARGET)
        beats = engine.store.metrics.total().get("index_errors", 0.0)
        wait_until(lambda: engine.store.metrics.total().get("index_errors", 0.0) > beats + 1)
        assert sorted(mount.rglob("*")) == seen, "something was made in the place of the file system"
    finally:
        subprocess.run(["mount", "--bind", str(store), str(mount)], check=True)
    wait_until(lambda: [done.failed_blocks for done in engine.load(TOKENS, TARGET)[1]] == [frozenset()])
    engine.close()
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_what_is_missing_below_a_mount_point_is_not_forgotten(tmp_path: Path, mount_tmpfs: Mount) -> None:
    """A node that lost the file system for a while takes nothing out of an index that others share."""
    mount, store = make(tmp_path / "mnt"), make(tmp_path / "store")
    Engine(mount / "kv").close()  # a root with this very namespace, of a day when nothing was mounted
    mount_tmpfs(store, "size=64m")
    subprocess.run(["mount", "--bind", str(store), str(mount)], check=True)
    changes = {"index": {"path": str(tmp_path / "index")}, "host": {"admit": "never"}, "segment_bytes": 1 << 20}
    engine = Engine(mount / "kv", changes=changes)
    engine.save(TOKENS, BLOCKS)
    subprocess.run(["umount", "-l", str(mount)], check=True)
    seen = sorted(mount.rglob("*"))
    try:
        engine.transfers[0]._worker.files.close()  # type: ignore[attr-defined]
        for _ in range(3):
            n_chunks, (answer,) = engine.load(TOKENS, TARGET)
            assert (n_chunks, answer.failed_blocks) == (3, frozenset(TARGET))
        (answer,) = engine.save(range(10_000, 10_064), BLOCKS[:4])
        assert answer.outcome is SaveOutcome.FAILED, "the first of a new set"
        assert sorted(mount.rglob("*")) == seen, "a segment was made in the place of the file system"
    finally:
        subprocess.run(["mount", "--bind", str(store), str(mount)], check=True)
    n_chunks, (answer,) = engine.load(TOKENS, TARGET)
    assert (n_chunks, answer.failed_blocks) == (3, frozenset())
    engine.close()
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_required_mount_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder below the mount point may be there: it is looked at all the same."""
    wanted = settings(tmp_path / "kv")
    root = open_root(wanted)
    open_again(wanted, root)
    required = wanted.model_copy(update={"require_mount": True})
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    with pytest.raises(TierUnavailable, match="nothing is mounted there"):
        open_again(required, root)


def shared_and_removed(folder: Path) -> tuple[Settings, Root]:
    """Make and remove a root of all nodes. Return its settings, and the Root from before the removal."""
    shared = settings(folder / "kv", index={"kind": "redis", "url": "redis://127.0.0.1:1/0"})
    root = open_root(shared)
    remove_at_once(folder / "kv")
    return shared, root


def test_a_root_of_all_nodes_keeps_its_id(tmp_path: Path) -> None:
    """The index knows it by that, and has its entries still: each is found to be gone when it is asked for."""
    shared, root = shared_and_removed(tmp_path)
    open_again(shared, root)
    assert open_root(shared) == root and root.root_id


def test_a_root_that_another_has_taken_meanwhile(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "kv")
    root = open_root(wanted)
    owner = tmp_path / "kv/v2" / OWNER_FILE
    theirs = json.loads(owner.read_text())
    remove_at_once(tmp_path / "kv")
    owner.parent.mkdir(parents=True)
    owner.write_text(json.dumps(theirs | {"node": {"host": "other", "machine": "other"}}))
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="it belongs to node other"):
            open_again(wanted, root)
    remove_at_once(tmp_path / "kv")
    elsewhere = wanted.model_copy(update={"index": wanted.index.model_copy(update={"path": tmp_path / "index"})})
    for _ in range(2):  # the first one made it
        with pytest.raises(TierUnavailable, match="is another one by now"):
            open_again(elsewhere, root)


def test_a_root_of_all_nodes_that_a_start_has_made_anew(tmp_path: Path) -> None:
    """It got another id, so another index: two must not keep one root in order, each by what it knows of it."""
    shared, root = shared_and_removed(tmp_path)
    assert open_root(shared) != root
    with pytest.raises(TierUnavailable, match="is another one by now; start this engine anew"):
        open_again(shared, root)


def test_an_owner_that_alone_was_removed_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another node would take the root, beside this one. It says what it said, whatever this node is called now."""
    wanted = settings(tmp_path / "kv")
    root = open_root(wanted)
    owner = tmp_path / "kv/v2" / OWNER_FILE
    before = owner.read_bytes()
    owner.unlink()
    monkeypatch.setattr("socket.gethostname", lambda: "as-dhcp-has-it")
    open_again(wanted, root)
    assert owner.read_bytes() == before


def test_a_root_below_the_one_that_was_opened_is_not_it(tmp_path: Path, mount_tmpfs: Mount) -> None:
    """Where no mount is required, an engine that started too early has left one there."""
    wanted = settings(tmp_path / "mnt/kv")
    open_root(wanted)
    mount_tmpfs(tmp_path / "mnt", "size=64m")
    root = open_root(wanted)
    open_again(wanted, root)
    open_again(wanted, replace(root, device=root.device + 1))  # mounted once more, as another device
    subprocess.run(["mount", "--move", str(tmp_path / "mnt"), str(make(tmp_path / "away"))], check=True)
    try:
        with pytest.raises(TierUnavailable, match="not on the file system that it was on; mount that again"):
            open_again(wanted, root)
    finally:
        subprocess.run(["mount", "--move", str(tmp_path / "away"), str(tmp_path / "mnt")], check=True)
    open_again(wanted, root)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_who_only_looks_makes_nothing_above_an_index(tmp_path: Path) -> None:
    index = LmdbIndex(str(tmp_path / "kv/v2/index"), 1 << 20)
    remove_at_once(tmp_path / "kv")
    with pytest.raises(IndexUnavailable):
        index.resolve([bytes(16)])
    assert not (tmp_path / "kv").exists()
    (tmp_path / "kv/v2").mkdir(parents=True)
    assert index.resolve([bytes(16)]) == []
    index.close()
