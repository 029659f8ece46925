"""KV caches and clocks of the two kernel benchmarks."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from kvtier.kernels.paged import PagedKV, PagedLayer

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
        that is timed is queued. Its L2 cache is overwritten before.
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
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--tune", action="store_true", help="also try all candidates of the kernels' parameters")
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
