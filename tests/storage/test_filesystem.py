"""Which file system a path is on, from mount tables as kernels write them."""

from pathlib import Path

import pytest

from kvtier.storage.filesystem import FileSystem, Visibility, file_system_of, is_network_kind
from tests.engines.targets import targets

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:40 / /mnt/kv rw,nosuid shared:12 master:3 - lustre 10.0.0.1@o2ib:/kv rw,flock
31 30 0:41 / /mnt/kv/local rw - xfs /dev/nvme0n1 rw
32 27 0:42 / /mnt/with\040space rw - nfs4 server:/x rw
33 27 0:43 / /home/u/remote rw - fuse.sshfs u@h:/ rw
34 27 0:44 / /twice rw - xfs /dev/sda rw
35 27 0:45 / /twice rw - wekafs weka rw
36 27 0:46 /sub\134dir /back\134slash rw - ext4 /dev/sdb rw
garbage
37 27 0:47 /
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_network", "mount_point"),
    [
        ("/var/lib/kvtier/index", "ext4", False, "/"),
        ("/", "ext4", False, "/"),
        ("/mnt/kv", "lustre", True, "/mnt/kv"),
        ("/mnt/kv/v2/index", "lustre", True, "/mnt/kv"),
        ("/mnt/kv/local/index", "xfs", False, "/mnt/kv/local"),
        ("/mnt/kv-other/index", "ext4", False, "/"),
        ("/mnt/with space/index", "nfs4", True, "/mnt/with space"),
        ("/home/u/remote/x", "fuse.sshfs", True, "/home/u/remote"),
        ("/twice/x", "wekafs", True, "/twice"),
        ("/back\\slash/x", "ext4", False, "/back\\slash"),
        ("/mnt/kv/local/../x", "lustre", True, "/mnt/kv"),
    ],
)
def test_the_longest_mount_point_wins(path: str, kind: str, is_network: bool, mount_point: str) -> None:
    assert file_system_of(path, TABLE) == FileSystem(kind, is_network, mount_point)


@pytest.mark.parametrize(
    ("mounted", "is_late"),
    [
        (r"fuse mfs\04310.0.0.1:9421 rw,user_id=0", True),  # as mfsmount 3.0.117 of Debian shows
        ("fuse.mfs mfsmaster:9421 rw", True),
        ("fuse plain rw", False),
        (r"ext4 mfs\043disk rw", False),
    ],
)
def test_moosefs_is_known_to_free_space_late_by_either_name(mounted: str, is_late: bool) -> None:
    """Debian's client mounts without its kind, so kvtier evicted more and more for space that was on its way."""
    found = file_system_of("/kv/x", f"27 1 254:0 / / rw - ext4 /dev/vda rw\n38 27 0:48 / /kv rw - {mounted}\n")
    assert (found.reclaim_s > 0) == is_late


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "local").symlink_to(tmp_path / "remote")
    table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:9 / {tmp_path}/remote rw - nfs server:/ rw\n"
    assert file_system_of(tmp_path / "local" / "not" / "yet", table).kind == "nfs"
    assert file_system_of(tmp_path / "other", table).kind == "ext4"


def test_an_empty_table_tells_nothing() -> None:
    assert file_system_of("/x", "") == FileSystem("unknown", False, "/")


def test_kinds() -> None:
    network = "nfs nfs4 lustre cifs smb3 ceph gpfs beegfs fuse fuseblk fuse.juicefs 9p virtiofs afs wekafs ocfs2 gfs2"
    local = "ext4 xfs btrfs zfs tmpfs overlay f2fs ramfs bcachefs fusectl"
    assert all(map(is_network_kind, [*network.split(), "glusterfs"]))
    assert not any(map(is_network_kind, local.split()))


def test_this_machine_has_a_root() -> None:
    found = file_system_of("/proc/self/status")
    assert (found.kind, found.is_network, found.mount_point) == ("proc", False, "/proc")


def test_a_mounted_user_space_file_system_is_seen(tmp_path: Path) -> None:
    with targets(tmp_path) as made:
        found = file_system_of(made.root / "v2" / "index")
        assert found.kind.startswith("fuse.") and found.is_network
        assert found.mount_point == str(made.root)


@pytest.mark.parametrize(
    ("kinds", "visibility"),
    [
        ("ext4 xfs btrfs f2fs zfs tmpfs ramfs overlay", Visibility.LOCAL),
        ("lustre", Visibility.COHERENT),
        (
            "nfs nfs4 fuse.glusterfs fuse.mfs fuse.juicefs fuse.ceph-fuse ceph cifs 9p fuse.other unknown",
            Visibility.FLUSHED,
        ),
    ],
)
def test_what_is_not_known_to_be_coherent_is_flushed(kinds: str, visibility: Visibility) -> None:
    for kind in kinds.split():
        assert FileSystem(kind, is_network_kind(kind), "/").visibility is visibility, kind


@pytest.mark.parametrize(
    ("line", "version", "is_advised"),
    [
        ("nfs4 server:/kv rw,vers=4.2,rsize=1048576,proto=tcp", "4.2", False),
        ("nfs4 server:/kv rw,vers=4.1,rsize=1048576,proto=tcp", "4.1", True),
        ("nfs server:/kv rw,vers=3,rsize=1048576,proto=tcp", "3", True),
        ("nfs server:/kv rw", None, False),
        ("ext4 /dev/sda rw,vers=3", None, False),
    ],
)
def test_the_version_of_nfs_is_named(line: str, version: str | None, is_advised: bool) -> None:
    found = file_system_of("/kv/v1", f"27 1 0:30 / /kv rw - {line}\n")
    assert found.nfs_version == version
    assert (found.nfs_fix is not None) == is_advised
    assert not is_advised or ("vers=4.2" in found.nfs_fix and "/kv" in found.nfs_fix)  # type: ignore[operator]
