"""Ceilings of the machine: copies over PCIe and in the GPU's memory, direct reads and writes of folders, and KvikIO.

    python -m benchmarks.gpu.ceilings --folders /dev/shm/kv,/mnt/kv --out OUT/ceilings.json [--bytes 1073741824,...]

--bytes: also KvikIO's reads of so many bytes straight into the GPU, each size --repetitions times.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from kvtier.format.geometry import PAGE_BYTES

THREADS = 16
PIECE_BYTES = 4 << 20
# Threads and bytes of a piece: the storage's rate is the best of these.
READ_GRID = ((16, 4 << 20), (16, 1 << 20), (8, 4 << 20), (8, 1 << 20), (64, 1 << 20))
COPY_PIECE_BYTES = 64 << 20
REPEATS, REPEATS_S = 3, 1.0  # reads of a file: at most so many, and no further one after so many seconds
GIB = 1 << 30
KVIKIO_THREADS, KVIKIO_TASK_BYTES = 16, 4 << 20  # the fastest on tmpfs
KVIKIO_PIECE_BYTES = 32 << 20  # a chunk of an 8B model


def direct_writes(
    folder: Path, n_bytes: int, keep: bool = False, files: int = 1, threads: int = THREADS
) -> dict[str, Any]:
    """Measure direct writes to new fallocated files, as kvtier writes: `bytes_s` of the first pass over their blocks.

    keep: the first file stays, as `ceiling.bin`. files: pieces go to so many files in turn.
    """
    paths = [folder / f"ceiling{number or ''}.bin" for number in range(files)]
    flags, is_direct = direct_flags(paths[0], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    fds = [os.open(path, flags, 0o600) for path in paths]

    def write(view: memoryview, offset: int) -> int:
        piece, file = divmod(offset // PIECE_BYTES, files)
        return os.pwritev(fds[file], [view], piece * PIECE_BYTES)

    try:
        for fd in fds:
            os.posix_fallocate(fd, 0, -(-n_bytes // files // PIECE_BYTES) * PIECE_BYTES)
        seconds = each_piece(n_bytes, write, threads, PIECE_BYTES)
    finally:
        for number, (path, fd) in enumerate(zip(paths, fds, strict=True)):
            os.close(fd)
            if number or not keep:
                path.unlink()
    return {"bytes_s": n_bytes / seconds, "bytes": n_bytes, "direct": is_direct, "threads": threads, "files": files}


def direct_reads(path: Path) -> dict[str, Any]:
    """Measure direct reads of a file: the best of READ_GRID, of each the median of its repeats."""
    rates = {f"{threads} x {piece >> 20} MiB": read_rate(path, threads, piece, REPEATS) for threads, piece in READ_GRID}
    is_direct = direct_flags(path, os.O_RDONLY)[1]
    n_bytes = path.stat().st_size
    return {"bytes_s": max(rates.values()), "all_bytes_s": rates, "bytes": n_bytes, "direct": is_direct}


def read_rate(path: Path, threads: int = THREADS, piece_bytes: int = PIECE_BYTES, repeats: int = 1) -> float:
    """Return bytes a second of direct reads of a file into plain memory, the median of the repeats."""
    n_bytes, times = path.stat().st_size // PAGE_BYTES * PAGE_BYTES, []
    fd = os.open(path, direct_flags(path, os.O_RDONLY)[0])
    try:
        while len(times) < repeats and sum(times) < REPEATS_S:
            times.append(each_piece(n_bytes, lambda view, offset: os.preadv(fd, [view], offset), threads, piece_bytes))
    finally:
        os.close(fd)
    return n_bytes / median(times)


def copies() -> dict[str, float]:
    """Measure bytes a second of pinned copies both ways, in pieces, and of copies in the GPU (read plus written)."""
    import torch

    host = torch.randint(0, 255, (COPY_PIECE_BYTES,), dtype=torch.uint8).pin_memory()
    device = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    pieces = device.split(COPY_PIECE_BYTES)
    n_bytes = device.numel()
    return {
        "h2d_bytes_s": _device_rate(lambda: [piece.copy_(host, non_blocking=True) for piece in pieces], n_bytes),
        "d2h_bytes_s": _device_rate(lambda: [host.copy_(piece, non_blocking=True) for piece in pieces], n_bytes),
        "device_copy_bytes_s": 2 * _device_rate(lambda: other.copy_(device), n_bytes),
    }


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
    """Add O_DIRECT where the file system takes it; return the flags and whether it does."""
    try:
        os.close(os.open(path, flags | os.O_DIRECT, 0o600))
    except OSError:
        return flags, False
    return flags | os.O_DIRECT, True


def each_piece(n_bytes: int, move: Callable[[memoryview, int], int], threads: int, piece_bytes: int) -> float:
    """Return the seconds in which the threads, each with one aligned buffer of random bytes, move all pieces."""
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


def kvikio_reads(path: Path, sizes: list[int], repetitions: int) -> dict[str, list[float]]:
    """Return {bytes read: seconds of each repetition}, the sizes in turn. Raise OSError after a short read."""
    import torch

    _preload_cufile()
    import kvikio
    import kvikio.defaults

    settings = {"num_threads": KVIKIO_THREADS, "task_size": KVIKIO_TASK_BYTES, "bounce_buffer_size": 16 << 20}
    kvikio.defaults.set(settings | {"auto_direct_io_read": True})
    target = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {str(n_bytes): [] for n_bytes in sizes}
    file = kvikio.CuFile(str(path), "r")
    try:
        file.pread(target[:KVIKIO_PIECE_BYTES], KVIKIO_PIECE_BYTES, 0).get()  # its buffers are made here
        for n_bytes in sizes * repetitions:
            started = time.perf_counter()
            futures = []
            for place in range(0, n_bytes, KVIKIO_PIECE_BYTES):
                size = min(KVIKIO_PIECE_BYTES, n_bytes - place)
                futures.append(file.pread(target[place : place + size], size, place))
            if sum(future.get() for future in futures) != n_bytes:
                raise OSError("a short read")
            torch.cuda.synchronize()
            found[str(n_bytes)].append(time.perf_counter() - started)
    finally:
        file.close()
    return found


def _preload_cufile() -> None:
    """Load libcufile.so.0 of the nvidia wheels, where it is not in a system folder."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(place).glob("**/libcufile.so.0")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


def measure_folder(folder: Path, n_bytes: int, kvikio_sizes: list[int], repetitions: int) -> dict[str, Any]:
    """Measure writes and reads of a file, which is removed, and KvikIO's reads of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ceiling.bin"
    try:
        found: dict[str, Any] = {"writes": direct_writes(folder, n_bytes, keep=True), "reads": direct_reads(path)}
        if kvikio_sizes:
            try:
                found["kvikio_s"] = kvikio_reads(path, kvikio_sizes, repetitions)
            except (ImportError, OSError, RuntimeError) as fault:  # the ceilings count without it
                print(f"KvikIO: {type(fault).__name__}: {fault}", flush=True)
    finally:
        path.unlink(missing_ok=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.ceilings", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--folders", required=True, help="separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--gib", type=float, default=8.0, help="least size of the file in each folder")
    parser.add_argument("--bytes", default="", help="sizes of KvikIO's reads, separated by commas")
    parser.add_argument("--repetitions", type=int, default=3, help="of KvikIO's reads")
    parser.add_argument("--no-gpu", action="store_true", help="folders alone, to try this script")
    options = parser.parse_args()
    sizes = [int(part) for part in options.bytes.split(",") if part]
    n_bytes = -(-max([int(options.gib * GIB), *sizes]) // PIECE_BYTES) * PIECE_BYTES
    content: dict[str, Any] = {"copies": {} if options.no_gpu else copies(), "folders": {}}
    rows = [(name.removesuffix("_bytes_s"), f"{value / 1e9:.1f}", "") for name, value in content["copies"].items()]
    for folder in options.folders.split(","):
        kvikio_sizes = [] if options.no_gpu else sizes
        found = content["folders"][folder] = measure_folder(Path(folder), n_bytes, kvikio_sizes, options.repetitions)
        for way in ("writes", "reads"):
            kind = "direct" if found[way]["direct"] else "buffered"
            rows.append((f"{folder}: {way}", f"{found[way]['bytes_s'] / 1e9:.2f}", kind))
        for size, seconds in found.get("kvikio_s", {}).items():
            rows.append((f"{folder}: KvikIO, {size} bytes", f"{int(size) / median(seconds) / 1e9:.2f}", "into the GPU"))
    report.write(options.out, "what this machine can do at best", content)
    report.table(("", "GB/s", ""), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
