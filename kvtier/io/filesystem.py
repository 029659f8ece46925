"""What kind of file system a path is on, from /proc/self/mountinfo (format: proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

MOUNTINFO = "/proc/self/mountinfo"

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose reads and writes are copies by the processor."""

NETWORK_KINDS = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "exfs", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs",
    "virtiofs", "vxfs", "wekafs",
})  # fmt: skip
"""File systems that other machines may have mounted at the same time. FUSE is added below: its daemon is unknown, and
nothing promises that memory mapped by two processes is the same memory."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """kind: the kernel's name of it ("ext4", "nfs4", "fuse.sshfs"), "unknown" when mountinfo does not tell.

    is_network: other nodes may see the same files, or memory maps may not be shared as on a local disk.
    """

    kind: str
    is_network: bool
    mount_point: str


def file_system_of(path: str | os.PathLike[str], mountinfo: str | None = None) -> FileSystem:
    """The file system that `path` is on, or would be on if it were created: symbolic links are followed.

    mountinfo: the text to read instead of this process's own mount table.
    """
    resolved = os.path.realpath(path)
    best = FileSystem("unknown", False, "/")
    for kind, mount_point in _mounts(_own_mountinfo() if mountinfo is None else mountinfo):
        # The later of two mounts at one place hides the earlier, hence >=.
        if _lies_under(resolved, mount_point) and len(mount_point) >= len(best.mount_point):
            best = FileSystem(kind, is_network_kind(kind), mount_point)
    return best


def is_network_kind(kind: str) -> bool:
    return kind in NETWORK_KINDS or kind in ("fuse", "fuseblk") or kind.startswith("fuse.")


def _own_mountinfo() -> str:
    try:
        with open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""  # no /proc: the kind is unknown


def _mounts(mountinfo: str) -> list[tuple[str, str]]:
    """(kind, mount point) of each line; the optional fields before the lone "-" vary in number."""
    found = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6:
            found.append((kinds[0], _unescape(fields[4])))
    return found


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _lies_under(path: str, mount_point: str) -> bool:
    return path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
