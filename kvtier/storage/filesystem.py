"""File systems: kind, mount point and properties of the one that a path is on.

The source is /proc/self/mountinfo (format: proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvtier.runtime.units import size

MOUNTINFO = "/proc/self/mountinfo"

IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose reads and writes are copies by the processor

# File systems that other machines may have mounted at the same time. FUSE is added below: its daemon is unknown, and
# nothing promises that memory mapped by two processes is the same memory.
NETWORK_KINDS = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "exfs", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs",
    "virtiofs", "vxfs", "wekafs",
})  # fmt: skip

# File systems on which several threads write one file at the same time, by aligned direct writes into allocated space.
# On all others, writes to one file exclude each other. (tmpfs, 8 threads: 2.5 GiB/s into one file, 16.6 into eight.)
SHARED_WRITE_KINDS = frozenset({"nfs", "nfs4", "xfs"})
STRIPES = 8  # files of a segment set that a rank writes at the same time, on the other file systems

FULL = (errno.ENOSPC, errno.EDQUOT)  # what a disk, a quota or a file system without free inodes answers
RESERVED_FILES = 8  # inodes left to files that are no segments: drafts, probes, locks

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Visibility(Enum):
    """Time from which other nodes can read bytes that this node wrote.

    LOCAL: no other node mounts the file system. COHERENT: at once; locks keep the clients' caches coherent. FLUSHED:
    only after the writer's fdatasync, and in part only for descriptors that are opened after it.
    """

    LOCAL = "local"
    COHERENT = "coherent"
    FLUSHED = "after fdatasync"


_VISIBILITY = {
    **dict.fromkeys((
        "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay", "ramfs",
        "reiserfs", "rootfs", "tmpfs", "ubifs", "vfat", "xfs", "zfs",
    ), Visibility.LOCAL),
    # Two nodes on Lustre 2.17: 0 of 23 pieces stale through a descriptor that was open before the write.
    "lustre": Visibility.COHERENT,
}  # fmt: skip
# Stale pieces of 23 that a second client read right after a direct write: through an open descriptor, after opening
# again, and both after the writer's fdatasync. NFS is close-to-open by its specification; its direct writes are
# synchronous, so fdatasync after them is free. All other kinds, and unknown ones, count as FLUSHED.
#   fuse.glusterfs  9-13, 2-3, 0, 0        fuse.mfs (MooseFS)  23, 1-15, 0, 0
#   fuse.juicefs    23, 23, 22-23, 0       fuse.ceph, nfs, nfs4  0, 0, 0, 0
# FLUSHED kinds whose clients send direct writes to the server before they return.
_WRITES_THROUGH = frozenset({"nfs", "nfs4", "ceph", "fuse.ceph", "fuse.ceph-fuse"})
# Time in which the space of removed files shows in statvfs where that takes minutes, seconds. MooseFS's master finds
# the chunks of removed files in a loop of 300 s or more (CHUNKS_LOOP_MIN_TIME): 13 minutes for 660 MiB.
_RECLAIM_S = {"fuse.mfs": 1200.0}


@dataclass(frozen=True, slots=True)
class FileSystem:
    """kind: the kernel's name of it ("ext4", "nfs4", "fuse.sshfs"), "unknown" when mountinfo does not tell.

    is_network: other nodes may see the same files, or memory maps may not be shared as on a local disk.
    options: of the mount, as the file system itself reports them. source: device or server, as mounted.
    """

    kind: str
    is_network: bool
    mount_point: str
    options: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.kind} mounted at {self.mount_point}"

    @property
    def visibility(self) -> Visibility:
        return _VISIBILITY.get(self.kind, Visibility.FLUSHED)

    @property
    def holds_direct_writes(self) -> bool:
        """Tell whether bytes of a direct write may stay in the client until fdatasync, so that a write looks faster
        than the storage."""
        return self.visibility is Visibility.FLUSHED and self.kind not in _WRITES_THROUGH

    @property
    def reclaim_s(self) -> float:
        """Return the time in which the space of removed files becomes free, seconds; 0: at once or within seconds."""
        # Debian's mfsmount mounts as "fuse", of the source "mfs#HOST:PORT".
        kind = "fuse.mfs" if self.kind == "fuse" and self.source.startswith("mfs#") else self.kind
        return _RECLAIM_S.get(kind, 0.0)

    def is_flushed(self, setting: str) -> bool:
        """Tell whether segments are flushed before their records are published. setting: io.fdatasync."""
        return {"auto": self.visibility is Visibility.FLUSHED, "always": True, "never": False}[setting]

    @property
    def nfs_version(self) -> str | None:
        """Return the NFS protocol version in use ("3", "4.1", "4.2"); None where this is no NFS, or does not tell."""
        if self.kind not in ("nfs", "nfs4"):
            return None
        found = (value for name, _, value in (option.partition("=") for option in self.options) if name == "vers")
        return next(found, None)

    @property
    def nfs_fix(self) -> str | None:
        """Return the advice for an NFS mount of a version below 4.2, which has no fallocate; None elsewhere."""
        version = self.nfs_version
        if version is None or version >= "4.2":
            return None
        return (
            f"{self.mount_point} is mounted with NFS {version}, which cannot reserve space: segments grow as they are "
            "written, and a full disk shows only then; mount it with vers=4.2"
        )


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Space that a file system has left for this user. n_files: inodes; None where it does not count any."""

    n_bytes: int
    n_files: int | None = None

    @classmethod
    def of(cls, disk: os.statvfs_result) -> FreeSpace:
        """Convert the answer of statvfs."""
        is_counted = disk.f_files and disk.f_favail >= 0  # CephFS counts the files that exist, and answers -1 here
        return cls(disk.f_bavail * disk.f_frsize, disk.f_favail if is_counted else None)

    @property
    def has_files(self) -> bool:
        """Return True if inodes are left for segments."""
        return self.n_files is None or self.n_files > RESERVED_FILES

    def for_sets(self, set_bytes: int, set_files: int) -> int:
        """Return the bytes that segment sets of that size may take: each needs its files' inodes, too."""
        if self.n_files is None:
            return self.n_bytes
        return min(self.n_bytes, max(0, self.n_files - RESERVED_FILES) // set_files * set_bytes)

    def why_full(self, need_bytes: int) -> str:
        """Name the cause for which this file system refused room for `need_bytes` (on disk, a set)."""
        free = size(self.n_bytes)
        if not self.has_files:
            return f"the root's file system has {self.n_files} inodes left ({free} are free; see df -i)"
        if self.n_bytes < need_bytes:
            return f"the root's disk is full ({free} are free)"
        return (
            f"the root's storage says that it is full, although {free} are free: a quota of this user, group, project "
            "or folder, or one full OST, brick or disk of several"
        )


def file_system_of(path: str | os.PathLike[str], mountinfo: str | None = None) -> FileSystem:
    """Return the file system that `path` is on, or would be on if it were created: symbolic links are followed.

    mountinfo: the text to read instead of this process's own mount table.
    """
    return mounted_at(os.path.realpath(path), mountinfo)


def stripes_for(kind: str, wanted: int | Literal["auto"]) -> int:
    """Return the number of files that a rank should have in a segment set: `wanted`, or what that kind of file system
    needs."""
    if wanted != "auto":
        return wanted
    return 1 if kind in SHARED_WRITE_KINDS else STRIPES


def mounted_at(path: str, mountinfo: str | None = None) -> FileSystem:
    """Return the file system of an absolute path without links. Makes no call of a file system, which may hang."""
    best = FileSystem("unknown", False, "/")
    for found in _mounts(_own_mountinfo() if mountinfo is None else mountinfo):
        # The later of two mounts at one place hides the earlier, hence >=.
        is_below = path == found.mount_point or path.startswith(found.mount_point.rstrip("/") + "/")
        if is_below and len(found.mount_point) >= len(best.mount_point):
            best = found
    return best


def is_network_kind(kind: str) -> bool:
    return kind in NETWORK_KINDS or kind in ("fuse", "fuseblk") or kind.startswith("fuse.")


def _own_mountinfo() -> str:
    try:
        with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""  # no /proc: the kind is unknown


def _mounts(mountinfo: str) -> list[FileSystem]:
    """Parse a mount of each line; the optional fields before the lone "-" vary in number."""
    found = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, about = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6:
            options = tuple(about[2].split(",")) if len(about) > 2 else ()
            source = _unescape(about[1]) if len(about) > 1 else ""
            found.append(FileSystem(about[0], is_network_kind(about[0]), _unescape(fields[4]), options, source))
    return found


def _unescape(text: str) -> str:
    """Decode space, tab, newline and backslash, which the kernel writes as three octal digits."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
