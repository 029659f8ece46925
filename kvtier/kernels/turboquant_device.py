"""Turboquant on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

The same bytes as the reference (kvtier.codecs.turboquant.reference). All chunks, layers and heads, K and V, are one
launch; where first and last layers have other bits, one for each run of layers that are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.checksum import PAIRS_PER_PAGE
from kvtier.codecs.base import Verdict
from kvtier.codecs.turboquant.layout import Bits, SlabFormat
from kvtier.codecs.turboquant.rotation import K_PLANE, V_PLANE
from kvtier.codecs.turboquant.rotation import signs as signs_of
from kvtier.geometry import Extent, padded
from kvtier.kernels.device_checksum import slab_table
from kvtier.kernels.launch import ToHost, on_device, pin_tables, to_device
from kvtier.kernels.move_table import PageTable
from kvtier.kernels.paged import Move, PagedKV, Patch, SlabRun
from kvtier.kernels.turboquant_decode import decode_chunks
from kvtier.kernels.turboquant_encode import encode_chunks
from kvtier.kernels.turboquant_tables import (
    ChunkShape,
    PlaneCode,
    decode_matrix,
    encode_matrix,
    padded_size,
    plane_code,
    signed_centroids,
    squares,
)

_ALIGNMENT = 16


class Tiling(NamedTuple):
    """How many tokens of a head a program works on at once, a multiple of 16 a warp; warps; registers a thread at most,
    0 for what the compiler likes."""

    rows: int
    warps: int
    registers: int = 0

    def registers_for(self, k: PlaneCode, v: PlaneCode) -> int | None:
        """None where there is no limit: larger vectors do not fit into it, and more thresholds spill."""
        is_small = all(code.padded <= 128 and code.bits <= 4 for code in (k, v))
        return self.registers if is_small and self.registers else None


ENCODE_TILINGS = (
    Tiling(64, 4, 128), Tiling(64, 4), Tiling(64, 4, 96), Tiling(128, 8), Tiling(128, 8, 128), Tiling(128, 4),
    Tiling(256, 16, 128),
)  # fmt: skip
DECODE_TILINGS = (
    Tiling(64, 4, 128), Tiling(64, 4), Tiling(64, 4, 96), Tiling(128, 8), Tiling(128, 8, 128), Tiling(128, 4),
)  # fmt: skip
"""What benchmarks/gpu/codec_kernels.py --tune tries. The first of each is the one in use."""


class _Tables(NamedTuple):
    """Of K or V with some number of bits, in device memory."""

    code: PlaneCode
    encode_matrix: torch.Tensor
    squares: torch.Tensor
    decode_matrix: torch.Tensor
    centroids: torch.Tensor


class _Run(NamedTuple):
    """Layers next to each other that are coded alike: of the pages, how many, and where in a slab they begin."""

    page_layer: int
    n_layers: int
    slab_start: int
    bits: Bits


class _Group(NamedTuple):
    """Moves of one launch, by their places among all."""

    patch: Patch
    slab_bytes: int
    places: list[int]


class _Answers(NamedTuple):
    """Of one group. values: (moves, heads + 1) int64 on the device: sums, and what is not 0 where a move is refused.
    places: of the moves."""

    values: torch.Tensor
    places: list[int]
    has_sums: bool


class PendingVerdicts:
    """kvtier.codecs.base.Encoded: verdicts on their way to the host."""

    def __init__(self, answers: Sequence[_Answers], moves: Sequence[Move], device: torch.device) -> None:
        self._moves = moves  # kept, because a launch does not keep the slabs' memory
        self._groups = [(each.places, each.has_sums) for each in answers]
        self._values = ToHost([each.values for each in answers], device)

    def wait(self) -> list[Verdict]:
        """Sleeps until the device is done, without the interpreter lock."""
        verdicts = [Verdict(False, None)] * len(self._moves)
        for (places, has_sums), found in zip(self._groups, self._values.wait(), strict=True):
            for place, values in zip(places, found.tolist(), strict=True):
                verdicts[place] = Verdict(values[-1] != 0, tuple(values[:-1]) if has_sums else None)
        return verdicts


class CudaTurboquant:
    """kvtier.codecs.base.Mover. Keeps the pages' tensors alive. Thread-safe."""

    def __init__(
        self,
        pages: PagedKV,
        slab_format: SlabFormat,
        held: Extent,
        encode_tiling: Tiling = ENCODE_TILINGS[0],
        decode_tiling: Tiling = DECODE_TILINGS[0],
    ) -> None:
        """Compiles for these pages, which takes some seconds. Tilings: others than the first only to measure.

        Raises ValueError for pages that are not bf16 or fp16, or not aligned to 16 bytes.
        """
        k = pages.layers[0].k
        if k.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"pages of {k.dtype}: the kernels take bfloat16 and float16")
        assert k.shape[2] == held.n_heads
        self._table = PageTable(pages)
        if self._table.bits % _ALIGNMENT:
            raise ValueError(f"pages' addresses and strides are not all multiples of {_ALIGNMENT} bytes")
        self._pages, self._format, self._held, self._device = pages, slab_format, held, k.device
        self._tilings = (encode_tiling, decode_tiling)
        pin_tables(self._device)
        with on_device(self._device):
            self._planes = to_device(self._table.planes.reshape(-1), self._device)
            self._signs = self._to_device(_sign_words(slab_format, held))
            self._tables = {layer.bits: self._tables_of(layer.bits) for layer in map(slab_format.layer, _layers(held))}
        self._prepare()

    def encode(self, moves: Sequence[Move]) -> PendingVerdicts:
        """Blocks -> slabs, on torch's current stream; padding is left as it is, and summed as it is.

        Sums are given for moves that fill all layers of their slabs. Raises ValueError, having launched nothing, when
        blocks, patches or slabs are out of range.
        """
        groups = [(group, self._rows_of(group, moves, True)) for group in _groups(moves)]
        answers = []
        with on_device(self._device):
            for group, table in groups:
                runs = self._runs(group.patch)
                n_moves, n_heads = len(group.places), group.patch.n_heads
                values = torch.zeros(n_moves, n_heads + 1, dtype=torch.int64, device=self._device)
                on_device_table = to_device(table.reshape(-1), self._device)
                for run in runs:
                    self._encode(run, group, on_device_table, values, run is runs[-1])
                layers = range(self._first_layer(group.patch), self._first_layer(group.patch) + group.patch.n_layers)
                is_whole = group.patch.slab_layer == 0 and padded(self._format.n_bytes(layers)) == group.slab_bytes
                answers.append(_Answers(values, group.places, is_whole))
            return PendingVerdicts(answers, list(moves), self._device)

    def decode(self, moves: Sequence[Move]) -> None:
        """Slabs -> blocks, but for those before each move's `first_block`, on torch's current stream. Raises as
        `encode` does."""
        groups = [(group, self._rows_of(group, moves, False)) for group in _groups(moves)]
        with on_device(self._device):
            for group, table in groups:
                on_device_table = to_device(table.reshape(-1), self._device)
                for run in self._runs(group.patch):
                    self._decode(run, group, on_device_table)

    def _encode(self, run: _Run, group: _Group, table: torch.Tensor, answers: torch.Tensor, ends_slab: bool) -> None:
        k, v = self._tables[run.bits]
        tiling = self._tilings[0]
        encode_chunks[(group.patch.n_heads, run.n_layers, len(group.places))](
            self._planes, table, self._signs, k.encode_matrix, v.encode_matrix, k.squares, v.squares, answers,
            run.page_layer, group.patch.page_head, self._held.n_heads, run.slab_start, group.slab_bytes,
            int(ends_slab), k.code, v.code, self._shape(tiling), PAIRS_PER_PAGE, num_warps=tiling.warps,
            num_stages=1, maxnreg=tiling.registers_for(k.code, v.code), enable_fp_fusion=False,
        )  # fmt: skip

    def _decode(self, run: _Run, group: _Group, table: torch.Tensor) -> None:
        k, v = self._tables[run.bits]
        tiling = self._tilings[1]
        decode_chunks[(group.patch.n_heads, run.n_layers, len(group.places))](
            self._planes, table, self._signs, k.decode_matrix, v.decode_matrix, k.centroids, v.centroids,
            run.page_layer, group.patch.page_head, self._held.n_heads, run.slab_start, group.slab_bytes,
            k.code, v.code, self._shape(tiling), num_warps=tiling.warps, num_stages=1,
            maxnreg=tiling.registers_for(k.code, v.code), enable_fp_fusion=False,
        )  # fmt: skip

    def _shape(self, tiling: Tiling) -> ChunkShape:
        return ChunkShape(
            self._format.tokens, self._pages.block_tokens, self._is_bf16, tiling.rows, tiling.warps, self._is_fast
        )

    @property
    def _is_bf16(self) -> bool:
        return self._pages.layers[0].k.dtype == torch.bfloat16

    @property
    def _is_fast(self) -> bool:
        return self._device.type == "cuda"  # else it is interpreted, for tests

    def _first_layer(self, patch: Patch) -> int:
        """Of a patch's layers, the first one's number within the model."""
        return self._held.first_layer + patch.page_layer

    def _runs(self, patch: Patch) -> list[_Run]:
        first = self._first_layer(patch)
        begin, runs, page_layer = first - patch.slab_layer, [], patch.page_layer
        for bits, layers in groupby(
            range(first, first + patch.n_layers), lambda number: self._format.layer(number).bits
        ):
            n_layers = len(list(layers))
            number = self._held.first_layer + page_layer
            runs.append(_Run(page_layer, n_layers, self._format.n_bytes(range(begin, number)), bits))
            page_layer += n_layers
        return runs

    def _rows_of(self, group: _Group, all_moves: Sequence[Move], with_seeds: bool) -> npt.NDArray[np.int64]:
        """(moves, 2 + n_blocks [+ heads]), as the kernels read it."""
        patch, n_blocks = group.patch, self._format.tokens // self._pages.block_tokens
        first = self._first_layer(patch)
        begin = first - patch.slab_layer
        fits = self._table.holds(patch)
        if not fits or self._format.n_bytes(range(begin, first + patch.n_layers)) > group.slab_bytes:
            raise ValueError(f"{patch} is out of range of pages or of slabs of {group.slab_bytes} bytes")
        moves = [all_moves[place] for place in group.places]
        for move in moves:
            _check_slabs(move)
            if len(move.block_ids) != n_blocks:
                raise ValueError(f"{len(move.block_ids)} blocks are out of range: chunks have {n_blocks}")
        table = self._table.rows(moves, not with_seeds)
        if not with_seeds:
            return table
        head = self._held.first_head + patch.page_head
        runs = [SlabRun(move.slabs, move.key, head, begin) for move in moves]
        seeds = slab_table(runs)[:, 1].view(np.int64).reshape(len(moves), patch.n_heads)
        return np.concatenate([table, seeds], axis=1)

    def _tables_of(self, bits: Bits) -> tuple[_Tables, _Tables]:
        """Of K and V."""
        sizes = (self._format.k_size, self._format.v_size)
        codes = (plane_code(sizes[plane], bits[plane], plane == K_PLANE, self._is_fast) for plane in (K_PLANE, V_PLANE))
        k, v = (
            _Tables(
                code, self._to_device(encode_matrix(code.size, self._is_bf16, self._is_fast)),
                self._to_device(squares(code.bits)), self._to_device(decode_matrix(code)),
                self._to_device(signed_centroids(code.bits)),
            )
            for code in codes
        )  # fmt: skip
        return k, v

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _prepare(self) -> None:
        """Compiles and loads all kernels, by launches of nothing: not for an engine's thread between forwards.

        Waits for the tables, because others than the current stream will read them."""
        nothing = _Group(Patch(0, 0, 0, 0, 0), 0, [])
        with on_device(self._device):
            answers = torch.zeros(1, dtype=torch.int64, device=self._device)
            for bits in self._tables:
                run = _Run(0, 0, 0, bits)
                self._encode(run, nothing, self._planes, answers, True)
                self._decode(run, nothing, self._planes)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()


def _layers(held: Extent) -> range:
    return range(held.first_layer, held.end_layer)


def _groups(moves: Sequence[Move]) -> Iterable[_Group]:
    """Moves that one launch can do together."""
    groups: dict[tuple[Patch, int], _Group] = {}
    for place, move in enumerate(moves):
        key = (move.patch, move.slabs.shape[-1])
        groups.setdefault(key, _Group(move.patch, move.slabs.shape[-1], [])).places.append(place)
    return groups.values()


def _check_slabs(move: Move) -> None:
    """What the kernels want of slabs beside what the table of moves checks."""
    slabs = move.slabs
    if slabs.dim() != 2 or slabs.shape[0] != move.patch.n_heads:
        raise ValueError(f"{move.patch} is out of range of slabs {tuple(slabs.shape)}")
    if (slabs.data_ptr() | slabs.shape[1]) % _ALIGNMENT:
        raise ValueError(f"slabs of {slabs.shape[1]} bytes at {slabs.data_ptr():#x} are not aligned to {_ALIGNMENT}")


def _sign_words(slab_format: SlabFormat, held: Extent) -> npt.NDArray[np.int32]:
    """(layers, heads, 2, words): a word for each two elements of K and V, the top bit set of each that is flipped."""
    widest = max(padded_size(slab_format.k_size), padded_size(slab_format.v_size))
    flips = np.zeros((held.n_layers, held.n_heads, 2, widest), dtype=np.uint16)
    for plane, size in ((K_PLANE, slab_format.k_size), (V_PLANE, slab_format.v_size)):
        flips[:, :, plane, :size] = (signs_of(slab_format.seed, held, plane, size) < 0) * np.uint16(0x8000)
    return flips.view(np.int32)
