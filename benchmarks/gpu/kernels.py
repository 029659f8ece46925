"""Rates of gather, scatter and checksum as shares of the device's own copy.

    python -m benchmarks.gpu.kernels --out kernels.json [--tune]

Ceiling: torch's copy of one large buffer to another, in the same run. Gather and scatter count bytes read and written,
as the copy does; the checksum only reads. 64 chunks of 256 tokens, their blocks shuffled over the cache. Before
anything is timed, it is compared: two chunks with the torch reference, all of them with the cache they came from, two
slabs with the checksum in numpy. --tune also tries all TILINGS and WALKS.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.kernel_cases import CHUNK_TOKENS, RUNS, TUNE_RUNS, DeviceClock, PagesCase, Row, Work, run
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import padded
from kvtier.kernels import device, device_checksum
from kvtier.kernels.paged import Move, Patch, SlabRun, gather, scatter

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
