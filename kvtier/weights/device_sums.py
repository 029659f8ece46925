"""Checksums of weights on the device: finds the blocks that a read brings there whole, and sums them.

16 cores copy 8B parameters to a GPU in 0.4 s, and would take a quarter longer to sum them too. The GPU sums them in
6 ms, mostly while further blocks are read.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import TierUnavailable
from kvtier.format.checksum import slab_seed
from kvtier.io import ranges
from kvtier.io.ranges import RangeProgress
from kvtier.kernels.block_sums import BlockSums, is_compiled
from kvtier.runtime.threads import begin
from kvtier.storage.cache_folder import FOLDER, CacheFolder
from kvtier.weights.copies import Table

log = logging.getLogger("kvtier")

# Least bytes to sum for which compiling the kernel during the read pays off.
FIRST_BYTES_MIN = 4 << 30
KERNELS = CacheFolder(FOLDER / "kernels", "kernel", b"KVTKERN1")
PAIR_BYTES = 8  # of the checksum; the kernel loads pairs


class WholeBlocks(NamedTuple):
    """Blocks that land whole, each byte once.

    pieces: (n, 4) int64, as kernels.block_sums.PIECE_FIELDS. by_file: bool for each block of each file; blocks
    are numbered file after file.
    """

    pieces: npt.NDArray[np.int64]
    by_file: list[npt.NDArray[np.bool_]]


def whole_blocks(table: Table, places: npt.NDArray[np.void], sizes: npt.NDArray[np.int64]) -> WholeBlocks:
    """Find the blocks that contiguous copies bring to the device whole, in pieces of whole pairs.

    places: of ranges.TARGET. sizes: of each file in bytes, 0 where its blocks do not count.
    """
    file, offset, rows, row_bytes, source_pitch, target, target_offset, target_pitch = table.T
    blocks = -(-sizes // ranges.BLOCK_BYTES)
    first_block = np.cumsum(blocks) - blocks
    address = places["address"].astype(np.int64)[target] + target_offset
    n_bytes = rows * row_bytes
    usable = (rows == 1) | ((source_pitch == row_bytes) & (target_pitch == row_bytes))
    usable &= (places["on_device"][target] != 0) & (offset + n_bytes <= sizes[file])
    usable &= ~_overlap(address, address + (rows - 1) * target_pitch + row_bytes)
    start = (first_block[file] * ranges.BLOCK_BYTES + offset)[usable]
    order = np.argsort(start, kind="stable")
    start, length, address = start[order], n_bytes[usable][order], address[usable][order]
    reached = np.maximum.accumulate(start + length)
    once = np.ones(len(start), np.bool_)  # of two copies of the same bytes, the first one is summed
    once[1:] = start[1:] >= reached[:-1]
    pieces = _pieces(start[once], length[once], address[once])
    n_blocks = int(blocks.sum())
    block_bytes = np.full(n_blocks, ranges.BLOCK_BYTES)
    last = (first_block + blocks - 1)[sizes > 0]
    block_bytes[last] = (sizes - (blocks - 1) * ranges.BLOCK_BYTES)[sizes > 0]
    whole = np.bincount(pieces[:, 3], PAIR_BYTES * pieces[:, 2], n_blocks) == block_bytes
    by_file = [whole[at : at + n] for at, n in zip(first_block, blocks, strict=True)]
    return WholeBlocks(pieces[whole[pieces[:, 3]]], by_file)


def _overlap(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return True for each range that overlaps another one."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    found = np.zeros(len(start), np.bool_)
    found[1:] = start[1:] < np.maximum.accumulate(stop)[:-1]
    found[:-1] |= start[1:] < stop[:-1]
    result = np.empty_like(found)
    result[order] = found
    return result


def _pieces(
    start: npt.NDArray[np.int64], length: npt.NDArray[np.int64], address: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Cut ranges at the ends of blocks. Return the pieces that are whole pairs on both sides."""
    first = start // ranges.BLOCK_BYTES
    counts = (start + length - 1) // ranges.BLOCK_BYTES - first + 1
    number = np.repeat(np.arange(len(start)), counts)
    block = first[number] + np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = np.maximum(start[number], block * ranges.BLOCK_BYTES)
    stop = np.minimum((start + length)[number], (block + 1) * ranges.BLOCK_BYTES)
    where = address[number] + at - start[number]
    paired = (at | stop | where) % PAIR_BYTES == 0
    table = np.stack([where, at % ranges.BLOCK_BYTES // PAIR_BYTES, (stop - at) // PAIR_BYTES, block], axis=1)
    return np.ascontiguousarray(table[paired])


_works: dict[torch.device, bool] = {}  # of devices where the kernel was tried


class DeviceSums:
    """Checksums of the whole blocks of one read. The kernel is loaded while the bytes are read."""

    def __init__(self, blocks: WholeBlocks, device: torch.device) -> None:
        self.blocks, self._device = blocks, device
        self._prepared = begin("weights-sums", self._prepare)

    def _prepare(self) -> BlockSums:
        n_blocks = sum(map(len, self.blocks.by_file))
        return BlockSums(self.blocks.pieces, n_blocks, slab_seed(ranges.SEED_KEY, 0, 0), self._device, KERNELS)

    def sum_landed(self, done: RangeProgress) -> None:
        """Begin to sum blocks that have landed, if the kernel is loaded. Raises TierUnavailable when CUDA fails."""
        if not self._prepared.done() or self._prepared.exception() is not None:
            return
        sizes = [len(each) for each in self.blocks.by_file]
        block = sum(sizes[: done.file])
        if done.file < len(sizes):
            block += min(done.offset // ranges.BLOCK_BYTES, sizes[done.file])
        with self._errors():
            self._prepared.result().sum_until(block)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TierUnavailable(f"checksums of weights cannot be computed on {self._device}: {error}") from error

    def sums(self) -> list[npt.NDArray[np.uint64]] | None:
        """Return those of each file, when all bytes have landed: of whole blocks, others are 0.

        None: the kernel cannot be compiled here, which is logged. Raises TierUnavailable when CUDA fails.
        """
        fault = self._prepared.exception()
        _works[self._device] = fault is None
        if fault is not None:
            log.warning(
                "checksums of weights are computed on the CPU, as their kernel cannot be used on %s (%r): check "
                "that a C compiler is installed and that Triton's cache can be written",
                self._device,
                fault,
            )
            return None
        with self._errors():
            found = self._prepared.result().sums()
        return np.split(found, np.cumsum([len(each) for each in self.blocks.by_file])[:-1])


def begin_sums(
    table: Table, places: npt.NDArray[np.void], sizes: Sequence[int], device: torch.device
) -> DeviceSums | None:
    """Prepare for a read. None: the CPU is to sum. Arguments as of `whole_blocks`."""
    if not _works.get(device, importlib.util.find_spec("triton") is not None):
        return None
    blocks = whole_blocks(table, places, np.array(sizes, np.int64))
    n_bytes = PAIR_BYTES * int(blocks.pieces[:, 2].sum())
    if n_bytes < (1 if _works.get(device) or is_compiled(device, KERNELS) else FIRST_BYTES_MIN):
        return None
    return DeviceSums(blocks, device)
