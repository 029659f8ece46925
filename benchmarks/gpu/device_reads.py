"""Reads of one large file straight into the GPU's memory, by kvtier's ring and by KvikIO, and whether they are right.

The ring is tried over threads, piece sizes and slots: more pinned bytes than the last-level cache holds cost half the
rate. Records are as large as a chunk of an 8B model, all of them in flight at once.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import median
from kvtier.errors import KVTierError
from kvtier.io import ring

RECORD_BYTES = 32 << 20
SLAB_BYTES = 4 << 20
REPEATS = 3
REPEATS_S = 1.0
"""No more repeats after so long; storage that needs longer for the file is tried with every fourth ring alone."""
TIMEOUT_S = 60.0
MIB = 1 << 20
GRID = [(threads, piece, slots) for threads in (8, 12, 16) for piece in (MIB, 4 * MIB) for slots in (2, 4)]
KVIKIO_GRID = [(16, 4 * MIB), (16, MIB), (8, 4 * MIB)]


def measure(path: Path, limit_bytes_s: float, on_device: bool = True) -> list[dict[str, Any]]:
    """A row a reader, fastest first. `limit_bytes_s`: the smaller of the storage's rate and PCIe's."""
    n_bytes = path.stat().st_size // RECORD_BYTES * RECORD_BYTES
    target = torch.empty(n_bytes + 4096, dtype=torch.uint8, device="cuda" if on_device else "cpu")
    target = target[-target.data_ptr() % 4096 :][:n_bytes]
    expected = _piece_of(path, target.device)
    readers: list[tuple[str, Callable[[], list[float]]]] = []
    is_slow = n_bytes / limit_bytes_s > REPEATS_S
    for threads, piece, slots in GRID[3::4] if is_slow else GRID:
        name = f"ring {threads} x {piece // MIB} MiB x {slots}"
        readers.append((name, lambda t=threads, p=piece, s=slots: _by_ring(path, target, t, p, s)))  # type: ignore[misc]
    if on_device:
        for threads, task in KVIKIO_GRID[: 1 if is_slow else None]:
            name = f"KvikIO {threads} x {task // MIB} MiB"
            readers.append((name, lambda t=threads, k=task: _by_kvikio(path, target, t, k)))  # type: ignore[misc]
    rows = []
    for name, read in readers:
        target.zero_()
        if on_device:
            torch.cuda.synchronize()
        try:
            times = read()
        except (KVTierError, OSError, RuntimeError, ImportError) as fault:
            print(f"  {name}: {type(fault).__name__}: {fault}", flush=True)
            continue
        is_right = bool((target.view(-1, expected.numel()) == expected).all())
        rate = n_bytes / median(times)
        rows.append(
            {
                "reader": name,
                "bytes_s": rate,
                "percent": 100 * rate / limit_bytes_s,
                "is_right": is_right,
                "all_bytes_s": [n_bytes / seconds for seconds in times],
            }
        )
        if not is_right:
            rows[-1]["reader"] += " WRONG BYTES"
    return sorted(rows, key=lambda row: -row["bytes_s"])


def _piece_of(path: Path, device: torch.device) -> torch.Tensor:
    """The file is one random piece again and again (ceilings.direct_writes)."""
    with path.open("rb") as file:
        return torch.frombuffer(bytearray(file.read(SLAB_BYTES)), dtype=torch.uint8).to(device)


def _by_ring(path: Path, target: torch.Tensor, threads: int, piece: int, slots: int) -> list[float]:
    """Seconds of each repeat; the ring is opened once, as an engine does."""
    on_device = target.device.type == "cuda"
    device = ring.DeviceRing(target.device.index or 0, piece, slots) if on_device else None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    times: list[float] = []
    try:
        with ring.Ring(threads, piece, device=device) as reader:
            ops = [
                ring.ReadOp(
                    fd,
                    offset,
                    target.data_ptr() + offset,
                    SLAB_BYTES,
                    RECORD_BYTES // SLAB_BYTES,
                    bytes(16),
                    0,
                    0,
                    None,
                    on_device=on_device,
                )
                for offset in range(0, target.numel(), RECORD_BYTES)
            ]
            while len(times) < REPEATS and sum(times) < REPEATS_S:
                started = time.perf_counter()
                batch = reader.submit(ops)
                if not batch.wait(TIMEOUT_S):
                    batch.cancel()
                    raise OSError(f"not done after {TIMEOUT_S:.0f} s")
                times.append(time.perf_counter() - started)
                bad = [result.error for result in batch.results() if not result.ok]
                if bad:
                    raise OSError(bad[0], os.strerror(bad[0]))
    finally:
        os.close(fd)
    return times


def _by_kvikio(path: Path, target: torch.Tensor, threads: int, task: int) -> list[float]:
    import kvikio
    import kvikio.defaults

    preload_cufile()
    kvikio.defaults.set(
        {
            "num_threads": threads,
            "task_size": task,
            "bounce_buffer_size": max(task, 16 * MIB),
            "auto_direct_io_read": True,
        }
    )
    times: list[float] = []
    file = kvikio.CuFile(str(path), "r")
    try:
        while len(times) < REPEATS and sum(times) < REPEATS_S:
            started = time.perf_counter()
            futures = [
                file.pread(target[offset : offset + RECORD_BYTES], RECORD_BYTES, offset)
                for offset in range(0, target.numel(), RECORD_BYTES)
            ]
            if sum(future.get() for future in futures) != target.numel():
                raise OSError("a short read")
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    finally:
        file.close()
    return times


def preload_cufile() -> None:
    """Makes libcufile.so.0 of the nvidia wheels known to the loader, where it is not in a system folder."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(place).glob("**/libcufile.so.0")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
