"""At what share of the device's own copy do gather, scatter and checksum run?

    python3 -m benchmarks.gpu.kernels --out kernels.json [--tune]

Ceiling: torch's copy of one large buffer to another, in the same run. Gather and scatter count bytes read and written,
as the copy does; the checksum only reads. 64 chunks of 256 tokens, their blocks shuffled over the cache. Before
anything is timed, it is compared: two chunks with the torch reference, all of them with the cache they came from, two
slabs with the checksum in numpy. Beside the rates stands what a call costs its host thread, for all 64 chunks.

Not triton.testing.do_bench: it times the host's part of a short launch, too. Here the device sleeps until all that is
timed has been queued, with its L2 cache overwritten before. --tune also tries all TILINGS and WALKS.
Ends with status 1 when a target is missed or bytes differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import report
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import padded
from kvtier.kernels import device, device_checksum
from kvtier.kernels.device import Tiling
from kvtier.kernels.device_checksum import Walk
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch, SlabRun, gather, scatter

CHUNKS, CHUNK_TOKENS = 64, 256
COPY_BYTES, L2_BYTES = 2 << 30, 256 << 20
RUNS, TUNE_RUNS = 30, 12
SLEEP_CYCLES = 3_000_000  # 1.5 ms: longer than any call takes to be queued
SEED = 7
GOAL_PERCENT, GOAL_SUM_GB_S = 88.0, 3500.0


@dataclass(frozen=True)
class Case:
    """A KV cache: (B,2,N,H,D) in NHD order, (B,H,N,2D) as LBHNC, or MLA's (B,N,D)."""

    layout: str
    dtype: torch.dtype
    size: int
    layers: int = 32
    heads: int = 8
    block_tokens: int = 16

    @property
    def name(self) -> str:
        return f"{self.layout} {str(self.dtype).removeprefix('torch.')} d={self.size}"

    @property
    def n_blocks(self) -> int:
        return CHUNKS * CHUNK_TOKENS // self.block_tokens

    @property
    def vector_bytes(self) -> int:
        return self.size * self.dtype.itemsize * (1 if self.layout == "MLA" else 2)

    @property
    def slab_bytes(self) -> int:
        return padded(self.layers * CHUNK_TOKENS * self.vector_bytes)

    @property
    def kv_bytes(self) -> int:
        return CHUNKS * CHUNK_TOKENS * self.layers * self.heads * self.vector_bytes

    @property
    def patch(self) -> Patch:
        return Patch(0, 0, self.layers, 0, self.heads)

    def pages(self, buffer: torch.Tensor) -> PagedKV:
        """Views into (kv_bytes,) uint8, layer after layer."""
        layers = [self._layer(part.view(self.dtype)) for part in buffer.chunk(self.layers)]
        return PagedKV(tuple(layers), self.block_tokens)

    def _layer(self, values: torch.Tensor) -> PagedLayer:
        blocks, tokens, heads, size = self.n_blocks, self.block_tokens, self.heads, self.size
        if self.layout == "MLA":
            return PagedLayer(values.view(blocks, tokens, 1, size), None)
        if self.layout == "NHD":
            both = values.view(blocks, 2, tokens, heads, size)
            return PagedLayer(both[:, 0], both[:, 1])
        vectors = values.view(blocks, heads, tokens, 2 * size).permute(0, 2, 1, 3)
        return PagedLayer(vectors[..., :size], vectors[..., size:])


MAIN = Case("NHD", torch.bfloat16, 128)
CASES = (
    *(
        Case(layout, dtype, size)
        for layout in ("NHD", "LBHNC")
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        for size in (64, 128, 256)
    ),
    Case("MLA", torch.bfloat16, 576, layers=61, heads=1, block_tokens=64),
    Case("MLA", torch.float8_e4m3fn, 576, layers=61, heads=1, block_tokens=64),
)


@dataclass(frozen=True)
class Rig:
    """A case with its buffers: the cache, another to scatter into, slabs, and the moves between."""

    case: Case
    cache: torch.Tensor
    copy: torch.Tensor
    moves: list[Move]
    runs: list[SlabRun]

    @classmethod
    def of(cls, case: Case) -> Rig:
        cache = torch.empty(case.kv_bytes // 8, dtype=torch.int64, device="cuda").random_().view(torch.uint8)
        slabs = torch.zeros(CHUNKS, case.heads, case.slab_bytes, dtype=torch.uint8, device="cuda")
        rng = random.Random(SEED)
        ids = rng.sample(range(case.n_blocks), case.n_blocks)
        each = CHUNK_TOKENS // case.block_tokens
        moves = [Move(case.patch, tuple(ids[each * n : each * (n + 1)]), slabs[n]) for n in range(CHUNKS)]
        runs = [SlabRun(slabs[n], rng.randbytes(16), 0, 0) for n in range(CHUNKS)]
        return cls(case, cache, torch.zeros_like(cache), moves, runs)

    def faults(self) -> list[str]:
        """What differs from the references; fills slabs and copy."""
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
        for number, head in ((0, 0), (CHUNKS - 1, self.case.heads - 1)):
            seed = slab_seed(self.runs[number].key, head, 0)
            right = sums[number][head] == slab_checksum(self.runs[number].slabs[head].cpu().numpy(), seed)
            faults += [] if right else ["checksum"]
        return faults


def device_ms(work: Callable[[], object], flush: torch.Tensor, runs: int = RUNS) -> float:
    """Milliseconds of `work` on the device, the median of many."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_us(work: Callable[[], object], runs: int = RUNS) -> float:
    """Microseconds that a call takes its thread, while the device is busy with something else."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin_s) * 1e6)
    return statistics.median(times)


Row = dict[str, object]


def measure(case: Case, copy_gb_s: float, flush: torch.Tensor) -> list[Row]:
    rig = Rig.of(case)
    faults = rig.faults()
    mover, other = device.DevicePages(case.pages(rig.cache)), device.DevicePages(case.pages(rig.copy))
    rows: list[Row] = []
    kernels: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("gather", partial(mover.gather, rig.moves), 2),
        ("scatter", partial(other.scatter, rig.moves), 2),
        ("checksum", partial(device_checksum.slab_checksums, rig.runs), 1),
    )
    for name, work, factor in kernels:
        gb_s = factor * case.kv_bytes / device_ms(work, flush) / 1e6
        rows.append(
            {
                "case": case.name,
                "kernel": name,
                "gb_s": gb_s,
                "percent_of_copy": 100 * gb_s / copy_gb_s,
                "host_us": host_us(work),
                "bytes": case.kv_bytes,
                "faults": faults,
            }
        )
    return rows


def tune(copy_gb_s: float, flush: torch.Tensor) -> list[Row]:
    rows: list[Row] = []
    for case in (MAIN, Case("LBHNC", torch.bfloat16, 128)):
        rig = Rig.of(case)
        variants: list[tuple[str, Tiling | Walk, Callable[[], object]]] = []
        for tiling in device.TILINGS:
            mover = device.DevicePages(case.pages(rig.cache), tiling)
            variants.append(("gather", tiling, partial(mover.gather, rig.moves)))
            variants.append(("scatter", tiling, partial(mover.scatter, rig.moves)))
        for walk in device_checksum.WALKS if case is MAIN else ():
            variants.append(("checksum", walk, partial(device_checksum.slab_checksums, rig.runs, walk)))
        for name, variant, work in variants:
            gb_s = (1 if name == "checksum" else 2) * case.kv_bytes / device_ms(work, flush, TUNE_RUNS) / 1e6
            rows.append(
                {
                    "case": case.name,
                    "kernel": name,
                    "variant": variant._asdict(),
                    "gb_s": gb_s,
                    "percent_of_copy": 100 * gb_s / copy_gb_s,
                }
            )
    return rows


def copy_rate(flush: torch.Tensor) -> float:
    """GB/s read and written by torch's copy on the device."""
    source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / device_ms(lambda: target.copy_(source), flush) / 1e6


def targets_met(rows: list[Row]) -> bool:
    """Of the main case: the rates; of all: not one wrong byte."""
    met = not any(row["faults"] for row in rows)
    for row in rows:
        if row["case"] == MAIN.name:
            rate, percent = float(str(row["gb_s"])), float(str(row["percent_of_copy"]))
            met = met and (rate >= GOAL_SUM_GB_S if row["kernel"] == "checksum" else percent >= GOAL_PERCENT)
    return met


def show(rows: list[Row]) -> None:
    for row in rows:
        rest = f"host {row['host_us']:>5.0f} us" if "host_us" in row else str(row["variant"])
        wrong = f"  WRONG: {row['faults']}" if row.get("faults") else ""
        rate = f"{row['gb_s']:>7.0f} GB/s{row['percent_of_copy']:>7.1f} %"
        print(f"{row['case']:<32}{row['kernel']:<10}{rate}  {rest}{wrong}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--tune", action="store_true", help="try all tilings and walks, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    copy_gb_s = copy_rate(flush)
    print(f"device copy (read + written) {copy_gb_s:.0f} GB/s", flush=True)
    rows: list[Row] = []
    for case in CASES:
        found = measure(case, copy_gb_s, flush)
        show(found)
        rows += found
    tuned = tune(copy_gb_s, flush) if arguments.tune else []
    show(tuned)
    met = targets_met(rows)
    print("targets met" if met else "TARGET MISSED", f"({time.monotonic() - begin_s:.0f} s)")
    if arguments.out:
        result = {
            "copy_gb_s": copy_gb_s,
            "targets": {"percent_of_copy": GOAL_PERCENT, "checksum_gb_s": GOAL_SUM_GB_S},
            "targets_met": met,
            "rows": rows,
            "tuned": tuned,
        }
        report.write(arguments.out, "gather, scatter and checksum as a share of the device's copy", result)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
