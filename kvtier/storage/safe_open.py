"""Safe opening of files in a root, which other users may be able to write to: only plain files in real folders, and no
symbolic links. (The root's own path is the operator's choice and may contain links.)
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.runtime.file_descriptors import close_file, with_descriptors

log = logging.getLogger("kvtier")

BELOW_ROOT = 2  # folders between a root and a namespace's files: `v2` and the namespace's own
LEASE_BREAK_S, LEASE_POLL_S = 5.0, 0.01  # deadline and poll interval while another process holds a lease, seconds

NOT_ANSWERING = frozenset({
    errno.EIO, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO,
    errno.ECOMM, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EBADFD,
})  # fmt: skip
# errno of a storage, or a part of it, that does not answer: no statement about the file

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def folder_within(folder: Path) -> Iterator[int]:
    """Open the folder and yield its descriptor, for `dir_fd` and for listing.

    Raises OSError: NotADirectoryError if one of the last BELOW_ROOT names of the path is a link or no folder.
    """
    descriptor = with_descriptors(lambda: _open_folder(folder))
    try:
        yield descriptor
    finally:
        close_file(descriptor)


def _open_folder(folder: Path) -> int:
    descriptor = os.open(folder.parents[BELOW_ROOT - 1], _FOLDER | os.O_PATH)
    for left, name in enumerate(folder.parts[-BELOW_ROOT:], start=1 - BELOW_ROOT):
        access = os.O_PATH if left else os.O_RDONLY
        above = descriptor
        try:
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW | access, dir_fd=above)
        finally:
            close_file(above)
    return descriptor


def hand_over(path: str | Path) -> None:
    """Change the owner of a file that user root created to that of its folder. Refusals (NFS, user namespaces) are
    ignored."""
    # A command run by root must not make a root or its index inaccessible to the engines' user.
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = os.stat(os.path.dirname(path) or ".")
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def hand_over_open(file: int, folder: int) -> None:
    """Change the owner of a file that user root created to that of its folder. Both are open. Refusals are ignored."""
    if os.geteuid() == 0:
        with suppress(OSError):
            owner, own = os.fstat(folder), os.fstat(file)
            if (owner.st_uid, owner.st_gid) != (own.st_uid, own.st_gid):
                os.fchown(file, owner.st_uid, owner.st_gid)


def make_private(path: str) -> None:
    """Create a folder and its missing parents with mode 0700. Raises OSError."""
    # os.makedirs would create the parents with the umask's mode.
    if not os.path.isdir(path):
        make_private(os.path.dirname(path))
        with suppress(FileExistsError):  # another process created it; if it is no folder, its use fails
            os.mkdir(path, 0o700)
            hand_over(path)


def is_plain(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def open_plain(path: str | Path, folder: int | None = None) -> int:
    """Open for reading, without blocking as a pipe would. Raises OSError, also when it is no plain file."""
    if not is_plain(os.stat(path, dir_fd=folder, follow_symlinks=False)):  # opening a device may have side effects
        raise _not_plain(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = with_descriptors(lambda: once_free(lambda: os.open(path, flags, dir_fd=folder)))
    if not is_plain(os.fstat(descriptor)):
        close_file(descriptor)
        raise _not_plain(path)
    return descriptor


def once_free(open_it: Callable[[], int]) -> int:
    """Call `open_it`, which opens with O_NONBLOCK, until no lease is in the way. Raises OSError at LEASE_BREAK_S."""
    # An NFS or Samba server of this machine may hold a lease on the file. With O_NONBLOCK the kernel does not wait for
    # the lease, but revokes it and fails with EWOULDBLOCK.
    deadline_s = time.monotonic() + LEASE_BREAK_S
    while True:
        try:
            return open_it()
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(LEASE_POLL_S)


def remove_strange(folder: str, names: Iterable[str]) -> None:
    """Unlink files of these names that are not plain, before a library opens them by name and would follow a link.
    Raises OSError."""
    for path in (os.path.join(folder, name) for name in names):
        with suppress(FileNotFoundError):  # another process may remove the file first
            if not is_plain(os.lstat(path)):
                log.warning("%s is not a plain file: removed", path)
                os.unlink(path)


def _not_plain(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a plain file", str(path))
