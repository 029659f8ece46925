"""Opening a root: what it makes, and every fault that must stop start-up with key, value and fix."""

import errno
import json
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.admin.opened import open_for_admin
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.storage import root as root_module
from kvtier.storage import root_owner
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.root import Root, check_space, find_root, open_root, unwritable, with_default_capacity
from kvtier.storage.root_owner import Node, Owner, read_owner
from tests.storage.users import as_user

Mount = Callable[[Path, str], None]
SMALL = {"segment_bytes": "64KiB", "capacity_bytes": "1MiB"}


def settings_for(root: Path, **more: Any) -> Settings:
    return Settings.load({"root": str(root), **SMALL, **more})


def refusal(settings: Settings) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_root(settings)
    assert "\n" not in str(caught.value) and caught.value.fix
    return caught.value


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- what it makes ---


def test_creates_private_folders_and_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = open_root(settings_for(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert root == Root(tmp_path / "a" / "b", tmp_path / "a" / "b" / "v2", root.index_path)
    assert mode(root.path) == mode(root.folder) == 0o700
    assert mode(root.folder / "owner.json") == 0o600
    assert [path.name for path in root.folder.iterdir()] == ["owner.json"]  # the write test left nothing


def test_index_lies_on_a_local_disk_when_the_root_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_owner, "file_system_of", lambda path: FileSystem("nfs4", True, "/"))
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path)
    index_path = open_root(settings_for(tmp_path / "kv")).index_path
    assert index_path is not None and index_path.parent == tmp_path / f"kvtier-{os.getuid()}" / "index"
    os.symlink(tmp_path / "kv", tmp_path / "link")  # another name of the same root has the same index
    assert open_root(settings_for(tmp_path / "link")).index_path == index_path
    assert open_root(settings_for(tmp_path / "kv2")).index_path != index_path
    assert mode(tmp_path / f"kvtier-{os.getuid()}") == 0o700


def test_folder_for_local_state_that_another_user_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path)
    (tmp_path / "theirs").mkdir()
    os.symlink(tmp_path / "theirs", tmp_path / f"kvtier-{os.getuid()}")
    with pytest.raises(ConfigError, match="index.path = .*another user's"):
        root_owner.private_folder()


def test_index_in_memory_has_no_path(tmp_path: Path) -> None:
    assert open_root(settings_for(tmp_path, index={"kind": "memory"})).index_path is None
    assert open_root(settings_for(tmp_path)).index_path == tmp_path / "v2" / "index"  # an embedded one may follow
    assert find_root(tmp_path).index_path == tmp_path / "v2" / "index"


# --- the place is wrong ---


@pytest.mark.parametrize(
    ("file", "root", "named"),
    [("kv", "kv", "kv"), ("kv", "kv/deeper/still", "kv"), ("v2", "", "v2")],
)
def test_a_file_in_place_of_a_folder(tmp_path: Path, file: str, root: str, named: str) -> None:
    (tmp_path / file).write_text("")
    error = refusal(settings_for(tmp_path / root))
    assert error.key == "root" and error.fix.startswith(f"{tmp_path / named} is a file")


def test_not_writable_for_this_user() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which others cannot even look into
        os.chmod(folder, 0o555)
        told = as_user(lambda: open_root(settings_for(Path(folder))))
        assert f"root = '{folder}': not writable: Permission denied" in told and "choose another root" in told
        told = as_user(lambda: open_root(settings_for(Path(folder) / "deeper")))
        assert "not writable: Permission denied" in told
        os.chmod(folder, 0o755)


def test_a_file_system_that_is_not_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmounted Lustre is an empty folder: the tier would fill the machine's own disk, and nobody would notice."""
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    settings = settings_for(tmp_path / "mnt/kv", require_mount=True)
    error = refusal(settings)
    assert error.key == "root" and f"nothing is mounted there: {tmp_path} is on" in error.fix
    assert "require_mount to false" in error.fix and not list(tmp_path.iterdir())
    monkeypatch.setattr(root_module, "MACHINE_ROOT", Path("/proc"))  # of another device
    monkeypatch.setattr(root_module, "file_system_of", lambda path: FileSystem("ext4", False, "/"))  # a subvolume of it
    assert "nothing is mounted there" in refusal(settings).fix
    monkeypatch.setattr(root_module, "file_system_of", lambda path: FileSystem("lustre", True, str(tmp_path)))
    assert open_root(settings).path == tmp_path / "mnt/kv"


def test_no_mount_is_required_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    open_root(settings_for(tmp_path))


def test_a_mount_of_its_own(tmp_path: Path, mount_tmpfs: Mount) -> None:
    (tmp_path / "mnt").mkdir()
    mount_tmpfs(tmp_path / "mnt", "size=4m")
    open_root(settings_for(tmp_path / "mnt/kv", require_mount=True))


def test_a_file_system_without_files() -> None:
    """It was called full."""
    for path in ("/proc", "/proc/kv/a"):
        with pytest.raises(ConfigError, match=rf"root = '{path}': no files can be made there \(proc has no room"):
            check_space(Path(path), 4096)


def test_servers_that_are_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MooseFS answers statfs with zeros then. The advice was to choose another root."""
    monkeypatch.setattr(root_module, "file_system_of", lambda path: FileSystem("fuse.mfs", True, "/mnt/kv"))
    zeros = os.statvfs_result([4096, 4096, *[0] * 8])
    monkeypatch.setattr(os, "statvfs", lambda path: zeros)
    with pytest.raises(ConfigError, match=r"fuse.mfs mounted at /mnt/kv\) says that it has no space.*start them"):
        check_space(tmp_path, 4096)


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EINVAL, "fsync is refused there .*Invalid argument.; choose"), (errno.EIO, "does not answer: .*{root}/v2")],
)
def test_fsync_that_fails(number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message called the root "not writable: Invalid argument (None)"."""

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    error = refusal(settings_for(tmp_path))
    assert error.value == str(tmp_path) and re.search(said.format(root=tmp_path), error.fix), error.fix
    assert not list((tmp_path / "v2").iterdir())


def test_disk_that_is_read_only(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=4m")
    open_root(settings_for(tmp_path / "kv"))
    subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
    for root in (tmp_path / "kv", tmp_path / "other"):
        error = refusal(settings_for(root))
        assert error.key == "root" and error.value == str(root)
        assert "not writable: Read-only file system" in error.fix and "choose another root" in error.fix
        assert ".write-test" not in error.fix
    assert "mount it for writing" in unwritable(tmp_path / "kv", tmp_path / "kv").fix


def test_disk_that_is_too_small_for_a_segment(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=1m")
    error = refusal(settings_for(tmp_path, segment_bytes="2MiB", capacity_bytes="8MiB"))
    assert error.key == "root" and error.value == str(tmp_path)
    assert "2MiB are needed" in error.fix and "are free" in error.fix and "lower segment_bytes" in error.fix


def test_a_small_capacity_needs_a_small_disk(tmp_path: Path, mount_tmpfs: Mount) -> None:
    """kvtier asked for 1 GiB of free space, although segment_bytes was not set."""
    mount_tmpfs(tmp_path, "size=1m")
    open_root(Settings.load({"root": str(tmp_path), "capacity_bytes": "8MiB"}))
    error = refusal(Settings.load({"root": str(tmp_path), "capacity_bytes": "32MiB"}))
    assert "2MiB are needed" in error.fix


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_disk_that_is_full(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=1m")
    fill(tmp_path / "somebody elses.bin")
    for root in (tmp_path, tmp_path / "a" / "b"):
        error = refusal(settings_for(root))
        assert error.key == "root" and "its disk is full" in error.fix
        assert "64KiB are needed" in error.fix
    with pytest.raises(ConfigError, match="root = .*its disk is full"):  # `kvtier check` called 0 bytes fit to start
        with_default_capacity(Settings.load({"root": str(tmp_path)}))


def test_commands_that_evict_open_a_root_on_a_full_disk(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=24m")
    settings = settings_for(tmp_path)
    root = open_root(settings)
    open_for_admin(settings).close()
    fill(tmp_path / "somebody elses.bin")
    assert "its disk is full" in refusal(settings).fix
    with closing(open_for_admin(settings)) as opened:
        assert opened.root == root and not opened.index.sets()


def test_commands_that_evict_open_a_root_on_a_full_disk_after_a_reboot(
    tmp_path: Path, mount_tmpfs: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount_tmpfs(tmp_path, "size=24m")
    settings = settings_for(tmp_path)
    open_for_admin(settings).close()
    fill(tmp_path / "somebody elses.bin")
    boot_id = tmp_path.parent / "boot-id"
    boot_id.write_text("a later boot")
    monkeypatch.setattr(root_owner, "BOOT_ID_FILE", boot_id)
    with closing(open_for_admin(settings)) as opened:
        assert not opened.index.sets()


def test_disk_without_a_free_inode(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=64m,nr_inodes=3")
    for name in ("a", "b"):
        (tmp_path / name).touch()
    error = refusal(settings_for(tmp_path))
    assert "no free inodes" in error.fix and "disk is full" not in error.fix and "64MiB are free" in error.fix
    with pytest.raises(ConfigError, match="no free inodes"):
        check_space(tmp_path, 4096)


def test_disk_that_the_tier_itself_has_filled(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=1m")
    root = open_root(settings_for(tmp_path))
    (root.folder / ("0" * 32)).mkdir()
    fill(root.folder / ("0" * 32) / "0000000000000001-0000-00.kvseg")
    assert open_root(settings_for(tmp_path)) == root
    with pytest.raises(ConfigError, match="its disk is full"):
        check_space(tmp_path, 8 << 20)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_existing_folder_in_a_parent_that_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """An NFS export of the administrator holds a folder `v2` of this user: mkdir fails for lack of permission, not
    because the folder exists."""
    (tmp_path / "v2").mkdir()
    mkdir = os.mkdir

    def of_nfs(path: str | Path, *rest: Any, **options: Any) -> None:
        if Path(path).parent == tmp_path:
            raise OSError(error, os.strerror(error), str(path))
        mkdir(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", of_nfs)
    assert open_root(settings_for(tmp_path)).folder == tmp_path / "v2"
    (tmp_path / "v2").rename(tmp_path / "v2.bak")
    assert os.strerror(error) in refusal(settings_for(tmp_path)).fix


def test_root_of_a_newer_format(tmp_path: Path) -> None:
    open_root(settings_for(tmp_path))
    (tmp_path / "v12").mkdir()
    for look in (lambda: open_root(settings_for(tmp_path)), lambda: find_root(tmp_path)):
        with pytest.raises(ConfigError, match=r"root = .*v12, written by a newer kvtier .*upgrade kvtier"):
            look()


def test_other_entries_are_nobodys_business(tmp_path: Path) -> None:
    for name in ("v0", "vault", "v2.bak", "lost+found"):
        (tmp_path / name).mkdir()
    open_root(settings_for(tmp_path))


# --- another owner ---


def test_root_of_another_node(tmp_path: Path) -> None:
    root = open_root(settings_for(tmp_path))
    other = Owner(Node("f00d", "gpu-07"), root.index_path)
    (root.folder / "owner.json").write_bytes(other.to_json(root.folder))
    error = refusal(settings_for(tmp_path))
    assert error.key == "root" and error.value == str(tmp_path)
    assert "gpu-07 (f00d)" in error.fix and str(root_owner.this_node()) in error.fix
    assert str(root.folder / "owner.json") in error.fix


def test_root_whose_index_lies_elsewhere(tmp_path: Path) -> None:
    open_root(settings_for(tmp_path))
    error = refusal(settings_for(tmp_path, index={"path": str(tmp_path / "second")}))
    assert error.key == "index.path" and str(tmp_path / "v2" / "index") in error.fix


@pytest.mark.parametrize("content", ["{", "[]", '{"node": "x"}', '{"node": {"machine": "1"}, "index_path": null}'])
def test_damaged_owner_file(tmp_path: Path, content: str) -> None:
    path = open_root(settings_for(tmp_path)).folder / "owner.json"
    path.write_text(content)
    error = refusal(settings_for(tmp_path))
    assert error.value == str(path) and "remove it" in error.fix


def test_owner_file_is_what_the_docstring_says(tmp_path: Path) -> None:
    root = open_root(settings_for(tmp_path))
    node = root_owner.this_node()
    assert json.loads((root.folder / "owner.json").read_bytes()) == {
        "node": {"machine": node.machine, "host": node.host, "boot": node.boot},
        "index_path": "index",
    }
    assert root.index_path == root.folder / "index"
    assert read_owner(root.folder) == Owner(node, root.index_path)


def test_node_without_a_machine_id_makes_one_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_owner, "MACHINE_ID_FILE", tmp_path / "absent")
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path)
    node = root_owner.this_node()
    assert len(node.machine) == 32 and root_owner.this_node() == node


def test_no_id_is_made_up_where_the_machines_own_cannot_be_opened_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unopened(type(tmp_path)):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))

    monkeypatch.setattr(root_owner, "MACHINE_ID_FILE", Unopened("/etc/machine-id"))
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path / "state")
    error = refusal(settings_for(tmp_path / "root"))
    assert error.key == "root" and "ulimit -n" in error.fix
    assert not (tmp_path / "state").exists() and not list((tmp_path / "root").rglob("owner.json"))
    assert root_owner.host_key()


POD, HOST = Node("5d1c", "pod-7f9c", "boot-1"), Node("5d1c", "vm", "boot-1")


def claimed(folder: Path, node: Node, index_path: Path | None = None) -> Node:
    """The node that owner.json names after `node` claimed the folder. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    root_owner.claim(folder, Owner(node, index_path or folder / "index"))
    found = read_owner(folder)
    assert found is not None and found.node is not None
    return found.node


def test_a_pod_with_a_new_name_is_the_same_node(tmp_path: Path) -> None:
    assert claimed(tmp_path, HOST) == HOST
    assert claimed(tmp_path, POD) == HOST, "and two that run at a time do not write it again and again"
    assert claimed(tmp_path, Node("made up in a container", "pod-2", "boot-1")) == HOST, "the boot is the same"


def test_a_pod_with_a_new_name_after_a_restart_of_its_host_is_the_same_node(tmp_path: Path) -> None:
    claimed(tmp_path, HOST)
    after = Node("5d1c", "pod-8", "boot-2")
    assert claimed(tmp_path, after) == after, "or what has another machine id would not be known from now on"
    assert claimed(tmp_path, Node("made up in a container", "pod-9", "boot-2")) == after
    for other in (Node("f00d", "vm", "boot-3"), Node("f00d", "vm")):
        with pytest.raises(ConfigError, match="it belongs to node pod-8 .*another machine id and boot"):
            claimed(tmp_path, other)


def test_a_root_of_a_release_before_is_still_this_nodes(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.write_text('{"index_path":"index","node":{"host":"vm","machine":"5d1c"}}')
    assert read_owner(tmp_path) == Owner(Node("5d1c", "vm"), tmp_path / "index")
    assert claimed(tmp_path, POD) == POD


def test_an_index_outside_of_the_root_must_be_there_for_a_pod_with_a_new_name(tmp_path: Path) -> None:
    """On a network file system: hosts, and containers, of one image may have the machine id in common."""
    folder, index = tmp_path / "v2", tmp_path / "var" / "index"
    claimed(folder, HOST, index)
    assert claimed(folder, HOST, index) == HOST, "it may have been removed"
    with pytest.raises(ConfigError, match="or without that index"):
        claimed(folder, POD, index)
    index.mkdir(parents=True)
    assert claimed(folder, POD, index) == HOST


def test_an_index_outside_of_the_root_is_told_from_one_that_another_host_has_there(tmp_path: Path) -> None:
    """A host of the same image that once had the root took it from the one that has it now, which runs."""
    folder, index = tmp_path / "v2", tmp_path / "var" / "index"
    LmdbIndex(str(index), 1 << 20, boot_id="boot-0").close()
    claimed(folder, HOST, index)
    other = Node(HOST.machine, "pod-2", "boot-2")
    with pytest.raises(ConfigError, match="or without that index"):
        claimed(folder, other, index)
    LmdbIndex(str(index), 1 << 20, boot_id="boot-1").close()
    assert claimed(folder, other, index) == other, "its host was started again"


def test_a_boot_that_cannot_be_noted_does_not_make_the_node_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, commands open a root without noting the boot. Then an index outside of the root would name the
    new boot and owner.json the old one, and a pod with a new name would be recognised by neither."""

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    folder, index, after = tmp_path / "v2", tmp_path / "var" / "index", replace(HOST, boot="boot-2")
    LmdbIndex(str(index), 1 << 20, boot_id=HOST.boot).close()
    claimed(folder, HOST, index)
    with monkeypatch.context() as patch:
        patch.setattr(root_owner, "replace_small", refuse)
        assert claimed(folder, after, index) == HOST, "it has the name that owner.json knows"
        with pytest.raises(OSError, match="No space left"):
            claimed(folder, replace(after, host="pod-2"), index)
    assert claimed(folder, replace(after, host="pod-2"), index).boot == "boot-2"


# --- looking at one ---


def test_find_root_writes_nothing(tmp_path: Path) -> None:
    root = open_root(settings_for(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert find_root(tmp_path) == root
    assert sorted(tmp_path.rglob("*")) == before


def test_find_root_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are 0700 by design; it said to make them readable."""

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "v2")

    monkeypatch.setattr(root_module, "check_versions", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="cannot be read: .*; run this as the engines' user") as refused:
        find_root(tmp_path)
    assert "readable" not in str(refused.value)
    for place in (tmp_path, tmp_path.parent):
        fix = unwritable(tmp_path, place).fix
        assert ("run this as the engines' user" in fix) == (place == tmp_path) != ("make it writable" in fix)


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_find_root_where_there_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no such folder|not a root of kvtier"):
        find_root(tmp_path / name)
    assert not (tmp_path / "absent").exists()
