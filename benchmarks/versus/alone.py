"""What the machine can do without any engine: pinned copies, a folder's reads and writes, and KvikIO's reads of as many
bytes as each prompt's KV has, straight into the GPU.

    python -m benchmarks.versus.alone --folder /dev/shm/kv --bytes 1073741824,13107200000 --out ALONE.json

A process of its own, for it takes GPU memory that engines want.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import PIECE_BYTES, copies, direct_flags, direct_reads, direct_writes, each_piece

KVIKIO_THREADS, KVIKIO_TASK_BYTES = 16, 4 << 20
"""The best of device_reads.KVIKIO_GRID on tmpfs."""
PIECE_OF_READ_BYTES = 32 << 20
"""A chunk of an 8B model."""
PROBE_THREADS, PROBE_PIECE_BYTES = 16, 4 << 20
"""Of `ceilings.direct_reads`, the fastest on the disk and as fast as any on tmpfs."""


def kvikio_reads(path: Path, sizes: list[int], repetitions: int) -> dict[str, list[float]]:
    """Bytes read -> seconds of each repetition; the sizes in turn. Raises OSError after a short read."""
    import kvikio
    import kvikio.defaults
    import torch

    from benchmarks.gpu.device_reads import preload_cufile

    preload_cufile()
    kvikio.defaults.set(
        {
            "num_threads": KVIKIO_THREADS,
            "task_size": KVIKIO_TASK_BYTES,
            "bounce_buffer_size": 16 << 20,
            "auto_direct_io_read": True,
        }
    )
    target = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {str(n_bytes): [] for n_bytes in sizes}
    file = kvikio.CuFile(str(path), "r")
    try:
        file.pread(target[:PIECE_OF_READ_BYTES], PIECE_OF_READ_BYTES, 0).get()  # its buffers are made here
        for _ in range(repetitions):
            for n_bytes in sizes:
                started = time.perf_counter()
                parts = [
                    (place, min(PIECE_OF_READ_BYTES, n_bytes - place))
                    for place in range(0, n_bytes, PIECE_OF_READ_BYTES)
                ]
                futures = [file.pread(target[place : place + size], size, place) for place, size in parts]
                if sum(future.get() for future in futures) != n_bytes:
                    raise OSError("a short read")
                torch.cuda.synchronize()
                found[str(n_bytes)].append(time.perf_counter() - started)
    finally:
        file.close()
    return found


def probe(path: Path) -> float:
    """Bytes a second of direct reads of a file, once, into plain memory."""
    n_bytes = path.stat().st_size
    flags, _ = direct_flags(path, os.O_RDONLY)
    fd = os.open(path, flags)
    try:
        seconds = each_piece(
            n_bytes, lambda view, place: os.preadv(fd, [view], place), PROBE_THREADS, PROBE_PIECE_BYTES
        )
        return n_bytes / seconds
    finally:
        os.close(fd)


def measure(folder: Path, sizes: list[int], repetitions: int, has_gpu: bool) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    n_bytes = -(-max(sizes) // PIECE_BYTES) * PIECE_BYTES
    found: dict[str, Any] = {"copies": copies() if has_gpu else {}}
    path = folder / "ceiling.bin"
    try:
        found["writes"] = direct_writes(folder, n_bytes, keep=True)
        found["reads"] = direct_reads(path)
        if has_gpu:
            try:
                found["kvikio_s"] = kvikio_reads(path, sizes, repetitions)
            except (ImportError, OSError, RuntimeError) as fault:  # the ceilings count without it
                print(f"KvikIO: {type(fault).__name__}: {fault}", flush=True)
    finally:
        path.unlink(missing_ok=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus.alone", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bytes", required=True, help="of each prompt's KV, divided by commas")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-gpu", action="store_true", help="the folder alone, to try this script")
    options = parser.parse_args()
    sizes = [int(part) for part in options.bytes.split(",")]
    found = measure(options.folder, sizes, options.repetitions, not options.no_gpu)
    options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
