"""Rates of the codecs' kernels (encode, verify, decode), beside the device's own copy.

    python -m benchmarks.gpu.codec_kernels --out codec_kernels.json [--tune]

Rates are bytes of the engine's KV over time. Bound: all bytes that must be read and written, at the rate of torch's
copy of one large buffer to another in the same run. 128 chunks of 256 tokens, blocks shuffled over the cache; two
caches take turns, each many times what the L2 holds. (With 64 chunks the host's part of a launch takes as long as the
device's.) `verify+decode` is the two launches of a load, without the comparison between them on the CPU.

Before anything is timed, chunks of fresh random data, each channel with a bias, are encoded and decoded by the kernels
and by the reference on the CPU into poisoned memory: every byte and sum must be equal; tc4 and tc3 may decode to a
neighbouring number. (tests/codecs have awkward data, and the errors that theory gives.) Tables of tc4 and tc3 are of
random statistics. Rates are medians of triton.testing.do_bench. --tune also tries all tilings.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import triton.testing

from benchmarks.gpu.kernels import CHUNK_TOKENS, RUNS, TUNE_RUNS, DeviceClock, PagesCase, Row, Work, run
from kvtier.codecs.int8 import device as int8_device
from kvtier.codecs.int8.codec import Int8Coder
from kvtier.codecs.transform import device as transform_device
from kvtier.codecs.transform.calibrate import PlaneStatistics, table_tensors
from kvtier.codecs.transform.codec import TransformCoder
from kvtier.codecs.transform.table import PRESET_BITS, TransformTable, read_table, write_table
from kvtier.codecs.turboquant import device as turboquant_device
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.vectors import VectorPages
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.device_checksum import prepare, slab_checksums
from kvtier.kernels.paged import Move, PagedKV, Patch, SlabRun

SEED = 7
CACHES = 2
CODECS = ("int8", "k6v5", "k4v4")
ROPE_BASE = 1e6  # of the rotary embedding that the presets of turboquant take off K
GOALS = {"encode": 1.0, "verify+decode": 1.6}  # TB/s of each of CODECS at head size 128


@cache
def table_of(preset: str, layers: int, heads: int, size: int) -> TransformTable:
    """Return a table of normal vectors with correlated elements."""
    draw = torch.Generator().manual_seed(0)
    scales = torch.logspace(-1, 1, size)
    vectors = [torch.randn(layers, heads, 256, size, generator=draw) * scales for _ in range(4)]
    planes = [PlaneStatistics.of(*vectors[n : n + 2]) for n in (0, 2)]
    frequencies = ROPE_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table")
        write_table(path, table_tensors(*planes, frequencies.expand(layers, -1)), "random", "")
        return read_table(path, preset)


@dataclass(frozen=True)
class CodecCase(PagesCase):
    """A KV cache and its codec: int8, or a preset of turboquant or of the transform codec."""

    chunks: int = 128
    codec: str = "k4v4"

    @property
    def name(self) -> str:
        return f"{self.codec} {super().name}"

    @property
    def held(self) -> Extent:
        return Extent(0, self.layers, 0, self.heads)

    @property
    def is_transform(self) -> bool:
        return self.codec in PRESET_BITS

    @property
    def _table(self) -> TransformTable:
        return table_of(self.codec, self.layers, self.heads, self.size)

    def _coder(self, device: str = "cpu") -> Any:
        if self.is_transform:
            return TransformCoder(self._table, self.held, CHUNK_TOKENS, torch.device("cpu"))
        if self.codec == "int8":
            return Int8Coder(CHUNK_TOKENS, self.size, self.size)
        slab_format = SlabFormat(CHUNK_TOKENS, self.size, self.size, PRESETS[self.codec], ROPE_BASE, SEED)
        return TurboquantCoder(slab_format, self.held, torch.device(device))

    @property
    def slab_bytes(self) -> int:
        return padded(self._coder().n_bytes(range(self.layers)))

    @property
    def encoded_bytes(self) -> int:
        return self.chunks * self.heads * self.slab_bytes

    @property
    def tilings(self) -> tuple[Any, Any]:
        """Candidates for encoding and for decoding; the first of each is in use."""
        modules = {"int8": int8_device} | dict.fromkeys(PRESET_BITS, transform_device)
        module: Any = modules.get(self.codec, turboquant_device)
        return module.ENCODE_TILINGS, module.DECODE_TILINGS

    def mover(self, pages: PagedKV, encode: Any = None, decode: Any = None) -> Any:
        """Return the kernels. None: the tiling that is in use."""
        pair = (encode or self.tilings[0][0], decode or self.tilings[1][0])
        if self.is_transform:
            return transform_device.CudaTransform(pages, self._coder(), self.held, self._table, pair)
        if self.codec == "int8":
            return int8_device.CudaInt8(pages, self._coder(), self.held, *pair)
        return turboquant_device.CudaTurboquant(pages, self._coder(), self.held, *pair)

    def reference(self, pages: PagedKV) -> VectorPages:
        """Return the codec in torch operations, on the pages' device."""
        return VectorPages(pages, self._coder(str(pages.layers[0].k.device)), self.held)

    def buffer(self) -> torch.Tensor:
        """Return (kv_bytes,) uint8, poisoned: all bits are set, which is NaN."""
        return torch.full((self.kv_bytes,), 0xFF, dtype=torch.uint8, device="cuda")

    def moves(self, slabs: torch.Tensor, seed: int) -> list[Move]:
        """Return moves of all blocks, shuffled. slabs: (chunks, heads, slab_bytes)."""
        rng, patch = random.Random(seed), Patch(0, 0, self.layers, 0, self.heads)
        places = [n * CHUNK_TOKENS if self.is_transform else 0 for n in range(self.chunks)]
        blocks = zip(self.blocks(seed), places, strict=True)
        return [Move(patch, ids, slabs[n], 0, rng.randbytes(16), position=at) for n, (ids, at) in enumerate(blocks)]

    def are_same(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Return whether decoded buffers are equal, or of the transform codec within a rounding."""
        if not self.is_transform:
            return torch.equal(ours, theirs)
        values = ours.view(self.dtype).float(), theirs.view(self.dtype).float()
        return torch.allclose(*values, rtol=2**-7, atol=2**-7, equal_nan=True)


OTHER_PAGES = (
    ("HND", torch.bfloat16, 128),
    ("NHD", torch.float16, 128),
    *(("NHD", torch.bfloat16, size) for size in (64, 96, 80, 256)),
)
CASES = (
    *(CodecCase(codec=codec) for codec in CODECS),
    *(CodecCase(*pages, chunks=32, codec=codec) for codec in CODECS for pages in OTHER_PAGES),
    *(CodecCase(chunks=64, codec=codec) for codec in PRESET_BITS),
)


def fill(pages: PagedKV, seed: int) -> None:
    """Fill with Gaussian values; each channel has a bias."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for layer in pages.layers:
        for plane in layer.planes:
            bias = 8 * torch.randn(plane.shape[2:], generator=generator, device="cuda")
            plane.copy_(torch.randn(plane.shape, generator=generator, device="cuda") + bias)


def faults(case: CodecCase, seed: int) -> list[str]:
    """Return the differences from the reference on the CPU, on two small chunks of fresh data."""
    small = replace(case, chunks=2, layers=4)
    source, ours, theirs = small.buffer(), small.buffer(), small.buffer()
    pages = small.pages(source)
    fill(pages, seed)
    slabs = torch.full((2, small.heads, small.slab_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    expected = slabs.cpu()
    moves = small.moves(slabs, seed)
    moves_expected = [move._replace(slabs=expected[n]) for n, move in enumerate(moves)]
    verdicts = small.mover(pages).encode(moves).wait()
    small.reference(small.pages(source.cpu())).encode(moves_expected).wait()
    found = [] if torch.equal(slabs.cpu(), expected) else ["encode"]
    found += ["refused"] if any(verdict.is_refused for verdict in verdicts) else []
    for number, move in enumerate(moves):
        seeds = [slab_seed(move.key, head, 0) for head in range(small.heads)]
        sums = [slab_checksum(expected[number, head].numpy(), one) for head, one in enumerate(seeds)]
        found += [] if verdicts[number].sums == tuple(sums) else ["sums"]
    first = [move._replace(first_block=3 * n) for n, move in enumerate(moves)]
    small.mover(small.pages(ours)).decode(first)
    there = theirs.cpu()
    small.reference(small.pages(there)).decode([one._replace(slabs=expected[n]) for n, one in enumerate(first)])
    return found if case.are_same(ours.cpu(), there) else [*found, "decode"]


class CodecRig:
    """A case's caches and slabs, which take turns."""

    def __init__(self, case: CodecCase) -> None:
        self.case = case
        self.pages = [case.pages(case.buffer()) for _ in range(CACHES)]
        shape = (CACHES, case.chunks, case.heads, case.slab_bytes)
        slabs = torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")
        self.moves = [case.moves(slabs[n], n) for n in range(CACHES)]
        self.runs = [[SlabRun(move.slabs, move.key, 0, 0) for move in moves] for moves in self.moves]
        for number, pages in enumerate(self.pages):
            fill(pages, number)

    def work(self, encode: Any = None, decode: Any = None) -> dict[str, Work]:
        """Return the kernels' calls. Decoding goes into the caches themselves: what is encoded next is decoded KV."""
        movers = [self.case.mover(pages, encode, decode) for pages in self.pages]
        turns = cycle(range(CACHES))

        def loading() -> object:
            n = next(turns)
            sums = slab_checksums(self.runs[n])
            movers[n].decode(self.moves[n])
            return sums

        return {
            "encode": lambda: movers[n := next(turns)].encode(self.moves[n]),
            "verify": lambda: slab_checksums(self.runs[next(turns)]),
            "decode": lambda: movers[n := next(turns)].decode(self.moves[n]),
            "verify+decode": loading,
        }

    def row(self, clock: DeviceClock, kernel: str, work: Work, runs: int) -> Row:
        kv, encoded = self.case.kv_bytes, self.case.encoded_bytes
        needed = {"encode": kv + encoded, "verify": encoded, "decode": kv + encoded, "verify+decode": kv + 2 * encoded}
        for _ in range(2 * CACHES):
            work()
        on_device = clock.device_ms(work, runs)
        bench = float(triton.testing.do_bench(work, warmup=10, rep=max(20, int(4 * on_device)), return_mode="median"))
        bound = needed[kernel] / clock.copy_gb_s / 1e6
        return {
            "case": self.case.name,
            "kernel": kernel,
            "tb_s": kv / bench / 1e9,
            "ms": bench,
            "percent_of_bound": 100 * bound / bench,
            "device_tb_s": kv / on_device / 1e9,
            "bound_tb_s": kv / bound / 1e9,
        }


def measure(clock: DeviceClock, is_tuned: bool) -> Iterator[Row]:
    compile_all(is_tuned)
    prepare(torch.device("cuda", 0))
    for case in CASES:
        wrong = faults(case, random.SystemRandom().randrange(1 << 32))
        rig = CodecRig(case)
        for name, work in rig.work().items():
            yield rig.row(clock, name, work, RUNS) | {"faults": wrong}
    for codec in (*CODECS, *PRESET_BITS) if is_tuned else ():
        rig = CodecRig(CodecCase(codec=codec))
        for kernel, encode, decode in candidates(rig.case):
            work = rig.work(encode, decode)[kernel]
            yield rig.row(clock, kernel, work, TUNE_RUNS) | {"variant": (encode or decode)._asdict()}


def candidates(case: CodecCase) -> list[tuple[str, Any, Any]]:
    """Return (kernel, tiling for encoding, tiling for decoding), one of which is None."""
    encode, decode = case.tilings
    return [*(("encode", tiling, None) for tiling in encode), *(("decode", None, tiling) for tiling in decode)]


def compile_one(job: tuple[CodecCase, Any, Any]) -> None:
    """Compile into Triton's cache on disk."""
    case, encode, decode = job
    small = replace(case, chunks=1, layers=1)
    small.mover(small.pages(small.buffer()), encode, decode)


def compile_all(with_candidates: bool) -> None:
    """Compile in many processes at once: one after the other takes longer than all that is measured."""
    jobs: list[tuple[CodecCase, Any, Any]] = [(case, None, None) for case in CASES]
    if with_candidates:
        cases = [CodecCase(codec=codec) for codec in (*CODECS, *PRESET_BITS)]
        jobs += [(case, encode, decode) for case in cases for _, encode, decode in candidates(case)]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def is_met(row: Row) -> bool:
    is_goal = row["case"] in [CodecCase(codec=codec).name for codec in CODECS]
    return not is_goal or bool(row["tb_s"] >= GOALS.get(row["kernel"], 0.0))


if __name__ == "__main__":
    raise SystemExit(run(__doc__, measure, is_met, GOALS))
