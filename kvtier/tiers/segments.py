"""The file-system tier of one namespace: making, opening, listing and unlinking its segment files.

Bytes are moved by kvtier.io.ring with the descriptors given out here. Files are 0600, never reached through a
symbolic link, and opened for direct I/O unless the file system refuses that.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.geometry import PAGE_BYTES
from kvtier.record import SegmentHeader

log = logging.getLogger("kvtier")

SUFFIX = ".kvseg"
OPEN_FILES_MAX = 256
"""Open segments kept by one process: at 1 GiB each, 256 GiB of recently used KV without an open() per read."""


def segment_name(set_id: int, rank: int) -> str:
    return f"{set_id:016x}-{rank:04d}{SUFFIX}"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """(set id, rank) of a segment's file name; None for any other file."""
    stem, dash, rank = name.removesuffix(SUFFIX).partition("-")
    if not name.endswith(SUFFIX) or not dash or len(stem) != 16 or len(rank) != 4:
        return None
    try:
        return int(stem, 16), int(rank)
    except ValueError:
        return None


@dataclass(slots=True)
class _Open:
    fd: int
    header: SegmentHeader
    users: int = 0


class SegmentFiles:
    """Segments in one folder. Thread-safe; descriptors are shared, counted, and closed when long unused.

    Raises TierUnavailable where the file system refuses (full, read-only, gone).
    """

    def __init__(self, folder: Path, direct: bool) -> None:
        self.folder = folder
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, header: SegmentHeader) -> None:
        """Makes a whole segment of empty slots. Already there is fine if it was made by this very header."""
        path = self.folder / segment_name(header.set_id, header.rank)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        except FileExistsError:
            return
        except OSError as fault:
            raise TierUnavailable(f"{path}: {fault.strerror}") from fault
        try:
            _allocate(fd, header.file_bytes)
            _write_page(fd, header.pack())
        except OSError as fault:
            path.unlink(missing_ok=True)
            raise TierUnavailable(f"{path}: {fault.strerror}") from fault
        finally:
            os.close(fd)

    def lease(self, set_id: int, rank: int) -> tuple[int, SegmentHeader] | None:
        """An open descriptor (read and write) and the header of a segment; None when there is no such segment.

        Raises Corrupt when the file is not the segment that its name says. Pair with `release`.
        """
        name = (set_id, rank)
        with self._lock:
            entry = self._open.get(name)
            if entry is not None and os.fstat(entry.fd).st_nlink:
                entry.users += 1
                self._open.move_to_end(name)
                return entry.fd, entry.header
        opened = self._open_file(set_id, rank)
        if opened is None:
            return None
        with self._lock:
            self._close_unused()
            entry = self._open.setdefault(name, opened)
            if entry is not opened and not os.fstat(entry.fd).st_nlink and not entry.users:
                os.close(entry.fd)
                entry = self._open[name] = opened
            elif entry is not opened:
                os.close(opened.fd)
            entry.users += 1
            self._open.move_to_end(name)
            return entry.fd, entry.header

    def release(self, set_id: int, rank: int) -> None:
        with self._lock:
            self._open[set_id, rank].users -= 1

    def trim(self, set_id: int, rank: int, slots_used: int) -> None:
        """Gives back the space of the slots from `slots_used` on, which nobody will fill any more."""
        leased = self.lease(set_id, rank)
        if leased is None:
            return
        fd, header = leased
        try:
            if os.fstat(fd).st_size > header.slot_offset(slots_used):
                os.ftruncate(fd, header.slot_offset(slots_used))
        except OSError as fault:
            raise TierUnavailable(f"{segment_name(set_id, rank)}: {fault.strerror}") from fault
        finally:
            self.release(set_id, rank)

    def ids(self) -> list[tuple[int, int]]:
        """(set id, rank) of every segment in the folder, in order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(parsed for name in names if (parsed := parse_segment_name(name)))

    def set_bytes(self) -> dict[int, int]:
        """Bytes that each segment set's files take on disk."""
        total: dict[int, int] = {}
        for set_id, rank in self.ids():
            try:
                blocks = os.lstat(self.folder / segment_name(set_id, rank)).st_blocks
            except FileNotFoundError:
                continue
            total[set_id] = total.get(set_id, 0) + blocks * 512
        return total

    def set_bytes_of(self, set_id: int) -> int:
        """Bytes that the files of one set take on disk."""
        return self.set_bytes().get(set_id, 0)

    def age_s(self, set_id: int, rank: int, now_s: float) -> float:
        """Seconds since the segment was last written; 0 when it is gone."""
        try:
            return now_s - os.lstat(self.folder / segment_name(set_id, rank)).st_mtime
        except FileNotFoundError:
            return 0.0

    def unlink_set(self, set_id: int) -> int:
        """Removes the set's files; readers that have one open read on (I3). Returns the bytes given back."""
        freed = self.set_bytes_of(set_id)
        for found, rank in self.ids():
            if found == set_id:
                (self.folder / segment_name(set_id, rank)).unlink(missing_ok=True)
        with self._lock:
            self._close_unused()
        return freed

    def close(self) -> None:
        with self._lock:
            for entry in self._open.values():
                os.close(entry.fd)
            self._open.clear()

    def pages(self, set_id: int, rank: int) -> Iterator[tuple[int, bytes]]:
        """The header page of every slot that lies within the file: (slot, page). For rebuild and verify."""
        leased = self.lease(set_id, rank)
        if leased is None:
            return
        fd, header = leased
        try:
            size = os.fstat(fd).st_size
            for slot in range(header.slots):
                if header.slot_offset(slot) + PAGE_BYTES > size:
                    return
                yield slot, _read_page(fd, header.slot_offset(slot))
        finally:
            self.release(set_id, rank)

    def _open_file(self, set_id: int, rank: int) -> _Open | None:
        path = self.folder / segment_name(set_id, rank)
        try:
            try:
                fd = os.open(path, os.O_RDWR | self._flags)
            except OSError as fault:
                if fault.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                fd = os.open(path, os.O_RDONLY | self._flags)
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise TierUnavailable(f"{path}: {fault.strerror}") from fault
        try:
            header = SegmentHeader.unpack(_read_page(fd, 0))
            if (header.set_id, header.rank) != (set_id, rank) or header.namespace.hex() != self.folder.name:
                raise Corrupt(f"{path}: holds segment {segment_name(header.set_id, header.rank)}")
        except BaseException:
            os.close(fd)
            raise
        return _Open(fd, header)

    def _close_unused(self) -> None:
        """Closes descriptors of unlinked files (they hold disk space) and, beyond the bound, the oldest unused."""
        excess = len(self._open) - OPEN_FILES_MAX
        for name, entry in list(self._open.items()):
            if entry.users == 0 and (excess > 0 or not os.fstat(entry.fd).st_nlink):
                os.close(entry.fd)
                del self._open[name]
                excess -= 1


def direct_io_works(folder: Path) -> bool:
    """Whether a direct write and read of one page succeed in `folder`; raises TierUnavailable when no write does."""
    path = folder / f".direct-io-probe-{os.getpid()}-{threading.get_ident()}"
    try:
        for flag in (os.O_DIRECT, 0):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
            except OSError as fault:
                if flag and fault.errno == errno.EINVAL:
                    continue
                raise
            try:
                _write_page(fd, bytes(PAGE_BYTES))
                _read_page(fd, 0)
                return bool(flag)
            except OSError as fault:
                if not flag or fault.errno != errno.EINVAL:
                    raise
            finally:
                os.close(fd)
        raise AssertionError("the buffered attempt returns or raises")
    except OSError as fault:
        raise TierUnavailable(f"{folder}: {fault.strerror}") from fault
    finally:
        path.unlink(missing_ok=True)


def _allocate(fd: int, n_bytes: int) -> None:
    """Reserves the file's space, so that a full disk is met here and not at some later write."""
    try:
        os.posix_fallocate(fd, 0, n_bytes)
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, n_bytes)


def _write_page(fd: int, page: bytes) -> None:
    with mmap.mmap(-1, PAGE_BYTES) as buffer:  # direct I/O wants a page-aligned address
        buffer[:] = page
        if os.pwritev(fd, [buffer], 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write of a header page")


def _read_page(fd: int, offset: int) -> bytes:
    """One page; shorter at the end of the file."""
    with mmap.mmap(-1, PAGE_BYTES) as buffer:
        n_bytes = os.preadv(fd, [buffer], offset)
        return bytes(buffer[:n_bytes])
