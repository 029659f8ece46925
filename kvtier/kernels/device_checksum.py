"""The checksum of kvtier.checksum on the device, in Triton: many slabs in one launch, the same sums as on the CPU.

A program walks over some pages of a slab. The key stream's part within a page stays in its registers: each thread
keeps to its places of the page, and mixes only once a page, for the part over the pages.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvtier.checksum import PAIRS_PER_PAGE
from kvtier.geometry import PAGE_BYTES
from kvtier.kernels.launch import ToHost, on_device, pin_tables, to_device
from kvtier.kernels.paged import SlabRun

_ALIGNMENT = 16  # of the widest load of a thread, which the kernel relies on
_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)


class Walk(NamedTuple):
    """How a program walks: `step` pages at a time (a power of two), `pages` in all (a multiple of it)."""

    pages: int
    step: int
    warps: int


WALKS = (
    Walk(16, 4, 4), Walk(8, 4, 4), Walk(32, 4, 4), Walk(64, 4, 4), Walk(16, 2, 4), Walk(16, 8, 4), Walk(16, 4, 8),
    Walk(32, 8, 8), Walk(32, 2, 2),
)  # fmt: skip
"""What benchmarks/gpu/kernels.py --tune tries. The first is the one in use."""


@triton.jit
def mix32(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def fold(x: tl.tensor) -> tl.tensor:
    x = x * 0x9E3779B9
    return x ^ (x >> 15)


@triton.jit
def add(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x + y


@triton.jit
def _products(
    words: tl.tensor, page: tl.tensor, lane: tl.tensor, a0: tl.tensor, a1: tl.tensor, low: tl.tensor, high: tl.tensor
) -> tl.tensor:
    """(lanes,) uint64: the summands of one page."""
    pairs = tl.load(words + page.to(tl.int64) * lane.shape[0] + lane).to(tl.uint64, bitcast=True)
    p0 = mix32(page.to(tl.uint32) * 0x9E3779B9 + high)
    p1 = fold(p0 ^ low)
    x = pairs.to(tl.uint32) + (a0 ^ p0)
    y = (pairs >> 32).to(tl.uint32) + (a1 ^ p1)
    return x.to(tl.uint64) * y.to(tl.uint64)


# Not specialized on values, so that it is compiled once, at start.
@triton.jit(do_not_specialize=("table", "sums", "n_pages", "n_parts"))
def _sum_pages(
    table: tl.tensor,
    sums: tl.tensor,
    n_pages: tl.tensor,
    n_parts: tl.tensor,
    PAIRS: tl.constexpr,
    PAGES: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Grid: (slabs x parts,). Adds the sum of PAGES pages, from the part's first on, to the slab's.

    table: (slabs, 2) int64: address, seed. sums: (slabs,) int64, zeros at first.
    """
    slab = tl.program_id(0) // n_parts
    first = tl.program_id(0) % n_parts * PAGES
    words = tl.multiple_of(tl.load(table + slab * 2).to(tl.pointer_type(tl.int64)), 16)
    seed = tl.load(table + slab * 2 + 1).to(tl.uint64, bitcast=True)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    lane = tl.arange(0, PAIRS)
    a0 = mix32(lane.to(tl.uint32) + low)
    a1 = fold(a0 ^ high)
    total = tl.full((PAIRS,), 0, tl.uint64)
    end = tl.minimum(first + PAGES, n_pages)
    page = first
    while page + STEP <= end:
        for j in tl.static_range(STEP):
            total += _products(words, page + j, lane, a0, a1, low, high)
        page += STEP
    while page < end:
        total += _products(words, page, lane, a0, a1, low, high)
        page += 1
    part = tl.reduce(total, 0, add).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + slab, part, sem="relaxed")


class PendingSums:
    """Checksums on their way to the host. What they are sums of must stay as it is until they are there."""

    def __init__(self, sums: torch.Tensor, runs: Sequence[SlabRun], places: Sequence[int]) -> None:
        """sums: (n,) int64 on the device; places: where the sums of each run start in it."""
        self._runs, self._places = runs, places  # the runs are kept, because a launch does not keep their memory
        self._sums = ToHost([sums], sums.device)

    def wait(self) -> list[tuple[int, ...]]:
        """One checksum a slab, a tuple for each run. Sleeps until the device is done, without the interpreter lock."""
        (sums,) = (found.tolist() for found in self._sums.wait())
        return [
            tuple(sums[place : place + len(run.slabs)]) for run, place in zip(self._runs, self._places, strict=True)
        ]


def slab_checksums(runs: Sequence[SlabRun], walk: Walk = WALKS[0]) -> PendingSums:
    """Starts to sum all slabs on the current stream of their device, one launch for each size of slab.

    slabs of each run: (n_slabs, slab_bytes) uint8, contiguous, slab_bytes whole pages. Raises ValueError.
    """
    if not runs:
        return PendingSums(torch.zeros(0, dtype=torch.int64), (), ())
    device = runs[0].slabs.device
    for run in runs:
        slabs = run.slabs
        if slabs.dtype != torch.uint8 or slabs.dim() != 2 or not slabs.is_contiguous() or slabs.device != device:
            raise ValueError(f"slabs {tuple(slabs.shape)} {slabs.dtype} on {slabs.device} are not plain bytes of slabs")
        if slabs.shape[1] % PAGE_BYTES or slabs.data_ptr() % _ALIGNMENT or len(run.key) != 16:
            raise ValueError(f"slabs of {slabs.shape[1]} bytes at {slabs.data_ptr():#x}, key of {len(run.key)} bytes")
    order = sorted(range(len(runs)), key=lambda number: int(runs[number].slabs.shape[1]))
    ordered = [runs[number] for number in order]
    starts = [0, *accumulate(len(run.slabs) for run in ordered)]
    places = [start for _, start in sorted(zip(order, starts[:-1], strict=True))]
    with on_device(device):
        return PendingSums(_launch(ordered, starts, walk), runs, places)


def prepare(device: torch.device) -> None:
    """Compiles and loads the kernel and has memory for tables pinned, for which else the first load would wait."""
    pin_tables(device)
    with on_device(device):
        table = torch.zeros(2, dtype=torch.int64, device=device)
        _sum_pages[(0,)](table, table, 1, 1, PAIRS_PER_PAGE, WALKS[0].pages, WALKS[0].step, num_warps=WALKS[0].warps)


def slab_table(runs: Sequence[SlabRun]) -> npt.NDArray[np.uint64]:
    """(slabs of all runs, 2), run after run: where each slab lies, and its seed (kvtier.checksum.slab_seed)."""
    counts = [len(run.slabs) for run in runs]
    words = [(run.slabs.data_ptr(), run.slabs.shape[1], run.first_head, run.first_layer) for run in runs]
    address, size, head, layer = np.repeat(np.array(words, dtype=np.uint64), counts, axis=0).T
    keys = np.frombuffer(b"".join(run.key for run in runs), dtype="<u8").reshape(-1, 2)
    low, high = np.repeat(keys, counts, axis=0).T
    number = np.arange(len(low), dtype=np.uint64) - np.repeat(np.cumsum([0, *counts[:-1]]).astype(np.uint64), counts)
    inner = _mix64(low + _GOLDEN64 * (head + number + np.uint64(1)))
    return np.stack([address + size * number, _mix64(inner ^ high ^ (_GOLDEN64 * (layer + np.uint64(1))))], axis=1)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _launch(runs: Sequence[SlabRun], starts: Sequence[int], walk: Walk) -> torch.Tensor:
    """(slabs,) int64: the sums. runs: those of slabs of equal size side by side. starts: their first slabs, and the
    end."""
    device = runs[0].slabs.device
    table = to_device(slab_table(runs).view(np.int64).reshape(-1), device)
    sums = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    first = 0
    for size, alike in groupby(int(run.slabs.shape[1]) for run in runs):
        last = first + len(list(alike))
        start, n_slabs = starts[first], starts[last] - starts[first]
        n_parts = -(-size // (PAGE_BYTES * walk.pages))
        _sum_pages[(n_slabs * n_parts,)](
            table[2 * start :], sums[start:], size // PAGE_BYTES, n_parts, PAIRS_PER_PAGE, walk.pages, walk.step,
            num_warps=walk.warps,
        )  # fmt: skip
        first = last
    return sums
