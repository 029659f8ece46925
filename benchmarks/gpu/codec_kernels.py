"""How fast do the kernels of turboquant and fp8 encode, verify and decode, next to the device's own copy?

    python3 -m benchmarks.gpu.codec_kernels --out codec_kernels.json [--tune]

Rates are bytes of the engine's KV over time. Bound by bytes: all that must be read and written, at the rate of torch's
copy of one large buffer to another in the same run. 128 chunks of 256 tokens, blocks shuffled over the cache; two
caches take turns, each many times what the L2 holds. (With 64 chunks the host's part of a launch takes as long as the
device's, and now this, now that was measured.) `verify + decode` is the two launches of a load; the comparison between
them, on the CPU, is not in it.

Before anything is timed, chunks of fresh random data, plain and awkward, are encoded and decoded by the kernels and by
the torch reference into poisoned memory: every byte must be equal, sums too, and the error as theory has it, or of fp8
as the reference has it on the CPU. Rates are medians of triton.testing.do_bench; beside them the device's part alone,
of launches that were queued before.
--tune also tries all tilings. Ends with status 1 when a target is missed or bytes differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
import triton
import triton.testing

from benchmarks.gpu import report
from benchmarks.gpu.codec_cases import NMSE_OF_THEORY_MAX, Case, CodecTiling
from benchmarks.gpu.kernels import L2_BYTES, copy_rate, device_ms
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.kernels.device_checksum import prepare, slab_checksums
from kvtier.kernels.paged import PagedKV, SlabRun

CACHES = 2
GOAL_TB_S = 2.0
GOAL_PRESETS = ("k4v4", "k4v3")
TUNED = (*GOAL_PRESETS, "fp8")
RUNS, TUNE_RUNS = 20, 10

MAIN = Case("k4v4")
CASES = (
    *(Case(codec) for codec in ("k4v4", "k4v3", "k6v4", "k5v3", "k3v3", "k4v2", "fp8")),
    *(
        Case(codec, layout, dtype, size, 32)
        for codec in TUNED
        for layout, dtype, size in (
            ("HND", torch.bfloat16, 128),
            ("NHD", torch.float16, 128),
            ("NHD", torch.bfloat16, 64),
            ("NHD", torch.bfloat16, 96),
            ("NHD", torch.bfloat16, 80),
            ("NHD", torch.bfloat16, 256),
        )
    ),
)


def fill(pages: PagedKV, seed: int, is_awkward: bool) -> None:
    """Gaussian. Awkward: of sizes 2^-8 to 2^8, with a mean on K in every other layer, outliers and zero vectors."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for number, layer in enumerate(pages.layers):
        for plane in layer.planes:
            values = torch.randn(plane.shape, generator=generator, device="cuda")
            if is_awkward:
                sizes = torch.randint(-8, 9, (*plane.shape[:3], 1), generator=generator, device="cuda")
                values *= torch.exp2(sizes.float())
                values[..., 3] *= 20
                values[::3, 5] = 0
                if plane is layer.k and number % 2:
                    values += 300 * torch.randn(plane.shape[2:], generator=generator, device="cuda")
            plane.copy_(values)


def faults(case: Case, seed: int, is_awkward: bool) -> tuple[list[str], dict[str, float]]:
    """What differs from the reference on two small chunks of fresh data, and the errors of K and V."""
    small = replace(case, chunks=2, layers=4)
    source, ours, theirs = small.buffer(), small.buffer(), small.buffer()
    pages = small.pages(source)
    fill(pages, seed, is_awkward)
    slabs = torch.full((2, small.heads, small.slab_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    expected = slabs.clone()
    moves = small.moves(slabs, seed)
    moves_expected = [replace(move, slabs=expected[n]) for n, move in enumerate(moves)]
    verdicts = small.mover(pages).encode(moves).wait()
    wanted = small.reference(pages).encode(moves_expected).wait()
    found = [] if torch.equal(slabs, expected) else ["encode"]
    found += [] if [v.is_refused for v in verdicts] == [v.is_refused for v in wanted] == [False] * 2 else ["verdicts"]
    for number, move in enumerate(moves):
        sums = tuple(
            slab_checksum(expected[number, head].cpu().numpy(), slab_seed(move.key, head, 0))
            for head in range(small.heads)
        )
        found += [] if verdicts[number].sums == sums else ["sums"]
    first = [replace(move, first_block=3 * n) for n, move in enumerate(moves_expected)]
    small.mover(small.pages(ours)).decode(first)
    small.reference(small.pages(theirs)).decode(first)
    found += [] if torch.equal(ours, theirs) else ["decode"]
    small.mover(small.pages(ours)).decode(moves_expected)
    return found, errors(pages, small.pages(ours))


def errors(pages: PagedKV, decoded: PagedKV) -> dict[str, float]:
    """Squared error over energy."""
    found = {}
    for name, plane in (("k", 0), ("v", 1)):
        pairs = [
            (a.planes[plane].double(), b.planes[plane].double())
            for a, b in zip(pages.layers, decoded.layers, strict=True)
        ]
        found[name] = sum(float((a - b).square().sum()) for a, b in pairs) / sum(
            float(a.square().sum()) for a, _ in pairs
        )
    return found


Row = dict[str, object]


class Rig:
    """A case's caches and slabs, which take turns."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.buffers = [case.buffer() for _ in range(CACHES)]
        self.pages = [case.pages(buffer) for buffer in self.buffers]
        shape = (CACHES, case.chunks, case.heads, case.slab_bytes)
        self.slabs = torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")
        self.moves = [case.moves(self.slabs[n], n) for n in range(CACHES)]
        self.runs = [[SlabRun(move.slabs, move.key, 0, 0) for move in moves] for moves in self.moves]
        for number, pages in enumerate(self.pages):
            fill(pages, number, is_awkward=False)

    def work(
        self, encode: CodecTiling | None = None, decode: CodecTiling | None = None
    ) -> dict[str, Callable[[], object]]:
        """Decoding goes into the caches themselves, so that what is encoded next is decoded KV: as good as any."""
        movers = [self.case.mover(pages, encode, decode) for pages in self.pages]
        turns: Iterator[int] = cycle(range(CACHES))

        def encoding() -> object:
            n = next(turns)
            return movers[n].encode(self.moves[n])

        def decoding() -> None:
            n = next(turns)
            movers[n].decode(self.moves[n])

        def loading() -> object:
            n = next(turns)
            sums = slab_checksums(self.runs[n])
            movers[n].decode(self.moves[n])
            return sums

        def verifying() -> object:
            return slab_checksums(self.runs[next(turns)])

        return {"encode": encoding, "verify": verifying, "decode": decoding, "verify+decode": loading}

    def needed_bytes(self, kernel: str) -> int:
        """What must be read and written."""
        kv, encoded = self.case.kv_bytes, self.case.encoded_bytes
        return {"encode": kv + encoded, "verify": encoded, "decode": kv + encoded, "verify+decode": kv + 2 * encoded}[
            kernel
        ]


@dataclass(frozen=True)
class Clock:
    copy_gb_s: float
    flush: torch.Tensor

    def row(self, rig: Rig, kernel: str, work: Callable[[], object], runs: int) -> Row:
        for _ in range(2 * CACHES):
            work()
        on_device = device_ms(work, self.flush, runs)
        bench = float(triton.testing.do_bench(work, warmup=10, rep=max(20, int(4 * on_device)), return_mode="median"))
        bound = rig.needed_bytes(kernel) / self.copy_gb_s / 1e6
        return {
            "case": rig.case.name,
            "kernel": kernel,
            "tb_s": rig.case.kv_bytes / bench / 1e9,
            "ms": bench,
            "percent_of_bound": 100 * bound / bench,
            "device_tb_s": rig.case.kv_bytes / on_device / 1e9,
            "device_percent_of_bound": 100 * bound / on_device,
            "bound_tb_s": rig.case.kv_bytes / bound / 1e9,
        }


def measure(case: Case, clock: Clock) -> list[Row]:
    seed = random.SystemRandom().randrange(1 << 32)
    wrong, nmse = faults(case, seed, is_awkward=False)
    more, _ = faults(case, seed + 1, is_awkward=True)
    for name, limit in case.nmse_max.items():
        wrong += [] if nmse[name] <= limit else [f"error of {name.upper()} {nmse[name]:.5f}"]
    rig = Rig(case)
    rows = [
        clock.row(rig, name, work, RUNS) | {"faults": wrong + more, "nmse": nmse, "seed": seed}
        for name, work in rig.work().items()
    ]
    return rows


def tune(clock: Clock) -> list[Row]:
    rows = []
    for codec in TUNED:
        rig = Rig(replace(MAIN, codec=codec))
        for kernel, tilings in zip(("encode", "decode"), rig.case.tilings, strict=True):
            for tiling in tilings:
                pair = (tiling, None) if kernel == "encode" else (None, tiling)
                rows.append(clock.row(rig, kernel, rig.work(*pair)[kernel], TUNE_RUNS) | {"tiling": tiling._asdict()})
    return rows


def compile_one(job: tuple[Case, CodecTiling | None, CodecTiling | None]) -> None:
    """Into Triton's cache on disk."""
    case, encode, decode = job
    small = replace(case, chunks=1, layers=1)
    small.mover(small.pages(small.buffer()), encode, decode)


def compile_all(with_tilings: bool) -> None:
    """By many processes at once, because one after the other they take longer than all that is measured."""
    jobs: list[tuple[Case, CodecTiling | None, CodecTiling | None]] = [(case, None, None) for case in CASES]
    if with_tilings:
        for case in (replace(MAIN, codec=codec) for codec in TUNED):
            encode, decode = case.tilings
            jobs += [(case, tiling, None) for tiling in encode[1:]] + [(case, None, tiling) for tiling in decode[1:]]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def targets_met(rows: Sequence[Row]) -> bool:
    """Of the main layout: the rates; of all: not one wrong byte."""
    met = not any(row["faults"] for row in rows)
    for row in rows:
        if row["case"] in [replace(MAIN, codec=codec).name for codec in GOAL_PRESETS]:
            met = met and (row["kernel"] not in ("encode", "verify+decode") or float(str(row["tb_s"])) >= GOAL_TB_S)
    return met


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        rate = f"{row['tb_s']:>6.2f} TB/s{row['percent_of_bound']:>6.1f} %   device {row['device_tb_s']:>6.2f}"
        wrong = f"  WRONG: {row['faults']}" if row.get("faults") else ""
        print(f"{row['case']:<30}{row['kernel']:<14}{rate}  {row.get('tiling', '')}{wrong}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--tune", action="store_true", help="try all tilings, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    compile_all(arguments.tune)
    compiled_s = time.monotonic() - begin_s
    prepare(torch.device("cuda", 0))
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    clock = Clock(copy_rate(flush), flush)
    rows = [row for case in CASES for row in measure(case, clock)]
    tuned = tune(clock) if arguments.tune else []
    show(rows)
    show(tuned)
    met = targets_met(rows)
    print(f"device copy (read + written) {clock.copy_gb_s:.0f} GB/s; compiled in {compiled_s:.0f} s")
    print("targets met" if met else "TARGET MISSED", f"({time.monotonic() - begin_s:.0f} s)")
    if arguments.out:
        result = {
            "copy_gb_s": clock.copy_gb_s,
            "targets": {"tb_s": GOAL_TB_S, "nmse_of_theory": NMSE_OF_THEORY_MAX},
            "targets_met": met,
            "rows": rows,
            "tuned": tuned,
        }
        report.write(arguments.out, "the codecs' encode, verify and decode, bytes of the engine's KV over time", result)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
