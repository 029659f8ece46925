"""Names of file systems, and what is known of each: what it promises, and what to set. `docs/filesystems.md` says how
it was found out. Which of them kvtier flushes is `kvtier.storage.filesystem`'s to say."""

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.doctor.host import Diagnosis
from kvtier.storage.filesystem import IN_MEMORY, FileSystem, Visibility

GLUSTER_OPTIONS = (
    "strict-o-direct on",
    "write-behind off",
    "io-cache off",
    "read-ahead off",
    "quick-read off",
    "stat-prefetch off",
)


class Known(NamedTuple):
    """A file system. known: what it promises. advice: what to set or to tell users, "" where nothing is to be done."""

    name: str
    known: str
    advice: str = ""


LUSTRE = Known(
    "Lustre", "coherent by its locks; fallocate reserves for direct writes; free space is the sum of its OSTs"
)
NFS = Known("NFS", "close-to-open; direct writes are synchronous; a name looked for before is seen after up to 30 s")
GLUSTER = Known(
    "GlusterFS",
    "its client writes behind and caches, direct I/O too; fallocate reserves; sizes of others are up to 1 s old",
    "keep replicas, or what is on a brick is away with it. A volume without client caches shows writes at once: "
    + "; ".join(f"`gluster volume set VOLUME performance.{option}`" for option in GLUSTER_OPTIONS)
    + "; `gluster volume set VOLUME network.remote-dio disable`",
)
CEPH = Known(
    "CephFS",
    "its clients' caches are coherent by capabilities; fallocate may reserve nothing",
    "set capacity_bytes well below what is free: a full pool shows at a write only",
)
MOOSE = Known(
    "MooseFS",
    "its client writes behind, direct I/O too; no fallocate; removed files keep their space for a day by default",
    "`mfssettrashtime -r 0 ROOT`; `mfssetgoal -r 1 ROOT` stores each file once; mount with mfserroronnospace, or a "
    "full disk is retried for minutes",
)
JUICE = Known(
    "JuiceFS",
    "its client writes behind, direct I/O too, and others read the bytes only after opening the file again; it says "
    "that 1 PiB is free",
    "set capacity_bytes to what its object store has; `juicefs config META-URL --trash-days 0`, or removed files keep "
    "their space",
)
TMPFS = Known("", "in memory: lost at a reboot, and counted as memory of the process that writes first")
LOCAL = Known("", "local to this node")
OTHER = Known("", "not known to kvtier's tables", "measure it: kvtier doctor ROOT --peer OTHER_MOUNT")

_BY_KIND = {
    "lustre": LUSTRE,
    "nfs": NFS,
    "nfs4": NFS,
    "fuse.glusterfs": GLUSTER,
    "glusterfs": GLUSTER,
    "ceph": CEPH,
    "fuse.ceph": CEPH,
    "fuse.ceph-fuse": CEPH,
    "fuse.mfs": MOOSE,
    "fuse.juicefs": JUICE,
    **dict.fromkeys(IN_MEMORY, TMPFS),
}
_BY_SOURCE = {"mfs#": MOOSE, "JuiceFS:": JUICE}  # how the source of a mount begins whose kind is "fuse" alone


def known_of(mount: FileSystem) -> Known:
    """Return what is known of a mount's file system."""
    found = _BY_KIND.get(mount.kind)
    if found is None and mount.is_network:
        found = next((known for start, known in _BY_SOURCE.items() if mount.source.startswith(start)), None)
    if found is not None:
        return found
    return LOCAL if mount.visibility is Visibility.LOCAL else OTHER


def examine_file_system(mount: FileSystem, fdatasync: str, is_shared: bool) -> Iterator[Diagnosis]:
    """Say what is known of the root's file system. fdatasync: the setting. is_shared: the index is in Redis."""
    found = known_of(mount)
    name = f"{found.name}, {mount.kind}" if found.name and found.name.lower() not in mount.kind else mount.kind
    if mount.nfs_version is not None:
        name = f"NFS {mount.nfs_version}"
    flushes = mount.is_flushed(fdatasync)
    if mount.visibility is Visibility.LOCAL:
        value = f"{name}: {found.known}; no fdatasync is needed"
    else:
        done = "calls fdatasync before it publishes" if flushes else "calls no fdatasync"
        value = f"{name}: {found.known}; kvtier {done} (io.fdatasync: {fdatasync})"
    if mount.nfs_fix is not None:
        yield Diagnosis("warn", "file system", value, mount.nfs_fix)
    elif mount.visibility is Visibility.FLUSHED and not flushes and is_shared:
        fix = "other nodes may read stale bytes of what is published, and take it for damaged: set io.fdatasync to auto"
        yield Diagnosis("warn", "file system", value, fix)
    else:
        yield Diagnosis("ok", "file system", value, found.advice)
