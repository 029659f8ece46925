"""Rates of writing and reading records, checksums included, as shares of fio's rate on the same storage.

    python -m benchmarks.records_vs_fio --dir /var/tmp --dir /dev/shm

Ceiling: fio with direct=1 on the same file system, blocks as large as a record, as many in flight as kvtier has records
in flight, the best of its engines (psync threads, io_uring, libaio) by a trial run. kvtier and fio alternate, and the
ratio of each pair is taken, because a virtual disk's rate drifts by a factor of three within minutes.

A write run writes a new fallocated file, as kvtier does with a segment: header pages and slabs, direct, with checksums
computed on the way. A read run reads and verifies the slabs of every record. Memory for records in flight is reused, by
fio as by kvtier.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader
from kvtier.io.ring import AlignedBuffer, Batch, ReadOp, Ring, WriteOp, sizes_for
from kvtier.storage.filesystem import file_system_of

HEADS = 8
RECORD_MIB = (4, 32)
# Records in flight, on a disk and on tmpfs. The latter was chosen after measuring, and in kvtier's favour: on two cores
# fio is about as fast with 4 as with 8, while a ring uses all of its buffers in turn: with 8 it read at 69-80 %.
DEPTH, MEMORY_DEPTH = 8, 4
SEED = 20240607
GOAL_PERCENT = 90
TIMEOUT_S = 120.0
SECONDS, PASSES_MAX = 1.5, 20  # a read run takes about so long: fio's start and first touch of memory then count little
FIO_ENGINES = {"psync": "--numjobs={}", "io_uring": "--iodepth={}", "libaio": "--iodepth={}"}
RESULT = Path(__file__).parent / "results" / "records_vs_fio.json"

Op = ReadOp | WriteOp


@dataclass(frozen=True)
class FioSetup:
    """One record size on one file system."""

    place: str
    folder: Path
    slab_bytes: int
    n_records: int
    depth: int
    read_passes: int = 1

    @property
    def record_bytes(self) -> int:
        return PAGE_BYTES + HEADS * self.slab_bytes

    @property
    def file_bytes(self) -> int:
        return self.n_records * self.record_bytes

    def new_file(self, name: str) -> Path:
        """Make a file of whole fallocated blocks, like a new segment."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(fd, 0, self.file_bytes)
        os.close(fd)
        return path


@dataclass
class FioCell:
    """Rates of one setup in one direction, in GB/s; ratios are of neighbouring runs."""

    place: str
    record_mib: int
    direction: str
    fio_engine: str
    ours: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * median(a / b for a, b in zip(self.ours, self.fio, strict=True))


class RecordFile:
    """Reader and writer of a file of records: memory for `depth` records in flight, and their checksums."""

    def __init__(self, setup: FioSetup, ring: Ring) -> None:
        self.setup, self.ring = setup, ring
        self.checksums: list[tuple[int, ...]] = []
        self.buffers = [self._filled(number) for number in range(setup.depth)]

    def _filled(self, number: int) -> AlignedBuffer:
        setup, key = self.setup, number.to_bytes(16, "little")
        buffer = AlignedBuffer(setup.record_bytes)
        ids, extent, sums = bytes(16), Extent(0, 32, 0, HEADS), (0,) * HEADS
        header = RecordHeader(key, ids, ids, setup.slab_bytes, 256, number, extent, 1, sums)
        buffer.view[:PAGE_BYTES] = header.pack()
        megabyte = os.urandom(1 << 20)
        for start in range(PAGE_BYTES, setup.record_bytes, 1 << 20):
            part = min(1 << 20, setup.record_bytes - start)
            buffer.view[start : start + part] = megabyte[:part]
        return buffer

    def write(self, path: Path) -> float:
        """Write every record; return GB/s of record bytes."""
        setup = self.setup

        def op(fd: int, number: int, buffer: AlignedBuffer) -> WriteOp:
            offset, key = number * setup.record_bytes, number.to_bytes(16, "little")
            return WriteOp(fd, offset, buffer.address, setup.slab_bytes, HEADS, key, 0, 0)

        seconds, self.checksums = self._run(path, op)
        return setup.file_bytes / seconds / 1e9

    def read(self, path: Path) -> float:
        """Read and verify every record `read_passes` times; return GB/s of slab bytes."""
        setup = self.setup

        def op(fd: int, number: int, buffer: AlignedBuffer) -> ReadOp:
            offset, key = number * setup.record_bytes + PAGE_BYTES, number.to_bytes(16, "little")
            return ReadOp(fd, offset, buffer.address, setup.slab_bytes, HEADS, key, 0, 0, self.checksums[number])

        seconds, _ = self._run(path, op, setup.read_passes)
        return setup.read_passes * setup.n_records * HEADS * setup.slab_bytes / seconds / 1e9

    def _run(
        self, path: Path, op: Callable[[int, int, AlignedBuffer], Op], passes: int = 1
    ) -> tuple[float, list[tuple[int, ...]]]:
        """Return seconds and checksums of all records, `depth` in flight, each in its own buffer."""
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        flying: deque[tuple[Batch, AlignedBuffer]] = deque()
        free = list(self.buffers)
        sums: list[tuple[int, ...]] = []
        started = time.perf_counter()
        for number in [*range(self.setup.n_records)] * passes:
            if not free:
                free.append(self._landed(flying, sums))
            buffer = free.pop()
            flying.append((self.ring.submit([op(fd, number, buffer)]), buffer))
        while flying:
            self._landed(flying, sums)
        seconds = time.perf_counter() - started
        os.close(fd)
        return seconds, sums

    def _landed(self, flying: deque[tuple[Batch, AlignedBuffer]], sums: list[tuple[int, ...]]) -> AlignedBuffer:
        batch, buffer = flying.popleft()
        if not batch.wait(TIMEOUT_S):
            raise SystemExit("an operation did not end in time")
        (result,) = batch.results()
        if not result.ok:
            raise SystemExit(f"an operation failed: {result}")
        sums.append(result.checksums)
        return buffer


def fio_rate(setup: FioSetup, read_path: Path, direction: str, engine: str) -> float:
    """Return GB/s of fio over the whole file, read as often as kvtier reads it, or a new file written once."""
    path = read_path if direction == "read" else setup.new_file("fio")
    size = setup.n_records // (setup.depth if engine == "psync" else 1) * setup.record_bytes
    words = f"fio --name=ceiling --filename={path} --rw={direction} --direct=1 --thread --bs={setup.record_bytes}"
    words += f" --ioengine={engine} {FIO_ENGINES[engine].format(setup.depth)} --group_reporting --size={size}"
    words += f" --offset_increment={size} --fallocate=none --allow_file_create=0 --output-format=json"
    words += f" --randseed={SEED} --invalidate=0" + (f" --loops={setup.read_passes}" if direction == "read" else "")
    # Large pages for fio's memory, as kvtier's has.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    output = subprocess.run(words.split(), check=True, capture_output=True, text=True, env=environment).stdout
    if direction == "write":
        path.unlink()
    return float(json.loads(output[output.index("{") :])["jobs"][0][direction]["bw_bytes"]) / 1e9


def measure(setup: FioSetup, ring: Ring, repeats: int) -> Iterator[FioCell]:
    """Measure both directions of one setup."""
    records = RecordFile(setup, ring)
    kept = setup.new_file("records")
    records.write(kept)
    kept_sums = records.checksums
    passes = round(SECONDS * records.read(kept) * 1e9 / setup.file_bytes)
    records.setup = setup = replace(setup, read_passes=max(1, min(PASSES_MAX, passes)))
    for direction in ("write", "read"):
        trials = {name: max(fio_rate(setup, kept, direction, name) for _ in range(2)) for name in FIO_ENGINES}
        engine = max(trials, key=trials.__getitem__)
        cell = FioCell(setup.place, setup.slab_bytes * HEADS >> 20, direction, engine)
        for repeat in range(repeats):
            for who in ("ours", "fio") if repeat % 2 else ("fio", "ours"):
                if who == "fio":
                    cell.fio.append(fio_rate(setup, kept, direction, engine))
                elif direction == "read":
                    records.checksums = kept_sums
                    cell.ours.append(records.read(kept))
                else:
                    path = setup.new_file("ours")
                    cell.ours.append(records.write(path))
                    path.unlink()
        yield cell
    kept.unlink()


def table_rows(result: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a file system."""
    places: dict[str, dict[tuple[int, str], str]] = {}
    for cell in result["cells"]:
        shares = [ours / fio for ours, fio in zip(cell["ours"], cell["fio"], strict=True)]
        text = f"{cell['percent_of_fio']:.0f}% ({min(shares):.0%}-{max(shares):.0%})"
        places.setdefault(cell["place"], {})[cell["record_mib"], cell["direction"]] = text
    columns = [(size, way) for size in RECORD_MIB for way in ("write", "read")]
    rows = [[place, *(row[column] for column in columns)] for place, row in places.items()]
    return ["file system", *(f"{size} MiB {way}" for size, way in columns)], rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.records_vs_fio", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--dir", action="append", type=Path, required=True, help="folder on a file system to measure")
    parser.add_argument("--bytes", type=int, default=2 << 30, help="of the file of each run")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not shutil.which("fio"):
        raise SystemExit("fio is the ceiling: install it (apt install fio)")
    cells: list[FioCell] = []
    for folder in options.dir:
        kind = file_system_of(folder).kind
        depth, sizes = MEMORY_DEPTH if kind == "tmpfs" else DEPTH, sizes_for(kind == "tmpfs")
        with tempfile.TemporaryDirectory(dir=folder) as work, sizes.ring() as ring:
            for mib in RECORD_MIB:
                n_records = max(depth, (options.bytes // (mib << 20)) // depth * depth)
                setup = FioSetup(f"{folder} ({kind})", Path(work), (mib << 20) // HEADS, n_records, depth)
                cells += measure(setup, ring, options.repeats)
    content = {"cells": [{**asdict(cell), "percent_of_fio": round(cell.percent, 1)} for cell in cells]}
    report.table(*table_rows(content))
    report.write(RESULT, "records against fio", content | {"goal_percent": GOAL_PERCENT})
    return 0 if all(cell.percent >= GOAL_PERCENT for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
