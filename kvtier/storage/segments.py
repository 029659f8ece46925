"""Segment files: creates, opens, lists and unlinks the segments of a namespace.

The engines of kvtier.io move the bytes, through the descriptors that are opened here. Segments are plain files of mode
0600 in folders that are no links (kvtier.storage.safe_open), opened for direct I/O unless the file system refuses that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import STRIPES_MAX, SegmentHeader, is_blank, stripes_of
from kvtier.runtime.file_descriptors import close_file, size_hint, with_descriptors
from kvtier.runtime.threads import Job
from kvtier.storage.filesystem import FULL, IN_MEMORY, file_system_of
from kvtier.storage.open_segments import OpenSegment, OpenSegments
from kvtier.storage.safe_open import folder_within, hand_over_open, is_plain, once_free

SUFFIX = ".kvseg"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{4})-([0-9]{2})\.kvseg")
# Name of an unlinked file that a process of its node has open: kernel NFS, libfuse.
KEPT_OPEN = re.compile(r"\.(nfs[0-9a-f]{24}|fuse_hidden[0-9a-f]{16})")
_OFFSET_MAX = (1 << 63) - 1
_libc = ctypes.CDLL(None, use_errno=True)


def segment_name(set_id: int, part: int) -> str:
    """Return the file name of one part of a set: the file of one stripe of one rank (kvtier.format.record)."""
    rank, stripe = divmod(part, STRIPES_MAX)
    return f"{set_id:016x}-{rank:04d}-{stripe:02d}{SUFFIX}"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """Return (set id, part) of a segment's file name; None for any other file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    set_id, rank, stripe = int(match[1], 16), int(match[2]), int(match[3])
    return (set_id, rank * STRIPES_MAX + stripe) if stripe < stripes_of(set_id) else None


class Sharing(NamedTuple):
    """Properties of a root's files between the nodes that share it.

    flushes: segments are flushed (fdatasync) before what was written to them is published.
    may_be_stale: a read may show what was there before another node wrote.
    may_be_away: a file may be missing, or shorter, as long as a part of the storage is down.
    """

    flushes: bool = False
    may_be_stale: bool = False
    may_be_away: bool = False


class NeverBegun(Corrupt):
    """A segment whose writer died before it wrote the header: no record was ever in it."""


class SegmentFiles(OpenSegments):
    """Segments in one folder. Thread-safe; descriptors are shared, counted, and closed when long unused.

    Raises TierUnavailable if the file system refuses (full, read-only, gone). before_close, submit: see OpenSegments.
    is_in_place: returns True if the folder's root is the one that was opened; called when a segment is missing.
    flushes: other nodes see written bytes only after fdatasync, so `create` and `erase` call it.
    """

    def __init__(
        self,
        folder: Path,
        direct: bool,
        before_close: Callable[[int], None] = lambda fd: None,
        is_in_place: Callable[[], bool] = lambda: True,
        flushes: bool = False,
        submit: Callable[[Job], object] | None = None,
    ) -> None:
        self.folder = folder
        self._flushes = flushes
        self._is_in_place = is_in_place
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        super().__init__(before_close, submit)

    def create(self, header: SegmentHeader) -> bool:
        """Create a segment of empty slots, with its full size. Return False if its file exists.

        Raises TierUnavailable; with `is_full` if space is missing.
        """
        try:
            return self._create(header)
        except TierUnavailable as fault:
            if not fault.is_full:
                raise
            self.close_unlinked()  # frees their space; only now, because an fstat may hang
            return self._create(header)

    def _create(self, header: SegmentHeader) -> bool:
        name = segment_name(header.set_id, header.part)
        with _unavailable(self.folder / name), folder_within(self.folder) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags
            try:
                fd = with_descriptors(lambda: os.open(name, flags, 0o600, dir_fd=folder))
            except FileExistsError:
                return False
            hand_over_open(fd, folder)
            try:
                self._fill_and_close(fd, header)
            except OSError:
                with suppress(OSError):  # a sweep removes it
                    os.unlink(name, dir_fd=folder)
                raise
            return True

    def _fill_and_close(self, fd: int, header: SegmentHeader) -> None:
        try:
            if file_system_of(self.folder).kind in IN_MEMORY:
                os.ftruncate(fd, header.file_bytes)  # tmpfs zeroes memory to reserve it, which takes as long as a write
            else:
                _allocate(fd, header.file_bytes)
            _write_page(fd, header.pack())
            if self._flushes:
                os.fdatasync(fd)
        except BaseException:
            close_file(fd)  # before the unlink, or NFS keeps it as `.nfsXXXX`
            raise
        os.close(fd)  # a network file system may say here that a quota or the disk is full

    def is_there(self) -> bool:
        """Return True if the folder exists in the root that was opened. Otherwise a missing file is not gone."""
        return self.folder.is_dir() and self._is_in_place()

    def trim(self, set_id: int, part: int, slots_used: int) -> None:
        """Truncate a file behind the set's first `slots_used` slots. No writer may fill the others any more."""
        with self._leased(set_id, part) as segment:
            if segment is not None and os.fstat(segment.fd).st_size > segment.header.bytes_up_to(slots_used):
                os.ftruncate(segment.fd, segment.header.bytes_up_to(slots_used))

    def erase(self, set_id: int, part: int, slots: Iterable[int]) -> bool:
        """Blank the header pages of slots, so that no rebuild of the index reads their records. Return False if the
        file is missing."""
        with self._leased(set_id, part) as segment:
            if segment is None:
                return False
            for offset in [segment.header.slot_offset(slot) for slot in slots]:
                if any(_read_page(segment.fd, offset)):  # else a write might need space that a full disk has not
                    _write_page(segment.fd, bytes(PAGE_BYTES), offset)
            if self._flushes:
                os.fdatasync(segment.fd)
            return True

    @contextmanager
    def _leased(self, set_id: int, part: int) -> Iterator[OpenSegment | None]:
        segment = self.lease(set_id, part)
        try:
            with _unavailable(self.folder / segment_name(set_id, part)):
                yield segment
        finally:
            if segment is not None:
                segment.release()

    def ids(self) -> list[tuple[int, int]]:
        """Return (set id, part) of every segment in the folder, in order."""
        with _unavailable(self.folder):
            try:
                with folder_within(self.folder) as folder:
                    names = os.listdir(folder)
            except FileNotFoundError:
                return []
        return sorted(parsed for name in names if (parsed := parse_segment_name(name)))

    def sets(self) -> list[tuple[int, list[int]]]:
        """Return (set id, its parts that have a file) of every set in the folder, in order."""
        return [(set_id, [part for _, part in found]) for set_id, found in groupby(self.ids(), key=itemgetter(0))]

    def exists(self, set_id: int, part: int) -> bool:
        """Return True if the file exists, or if its status cannot be read."""
        try:
            return self._status(set_id, part) is not None
        except OSError:  # as while a part of the storage is down
            return True

    def sizes(self) -> dict[int, dict[int, int] | None]:
        """Return the bytes on disk of each file in the folder, by set id and part; None for a set with a file whose
        status cannot be read, as while a part of the storage is down."""
        found = {set_id: self._sizes_of(set_id, parts) for set_id, parts in self.sets()}
        return {set_id: sizes if are_all else None for set_id, (sizes, are_all) in found.items()}

    def part_bytes(self, set_id: int) -> dict[int, int]:
        """Return the bytes on disk of the set's files, by part, without those whose status cannot be read. Stats no
        other file: there may be a million."""
        return self._sizes_of(set_id, self._parts_of(set_id))[0]

    def _parts_of(self, set_id: int) -> list[int]:
        return [part for found, part in self.ids() if found == set_id]

    def _sizes_of(self, set_id: int, parts: Sequence[int]) -> tuple[dict[int, int], bool]:
        """Return the bytes on disk by part, and True if the status of every file could be read."""
        sizes: dict[int, int] = {}
        are_all = True
        for part in parts:
            try:
                status = self._status(set_id, part)
            except OSError:
                are_all = False
                continue
            if status is not None:
                sizes[part] = status.st_blocks * 512
        return sizes, are_all

    def set_bytes_of(self, set_id: int) -> int:
        """Return the bytes that the files of one set take on disk."""
        return sum(self.part_bytes(set_id).values())

    def age_s(self, set_id: int, part: int, now_s: float) -> float:
        """Return the seconds since the segment was last written; 0 when it is gone or its status cannot be read."""
        try:
            status = self._status(set_id, part)
        except OSError:  # as while a part of the storage is down: to be read, and kept, like a new one
            return 0.0
        return 0.0 if status is None else now_s - status.st_mtime

    def file_bytes(self, set_id: int, part: int) -> int:
        """Return the length of the file; 0 when it is gone."""
        status = self._status(set_id, part)
        return 0 if status is None else status.st_size

    def _status(self, set_id: int, part: int) -> os.stat_result | None:
        """Return the file's status; None when it is gone. Uses the path: sizes and times reveal no content."""
        try:
            return os.lstat(self.folder / segment_name(set_id, part))
        except FileNotFoundError:
            return None

    def held_bytes(self) -> int:
        """Return the bytes on disk of unlinked files that a process has open and that the file system has renamed.
        Local file systems rename none, so there the folder is not listed."""
        if not file_system_of(self.folder).is_network:
            return 0
        total = 0
        with suppress(OSError):  # the folder is gone, or away
            for name in os.listdir(self.folder):
                if KEPT_OPEN.fullmatch(name):
                    with suppress(FileNotFoundError):
                        total += os.lstat(self.folder / name).st_blocks * 512
        return total

    def unlink_set(self, set_id: int) -> int:
        """Unlink the set's files. Readers that have one open go on reading (I3). Return the size of the files found."""
        self._close_everywhere(set_id)  # also files that another process has removed
        parts = self._parts_of(set_id)
        sizes, _ = self._sizes_of(set_id, parts)
        return sum(sizes.get(part, 0) for part in parts if self._unlink(set_id, part))

    def unlink(self, set_id: int, part: int) -> bool:
        """Remove a file. Return False if there is none. Raises TierUnavailable."""
        self._close_everywhere(set_id)
        return self._unlink(set_id, part)

    def _close_everywhere(self, set_id: int) -> None:
        self.close_sets({set_id})
        close_in_process(self.folder, set_id)

    def _unlink(self, set_id: int, part: int) -> bool:
        name = segment_name(set_id, part)
        with _unavailable(self.folder / name):
            try:
                with folder_within(self.folder) as folder:
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                return False
        return True

    def pages(self, set_id: int, part: int) -> Iterator[tuple[int, bytes]]:
        """Yield (slot, header page) of the slots that the file has, but for those in a hole. For rebuild and verify."""
        with self._leased(set_id, part) as segment:
            if segment is None:
                return
            header = segment.header
            size, slot = os.fstat(segment.fd).st_size, header.stripe
            while slot < header.slots and header.slot_offset(slot) + PAGE_BYTES <= size:
                page = _read_page(segment.fd, header.slot_offset(slot))
                yield slot, page
                slot += header.stripes
                if not any(page):
                    slot = _next_with_data(segment.fd, header, slot)

    def _open_file(self, name: tuple[int, int]) -> tuple[int, SegmentHeader] | None:
        path = self.folder / segment_name(*name)
        with _unavailable(path):
            with folder_within(self.folder) as folder:
                try:
                    if not is_plain(os.stat(path.name, dir_fd=folder, follow_symlinks=False)):
                        raise Corrupt(f"{path}: is not a plain file")
                    fd = with_descriptors(lambda: _open_to_write_or_read(path.name, folder, self._flags))
                except FileNotFoundError:
                    if self._is_in_place():
                        return None
                    what = "that is not in the root that was opened; is its file system mounted?"
                    raise TierUnavailable(f"{path}: {what}") from None
            try:
                if not is_plain(os.fstat(fd)):  # it was put there just now
                    raise Corrupt(f"{path}: is not a plain file")
                os.set_blocking(fd, True)
                page = _read_page(fd, 0)
                if is_blank(page):
                    raise NeverBegun(f"{path}: its writer died before the header")
                header = SegmentHeader.unpack(page)
                if (header.set_id, header.part) != name or header.namespace.hex() != self.folder.name:
                    named = segment_name(header.set_id, header.part)
                    raise Corrupt(f"{path}: was renamed or copied: its header names {named}")
            except BaseException:
                close_file(fd)
                raise
        return fd, header


_folders: weakref.WeakSet[SegmentFolders] = weakref.WeakSet()
_folders_lock = threading.Lock()


def close_in_process(folder: Path, set_id: int) -> None:
    """Close all segments of a set that any SegmentFolders of this process has open, except those in use.

    Called before the set's files are unlinked: an NFS client renames an open file that it unlinks to `.nfsXXXX`, which
    keeps its space. Other processes close the segments when they see in the index that the set is gone
    (kvtier.worker.context).
    """
    with _folders_lock:
        found = list(_folders)
    for folders in found:
        for files in folders.made():
            if files.folder == folder:
                files.close_sets({set_id})


class SegmentFolders:
    """Namespace id -> its segments, made at first use. Thread-safe.

    check: raises TierUnavailable for a namespace that must not be used here; called until it succeeds once.
    before_close, is_in_place: see SegmentFiles. sharing: properties of the files between nodes. submit: see
    OpenSegments; set before the first use of a namespace.
    """

    def __init__(
        self,
        folder: Path,
        direct: bool,
        check: Callable[[bytes], None] = lambda namespace: None,
        before_close: Callable[[int], None] = lambda fd: None,
        is_in_place: Callable[[], bool] = lambda: True,
        sharing: Sharing = Sharing(),  # noqa: B008 - immutable
    ) -> None:
        self.sharing = sharing
        self.submit: Callable[[Job], object] | None = None
        self._folder = folder
        self._make = partial(SegmentFiles, direct=direct, before_close=before_close, is_in_place=is_in_place)
        self._check = check
        self._known: dict[bytes, SegmentFiles] = {}
        self._lock = threading.Lock()
        with _folders_lock:
            _folders.add(self)

    def __call__(self, namespace: bytes) -> SegmentFiles:
        known = self.if_known(namespace)
        if known is not None:
            return known
        self._check(namespace)
        with self._lock:
            made = self._make(self._folder / namespace.hex(), flushes=self.sharing.flushes, submit=self.submit)
            return self._known.setdefault(namespace, made)

    def if_known(self, namespace: bytes) -> SegmentFiles | None:
        """Return the segments of a namespace that was used before; None otherwise. Does not wait."""
        with self._lock:
            return self._known.get(namespace)

    def open_sets(self) -> set[int]:
        return {set_id for files in self.made() for set_id in files.open_sets()}

    def close_sets(self, set_ids: Collection[int]) -> None:
        """Close the segments of sets that were removed, so that their space becomes free."""
        for files in self.made():
            files.close_sets(set_ids)

    def close_unlinked(self) -> None:
        """Close the segments that the file system says were unlinked."""
        for files in self.made():
            files.close_unlinked()

    def close(self) -> None:
        for files in self.made():
            files.close()

    def made(self) -> list[SegmentFiles]:
        with self._lock:
            return list(self._known.values())


def _open_to_write_or_read(name: str, folder: int, flags: int) -> int:
    """Open a file without waiting, as opening a pipe would."""
    flags |= os.O_NONBLOCK
    try:
        return once_free(lambda: os.open(name, os.O_RDWR | flags, dir_fd=folder))
    except OSError as fault:
        if fault.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return once_free(lambda: os.open(name, os.O_RDONLY | flags, dir_fd=folder))


def _next_with_data(fd: int, header: SegmentHeader, slot: int) -> int:
    """Return the first slot of the file from `slot` on with anything in it; `header.slots` when none has. A header may
    name billions of slots in a file that takes up no space: to read a hole's pages would take hours."""
    try:
        data = os.lseek(fd, min(header.slot_offset(slot), _OFFSET_MAX), os.SEEK_DATA)
    except OSError as fault:
        if fault.errno == errno.ENXIO:  # no data behind it
            return header.slots
        return slot  # a file system that does not tell
    return max(slot, (data - PAGE_BYTES) // header.slot_bytes * header.stripes + header.stripe)


@contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    """Raise TierUnavailable in place of OSError."""
    try:
        yield
    except OSError as fault:
        raise TierUnavailable(f"{path}: {fault.strerror}{size_hint(fault)}", is_full=fault.errno in FULL) from fault


def direct_io_works(folder: Path) -> bool:
    """Return whether a direct write and read of one page succeed in `folder`. Raises TierUnavailable when no write
    does."""
    path = folder / f".direct-io-probe-{uuid.uuid4().hex}"
    with _unavailable(folder):
        for flag in (os.O_DIRECT, 0):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flag, 0o600)
                try:
                    _write_page(fd, bytes(PAGE_BYTES))
                    _read_page(fd, 0)
                    return bool(flag)
                finally:
                    close_file(fd)
            except OSError as fault:
                if not flag or fault.errno != errno.EINVAL:
                    raise
            finally:
                path.unlink(missing_ok=True)  # it may have been made although open failed
        raise AssertionError("the buffered attempt returns or raises")


def fallocate(fd: int, n_bytes: int) -> None:
    """Reserve a file's space from its start with fallocate(2). Raise OSError: EOPNOTSUPP where there is none."""
    # os.posix_fallocate is not used: glibc emulates it with one write for each 4 KiB (41 s for 8 MiB on NFS 3).
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(n_bytes)) != 0:
        fault = ctypes.get_errno()
        if fault != errno.EINTR:
            raise OSError(fault, os.strerror(fault))


def _allocate(fd: int, n_bytes: int) -> None:
    """Reserve the file's space, so that a full disk shows here and not at a later write. Where the file system cannot
    reserve, the file gets its size without space, and a full disk shows at a write."""
    try:
        fallocate(fd, n_bytes)
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, n_bytes)


def _write_page(fd: int, page: bytes, offset: int = 0) -> None:
    with mmap.mmap(-1, PAGE_BYTES) as buffer:  # direct I/O wants a page-aligned address
        buffer[:] = page
        if os.pwritev(fd, [buffer], offset) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write of a header page")


def _read_page(fd: int, offset: int) -> bytes:
    """Read one page; shorter at the end of the file. Raises as `refuse_early_end`."""
    with mmap.mmap(-1, PAGE_BYTES) as buffer:
        n_bytes = os.preadv(fd, [buffer], offset)
        if n_bytes < PAGE_BYTES:
            refuse_early_end(fd, offset + PAGE_BYTES)
        return bytes(buffer[:n_bytes])


def refuse_early_end(fd: int, end: int) -> None:
    """Raise OSError if the file has all bytes before `end`, although a read of them ended sooner.

    Reads of a striped file system do so while a target is away. The bytes that they lack are not damaged.
    """
    if os.fstat(fd).st_size >= end:
        raise OSError(errno.EIO, "a read ended before the end of the file; is part of the storage down?")
