"""Rate of loading weights, beside plain reads of the same files and, on a GPU, copies over PCIe."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.errors import TierUnavailable
from kvtier.io.ranges import PIECE_BYTES, THREADS
from kvtier.kernels import pcie
from kvtier.model.safetensors import read_header
from kvtier.runtime.threads import run_each
from kvtier.weights import manifest
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.reader import ReadReport, WeightReader, open_file
from kvtier.weights.verify import weight_files

ROUNDS = 3
TARGET_BYTES = 256 << 20
HANGS_S = 600.0  # deadline of one plain read, seconds


@dataclass(frozen=True, slots=True)
class WeightRates:
    """Bytes a second: medians over the rounds; of ceilings the best. verified, pcie: None if not measured."""

    n_bytes: int
    files: int
    direct_files: int
    rounds: int
    loading: float
    verified: float | None
    plain_read: float
    pcie: float | None

    @property
    def ceiling(self) -> float:
        return self.plain_read if self.pcie is None else min(self.plain_read, self.pcie)

    @property
    def share(self) -> float:
        """Return the fraction of the ceiling that loading reaches."""
        return self.loading / self.ceiling

    def rates(self) -> Iterator[tuple[str, float]]:
        yield "", self.loading
        if self.verified is not None:
            yield ", compared with the manifest", self.verified

    def ceilings(self) -> Iterator[tuple[str, float]]:
        yield f"plain reads, {THREADS} threads", self.plain_read
        if self.pcie is not None:
            yield "copies of pinned memory over PCIe", self.pcie


def measure(folder: Path, device: str, show: Callable[[int, int], None]) -> WeightRates:
    """Measure all in turns. Raises as `WeightReader.read`, TierUnavailable for a device that torch does not have."""
    files = weight_files(folder)
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("weights load to the CPU or to CUDA")
        target = torch.empty(TARGET_BYTES, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TierUnavailable(f"device {device} cannot be used: {error}") from None
    copies = list(_copies(files))
    n_bytes = sum(copy.n_bytes for copy in copies)
    sums = manifest.of_files(files)
    total = ROUNDS * n_bytes * (2 if sums else 1)
    done = 0
    times: dict[str, list[float]] = {"loading": [], "verified": [], "plain": []}
    with WeightReader(progress=lambda landed: show(done + landed, total)) as reader:
        for _ in range(ROUNDS):
            report = _timed(times["loading"], lambda: reader.read(files, copies, [target]))
            done += n_bytes
            if sums:
                report = _timed(times["verified"], lambda: reader.read(files, copies, [target], sums))
                done += n_bytes
            times["plain"].append(_plain(files))
    return WeightRates(
        n_bytes,
        len(files),
        report.direct_files,
        ROUNDS,
        n_bytes / statistics.median(times["loading"]),
        n_bytes / statistics.median(times["verified"]) if sums else None,
        sum(path.stat().st_size for path in files) / min(times["plain"]),
        pcie.rates()[0] if target.is_cuda else None,
    )


def _copies(files: Sequence[Path]) -> Iterator[Copy]:
    for number, path in enumerate(files):
        for entry in read_header(path).tensors.values():
            for start in range(entry.start, entry.stop, TARGET_BYTES):
                yield contiguous(number, start, min(TARGET_BYTES, entry.stop - start), 0)


def _timed(times: list[float], read: Callable[[], ReadReport]) -> ReadReport:
    started_s = time.perf_counter()
    report = read()
    times.append(time.perf_counter() - started_s)
    return report


def _plain(files: Sequence[Path]) -> float:
    """Return the seconds of plain system calls that read the files into memory that is dropped."""
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(THREADS):
        buffers.put(mmap.mmap(-1, PIECE_BYTES))

    def move(piece: tuple[int, int, int]) -> None:
        descriptor, offset, needed = piece
        buffer = buffers.get()
        try:
            if os.preadv(descriptor, [buffer], offset) < needed:
                raise OSError(errno.EIO, "the read returned fewer bytes than asked for")
        finally:
            buffers.put(buffer)

    with ExitStack() as stack:
        pieces = []
        for path in files:
            descriptor = open_file(path, stack).descriptor
            size = os.fstat(descriptor).st_size
            pieces += [(descriptor, at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
        return run_each(THREADS, HANGS_S, move, pieces)
