"""What benchmarks/gpu/resident.py takes for a process's own memory, and that it keeps the most of it."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from benchmarks.gpu.resident import ResidentWatch, sizes
from tests.waiting import wait_until

BYTES = 64 << 20
NOISE_BYTES = 16 << 20
"""What other tests' threads in this process may take or free meanwhile."""


@contextmanager
def own_memory() -> Iterator[None]:
    with mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as view:
        view[:: mmap.PAGESIZE] = bytes(BYTES // mmap.PAGESIZE)
        yield


def test_mapped_files_of_tmpfs_are_told_from_memory_of_ones_own_and_peaks_stay() -> None:
    own, mapped = sizes()
    with closing(ResidentWatch()) as watch:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(BYTES)
            with mmap.mmap(file.fileno(), BYTES) as view:
                view[:: mmap.PAGESIZE] = bytes(BYTES // mmap.PAGESIZE)
                own_max, mapped_max = watch.look()
                assert mapped_max >= mapped + BYTES and own_max < own + NOISE_BYTES
        with own_memory():
            assert watch.look()[0] >= own + BYTES - NOISE_BYTES
        own_max, mapped_max = watch.look()
        assert own_max >= sizes()[0] + BYTES - NOISE_BYTES and mapped_max >= sizes()[1] + BYTES


def test_a_peak_between_two_questions_is_seen() -> None:
    with closing(ResidentWatch()) as watch:
        before, _ = watch.look()
        with own_memory():
            looks = watch.looks
            wait_until(lambda: watch.looks >= looks + 2)
        assert watch.look()[0] >= before + BYTES - NOISE_BYTES
