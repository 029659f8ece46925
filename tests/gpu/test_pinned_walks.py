"""Loads on a GPU out of segments in memory that are registered with CUDA, which others change and cut meanwhile."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.io.native import reads_issued
from kvtier.runtime import metrics as names
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from tests.gpu.test_walks import TARGET, expected, flip_a_byte, is_equal, load_behind, save_late, start
from tests.support.rig import Engine

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not os.access(SHM, os.W_OK) or file_system_of(SHM).kind not in IN_MEMORY,
    reason="no CUDA device, or no tmpfs, here",
)


@pytest.fixture(name="root")
def _root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir=SHM) as folder:
        yield Path(folder)


@pytest.fixture(name="reader")
def _reader(root: Path) -> Iterator[Engine]:
    """An engine that has pinned the one segment of another, which has ended, and so cut it to what it wrote."""
    made: list[Engine] = []
    writer = start(root, [])
    save_late(writer)
    writer.close()
    reader = start(root, made, host={"arena_bytes": "16MiB", "admit": "never"})
    deadline = time.monotonic() + 20
    while not reader.transfers[0].metrics.total().get(names.PINNED_FILE_BYTES, 0):
        assert time.monotonic() < deadline, "nothing was pinned"
        time.sleep(0.01)
    yield reader
    reader.close()


def test_the_gpu_copies_out_of_the_file(root: Path, reader: Engine) -> None:
    (segment,) = root.rglob("*.kvseg")
    assert reader.transfers[0].metrics.total()[names.PINNED_FILE_BYTES] == segment.stat().st_size
    before = reads_issued()
    assert load_behind(reader) == (5, frozenset())
    assert is_equal(reader.blocks(TARGET), expected(reader))
    assert reads_issued() == before


def test_a_byte_that_is_flipped_afterwards_is_a_miss(root: Path, reader: Engine) -> None:
    (segment,) = root.rglob("*.kvseg")
    flip_a_byte(segment)
    assert load_behind(reader) == (5, frozenset(TARGET))
    assert reader.transfers[0].metrics.total()[names.CHECKSUM_FAILURES] == 1


def test_a_segment_that_is_cut_afterwards_is_short(root: Path, reader: Engine) -> None:
    """Although its pages are still there: what is gone counts as gone, and not as bytes that are wrong."""
    (segment,) = root.rglob("*.kvseg")
    os.truncate(segment, segment.stat().st_size // 2 // 4096 * 4096)
    n, failed = load_behind(reader)
    assert n == 5 and failed and failed < frozenset(TARGET)
    totals = reader.transfers[0].metrics.total()
    assert totals[names.GONE_CHUNKS] and names.CHECKSUM_FAILURES not in totals
