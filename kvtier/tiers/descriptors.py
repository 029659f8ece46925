"""Open segments: descriptors shared by all users of a segment, counted, and closed when long unused or unlinked.

No system call is made while the lock is held: any of them may hang on a network file system, and the engine's own
thread passes through `release` (I10).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvtier.record import SegmentHeader

OPEN_FILES_MAX = 256
"""Segments kept open by one process: at 1 GiB each, 256 GiB of recently used KV without an open() per read."""

GONE = (errno.ESTALE, errno.ENOENT)
"""What fstat says, instead of how many names there are, of a file that was unlinked elsewhere: NFS, and FUSE."""

Name = tuple[int, int]
"""(set id, rank)."""


class OpenSegment:
    """A descriptor in use. `release` it exactly once for each time it was given out."""

    def __init__(self, fd: int, header: SegmentHeader, release: Callable[[OpenSegment], None]) -> None:
        self.fd = fd
        self.header = header
        self.users = 0
        self.is_forgotten = False
        self._release = release

    def release(self) -> None:
        self._release(self)

    def is_unlinked(self) -> bool | None:
        """None where the storage does not tell."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError as fault:
            return True if fault.errno in GONE else None


class Descriptors:
    """Thread-safe. `open_file` opens a segment and reads its header; None when there is no such file. `before_close` is
    told of each descriptor that somebody had, and must not wait."""

    def __init__(
        self,
        open_file: Callable[[Name], tuple[int, SegmentHeader] | None],
        before_close: Callable[[int], None] = lambda fd: None,
    ) -> None:
        self._open_file = open_file
        self._before_close = before_close
        self._open: OrderedDict[Name, OpenSegment] = OrderedDict()
        self._lock = threading.Lock()

    def lease(self, name: Name) -> OpenSegment | None:
        """The segment, open; None when it is gone. Whatever `open_file` raises."""
        segment = self._take(name)
        if segment is not None:
            if segment.is_unlinked() is False:
                return segment  # else its mount may have been made anew, and this would never be of use again
            self._forget(name, segment)
            segment.release()
        found = self._open_file(name)
        if found is None:
            return None
        with self._lock:
            segment = self._open.setdefault(name, OpenSegment(*found, self._give_back))
            segment.users += 1
        if segment.fd != found[0]:
            os.close(found[0])  # another thread opened it meanwhile
        self._close_all(self._excess())
        return segment

    def lease_anew(self, name: Name) -> OpenSegment | None:
        """As `lease`, through a descriptor that is opened after this call: an open one may show stale bytes."""
        segment = self._take(name)
        if segment is not None:
            self._forget(name, segment)
            segment.release()
        return self.lease(name)

    def close_unlinked(self) -> None:
        """Lets go of files that were evicted: as long as they are open, they keep their space on the disk."""
        self._forget_those(lambda segment: segment.is_unlinked() is True)

    def close(self) -> None:
        """Closes what is not in use; what is, is closed by its last release."""
        self._forget_those(lambda segment: True)

    def _forget_those(self, meant: Callable[[OpenSegment], bool]) -> None:
        with self._lock:
            segments = list(self._open.items())
        for name, segment in segments:
            with self._lock:
                if segment.is_forgotten:
                    continue
                segment.users += 1  # so that nobody closes it while we look at it
            if meant(segment):
                self._forget(name, segment)
            segment.release()

    def _take(self, name: Name) -> OpenSegment | None:
        with self._lock:
            segment = self._open.get(name)
            if segment is not None:
                segment.users += 1
                self._open.move_to_end(name)
            return segment

    def _forget(self, name: Name, segment: OpenSegment) -> None:
        """Nobody is given this descriptor any more; the last user closes it."""
        with self._lock:
            segment.is_forgotten = True
            if self._open.get(name) is segment:
                del self._open[name]

    def _give_back(self, segment: OpenSegment) -> None:
        with self._lock:
            segment.users -= 1
            is_last = segment.is_forgotten and segment.users == 0
        if is_last:
            self._close_all([segment])

    def _excess(self) -> list[OpenSegment]:
        """The longest unused descriptors beyond the bound, forgotten here and now."""
        with self._lock:
            excess = len(self._open) - OPEN_FILES_MAX
            unused = [name for name, segment in self._open.items() if segment.users == 0][: max(0, excess)]
            closing = [self._open.pop(name) for name in unused]
            for segment in closing:
                segment.is_forgotten = True
            return closing

    def _close_all(self, segments: list[OpenSegment]) -> None:
        for segment in segments:
            self._before_close(segment.fd)
            os.close(segment.fd)
