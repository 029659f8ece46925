"""What the machine can do at best: copies over PCIe and in the GPU's memory, direct reads and writes of folders.

    python -m benchmarks.gpu.ceilings --folders /dev/shm/kv,/mnt/kv --out OUT/ceilings.json [--reads] [--gib 8]

With --reads also reads of files straight into the GPU, by kvtier's ring over its threads, pieces and slots, and by
KvikIO: what share of the two ceilings (storage, PCIe) they reach (device_reads.py).
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.report import median

THREADS = 16
PIECE_BYTES = 4 << 20
READ_GRID = [(16, 4 << 20), (16, 1 << 20), (8, 4 << 20), (8, 1 << 20), (64, 1 << 20)]
"""Threads and bytes of a piece: the storage's rate is the best of these."""
COPY_PIECE_BYTES = 64 << 20
REPEATS = 3
REPEATS_S = 1.0
"""No more repeats after so long."""
GIB = 1 << 30


def direct_writes(folder: Path, n_bytes: int, keep: bool = False) -> dict[str, Any]:
    """Direct writes to one fallocated file, as kvtier writes: bytes a second of the first pass over fresh blocks.

    The content is random and of one piece, again and again. `keep`: the file stays, as `ceiling.bin`.
    """
    path = folder / "ceiling.bin"
    flags, is_direct = direct_flags(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
        seconds = each_piece(n_bytes, lambda view, offset: os.pwritev(fd, [view], offset), THREADS, PIECE_BYTES)
    finally:
        os.close(fd)
        if not keep:
            path.unlink()
    return {"bytes_s": n_bytes / seconds, "bytes": n_bytes, "direct": is_direct, "threads": THREADS}


def direct_reads(path: Path) -> dict[str, Any]:
    """Direct reads of a file, the best of READ_GRID; of each the median of REPEATS, fewer on a disk."""
    flags, is_direct = direct_flags(path, os.O_RDONLY)
    n_bytes = path.stat().st_size
    fd = os.open(path, flags)
    try:
        rates = {
            f"{threads} x {piece >> 20} MiB": n_bytes / read_s(fd, n_bytes, threads, piece)
            for threads, piece in READ_GRID
        }
    finally:
        os.close(fd)
    return {"bytes_s": max(rates.values()), "all_bytes_s": rates, "bytes": n_bytes, "direct": is_direct}


def copies() -> dict[str, float]:
    """Bytes a second of pinned copies either way, in pieces, and of copies within the GPU (read plus written)."""
    import torch

    host = torch.randint(0, 255, (COPY_PIECE_BYTES,), dtype=torch.uint8).pin_memory()
    device = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    pieces = device.split(COPY_PIECE_BYTES)

    def to_device() -> None:
        for piece in pieces:
            piece.copy_(host, non_blocking=True)

    def to_host() -> None:
        for piece in pieces:
            host.copy_(piece, non_blocking=True)

    other = torch.empty_like(device)
    return {
        "h2d_bytes_s": _device_rate(to_device, device.numel()),
        "d2h_bytes_s": _device_rate(to_host, device.numel()),
        "device_copy_bytes_s": 2 * _device_rate(lambda: other.copy_(device), device.numel()),
    }


def read_s(fd: int, n_bytes: int, threads: int, piece_bytes: int) -> float:
    """Seconds that reading the whole file takes: the median of REPEATS, fewer on a disk."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < REPEATS_S:
        times.append(each_piece(n_bytes, lambda view, offset: os.preadv(fd, [view], offset), threads, piece_bytes))
    return median(times)


def _device_rate(work: Callable[[], object], n_bytes: int) -> float:
    import torch

    rates = []
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        rates.append(n_bytes / (start.elapsed_time(end) / 1e3))
    return median(rates[1:])  # the first one warms up


def direct_flags(path: Path, flags: int) -> tuple[int, bool]:
    """With O_DIRECT where the file system takes it."""
    try:
        os.close(os.open(path, flags | os.O_DIRECT, 0o600))
    except OSError:
        return flags, False
    return flags | os.O_DIRECT, True


def each_piece(n_bytes: int, move: Callable[[memoryview, int], int], threads: int, piece_bytes: int) -> float:
    """Seconds in which so many threads, each with one aligned buffer of the same random bytes, move all pieces."""
    offsets = iter(range(0, n_bytes, piece_bytes))  # a step of an iterator is atomic
    content = os.urandom(piece_bytes)
    buffers = []
    for _ in range(threads):
        buffer = mmap.mmap(-1, piece_bytes)
        buffer.write(content)
        buffers.append(memoryview(buffer))

    def work(view: memoryview) -> None:
        for offset in offsets:
            size = min(piece_bytes, n_bytes - offset)
            if move(view[:size], offset) != size:
                raise OSError(f"a short transfer at {offset}")

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for job in [pool.submit(work, view) for view in buffers]:
            job.result()
        return time.perf_counter() - started


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ceilings", description=__doc__.splitlines()[0])
    parser.add_argument("--folders", required=True, help="divided by commas")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--gib", type=float, default=8.0, help="size of the file in each folder")
    parser.add_argument("--reads", action="store_true", help="also reads into the GPU")
    parser.add_argument("--no-gpu", action="store_true", help="folders alone, to try this script")
    return parser.parse_args(text)


def main() -> int:
    arguments = parse()
    n_bytes = int(arguments.gib * GIB) // PIECE_BYTES * PIECE_BYTES
    content: dict[str, Any] = {"copies": {} if arguments.no_gpu else copies(), "folders": {}}
    rows = [(name.removesuffix("_bytes_s"), f"{value / 1e9:.1f}", "") for name, value in content["copies"].items()]
    for folder in map(Path, arguments.folders.split(",")):
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"writes": direct_writes(folder, n_bytes, keep=True)}
        path = folder / "ceiling.bin"
        try:
            found["reads"] = direct_reads(path)
            rows += [
                (
                    f"{folder}: {way}",
                    f"{found[way]['bytes_s'] / 1e9:.2f}",
                    "direct" if found[way]["direct"] else "buffered",
                )
                for way in ("writes", "reads")
            ]
            if arguments.reads:
                from benchmarks.gpu import device_reads

                limit = min(found["reads"]["bytes_s"], content["copies"].get("h2d_bytes_s", float("inf")))
                found["device_reads"] = device_reads.measure(path, limit, on_device=not arguments.no_gpu)
                rows += [
                    (f"  {row['reader']}", f"{row['bytes_s'] / 1e9:.2f}", f"{row['percent']:.0f}% of the limit")
                    for row in found["device_reads"]
                ]
        finally:
            path.unlink()
        content["folders"][str(folder)] = found
    report.write(arguments.out, "what this machine can do at best", content)
    report.table(("what", "GB/s", ""), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
