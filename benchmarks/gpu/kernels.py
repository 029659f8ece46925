"""Rates of gather, scatter and checksum as shares of the device's own copy.

    python -m benchmarks.gpu.kernels --out kernels.json [--tune]

Ceiling: torch's copy of one large buffer to another, in the same run. Gather and scatter count bytes read and written,
as the copy does; the checksum only reads. 64 chunks of 256 tokens, their blocks shuffled over the cache. Before
anything is timed, it is compared: two chunks with the torch reference, all of them with the cache they came from, two
slabs with the checksum in numpy. --tune also tries all TILINGS and WALKS.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import padded
from kvtier.kernels import device, device_checksum
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch, SlabRun, gather, scatter

CHUNK_TOKENS = 256
COPY_BYTES, L2_BYTES = 2 << 30, 256 << 20
RUNS, TUNE_RUNS = 30, 12
SLEEP_CYCLES = 3_000_000  # 1.5 ms: longer than any call takes to be queued

Row = dict[str, Any]
Work = Callable[[], object]


@dataclass(frozen=True)
class PagesCase:
    """A KV cache: (B,2,N,H,D) in NHD order, (B,H,N,2D) as HND or LBHNC, or MLA's (B,N,D)."""

    layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    size: int = 128
    chunks: int = 64
    layers: int = 32
    heads: int = 8
    block_tokens: int = 16

    @property
    def name(self) -> str:
        return f"{self.layout} {str(self.dtype).removeprefix('torch.')} d={self.size}"

    @property
    def vector_bytes(self) -> int:
        return self.size * self.dtype.itemsize * (1 if self.layout == "MLA" else 2)

    @property
    def kv_bytes(self) -> int:
        return self.chunks * CHUNK_TOKENS * self.layers * self.heads * self.vector_bytes

    def pages(self, buffer: torch.Tensor) -> PagedKV:
        """Return views into (kv_bytes,) uint8, layer after layer."""
        layers = [self._layer(part.view(self.dtype)) for part in buffer.chunk(self.layers)]
        return PagedKV(tuple(layers), self.block_tokens)

    def _layer(self, values: torch.Tensor) -> PagedLayer:
        tokens, heads, size = self.block_tokens, self.heads, self.size
        if self.layout == "MLA":
            return PagedLayer(values.view(-1, tokens, 1, size), None)
        if self.layout == "NHD":
            both = values.view(-1, 2, tokens, heads, size)
            return PagedLayer(both[:, 0], both[:, 1])
        vectors = values.view(-1, heads, tokens, 2 * size).permute(0, 2, 1, 3)
        return PagedLayer(vectors[..., :size], vectors[..., size:])

    def blocks(self, seed: int) -> list[tuple[int, ...]]:
        """Return the block ids of each chunk, shuffled over the cache."""
        n, each = self.chunks * CHUNK_TOKENS // self.block_tokens, CHUNK_TOKENS // self.block_tokens
        ids = random.Random(seed).sample(range(n), n)
        return [tuple(ids[first : first + each]) for first in range(0, n, each)]


class DeviceClock:
    """Times of launches on the device, and the rate of its own copy (`copy_gb_s`, bytes read and written)."""

    def __init__(self) -> None:
        self._flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
        source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device="cuda").random_()
        target = torch.empty_like(source)
        self.copy_gb_s = 2 * COPY_BYTES / self.device_ms(lambda: target.copy_(source)) / 1e6
        print(f"device copy (read + written) {self.copy_gb_s:.0f} GB/s", flush=True)

    def device_ms(self, work: Work, runs: int = RUNS) -> float:
        """Return the milliseconds of `work` on the device, the median of the runs.

        Unlike triton.testing.do_bench this leaves out the host's part of a short launch: the device sleeps until all
        timed work is queued. The L2 cache is overwritten before.
        """
        for _ in range(3):
            work()
        times: list[float] = []
        for _ in range(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return median(times)


def run(
    about: str,
    measure: Callable[[DeviceClock, bool], Iterable[Row]],
    is_met: Callable[[Row], bool],
    targets: dict[str, float],
) -> int:
    """Measure, print and write; return 1 if a row misses its target or has wrong bytes.

    measure: yields rows; its second argument says whether to try all candidates (rows with `variant`).
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--tune", action="store_true", help="also try all candidates for the kernels' parameters")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    clock = DeviceClock()
    rows: list[Row] = []
    for row in measure(clock, options.tune):
        figures = {name: round(value, 1) for name, value in row.items() if isinstance(value, float)}
        more = {name: row[name] for name in ("variant", "faults") if row.get(name)}
        print(
            f"{row['case']:<30}{row['kernel']:<14}", json.dumps(figures), json.dumps(more) if more else "", flush=True
        )
        rows.append(row)
    counted = [row for row in rows if "variant" not in row]
    met = all(not row["faults"] and is_met(row) for row in counted)
    print("targets met" if met else "TARGET MISSED")
    content = {"copy_gb_s": clock.copy_gb_s, "targets": targets, "targets_met": met, "rows": counted}
    content["tuned"] = [row for row in rows if "variant" in row]
    report.write(options.out, about.partition("\n")[0], content)
    return int(not met)


SEED = 7
GOALS = {"percent_of_copy": 88.0, "checksum_gb_s": 3500.0}
MAIN = PagesCase()
CASES = (
    *(
        PagesCase(layout, dtype, size)
        for layout in ("NHD", "LBHNC")
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        for size in (64, 128, 256)
    ),
    PagesCase("MLA", torch.bfloat16, 576, layers=61, heads=1, block_tokens=64),
    PagesCase("MLA", torch.float8_e4m3fn, 576, layers=61, heads=1, block_tokens=64),
)


class KernelRig:
    """A case with its buffers: the cache, another to scatter into, slabs, and the moves between."""

    def __init__(self, case: PagesCase) -> None:
        self.case = case
        self.cache = torch.empty(case.kv_bytes // 8, dtype=torch.int64, device="cuda").random_().view(torch.uint8)
        self.copy = torch.zeros_like(self.cache)
        slab_bytes = padded(case.layers * CHUNK_TOKENS * case.vector_bytes)
        slabs = torch.zeros(case.chunks, case.heads, slab_bytes, dtype=torch.uint8, device="cuda")
        patch, rng = Patch(0, 0, case.layers, 0, case.heads), random.Random(SEED)
        self.moves = [Move(patch, blocks, slabs[n]) for n, blocks in enumerate(case.blocks(SEED))]
        self.runs = [SlabRun(slabs[n], rng.randbytes(16), 0, 0) for n in range(case.chunks)]

    def faults(self) -> list[str]:
        """Return what differs from the references; fills slabs and copy."""
        pages, other = self.case.pages(self.cache), self.case.pages(self.copy)
        device.DevicePages(pages).gather(self.moves)
        faults = []
        for move in (self.moves[0], self.moves[-1]):
            expected = torch.zeros_like(move.slabs)
            gather(pages, move.patch, move.block_ids, expected)
            faults += [] if torch.equal(move.slabs, expected) else ["gather"]
        first = [Move(move.patch, move.block_ids, move.slabs, 1) for move in self.moves[:2]]
        expected = torch.zeros_like(self.copy)
        for move in first:
            scatter(self.case.pages(expected), move.patch, move.block_ids, move.first_block, move.slabs)
        device.DevicePages(other).scatter(first)
        faults += [] if torch.equal(self.copy, expected) else ["scatter but the first block"]
        device.DevicePages(other).scatter(self.moves)
        faults += [] if torch.equal(self.copy, self.cache) else ["scatter"]
        sums = device_checksum.slab_checksums(self.runs).wait()
        for number, head in ((0, 0), (self.case.chunks - 1, self.case.heads - 1)):
            seed = slab_seed(self.runs[number].key, head, 0)
            right = sums[number][head] == slab_checksum(self.runs[number].slabs[head].cpu().numpy(), seed)
            faults += [] if right else ["checksum"]
        return faults

    def row(self, clock: DeviceClock, kernel: str, work: Work, runs: int = RUNS) -> Row:
        factor = 1 if kernel == "checksum" else 2
        gb_s = factor * self.case.kv_bytes / clock.device_ms(work, runs) / 1e6
        return {"case": self.case.name, "kernel": kernel, "gb_s": gb_s, "percent_of_copy": 100 * gb_s / clock.copy_gb_s}


def measure(clock: DeviceClock, is_tuned: bool) -> Iterator[Row]:
    for case in CASES:
        rig = KernelRig(case)
        faults = rig.faults()
        mover, other = (device.DevicePages(case.pages(buffer)) for buffer in (rig.cache, rig.copy))
        kernels: dict[str, Work] = {
            "gather": partial(mover.gather, rig.moves),
            "scatter": partial(other.scatter, rig.moves),
            "checksum": partial(device_checksum.slab_checksums, rig.runs),
        }
        for name, work in kernels.items():
            yield rig.row(clock, name, work) | {"faults": faults}
    for case in (MAIN, PagesCase("LBHNC")) if is_tuned else ():
        rig = KernelRig(case)
        for tiling in device.TILINGS:
            mover = device.DevicePages(case.pages(rig.cache), tiling)
            for name, work in (("gather", mover.gather), ("scatter", mover.scatter)):
                yield rig.row(clock, name, partial(work, rig.moves), TUNE_RUNS) | {"variant": tiling._asdict()}
        for walk in device_checksum.WALKS if case is MAIN else ():
            work = partial(device_checksum.slab_checksums, rig.runs, walk)
            yield rig.row(clock, "checksum", work, TUNE_RUNS) | {"variant": walk._asdict()}


def is_met(row: Row) -> bool:
    if row["case"] != MAIN.name:
        return True
    name = "gb_s" if row["kernel"] == "checksum" else "percent_of_copy"
    return bool(row[name] >= GOALS["checksum_gb_s" if row["kernel"] == "checksum" else "percent_of_copy"])


if __name__ == "__main__":
    raise SystemExit(run(__doc__, measure, is_met, GOALS))
