"""Descriptors of segments, where a file goes away under them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtier.geometry import Extent
from kvtier.record import SegmentHeader
from kvtier.tiers.descriptors import Descriptors


@pytest.mark.parametrize("gone", [errno.ESTALE, errno.ENOENT])
def test_a_segment_that_another_node_unlinked_is_opened_anew(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers ESTALE for a descriptor whose file another node removed, FUSE ENOENT."""
    header = SegmentHeader(bytes(16), 1, 0, 1, 8192, Extent(0, 1, 0, 1), 4096, 0)
    opened: list[int] = []

    def open_file(name: tuple[int, int]) -> tuple[int, SegmentHeader]:
        opened.append(os.open(tmp_path, os.O_RDONLY))
        return opened[-1], header

    files = Descriptors(open_file)
    first = files.lease((1, 0))
    assert first is not None
    stale, fstat = first.fd, os.fstat  # still in use, so that its number is not given to another file

    def answer(fd: int) -> os.stat_result:
        if fd == stale:
            raise OSError(gone, os.strerror(gone))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", answer)
    second = files.lease((1, 0))
    assert second is not None and second.fd == opened[1] != stale
    for segment in (first, second):
        segment.release()
    files.close_unlinked()
    files.close()
    with pytest.raises(OSError):
        fstat(opened[1])


def test_storage_that_does_not_tell_takes_no_descriptor_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO, or ENOTCONN of a FUSE server that died: housekeeping goes on, and closes it when it is asked to."""
    header = SegmentHeader(bytes(16), 1, 0, 1, 8192, Extent(0, 1, 0, 1), 4096, 0)
    files = Descriptors(lambda name: (os.open(tmp_path, os.O_RDONLY), header))
    first, fstat = files.lease((1, 0)), os.fstat
    assert first is not None
    dead = first.fd

    def answer(fd: int) -> os.stat_result:
        if fd == dead:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", answer)
    files.close_unlinked()
    second = files.lease((1, 0))
    assert second is first
    for segment in (first, second):
        segment.release()
    files.close()
    with pytest.raises(OSError):
        fstat(dead)
