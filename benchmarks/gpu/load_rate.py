"""The load walk without an engine: how fast chunks come from files, verified, into paged KV on a GPU.

    python -m benchmarks.gpu.load_rate --folder /dev/shm/kv [--out OUT.json] [--chunks 32,128,390] [--pauses 0.3]

Llama-3.1-8B's dimensions: 32 MiB a chunk. Each load follows a pause, as a request follows an engine's quiet time, and
begins with empty blocks; afterwards all of them are compared with what was saved. Nothing stays in the host arena, so
that every load comes from the files. The ceiling is a pinned copy; beside each load stands one of as many bytes that
follows as long a pause, for a machine that slept is slow at first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.report import median
from kvtier import metrics as names
from kvtier.assemble import Work, open_store, open_transfer
from kvtier.config import Settings
from kvtier.geometry import Geometry, share_of_rank
from kvtier.identity import CodecId, Namespace, chunk_keys
from kvtier.kernels.paged import PagedKV, PagedLayer
from kvtier.kernels.pcie import rates
from kvtier.pinned_segments import LOOK_INTERVAL_S, QUIET_S
from kvtier.plan import LoadPlan
from kvtier.store import Store, WantedChunk
from kvtier.transfer import Transfer

SHAPE = Geometry(layers=32, kv_heads=8, k_head_size=128, v_head_size=128, dtype="bfloat16", element_bytes=2,
                 attention="heads", chunk_tokens=256)  # fmt: skip
BLOCK_TOKENS = 16
CHUNK_BLOCKS = SHAPE.chunk_tokens // BLOCK_TOKENS
CHUNKS_A_SAVE = 32
COPY_PIECE_BYTES = 64 << 20


@dataclass
class Rig:
    """Paged KV of random bytes, saved; and a worker's Transfer over it. layers: (2, blocks, block, heads, size) int16
    each; saved: what they were when they were saved."""

    store: Store
    transfer: Transfer
    layers: list[torch.Tensor]
    saved: list[torch.Tensor]
    keys: list[bytes]

    def plan(self, name: str, n_chunks: int) -> LoadPlan:
        keys = self.keys[:n_chunks]
        entries = self.store.lookup(keys)
        assert len(entries) == n_chunks, f"{len(entries)} of {n_chunks} chunks are stored"
        return self.store.plan_load(name, keys, entries, list(range(n_chunks * CHUNK_BLOCKS)), 0)

    def load(self, name: str, n_chunks: int, pause_s: float) -> float:
        """Seconds from asking to the answer; raises when anything of it is wrong."""
        for layer in self.layers:
            layer.zero_()
        torch.cuda.synchronize()
        time.sleep(pause_s)
        plan = self.plan(name, n_chunks)
        started = time.perf_counter()
        self.transfer.load(plan)
        done = self.transfer.poll(30.0).loads
        seconds = time.perf_counter() - started
        assert len(done) == 1 and not done[0].failed_blocks, done
        n_blocks = n_chunks * CHUNK_BLOCKS
        for layer, saved in zip(self.layers, self.saved, strict=True):
            assert torch.equal(layer[:, :n_blocks], saved[:, :n_blocks]), "other bytes than were saved"
        return seconds


def make_rig(root: Path, n_chunks: int, extra: dict[str, Any], ranks: int = 1) -> Rig:
    settings = Settings.load({"root": str(root), "capacity_bytes": "60GiB", "host": {"admit": "never"}} | extra)
    namespace = Namespace("load-rate", "random", SHAPE, SHAPE.dtype, "", "", "", CodecId("raw", 1, 0), "", "0")
    share = share_of_rank(SHAPE, 0, 1, 0, range(SHAPE.layers))
    n_blocks = n_chunks * CHUNK_BLOCKS
    shape = (2, n_blocks, BLOCK_TOKENS, SHAPE.kv_heads, SHAPE.k_head_size)
    tensors = [torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda") for _ in range(SHAPE.layers)]
    views = [tensor.view(torch.bfloat16) for tensor in tensors]
    pages = PagedKV(tuple(PagedLayer(view[0], view[1]) for view in views), BLOCK_TOKENS)
    store = open_store(settings, namespace, [share])
    transfer = open_transfer(settings, namespace, share, pages, Work(ranks=ranks))
    keys = chunk_keys(store.namespace_id, list(range(n_chunks * SHAPE.chunk_tokens)), SHAPE.chunk_tokens, {})
    rig = Rig(store, transfer, tensors, [tensor.clone() for tensor in tensors], keys)
    _save(rig)
    _settle(rig)
    return rig


def _save(rig: Rig) -> None:
    parents = [rig.store.namespace_id, *rig.keys]
    for first in range(0, len(rig.keys), CHUNKS_A_SAVE):
        while len(rig.store.lookup(rig.keys)) < min(first + CHUNKS_A_SAVE, len(rig.keys)):
            wanted = [
                WantedChunk(rig.keys[i], parents[i], tuple(range(i * CHUNK_BLOCKS, (i + 1) * CHUNK_BLOCKS)))
                for i in range(first, min(first + CHUNKS_A_SAVE, len(rig.keys)))
            ]
            plan = rig.store.plan_save(wanted)
            if plan is None:  # what is stored is asked for again; or no segment set is ready
                time.sleep(0.05)
                continue
            rig.transfer.save(plan)
            assert rig.transfer.drain(60)
            rig.store.saved(rig.transfer.poll().saves)


def _settle(rig: Rig) -> None:
    """Until no more segments are pinned, which begins when there was nothing to do for a while."""
    pinned = -1.0
    while (now := rig.transfer.metrics.total().get(names.PINNED_FILE_BYTES, 0.0)) > pinned:
        pinned = now
        time.sleep(QUIET_S + 1.5 * LOOK_INTERVAL_S)


class PinnedCopy:
    """Copies to the GPU of pinned memory, piece after piece."""

    def __init__(self) -> None:
        self._host = torch.randint(0, 255, (COPY_PIECE_BYTES,), dtype=torch.uint8).pin_memory()
        self._device = torch.empty(COPY_PIECE_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(self, n_bytes: int, pause_s: float) -> float:
        torch.cuda.synchronize()
        time.sleep(pause_s)
        started = time.perf_counter()
        for _ in range(-(-n_bytes // COPY_PIECE_BYTES)):
            self._device.copy_(self._host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started


def main(text: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.load_rate", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--chunks", default="32,128,390")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--pauses", default="0.3", help="seconds before each load, divided by commas")
    parser.add_argument("--extra", default="{}", help="more settings of kvtier, as JSON")
    arguments = parser.parse_args(text)
    sizes = [int(part) for part in arguments.chunks.split(",")]
    pauses = [float(part) for part in arguments.pauses.split(",")]
    root = arguments.folder / "load-rate"
    shutil.rmtree(root, ignore_errors=True)
    rig = make_rig(root, max(sizes), json.loads(arguments.extra))
    limit, _ = rates()
    copy = PinnedCopy()
    rows = []
    for n_chunks, pause_s in itertools.product(sizes, pauses):
        n_bytes = n_chunks * SHAPE.chunk_tokens * SHAPE.token_bytes
        times, copies = [], []
        for number in range(arguments.repeats + 1):
            times.append(rig.load(f"{n_chunks}-{pause_s}-{number}", n_chunks, pause_s))
            copies.append(copy.seconds(n_bytes, pause_s))
        rate = n_bytes / median(times[1:])
        rows.append({"chunks": n_chunks, "pause_s": pause_s, "bytes": n_bytes, "all_s": times[1:], "bytes_s": rate,
                     "percent": 100 * rate / limit, "copy_s": median(copies[1:])})  # fmt: skip
    rig.transfer.close()
    rig.store.close()
    shutil.rmtree(root, ignore_errors=True)
    if arguments.out is not None:
        report.write(arguments.out, "verified loads without an engine", {"pinned_bytes_s": limit, "rows": rows})
    cells = [
        (row["chunks"], f"{row['pause_s']:g}", f"{1e3 * row['copy_s']:.1f}", f"{1e3 * median(row['all_s']):.1f}",
         f"{row['bytes_s'] / 1e9:.1f}", f"{row['percent']:.0f}",
         " ".join(f"{1e3 * s:.1f}" for s in row["all_s"]))
        for row in rows
    ]  # fmt: skip
    print(f"pinned copies {limit / 1e9:.1f} GB/s")
    report.table(("chunks", "pause s", "copy ms", "ms", "GB/s", "% of pinned", "all"), cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
