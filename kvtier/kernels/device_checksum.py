"""Checksum of kvtier.format.checksum on the device, in Triton: many slabs in one launch, the same sums as on the CPU.

A program walks over some pages of a slab. The key stream's part within a page stays in its registers: each thread
keeps to its places of the page, and mixes only once a page, for the part over the pages.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import PAGE_BYTES
from kvtier.kernels import table_kernel
from kvtier.kernels.launch import on_device
from kvtier.kernels.paged import SlabRun, plain_slabs
from kvtier.kernels.table_kernel import TableAnswer, TableAt, TableKernel

_ALIGNMENT = 16  # of the widest load of a thread, which the kernel relies on
_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)


class Walk(NamedTuple):
    """Pages of a program: `step` at a time (a power of two), `pages` in all (a multiple of it)."""

    pages: int
    step: int
    warps: int


# Candidates of benchmarks/gpu/kernels.py --tune. The first one is in use.
WALKS = (
    Walk(16, 4, 4), Walk(8, 4, 4), Walk(32, 4, 4), Walk(64, 4, 4), Walk(16, 2, 4), Walk(16, 8, 4), Walk(16, 4, 8),
    Walk(32, 8, 8), Walk(32, 2, 2),
)  # fmt: skip


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
def page_keys(page: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tuple:
    """Return the key stream's parts that all pairs of a page share. low, high: halves of the seed."""
    p0 = mix32(page.to(tl.uint32) * 0x9E3779B9 + high)
    return p0, fold(p0 ^ low)


@triton.jit
def place_keys(place: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tuple:
    """Return the key stream's parts of places within a page, which are equal in all pages."""
    a0 = mix32(place.to(tl.uint32) + low)
    return a0, fold(a0 ^ high)


@triton.jit
def products(pairs: tl.tensor, of_place: tl.tuple, of_page: tl.tuple) -> tl.tensor:
    """uint64: the summands of pairs of words, int64. of_place, of_page: parts of the key stream."""
    pairs = pairs.to(tl.uint64, bitcast=True)
    x = pairs.to(tl.uint32) + (of_place[0] ^ of_page[0])
    y = (pairs >> 32).to(tl.uint32) + (of_place[1] ^ of_page[1])
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
    keys = place_keys(lane, low, high)
    total = tl.full((PAIRS,), 0, tl.uint64)
    end = tl.minimum(first + PAGES, n_pages)
    page = first
    while page + STEP <= end:
        for j in tl.static_range(STEP):
            pairs = tl.load(words + (page + j).to(tl.int64) * PAIRS + lane)
            total += products(pairs, keys, page_keys(page + j, low, high))
        page += STEP
    while page < end:
        pairs = tl.load(words + page.to(tl.int64) * PAIRS + lane)
        total += products(pairs, keys, page_keys(page, low, high))
        page += 1
    part = tl.reduce(total, 0, add).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + slab, part, sem="relaxed")


class _Described(NamedTuple):
    """Slabs of a run, as numbers: asking a tensor takes longer than all else that is done with them here."""

    slab_bytes: int
    address: int
    n_slabs: int
    run: SlabRun


class PendingSums:
    """Checksums on their way to the host. The summed bytes must not change until then."""

    def __init__(self, answers: Sequence[TableAnswer], runs: Sequence[SlabRun], places: Sequence[int]) -> None:
        """answers: sums, one after another; places: where the sums of each run start in them."""
        self._runs, self._places = runs, places  # the runs are kept, because a launch does not keep their memory
        self._answers = answers

    def wait(self) -> list[tuple[int, ...]]:
        """One checksum a slab, a tuple for each run. Sleeps until the device is done, without the interpreter lock."""
        sums: list[int] = []
        for answer in self._answers:
            sums += answer.wait().view(np.uint64).tolist()
        return [
            tuple(sums[place : place + run.slabs.shape[0]]) for run, place in zip(self._runs, self._places, strict=True)
        ]


def slab_checksums(runs: Sequence[SlabRun], walk: Walk = WALKS[0]) -> PendingSums:
    """Starts to sum all slabs on the current stream of their device, one launch for each size of slab.

    slabs of each run: (n_slabs, slab_bytes) uint8, contiguous, slab_bytes whole pages. Raises ValueError.
    """
    if not runs:
        return PendingSums((), (), ())
    device, described = runs[0].slabs.device, []
    for run in runs:
        address, n_slabs, size = plain_slabs(run.slabs, device)
        if size % PAGE_BYTES or address % _ALIGNMENT or len(run.key) != 16:
            raise ValueError(f"slabs of {size} bytes at {address:#x}, key of {len(run.key)} bytes")
        described.append(_Described(size, address, n_slabs, run))
    order = sorted(range(len(runs)), key=[each.slab_bytes for each in described].__getitem__)
    ordered = [described[number] for number in order]
    starts = [0, *accumulate(each.n_slabs for each in ordered)]
    places = [0] * len(runs)
    for number, start in zip(order, starts[:-1], strict=True):
        places[number] = start
    with on_device(device):
        return PendingSums(_launch(ordered, walk, device), runs, places)


def prepare(device: torch.device) -> None:
    """Compile and load the kernel, and pin memory for tables, or the first load would wait for both."""
    table_kernel.prepare(device)
    with on_device(device):
        _kernel(WALKS[0]).launch((0, 1, 1), (TableAt(0), TableAt(0), 1, 1), np.zeros(1, np.int64), device)


def slab_seeds(keys: bytes, first_head: int, n_heads: int, first_layer: int) -> npt.NDArray[np.uint64]:
    """(keys, n_heads): kvtier.format.checksum.slab_seed of heads next to each other. keys: of 16 bytes each, joined."""
    heads = np.arange(first_head + 1, first_head + n_heads + 1, dtype=np.uint64)
    low, high = np.frombuffer(keys, dtype="<u8").reshape(-1, 2).T
    inner = _mix64(low[:, None] + _GOLDEN64 * heads)
    of_layer = _GOLDEN64 * np.array([first_layer + 1], dtype=np.uint64)  # of scalars, numpy tells that they overflow
    return _mix64(inner ^ (high ^ of_layer)[:, None])


def _slab_table(described: Sequence[_Described]) -> npt.NDArray[np.int64]:
    """Return (slabs of all runs, 2), run after run: address and seed of each slab."""
    parts = []
    what_seeds_share = attrgetter("run.first_head", "n_slabs", "run.first_layer", "slab_bytes")
    for (head, n_slabs, layer, size), alike in groupby(described, what_seeds_share):
        found = list(alike)
        table = np.empty((len(found), n_slabs, 2), dtype=np.uint64)
        first = np.array([each.address for each in found], dtype=np.uint64)
        table[:, :, 0] = first[:, None] + np.arange(0, size * n_slabs, size, dtype=np.uint64)
        table[:, :, 1] = slab_seeds(b"".join([each.run.key for each in found]), head, n_slabs, layer)
        parts.append(table.reshape(-1, 2))
    return np.concatenate(parts).view(np.int64)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def _kernel(walk: Walk) -> TableKernel:
    constants = {"PAIRS": PAIRS_PER_PAGE, "PAGES": walk.pages, "STEP": walk.step, "num_warps": walk.warps}
    return TableKernel(_sum_pages, constants)


def _launch(described: Sequence[_Described], walk: Walk, device: torch.device) -> list[TableAnswer]:
    """Return the sums, an answer for each size of slab. described: slabs of equal size side by side."""
    answers = []
    for size, alike in groupby(described, attrgetter("slab_bytes")):
        slabs = _slab_table(list(alike)).reshape(-1)
        n_slabs, n_parts = len(slabs) // 2, -(-size // (PAGE_BYTES * walk.pages))
        table = np.concatenate([slabs, np.zeros(n_slabs, np.int64)])  # the sums start at 0
        arguments = TableAt(0), TableAt(2 * n_slabs), size // PAGE_BYTES, n_parts
        answers.append(_kernel(walk).launch((n_slabs * n_parts, 1, 1), arguments, table, device, n_answer=n_slabs))
    return answers
