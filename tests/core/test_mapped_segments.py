"""Segments of a root in memory, mapped: through the real Transfer, with files that are cut and evicted under it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.io import memory_reads
from kvtier.io.filesystem import IN_MEMORY, file_system_of
from kvtier.io.memory_reads import MemoryReads
from kvtier.io.native import reads_issued
from kvtier.io.ring import InMemory
from tests.core.rig import Engine, reader_of_saved
from tests.waiting import wait_until

SHM = Path("/dev/shm")
TOKENS, SAVED, TARGET = list(range(64 * 3)), list(range(12)), list(range(100, 112))


@pytest.fixture(name="root")
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if not SHM.is_dir() or file_system_of(SHM).kind not in IN_MEMORY or not os.access(SHM, os.W_OK):
        pytest.skip("no file system in memory here")
    monkeypatch.setattr(memory_reads, "measured", lambda *_: MemoryReads(InMemory(map_reads=True), "mapped"))
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir=SHM) as folder:
        yield Path(folder)


@pytest.fixture(name="reader")
def _reader(root: Path) -> Iterator[Engine]:
    """Of what another engine saved."""
    reader = reader_of_saved(root, TOKENS, SAVED)
    reader.prefill(TOKENS, SAVED)  # what is expected
    yield reader
    reader.close()
    wait_until(lambda: not mapped(), "the end of the mappings")


def mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if ".kvseg" in line]


def loads(reader: Engine) -> int:
    """How many chunks come, and are right."""
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    n_failed = len(answer.failed_blocks) // reader.chunk_blocks
    good = (n_chunks - n_failed) * reader.chunk_blocks
    for found, expected in zip(reader.blocks(TARGET[:good]), reader.blocks(SAVED[:good]), strict=True):
        assert torch.equal(found, expected)
    return n_chunks - n_failed


def test_loads_ask_the_kernel_for_nothing(reader: Engine) -> None:
    before = reads_issued()
    assert loads(reader) == loads(reader) == 3
    assert reads_issued() == before and len(mapped()) == 1


def test_a_cut_segment_is_a_miss(reader: Engine, root: Path) -> None:
    assert loads(reader) == 3
    (segment,) = root.glob("v1/*/*.kvseg")
    os.truncate(segment, segment.stat().st_size // 2)
    assert loads(reader) < 3
    os.truncate(segment, 4096)
    assert loads(reader) == 0


def test_an_evicted_segment_is_let_go_of(reader: Engine, root: Path) -> None:
    assert loads(reader) == 3 and mapped()
    (segment,) = root.glob("v1/*/*.kvseg")
    segment.unlink()
    for transfer in reader.transfers:
        transfer._worker.files.close_unlinked()
    deadline = time.monotonic() + 10
    while mapped():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert loads(reader) == 0
