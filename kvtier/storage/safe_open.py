"""What lies in a root may have been put there by others who can write to its share: only plain files are opened, only
in folders that are folders, and no link of theirs is followed. (The root's own path is the operator's, links and all.)
"""

from __future__ import annotations

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

BELOW_ROOT = 2
"""Folders of a namespace: `v1`, and its own."""
LEASE_BREAK_S, LEASE_LOOK_S = 5.0, 0.01
"""How long a file is waited for that somebody has a lease on, and how often it is tried."""

NOT_ANSWERING = frozenset({
    errno.EIO, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO,
    errno.ECOMM, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EBADFD,
})  # fmt: skip
# errno of a storage, or a part of it, that is away: they say nothing of the file

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def folder_within(folder: Path, depth: int = BELOW_ROOT) -> Iterator[int]:
    """A descriptor of it until the end, for `dir_fd` and for listing. The last `depth` names of the path must be those
    of folders, not of links to any. Raises OSError: NotADirectoryError where they are not."""
    descriptor = with_descriptors(lambda: _open_folder(folder, depth))
    try:
        yield descriptor
    finally:
        close_file(descriptor)


def _open_folder(folder: Path, depth: int) -> int:
    descriptor = os.open(folder.parents[depth - 1], _FOLDER | os.O_PATH)
    for left, name in enumerate(folder.parts[-depth:], start=1 - depth):
        access = os.O_PATH if left else os.O_RDONLY
        above = descriptor
        try:
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW | access, dir_fd=above)
        finally:
            close_file(above)
    return descriptor


def hand_over(path: str | Path) -> None:
    """Give what root made to the owner of the folder that it is in, because one command that root runs must not take a
    root or its index away from the engines' user. Where that is refused (NFS, a user namespace) it stays as it is."""
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = os.stat(os.path.dirname(path) or ".")
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def make_private(path: str) -> None:
    """A folder, with those above it that are missing, all for their user alone: os.makedirs takes what the umask leaves
    for those above. Raises OSError."""
    if not os.path.isdir(path):
        make_private(os.path.dirname(path))
        with suppress(FileExistsError):  # another process was quicker; if it is no folder, its use says so
            os.mkdir(path, 0o700)
            hand_over(path)


def is_plain(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def open_plain(path: str | Path, folder: int | None = None) -> int:
    """For reading. Waits for nobody, as opening a pipe would. Raises OSError, also when it is no plain file."""
    if not is_plain(os.stat(path, dir_fd=folder, follow_symlinks=False)):  # to open a device may do something
        raise _not_plain(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = with_descriptors(lambda: once_free(lambda: os.open(path, flags, dir_fd=folder)))
    if not is_plain(os.fstat(descriptor)):
        close_file(descriptor)
        raise _not_plain(path)
    return descriptor


def once_free(open_it: Callable[[], int]) -> int:
    """What `open_it` returns, with O_NONBLOCK. The kernel then does not wait either for who has a lease on a file (a
    server of NFS or Samba on this machine, for another node that has it open), but tells them to give it back: so it is
    tried again for a moment. Raises OSError."""
    deadline_s = time.monotonic() + LEASE_BREAK_S
    while True:
        try:
            return open_it()
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(LEASE_LOOK_S)


def remove_strange(folder: str, names: Iterable[str]) -> None:
    """Unlinks what has one of these names and is no plain file, for a library that opens them by name and would follow
    a link. Raises OSError."""
    for path in (os.path.join(folder, name) for name in names):
        if os.path.lexists(path) and not is_plain(os.lstat(path)):
            log.warning("%s is not a plain file, and is removed", path)
            os.unlink(path)


def _not_plain(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a plain file", str(path))
