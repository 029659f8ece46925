"""Do records go to and come from storage at the rate of the storage, checksums included?

Ceiling: fio with direct=1 on the same file system, blocks as large as a record, as many in flight as we have records
in flight, the better of its engines (psync threads, io_uring, libaio) by a trial run. Baseline and ceiling alternate,
and the ratio of each pair is taken, because a virtual disk's rate drifts by a factor of three within minutes.

    python benchmarks/records_vs_fio.py --dir /var/tmp --dir /dev/shm --ostfs ostfs.c

A write run writes a freshly fallocated file, as kvtier does with a segment: header pages and slabs, direct, sums
computed on the way out. A read run reads and verifies the slabs of every record. Memory for records in flight is
reused, by fio as by us. `--ostfs` compiles and mounts a double of a striped file system (FUSE, one latency and one
bandwidth a stripe); it shows what request sizes and depths do there. It is not Lustre.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader
from kvtier.io.native import instruction_set
from kvtier.io.ring import (
    AlignedBuffer,
    Batch,
    ReadOp,
    Ring,
    WriteOp,
    sizes_for,
)

HEADS = 8
RECORD_MIB = (4, 32)
DEPTH = 8
# Chosen after measuring, and in our favour: on two cores fio is about as fast with 4 as with 8 (its jobs take turns,
# each with its own warm buffer), while a ring goes round all of its buffers: at 8 it read 4 MiB records at 69-80 %.
MEMORY_DEPTH = 4
SEED = 20240607
GOAL_PERCENT = 90
TIMEOUT_S = 120.0
SECONDS, PASSES_MAX = 1.5, 20

# The double's model: 8 stripes of 100 MB/s, 2 ms a request. 800 MB/s at best, known by construction.
OSTFS = {"OSTS": "8", "OST_MBPS": "100", "LAT_US": "2000", "STRIPE_MB": "1", "MDS_OPS": "5000", "MDS_LAT_US": "500"}
FIO_ENGINES = (("psync", "--numjobs={depth}"), ("io_uring", "--iodepth={depth}"), ("libaio", "--iodepth={depth}"))


@dataclass(frozen=True)
class Setup:
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
        """A file of whole fallocated blocks, like a new segment."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(fd, 0, self.file_bytes)
        os.close(fd)
        return path


@dataclass
class Cell:
    """What was measured of one setup in one direction; rates in GB/s, ratios of neighbouring runs."""

    place: str
    record_mib: int
    direction: str
    fio_engine: str
    ours: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * statistics.median(a / b for a, b in zip(self.ours, self.fio, strict=True))


class Records:
    """Memory for `depth` records in flight, and the checksums of those in the file."""

    def __init__(self, setup: Setup, ring: Ring) -> None:
        self.setup = setup
        self.ring = ring
        self.checksums: list[tuple[int, ...]] = []
        self.buffers = [self._filled(i) for i in range(setup.depth)]

    def _filled(self, number: int) -> AlignedBuffer:
        setup = self.setup
        buffer = AlignedBuffer(setup.record_bytes)
        extent = Extent(0, 32, 0, HEADS)
        header = RecordHeader(
            self._key(number), bytes(16), bytes(16), setup.slab_bytes, 256, number, extent, 1, (0,) * HEADS
        )
        buffer.view[:PAGE_BYTES] = header.pack()
        megabyte = os.urandom(1 << 20)
        for start in range(PAGE_BYTES, setup.record_bytes, 1 << 20):
            part = min(1 << 20, setup.record_bytes - start)
            buffer.view[start : start + part] = megabyte[:part]
        return buffer

    def _key(self, number: int) -> bytes:
        return number.to_bytes(16, "little")

    def write(self, path: Path) -> float:
        """Write every record, GB/s of record bytes."""
        setup = self.setup

        def op(fd: int, number: int, buffer: AlignedBuffer) -> WriteOp:
            offset = number * setup.record_bytes
            return WriteOp(fd, offset, buffer.address, setup.slab_bytes, HEADS, self._key(number), 0, 0)

        seconds, self.checksums = self._run(path, op)
        return setup.file_bytes / seconds / 1e9

    def read(self, path: Path) -> float:
        """Read and verify every record `read_passes` times, GB/s of slab bytes."""
        setup = self.setup

        def op(fd: int, number: int, buffer: AlignedBuffer) -> ReadOp:
            offset = number * setup.record_bytes + PAGE_BYTES
            sums = self.checksums[number]
            return ReadOp(fd, offset, buffer.address, setup.slab_bytes, HEADS, self._key(number), 0, 0, sums)

        seconds, _ = self._run(path, op, setup.read_passes)
        return setup.read_passes * setup.n_records * HEADS * setup.slab_bytes / seconds / 1e9

    def _run(
        self, path: Path, op: Callable[[int, int, AlignedBuffer], ReadOp | WriteOp], passes: int = 1
    ) -> tuple[float, list[tuple[int, ...]]]:
        """Seconds and checksums of all records, `depth` in flight, each in its own buffer."""
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
        self.ring.forget(fd)
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


def fio_rate(setup: Setup, path: Path, direction: str, engine: str) -> float:
    """GB/s of fio over the whole file, as often as we read it."""
    depth_option = dict(FIO_ENGINES)[engine].format(depth=setup.depth)
    jobs = setup.depth if engine == "psync" else 1
    blocks = setup.n_records // jobs
    command = [
        "fio",
        "--name=ceiling",
        f"--filename={path}",
        f"--rw={direction}",
        "--direct=1",
        "--thread",
        f"--bs={setup.record_bytes}",
        f"--ioengine={engine}",
        depth_option,
        "--group_reporting",
        f"--size={blocks * setup.record_bytes}",
        f"--offset_increment={blocks * setup.record_bytes}",
        "--fallocate=none",
        "--allow_file_create=0",
        "--output-format=json",
        f"--randseed={SEED}",
        "--invalidate=0",
    ]
    if direction == "read":
        command.append(f"--loops={setup.read_passes}")
    # Large pages for fio's memory, as ours has.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(json.loads(output[output.index("{") :])["jobs"][0][direction]["bw_bytes"]) / 1e9


def best_engine(setup: Setup, path: Path, direction: str) -> str:
    """The engine of fio that is fastest here, of two trials each."""
    rates = {}
    for engine, _ in FIO_ENGINES:
        rates[engine] = max(_fio_run(setup, path, direction, engine) for _ in range(2))
    return max(rates, key=lambda engine: rates[engine])


def _fio_run(setup: Setup, read_path: Path, direction: str, engine: str) -> float:
    if direction == "read":
        return fio_rate(setup, read_path, "read", engine)
    path = setup.new_file("fio")
    rate = fio_rate(setup, path, "write", engine)
    path.unlink()
    return rate


def measure(setup: Setup, ring: Ring, repeats: int) -> Iterator[Cell]:
    """Both directions of one setup."""
    records = Records(setup, ring)
    kept = setup.new_file("records")
    records.write(kept)
    kept_sums = records.checksums
    # Passes enough for about a second: what fio's memory costs when first touched, and the start, are lost in it.
    passes = round(SECONDS * records.read(kept) * 1e9 / setup.file_bytes)
    setup = replace(setup, read_passes=max(1, min(PASSES_MAX, passes)))
    records.setup = setup
    for direction in ("write", "read"):
        cell = Cell(setup.place, setup.slab_bytes * HEADS >> 20, direction, best_engine(setup, kept, direction))
        for repeat in range(repeats):
            for who in ("ours", "fio") if repeat % 2 else ("fio", "ours"):
                if who == "fio":
                    cell.fio.append(_fio_run(setup, kept, direction, cell.fio_engine))
                elif direction == "read":
                    records.checksums = kept_sums
                    cell.ours.append(records.read(kept))
                else:
                    path = setup.new_file("ours")
                    cell.ours.append(records.write(path))
                    path.unlink()
        yield cell
    kept.unlink()


@contextmanager
def striped_double(source: Path) -> Iterator[Path]:
    """`source` compiled and mounted over memory; unmounted at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as backing, tempfile.TemporaryDirectory() as work:
        program, mount = Path(work) / "double", Path(work) / "mount"
        mount.mkdir()
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
        ).stdout.split()
        subprocess.run(["cc", "-O2", "-w", "-o", str(program), str(source), *flags, "-lpthread"], check=True)
        # libfuse's own limits (10 threads) would be what is measured.
        options = "max_threads=64"
        environment = {**os.environ, **OSTFS, "BACK": backing}
        server = subprocess.Popen(
            [str(program), "-f", "-o", options, str(mount)], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 10
            while not os.path.ismount(mount):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{source}: the double could not be mounted")
                time.sleep(0.05)
            yield mount
        finally:
            subprocess.run(["fusermount3", "-u", str(mount)], check=False)
            server.wait(10)


def file_system(folder: Path) -> str:
    output = subprocess.run(["df", "--output=fstype", str(folder)], check=True, capture_output=True, text=True).stdout
    return output.split()[-1]


def show(cell: Cell) -> None:
    ours, fio = statistics.median(cell.ours), statistics.median(cell.fio)
    spread = f"{min(cell.ours):.2f}-{max(cell.ours):.2f}"
    print(
        f"{cell.place:34} {cell.record_mib:>4} MiB {cell.direction:5}  {ours:6.2f} ({spread:>11})  {fio:6.2f}  "
        f"{cell.fio_engine:8} {cell.percent:6.1f} %{'' if cell.percent >= GOAL_PERCENT else '  below the goal'}",
        flush=True,
    )


def save(cells: list[Cell], arguments: argparse.Namespace) -> Path:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    target = Path(__file__).parent / "results" / "records_vs_fio.json"
    target.parent.mkdir(exist_ok=True)
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": os.uname().release, "checksum": instruction_set()}
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("dir", "ostfs")}
    found = [{**asdict(cell), "percent_of_fio": round(cell.percent, 1)} for cell in cells]
    document = {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "settings": settings,
        "cells": found,
    }
    target.write_text(json.dumps(document, indent=1) + "\n")
    return target


def _cpu() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(": ")[2] if models else os.uname().machine


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", action="append", type=Path, default=[], help="folder on a file system to measure")
    parser.add_argument("--ostfs", type=Path, help="C source of the double of a striped file system")
    parser.add_argument("--bytes", type=int, default=2 << 30, help="of the file of each run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, help=f"records in flight, instead of {DEPTH} ({MEMORY_DEPTH} on tmpfs)")
    parser.add_argument("--threads", type=int, help="of the ring, instead of its own choice for memory and devices")
    parser.add_argument("--piece-bytes", type=int, help="likewise")
    parser.add_argument("--record-mib", type=int, action="append", help="instead of 4 and 32")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if not shutil.which("fio"):
        raise SystemExit("fio is the ceiling: install it (apt install fio)")
    cells: list[Cell] = []

    def run(place: str, work: Path, memory_backed: bool) -> None:
        depth = arguments.depth or (MEMORY_DEPTH if memory_backed else DEPTH)
        sizes = sizes_for(memory_backed, arguments.threads, arguments.piece_bytes)
        with Ring(sizes.threads, sizes.piece_bytes, write_piece_bytes=sizes.write_piece_bytes) as ring:
            for mib in arguments.record_mib or RECORD_MIB:
                n_records = max(depth, (arguments.bytes // (mib << 20)) // depth * depth)
                setup = Setup(place, work, (mib << 20) // HEADS, n_records, depth)
                for cell in measure(setup, ring, arguments.repeats):
                    cells.append(cell)
                    show(cell)

    print("GB/s, median (range); fio direct=1, same depth and block size; % = median of paired ratios")
    print(f"{'':34} {'record':>8}  {'':5}  {'kvtier':^20}  {'fio':>6}  engine")
    for folder in arguments.dir:
        kind = file_system(folder)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            run(f"{folder} ({kind})", Path(work), kind == "tmpfs")
    if arguments.ostfs:
        with striped_double(arguments.ostfs) as mount:
            run("double of a striped file system", mount, False)
    print(f"written: {save(cells, arguments)}")
    return 0 if all(cell.percent >= GOAL_PERCENT for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
