"""Gather and scatter on the device, in Triton: the same bytes as the reference in kvtier.kernels.paged.

A program moves a part of one block of one plane: its block's number is a scalar, so the rest is arithmetic with
constants, and the layout is nothing but a base pointer and three strides a plane. All layers, heads and chunks are one
launch. Words of memory are as wide as alignment allows: 16 bytes a thread on all common layouts.

Programs next to each other share a block, so that its pages are read (written) whole while they are open in memory.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvtier.format.geometry import PAGE_BYTES
from kvtier.kernels.launch import on_device, to_device
from kvtier.kernels.move_table import Alike, PageTable, alike
from kvtier.kernels.paged import Move, PagedKV, Patch
from kvtier.kernels.table_kernel import TableAt, TableKernel, Words, prepare

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_VECTOR_BYTES = 16  # the widest access of one thread


class Tiling(NamedTuple):
    """Part of a block that one program moves. `words`: a power of two; of 8 bytes where alignment allows."""

    words: int
    warps: int


# Candidates of benchmarks/gpu/kernels.py --tune. The first one is in use.
TILINGS = (
    Tiling(1024, 4), Tiling(512, 1), Tiling(512, 2), Tiling(1024, 2), Tiling(1024, 8), Tiling(2048, 4),
    Tiling(2048, 8), Tiling(4096, 4), Tiling(4096, 8),
)  # fmt: skip


@triton.jit
def _move_tile(
    plane: tl.tensor,
    slab: tl.tensor,
    before: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    slab_bytes: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    ROW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    TO_PAGES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Moves words [start, end) of a block, counted [head][token][column], at most TILE of them.

    plane: to base, block stride, token stride and head stride, all in bytes. slab: address of the first head's slab.
    before: words a token, times blocks, before the block in a slab. ROW: words of a row. VECTOR: as many
    words of a row, from a multiple of it on, are contiguous and aligned to their size on either side.
    """
    base = tl.load(plane) + block_id * tl.load(plane + 1) + head * tl.load(plane + 3)
    token_stride = tl.load(plane + 2) // WORD_BYTES
    head_stride = tl.load(plane + 3) // WORD_BYTES
    first_row = slab + before * (BLOCK_TOKENS * WORD_BYTES)
    # Without the hints the compiler knows nothing of addresses out of a table, and moves word by word.
    page = tl.multiple_of(base.to(tl.pointer_type(WORD)), VECTOR * WORD_BYTES)
    rows = tl.multiple_of(first_row.to(tl.pointer_type(WORD)), VECTOR * WORD_BYTES)
    slab_stride = (slab_bytes // WORD_BYTES).to(tl.int64)
    word = start + tl.arange(0, TILE)
    valid = word < end
    of_head = word // (BLOCK_TOKENS * ROW)
    in_head = word % (BLOCK_TOKENS * ROW)
    token = in_head // ROW
    in_page = of_head * head_stride + token * token_stride + in_head % ROW
    in_page = tl.max_contiguous(tl.multiple_of(in_page, VECTOR), VECTOR)
    in_slab = of_head * slab_stride + in_head
    in_slab = tl.max_contiguous(tl.multiple_of(in_slab, VECTOR), VECTOR)
    if TO_PAGES:
        tl.store(page + in_page, tl.load(rows + in_slab, mask=valid), mask=valid)
    else:
        tl.store(rows + in_slab, tl.load(page + in_page, mask=valid), mask=valid)


# Nothing is specialized on values or alignment: another chunk or rank must not mean another compilation, which would
# take its second on the engine's thread.
@triton.jit(
    do_not_specialize=(
        "planes", "table", "page_layer", "slab_layer", "first_head", "n_heads", "n_blocks", "slab_bytes",
    )
)  # fmt: skip
def _move(
    planes: tl.tensor,
    table: tl.tensor,
    page_layer: tl.tensor,
    slab_layer: tl.tensor,
    first_head: tl.tensor,
    n_heads: tl.tensor,
    n_blocks: tl.tensor,
    slab_bytes: tl.tensor,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    TO_PAGES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (tiles of a block x planes x blocks, layers, moves); the first of each runs fastest.

    planes: (layers, planes a layer, 4) int64, see _move_tile. table: (moves, 2 + n_blocks) int64: address of the
    slabs, first block to move, block ids. V_ROW: 0 where K holds everything.
    """
    N_PLANES: tl.constexpr = 1 if V_ROW == 0 else 2
    WIDEST: tl.constexpr = K_ROW if K_ROW > V_ROW else V_ROW
    n_tiles = (n_heads * (BLOCK_TOKENS * WIDEST) + TILE - 1) // TILE
    start = tl.program_id(0) % n_tiles * TILE
    number = tl.program_id(0) // n_tiles % N_PLANES
    block = tl.program_id(0) // n_tiles // N_PLANES
    layer = tl.program_id(1)
    move = table + tl.program_id(2).to(tl.int64) * (n_blocks + 2)
    plane = planes + ((page_layer + layer) * N_PLANES + number) * 4
    block_id = tl.load(move + 2 + block)
    heads = tl.where(block >= tl.load(move + 1), n_heads, 0)
    slab = tl.load(move)
    # Bytes before this block in a slab: earlier layers, K before V, earlier blocks.
    before = (slab_layer + layer).to(tl.int64) * n_blocks * (K_ROW + V_ROW)
    if K_ROW == V_ROW or V_ROW == 0:
        before += (number * n_blocks + block) * K_ROW
        _move_tile(plane, slab, before, block_id, first_head, slab_bytes, start, heads * (BLOCK_TOKENS * K_ROW),
                   K_ROW, BLOCK_TOKENS, WORD, WORD_BYTES, VECTOR, TO_PAGES, TILE)  # fmt: skip
    elif number == 0:
        before += block * K_ROW
        _move_tile(plane, slab, before, block_id, first_head, slab_bytes, start, heads * (BLOCK_TOKENS * K_ROW),
                   K_ROW, BLOCK_TOKENS, WORD, WORD_BYTES, VECTOR, TO_PAGES, TILE)  # fmt: skip
    else:
        before += n_blocks * K_ROW + block * V_ROW
        _move_tile(plane, slab, before, block_id, first_head, slab_bytes, start, heads * (BLOCK_TOKENS * V_ROW),
                   V_ROW, BLOCK_TOKENS, WORD, WORD_BYTES, VECTOR, TO_PAGES, TILE)  # fmt: skip


class DevicePages:
    """The planes of a PagedKV in device memory. Keeps the tensors alive. Thread-safe.

    Moves are launched on the caller's current stream and not waited for; blocks and slabs must stay until they ran.
    """

    def __init__(self, pages: PagedKV, tiling: Tiling = TILINGS[0]) -> None:
        """Compiles for these pages, which takes a second or two. `tiling`: one of TILINGS; others only to measure."""
        layers = [layer.planes for layer in pages.layers]
        rows = {tuple(plane.shape[3] * plane.element_size() for plane in planes) for planes in layers}
        assert len(rows) == 1, "a model's layers are alike (kvtier.format.geometry)"
        self._pages = pages
        self._device = pages.layers[0].k.device
        self._rows = (*rows.pop(), 0)[:2]
        self._table = PageTable(pages)
        self._bits = self._table.bits | self._rows[0] | self._rows[1]
        block_words = pages.layers[0].k.shape[2] * pages.block_tokens * max(self._rows) // 8
        self._tiling = tiling._replace(words=min(tiling.words, 1 << max(block_words - 1, 0).bit_length()))
        self._kernels: dict[tuple[int, bool], TableKernel] = {}  # by alignment, and whether to pages
        prepare(self._device)
        with on_device(self._device):
            self._planes = to_device(self._table.planes.reshape(-1), self._device)
        self._prepare()

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread moves at once, between these pages and slabs that are aligned at least as well."""
        return _alignment(self._bits)

    def gather(self, moves: Sequence[Move]) -> None:
        """Copies the blocks of each move into its slabs, on torch's current stream: kvtier.kernels.paged.gather.

        Raises ValueError, having moved nothing, when blocks, patches or slabs are out of range.
        """
        self._move(moves, to_pages=False)

    def scatter(self, moves: Sequence[Move]) -> None:
        """Copies slabs into blocks, but for those before each move's first: kvtier.kernels.paged.scatter.

        On torch's current stream. Raises as `gather` does.
        """
        self._move(moves, to_pages=True)

    def _move(self, moves: Sequence[Move], to_pages: bool) -> None:
        tables = [(group, self._rows_of(group, moves, to_pages)) for group in alike(moves)]
        with on_device(self._device):
            for group, table in tables:
                bits = self._bits | group.shape[1] | int(np.bitwise_or.reduce(table[:, 0], initial=0))
                self._launch(group, table.reshape(-1), bits, to_pages)

    def _rows_of(self, group: Alike, all_moves: Sequence[Move], to_pages: bool) -> npt.NDArray[np.int64]:
        """Return the table of the moves that the kernel reads, (moves, 2 + n_blocks)."""
        patch, n_blocks = group.patch, group.n_blocks
        moves = [all_moves[place] for place in group.places]
        end = (patch.slab_layer + patch.n_layers) * n_blocks * self._pages.block_tokens * sum(self._rows)
        end += max(move.skip_bytes for move in moves)
        fits = self._table.holds(patch) and len(group.shape) == 2
        fits = fits and min(move.skip_bytes for move in moves) >= 0
        if not fits or patch.n_heads != group.shape[0] or end > group.shape[1]:
            raise ValueError(f"{patch} of {n_blocks} blocks is out of range of pages or of slabs {tuple(group.shape)}")
        return self._table.rows(moves, to_pages)

    def _launch(self, group: Alike, table: Words, bits: int, to_pages: bool) -> None:
        """bits: all addresses, strides and sizes, one upon the other, which says what they are multiples of."""
        alignment = _alignment(bits)
        k_row, v_row = (row // min(alignment, 8) for row in self._rows)
        patch = group.patch
        tiles = -(-patch.n_heads * self._pages.block_tokens * max(k_row, v_row) // self._tiling.words)
        planes = 2 if v_row else 1
        kernel = self._kernels.get((alignment, to_pages)) or self._kernel(alignment, to_pages)
        arguments = (
            self._planes, TableAt(0), patch.page_layer, patch.slab_layer, patch.page_head, patch.n_heads,
            group.n_blocks, group.shape[1],
        )  # fmt: skip
        kernel.launch(
            (tiles * planes * group.n_blocks, patch.n_layers, len(group.places)), arguments, table, self._device
        )

    def _kernel(self, alignment: int, to_pages: bool) -> TableKernel:
        word_bytes = min(alignment, 8)
        k_row, v_row = (row // word_bytes for row in self._rows)
        constants = {"K_ROW": k_row, "V_ROW": v_row, "BLOCK_TOKENS": self._pages.block_tokens, "TO_PAGES": to_pages}
        constants |= {"WORD": _WORDS[word_bytes], "WORD_BYTES": word_bytes, "VECTOR": alignment // word_bytes}
        tile, warps = self._tiling
        kernel = TableKernel(_move, constants | {"TILE": tile, "num_warps": warps})
        return self._kernels.setdefault((alignment, to_pages), kernel)

    def _prepare(self) -> None:
        """Compile and load both kernels by empty launches, which an engine's thread must not do between forwards.

        Wait for the table of planes, because other streams than the current one will read it."""
        nothing = Alike(Patch(0, 0, 0, 0, 0), torch.Size((0, PAGE_BYTES)), 0, [])
        with on_device(self._device):
            for to_pages in (False, True):
                self._launch(nothing, np.zeros(1, np.int64), self._bits | PAGE_BYTES, to_pages)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()


def _alignment(bits: int) -> int:
    """The greatest power of two, at most _VECTOR_BYTES, that divides all numbers whose bits these are."""
    return min(bits & -bits, _VECTOR_BYTES)
