"""Which way of turboquant's encoding is fastest, and where does its time go?

    python3 -m benchmarks.gpu.encode_variants --out variants.json [--ncu FOLDER] [--only WORD]

Each variant's bytes and sums are compared with those of the encoding by whole programs, on plain and on awkward data.
Rates: the engine's bytes over do_bench's median. Beside them registers, spilled bytes and shared memory of the compiled
kernel, and how many warps of it an SM holds.

--ncu: also profiles one launch of the first and of the fastest variant; reports as text.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton.testing
from triton.errors import TritonError

from benchmarks.gpu import codec_kernels, report
from benchmarks.gpu.codec_cases import CHUNK_TOKENS, SEED, Case
from benchmarks.gpu.kernels import L2_BYTES, device_ms
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.kernels import turboquant_device
from kvtier.kernels.coded_pages import NOTHING
from kvtier.kernels.paged import PagedKV
from kvtier.kernels.turboquant_device import CudaTurboquant, Tiling
from kvtier.kernels.turboquant_tables import ChunkShape, PlaneCode

RUNS = 8
CODECS = ("k4v4", "k4v3")
SM_REGISTERS, SM_SHARED, SM_WARPS, SM_PROGRAMS = 65536, 227 << 10, 64, 32


@dataclass(frozen=True)
class Variant:
    """is_whole: the encoding by whole programs, as it was before the one by warps."""

    name: str
    tiling: Tiling
    is_whole: bool = False


def _variants() -> tuple[Variant, ...]:
    found = [Variant("whole", turboquant_device.WHOLE_TILING, True)]
    for tiling in (*turboquant_device.ENCODE_TILINGS, *MORE):
        early, mean = " early" if tiling.early else "", f" mean {tiling.mean_rows}" if tiling.mean_rows else ""
        shape = f"{tiling.warps} warps, {tiling.rows} rows, {tiling.registers} registers"
        found.append(Variant(f"{shape}, {int(tiling.by_tensor)} bit by tensor{early}{mean}", tiling))
    return tuple(found)


MORE = (
    Tiling(32, 4, 72, 32), Tiling(32, 4, 96, 128, True, True), Tiling(64, 8, 80, 128, True, True),
    Tiling(64, 8, 64, 64, True), Tiling(64, 4, 128, 128, True, True),
)  # fmt: skip
"""Beside the product's own."""
VARIANTS = _variants()


class Encoder(CudaTurboquant):
    """A variant's encoding; decoding is not compiled."""

    def __init__(self, variant: Variant, case: Case, pages: PagedKV) -> None:
        self._variant = variant
        self.kernel: Any = None
        slab_format = SlabFormat(case.layers, CHUNK_TOKENS, case.size, case.size, PRESETS[case.codec], 0, SEED)
        super().__init__(pages, slab_format, case.held, variant.tiling)

    def _encoding(self, k: PlaneCode, v: PlaneCode) -> tuple[Tiling, ChunkShape]:
        if self._variant.is_whole:
            return self._variant.tiling, self._shape(self._variant.tiling)
        return super()._encoding(k, v)

    def _launch_nothing(self, table: torch.Tensor) -> None:
        for bits in self._tables:
            self._encode(turboquant_device._Run(0, 0, 0, bits), NOTHING, table, table, True)

    def _encode(self, *arguments: Any) -> object:
        self.kernel = super()._encode(*arguments)
        return self.kernel


def resources(variant: Variant, kernel: Any) -> dict[str, int]:
    """Warps an SM holds at once, and what binds them."""
    kernel._init_handles()
    registers, shared, warps = kernel.n_regs, kernel.metadata.shared, variant.tiling.warps
    by_registers = SM_REGISTERS // 4 // (-(-registers * 32 // 256) * 256) * 4 // warps
    by_shared = SM_SHARED // (shared + 1024)
    programs = min(by_registers, by_shared, SM_WARPS // warps, SM_PROGRAMS)
    return {"registers": registers, "spilled": kernel.n_spills, "shared": shared, "warps_per_sm": programs * warps}


def small(codec: str) -> Case:
    return Case(codec, chunks=1, layers=1)


def compile_one(job: tuple[Variant, str]) -> str:
    """Into Triton's cache on disk. Returns why it cannot be compiled."""
    variant, codec = job
    try:
        case = small(codec)
        Encoder(variant, case, case.pages(case.buffer()))
    except (TritonError, RuntimeError) as error:  # a variant that ptxas refuses is a row of the table
        return repr(error)[:300]
    return ""


class Bench:
    """One codec's caches and what they are encoded to by the first variant."""

    def __init__(self, codec: str, flush: torch.Tensor) -> None:
        self.rig = codec_kernels.Rig(replace(codec_kernels.MAIN, codec=codec))
        self.flush = flush
        self.check = Case(codec, chunks=4, layers=4)
        self.pages = []
        for awkward in (False, True):
            pages = self.check.pages(self.check.buffer())
            codec_kernels.fill(pages, 11, awkward)
            self.pages.append(pages)
        self.wanted = [self.encoded(VARIANTS[0], pages) for pages in self.pages]

    def encoded(self, variant: Variant, pages: PagedKV) -> tuple[torch.Tensor, list[Any]]:
        slabs = torch.full(
            (self.check.chunks, self.check.heads, self.check.slab_bytes), 0xA5, dtype=torch.uint8, device="cuda"
        )
        verdicts = Encoder(variant, self.check, pages).encode(self.check.moves(slabs, 3)).wait()
        return slabs, verdicts

    def faults(self, variant: Variant) -> list[str]:
        found = []
        for name, pages, (slabs, verdicts) in zip(("plain", "awkward"), self.pages, self.wanted, strict=True):
            ours, said = self.encoded(variant, pages)
            found += [] if torch.equal(ours, slabs) else [f"bytes, {name}"]
            found += [] if said == verdicts else [f"sums, {name}"]
        return found

    def row(self, variant: Variant) -> dict[str, Any]:
        wrong = self.faults(variant)
        encoders = [Encoder(variant, self.rig.case, pages) for pages in self.rig.pages]
        turn = [0]

        def work() -> object:
            turn[0] ^= 1
            return encoders[turn[0]].encode(self.rig.moves[turn[0]])

        for _ in range(3):
            work()
        on_device = device_ms(work, self.flush, RUNS)
        bench = float(triton.testing.do_bench(work, warmup=5, rep=20, return_mode="median"))
        kv = self.rig.case.kv_bytes
        return {
            "variant": variant.name, "codec": self.rig.case.codec, "tb_s": kv / bench / 1e9,
            "device_tb_s": kv / on_device / 1e9, "faults": wrong, **resources(variant, encoders[0].kernel),
        }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['codec']} {row['variant']:<56}{row['tb_s']:>6.2f} TB/s  device{row['device_tb_s']:>6.2f}"
        f"{row['registers']:>5} regs{row['spilled']:>4} spilled{row['shared']:>6} B{row['warps_per_sm']:>3} warps"
        f"{'  WRONG: ' + str(row['faults']) if row['faults'] else ''}",
        flush=True,
    )


def profile(names: list[str], folder: Path) -> None:
    """Stalls and units by Nsight Compute, of one launch over 16 chunks."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        file = folder / f"ncu_{number}"
        command = [
            "ncu", "--set", "full", "--import-source", "no", "-k", "regex:encode", "-s", "3", "-c", "1", "-f", "-o",
            str(file), sys.executable, "-m", "benchmarks.gpu.encode_variants", "--one", name,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            for page, ending in (("details", "txt"), ("source", "csv")):
                shown = subprocess.run(
                    ["ncu", "--import", f"{file}.ncu-rep", "--page", page, *(["--csv"] if page == "source" else [])],
                    capture_output=True, text=True, timeout=60, check=False,
                )  # fmt: skip
                Path(f"{file}_{page}.{ending}").write_text(f"{name}\n{shown.stdout}{shown.stderr[-2000:]}")
            if done.returncode:
                print("ncu", name, done.stdout[-600:], done.stderr[-600:])
        except (OSError, subprocess.TimeoutExpired) as error:
            print("ncu", name, repr(error)[:300])
        Path(f"{file}.ncu-rep").unlink(missing_ok=True)


def one(name: str) -> None:
    """Launches a variant some times, to be profiled."""
    variant = next(each for each in VARIANTS if each.name == name)
    case = Case("k4v4", chunks=16)
    pages = case.pages(case.buffer())
    codec_kernels.fill(pages, 1, is_awkward=False)
    slabs = torch.zeros((case.chunks, case.heads, case.slab_bytes), dtype=torch.uint8, device="cuda")
    encoder = Encoder(variant, case, pages)  # launches once
    for _ in range(4):
        encoder.encode(case.moves(slabs, 1)).wait()


def measure(variants: list[Variant], flush: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    jobs = [(variant, codec) for codec in CODECS for variant in variants]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for codec in CODECS:
        bench = Bench(codec, flush)
        for variant in variants:
            if errors[variant, codec]:
                print(codec, variant.name, errors[variant, codec])
                continue
            rows.append(bench.row(variant))
            show(rows[-1])
        del bench
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--ncu", type=Path, default=None, help="folder for profiles")
    parser.add_argument("--only", default="", help="only variants with this in their name, and the first")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    if arguments.one:
        one(arguments.one)
        return 0
    begin_s = time.monotonic()
    variants = [each for each in VARIANTS if arguments.only in each.name or each is VARIANTS[0]]
    rows = measure(variants, torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda"))
    print(f"{time.monotonic() - begin_s:.0f} s")
    if arguments.out:
        report.write(arguments.out, "ways to encode, bytes of the engine's KV over time", {"rows": rows})
    if arguments.ncu:
        best = max((row for row in rows if not row["faults"]), key=lambda row: row["tb_s"])
        profile(list(dict.fromkeys([best["variant"], VARIANTS[0].name])), arguments.ncu)
        print(f"{time.monotonic() - begin_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
