"""Descriptors of segments, where a file goes away under them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import Extent
from kvtier.format.record import SegmentHeader
from kvtier.storage import open_segments
from kvtier.storage.open_segments import OpenSegments

HEADER = SegmentHeader(bytes(16), 1, 0, 1, 8192, Extent(0, 1, 0, 1), 4096, 0)


class Opened(OpenSegments):
    def __init__(
        self,
        open_file: Callable[[tuple[int, int]], tuple[int, SegmentHeader] | None],
        before_close: Callable[[int], None] = lambda fd: None,
    ) -> None:
        super().__init__(before_close)
        self._open_file = open_file  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _asks_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # undone before tmp_path is removed
    monkeypatch.setattr(open_segments, "CHECKED_FOR_S", 0.0)


@pytest.mark.parametrize("gone", [errno.ESTALE, errno.ENOENT])
def test_a_segment_that_another_node_unlinked_is_opened_anew(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers ESTALE for a descriptor whose file another node removed, FUSE ENOENT."""
    opened: list[int] = []

    def open_file(name: tuple[int, int]) -> tuple[int, SegmentHeader]:
        opened.append(os.open(tmp_path, os.O_RDONLY))
        return opened[-1], HEADER

    files = Opened(open_file)
    first = files.lease(1, 0)
    assert first is not None
    stale, fstat = first.fd, os.fstat  # still in use, so that its number is not given to another file

    def answer(fd: int) -> os.stat_result:
        if fd == stale:
            raise OSError(gone, os.strerror(gone))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", answer)
    second = files.lease(1, 0)
    assert second is not None and second.fd == opened[1] != stale
    for segment in (first, second):
        segment.release()
    files.close_unlinked()
    files.close()
    with pytest.raises(OSError):
        fstat(opened[1])


def test_storage_that_does_not_tell_is_left_alone_by_housekeeping_and_opened_anew_by_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO, or ENOTCONN of a FUSE server that died. It is mounted again below the same path, where the file is; the
    descriptor will never work again."""
    is_mounted = True

    def open_file(name: tuple[int, int]) -> tuple[int, SegmentHeader]:
        if not is_mounted:
            raise TierUnavailable("not connected")
        return os.open(tmp_path, os.O_RDONLY), HEADER

    files = Opened(open_file)
    first, fstat = files.lease(1, 0), os.fstat
    assert first is not None
    dead = first.fd

    def answer(fd: int) -> os.stat_result:
        if fd == dead:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", answer)
    monkeypatch.setattr(open_segments, "CHECKED_FOR_S", 60.0)
    assert files.lease_at_once(1, 0) is first
    first.release()
    files.close_unlinked()
    assert not first.is_forgotten and files.lease_at_once(1, 0) is None
    is_mounted = False
    with pytest.raises(TierUnavailable):
        files.lease(1, 0)
    is_mounted = True
    second = files.lease(1, 0)
    assert second is not None and second.fd != dead and second is files.lease(1, 0)
    for segment in (first, second, second):
        segment.release()
    files.close()
    for fd in (dead, second.fd):
        with pytest.raises(OSError):
            fstat(fd)


def test_who_else_knows_a_descriptor_is_told_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another file's a moment later."""
    told: list[int] = []

    def before_close(fd: int) -> None:
        os.fstat(fd)  # it is still open
        told.append(fd)

    monkeypatch.setattr(open_segments, "OPEN_FILES_MAX", 1)
    files = Opened(lambda name: (os.open(tmp_path, os.O_RDONLY), HEADER), before_close)
    opened: list[int] = []
    for number in range(3):
        segment = files.lease(number, 0)
        assert segment is not None
        opened.append(segment.fd)
        segment.release()
    assert told == opened[:2]  # beyond the bound
    segment = files.lease(2, 0)
    assert segment is not None and segment.fd == opened[2]
    files.close()
    assert told == opened[:2]
    segment.release()
    assert told == opened
