"""Open segments: reference-counted descriptors, shared by all users of a segment. A descriptor is closed when it is
long unused or its set was removed.

No system call is made under the lock, because any of them may hang on a network file system. `release` makes none at
all, because threads that must not wait call it (I10).
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress

from kvtier.format.record import SegmentHeader
from kvtier.runtime.file_descriptors import close_file, most_open, register
from kvtier.runtime.threads import Job

OPEN_FILES_MAX = 2048  # segments of a namespace kept open, where RLIMIT_NOFILE allows: 256 sets of 8 files a rank

# Time for which a check that an open segment was not unlinked is valid, seconds, so that many reads need one fstat. A
# worker calls `close_unlinked`, which checks all open segments, every two seconds.
CHECKED_FOR_S = 5.0

GONE = (errno.ESTALE, errno.ENOENT)  # errors of fstat for a file that another node unlinked: NFS, and FUSE

Name = tuple[int, int]  # (set id, part): see kvtier.format.record.part_of


class OpenSegment:
    """Open segment. Its users call `release` exactly once for each lease."""

    def __init__(self, fd: int, header: SegmentHeader, pool: OpenSegments) -> None:
        self.fd = fd
        self.header = header
        self.users = 0
        self.is_forgotten = False
        self.is_asked = False  # `close_unlinked` waits for the fstat of this segment
        self.checked_s = time.monotonic()  # time at which the file was last known to have a name
        self._pool = pool

    def release(self) -> None:
        """Give the descriptor back. The next call that opens or closes files closes a forgotten segment, because
        `release` may run on a thread that must not wait."""
        pool = self._pool
        with pool.lock:
            self.users -= 1
            if not self.is_forgotten or self.users:
                return
            pool.released.append(self)
        if pool.is_closed:
            pool.close_released()

    def is_unlinked(self) -> bool | None:
        """Return True if the file system reports that the file has no name any more; None if it does not answer.

        False does not mean that the file has a name: NFS gives a file that this client has open another name
        (`.nfsXXXX`) when it is unlinked. So a segment is closed because its set was removed from the index.
        """
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError as fault:
            return True if fault.errno in GONE else None


class OpenSegments:
    """Open files of one folder. Thread-safe. `before_close` is called with each descriptor that had a user, and must
    not wait. submit: queues a job for another thread, or returns False; with it, `lease` waits for no close.

    lock, released, is_closed: for OpenSegment. released: forgotten segments without users, which are to be closed.
    """

    def __init__(
        self, before_close: Callable[[int], None] = lambda fd: None, submit: Callable[[Job], object] | None = None
    ) -> None:
        self.lock = threading.Lock()
        self.released: list[OpenSegment] = []
        self.is_closed = False
        self._before_close = before_close
        self._submit = submit
        self._open: OrderedDict[Name, OpenSegment] = OrderedDict()
        self._most_open = most_open(OPEN_FILES_MAX)
        register(self)

    def _open_file(self, name: Name) -> tuple[int, SegmentHeader] | None:
        """Open a segment and read its header. Return None when there is no such file."""
        raise NotImplementedError

    def lease(self, set_id: int, part: int, *, for_writing: bool = False) -> OpenSegment | None:
        """Return the segment, open until its `release`; None if there is no such file. A segment to write is checked
        each time, because bytes that are written to an unlinked file are lost.

        Raises Corrupt if the file is not the segment of its name. Raises TierUnavailable also if the folder is missing
        or another one, as with a mount that is away: then its files are not gone.
        """
        name, now_s = (set_id, part), time.monotonic()
        with self.lock:
            segment = self._open.get(name)
            if segment is not None:
                segment.users += 1
                self._open.move_to_end(name)
        if segment is not None:
            if not for_writing and now_s - segment.checked_s <= CHECKED_FOR_S:
                return segment
            if segment.is_unlinked() is False:
                segment.checked_s = now_s
                return segment  # else reopen it: after a remount this descriptor would fail for good
            self._forget(name, segment)
            segment.release()
        found = self._open_file(name)
        if found is None:
            return None
        with self.lock:
            segment = self._open.setdefault(name, OpenSegment(*found, self))
            segment.users += 1
        if segment.fd != found[0]:
            close_file(found[0])  # another thread opened it at the same time
        self._forget_unused(beyond=self._most_open)
        if self._submit is None:
            self.close_released()
        elif self.released:
            self._submit(self.close_released)  # refused while the thread is busy; its next `tidy` closes these too
        return segment

    def lease_at_once(self, set_id: int, part: int) -> OpenSegment | None:
        """Lease the segment for reading if that needs no system call: it is open, and was lately known to have a name.
        Return None otherwise."""
        name, since_s = (set_id, part), time.monotonic() - CHECKED_FOR_S
        with self.lock:
            segment = self._open.get(name)
            if segment is None or segment.checked_s < since_s:
                return None
            segment.users += 1
            self._open.move_to_end(name)
            return segment

    def lease_anew(self, set_id: int, part: int) -> OpenSegment | None:
        """Lease the segment through a descriptor that is opened after this call, and drop its pages from the page
        cache: both may hold bytes from before another node wrote."""
        segment = self._open.get((set_id, part))
        if segment is not None:
            self._forget((set_id, part), segment)
        segment = self.lease(set_id, part)
        if segment is not None:
            with suppress(OSError):  # a file system without page cache
                os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return segment

    def open_sets(self) -> set[int]:
        """Return the ids of the sets that have a segment open here."""
        with self.lock:
            return {set_id for set_id, _ in self._open}

    def close_sets(self, set_ids: Collection[int]) -> None:
        """Close the segments of removed sets: an open file keeps its space on the disk. Those in use are closed after
        their last release (I3)."""
        self._forget_those(lambda name, segment: name[0] in set_ids)

    def close_unlinked(self) -> None:
        """Close the files that were unlinked. If the fstat of a file hangs, another call goes on with the files behind
        it, and no call checks that file again before the fstat returns."""
        self._forget_those(self._is_found_unlinked)

    def close_unused(self) -> None:
        """Close the segments that are not in use, so that other files can be opened."""
        self._forget_unused(beyond=0)
        self.close_released()

    def close(self) -> None:
        """Close what is not in use; what is in use is closed by its last release."""
        self.is_closed = True
        self._forget_those(lambda name, segment: True)

    def close_released(self) -> None:
        """Close forgotten segments that have no users. Where a close hangs, another call closes the others."""
        while True:
            with self.lock:
                if not self.released:
                    return
                segment = self.released.pop(0)
            self._before_close(segment.fd)
            close_file(segment.fd)

    def _forget_those(self, meant: Callable[[Name, OpenSegment], bool]) -> None:
        with self.lock:
            segments = list(self._open.items())
        for name, segment in segments:
            with self.lock:
                if segment.is_forgotten:
                    continue
                segment.users += 1  # keeps it open during the check
            if meant(name, segment):
                self._forget(name, segment)
            segment.release()
        self.close_released()

    def _is_found_unlinked(self, name: Name, segment: OpenSegment) -> bool:
        with self.lock:
            if segment.is_asked:
                return False
            segment.is_asked = True
        asked_s = time.monotonic()
        try:
            is_unlinked = segment.is_unlinked()
        finally:
            segment.is_asked = False
        segment.checked_s = asked_s if is_unlinked is False else -math.inf  # at -inf its next user checks it again
        return is_unlinked is True

    def _forget(self, name: Name, segment: OpenSegment) -> None:
        """Stop giving out this descriptor. It is closed when it has no users."""
        with self.lock:
            if segment.is_forgotten:
                return
            segment.is_forgotten = True
            if self._open.get(name) is segment:
                del self._open[name]
            if not segment.users:
                self.released.append(segment)

    def _forget_unused(self, beyond: int) -> None:
        """Move unused segments to `released`, the longest unused first, until `beyond` segments are left open."""
        with self.lock:
            excess = len(self._open) - beyond
            unused = [name for name, segment in self._open.items() if segment.users == 0][: max(0, excess)]
            for name in unused:
                segment = self._open.pop(name)
                segment.is_forgotten = True
                self.released.append(segment)
