"""Many loads at once, without an engine: `python -m benchmarks.gpu.loads_at_once FOLDER [--out FILE]`.

Stores prompts of 8B dimensions (a chunk of 256 tokens is 32 MiB) in a fresh root in FOLDER, then loads them into GPU
memory: all at once, alone and beside a thread that holds the interpreter lock as an engine's steps do. Beside each rate
stands the share of what pinned copies to the device reach in the same run.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from kvtier.build import open_store, open_transfer
from kvtier.config.settings import Settings
from kvtier.format.geometry import Geometry, share_of_rank
from kvtier.format.namespace import CodecId, Namespace, chunk_keys
from kvtier.io.ring import CLEAN
from kvtier.kernels.paged import PagedKV, PagedLayer
from kvtier.plan import LoadChunk
from kvtier.scheduler.store import Store, WantedChunk
from kvtier.worker.record_reader import HeldSegments
from kvtier.worker.transfer import Transfer

LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
CHUNK_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * CHUNK_TOKENS * 2
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
SHAPES = {"1 x 376": (1, 376), "16 x 47": (16, 47), "64 x 16": (64, 16)}  # loads x chunks
REPEATS = 5
READS_AHEAD = 32  # chunks that are read at a time where only the reading is timed
STEP_S, LOCK_S = 0.007, 0.004  # of an engine's step while it decodes, and of it with the interpreter lock


class Bench:
    """One worker on one GPU."""

    def __init__(self, root: Path, n_chunks: int) -> None:
        shape = Geometry(LAYERS, HEADS, HEAD_SIZE, HEAD_SIZE, "bfloat16", 2, "heads", CHUNK_TOKENS)
        values = {"root": str(root), "capacity_bytes": "200GiB", "host": {"arena_bytes": "2GiB"}}
        self.settings = Settings.load(values)
        namespace = Namespace("bench", "w", shape, "bfloat16", "", "", "", CodecId("raw", 1, 0), "", "0")
        share = share_of_rank(shape, 0, 1, 0, range(LAYERS))
        blocks = n_chunks * CHUNK_BLOCKS
        layers = []
        for _ in range(LAYERS):
            planes = torch.zeros(2, blocks, BLOCK_TOKENS, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
            layers.append(PagedLayer(planes[0], planes[1]))
        self.pages = PagedKV(tuple(layers), BLOCK_TOKENS)
        self.store: Store = open_store(self.settings, namespace, [share])
        self.transfer: Transfer = open_transfer(self.settings, namespace, share, self.pages)
        host = self.transfer._worker.host
        while host is not None and host._table.n_slots < host.n_slots:  # while memory is pinned, copies are slower
            time.sleep(0.05)

    def keys(self, number: int, n_chunks: int) -> list[bytes]:
        tokens = [(number * 1_000_003 + i) % 2_000_000_011 for i in range(n_chunks * CHUNK_TOKENS)]
        return chunk_keys(self.store.namespace_id, tokens, CHUNK_TOKENS, {})

    def save(self, number: int, n_chunks: int) -> None:
        keys = self.keys(number, n_chunks)
        parents = [self.store.namespace_id, *keys]
        ends_s = time.monotonic() + 60
        while len(self.store.lookup(keys) or ()) < n_chunks:
            assert time.monotonic() < ends_s, "a prompt can't be stored"
            for first in range(0, n_chunks, 16):
                wanted = [
                    WantedChunk(keys[i], parents[i], tuple(range(i * CHUNK_BLOCKS, (i + 1) * CHUNK_BLOCKS)))
                    for i in range(first, min(first + 16, n_chunks))
                ]
                plan = self.store.plan_save(wanted)
                if plan is not None:
                    self.transfer.save(plan)
                    self.transfer.drain(30)
                self.store.saved(self.transfer.poll().saves)

    def load(self, n_loads: int, n_chunks: int) -> float:
        """Return the seconds until the last of the loads has ended."""
        plans = []
        for number in range(n_loads):
            keys = self.keys(1000 * n_chunks + number, n_chunks)
            entries = self.store.lookup(keys)
            assert entries is not None and len(entries) == n_chunks
            first = number * n_chunks * CHUNK_BLOCKS
            blocks = list(range(first, first + n_chunks * CHUNK_BLOCKS))
            plans.append(self.store.plan_load(f"r{number}", keys, entries, blocks, 0))
        torch.cuda.synchronize()
        started = time.perf_counter()
        for plan in plans:
            self.transfer.load(plan)
        n_done = 0
        while n_done < n_loads:
            for done in self.transfer.poll(0.005).loads:
                assert not done.failed_blocks
                n_done += 1
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def read(self, n_loads: int, n_chunks: int) -> float:
        """Return the seconds in which the same records are read into staging slots, not verified and not scattered."""
        worker, reader = self.transfer._worker, self.transfer._loader._chunks.reader
        flying: deque[tuple[Any, int, HeldSegments]] = deque()

        def end_one() -> None:
            reads, slot, held = flying.popleft()
            assert reads.batch.wait(30) and list(reader.engine.states([reads.batch])) == [CLEAN]
            worker.arena.discard(slot)
            held.release()

        started = time.perf_counter()
        for number in range(n_loads):
            keys = self.keys(1000 * n_chunks + number, n_chunks)
            for key, entry in zip(keys, self.store.lookup(keys) or (), strict=True):
                while len(flying) >= READS_AHEAD or (slot := worker.arena.reserve()) is None:
                    end_one()
                held = HeldSegments(1)
                chunk = LoadChunk(key, entry, (), 0)
                (reads,) = reader.begin(self.store.namespace_id, [(chunk, slot)], held)
                flying.append((reads, slot, held))
        while flying:
            end_one()
        return time.perf_counter() - started


@contextmanager
def engine_at_work() -> Iterator[list[float]]:
    """A thread that holds the interpreter lock for a part of each step. Yields its steps' durations."""
    steps: list[float] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            started = time.perf_counter()
            while time.perf_counter() - started < LOCK_S:
                sum(range(50))
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - started)))
            steps.append(time.perf_counter() - started)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield steps
    finally:
        ended.set()
        thread.join()


def pinned_rate() -> float:
    """Return bytes a second of copies from pinned host memory to the device."""
    source = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(32):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(32 * CHUNK_BYTES / (time.perf_counter() - started))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ceiling = pinned_rate()
    rows: list[dict[str, Any]] = []
    for name, (n_loads, chunks) in SHAPES.items():
        root = given.folder / "kvtier-loads-at-once"
        bench = Bench(root, n_loads * chunks)
        for number in range(n_loads):
            bench.save(1000 * chunks + number, chunks)
        n_bytes = n_loads * chunks * CHUNK_BYTES
        alone = [bench.load(n_loads, chunks) for _ in range(REPEATS)]
        read = [bench.read(n_loads, chunks) for _ in range(REPEATS)]
        with engine_at_work() as steps:
            beside = [bench.load(n_loads, chunks) for _ in range(REPEATS)]
        bench.transfer.close()
        bench.store.close()
        shutil.rmtree(root)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
        row = {
            "loads": name,
            "alone_s": alone,
            "beside_s": beside,
            "read_s": read,
            "read_share": n_bytes / statistics.median(read) / ceiling,
            "alone_share": n_bytes / statistics.median(alone) / ceiling,
            "beside_share": n_bytes / statistics.median(beside) / ceiling,
            "step_ms": 1e3 * statistics.median(steps),
        }
        rows.append(row)
    columns = ("loads", "read_share", "alone_share", "beside_share", "step_ms")
    shown = [[f"{row[key]:.3f}" for key in columns[1:]] for row in rows]
    report.table(columns, [[row["loads"], *cells] for row, cells in zip(rows, shown, strict=True)])
    if given.out is not None:
        report.write(given.out, "many loads at once, without an engine", {"pinned_bytes_s": ceiling, "rows": rows})


if __name__ == "__main__":
    main()
