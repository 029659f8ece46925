"""Launches of the codecs' kernels: moves are checked, put together into launches, and passed to the device.

A codec's mover is a CodedPages that launches its kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.codecs.base import EncodeResult
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.geometry import Extent, padded
from kvtier.kernels import table_kernel
from kvtier.kernels.device_checksum import slab_seeds
from kvtier.kernels.launch import on_device, to_device
from kvtier.kernels.move_table import PageTable, alike
from kvtier.kernels.paged import Move, PagedKV, Patch
from kvtier.kernels.table_kernel import Argument, TableAnswer, TableAt, TableKernel

_ALIGNMENT = 16


class Group(NamedTuple):
    """Moves of one launch, by their places among all. slab_start: byte of a slab where their first layer begins."""

    patch: Patch
    slab_bytes: int
    slab_start: int
    places: list[int]

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.patch.n_heads, self.patch.n_layers, len(self.places)


_NOTHING = Group(Patch(0, 0, 0, 0, 0), 0, 0, [])  # to compile and load a kernel with


class _GroupAnswer(NamedTuple):
    """Answer of one group: (moves, heads + 1) int64, sums, and what is not 0 where a move is refused. places: of the
    moves."""

    answer: TableAnswer
    places: list[int]
    has_sums: bool


class PendingVerdicts:
    """kvtier.codecs.base.Encoded: verdicts on their way to the host."""

    def __init__(self, answers: Sequence[_GroupAnswer], moves: Sequence[Move]) -> None:
        self._moves = moves  # kept, because a launch does not keep the slabs' memory
        self._answers = answers

    def wait(self) -> list[EncodeResult]:
        """Sleeps until the device is done, without the interpreter lock."""
        verdicts = [EncodeResult(False, None)] * len(self._moves)
        for answer, places, has_sums in self._answers:
            found = answer.wait().view(np.uint64).reshape(len(places), -1)
            for place, values in zip(places, found.tolist(), strict=True):
                verdicts[place] = EncodeResult(values[-1] != 0, tuple(values[:-1]) if has_sums else None)
        return verdicts


class CodedPages(ABC):
    """Base of the movers that launch kernels: a kvtier.codecs.base.Mover for pages of bf16 or fp16. Thread-safe.

    A subclass sets the kernels and calls `prepare`. Grid of both: (heads, layers, moves).

    It holds a reference to the pages. planes: PageTable.planes (kvtier.kernels.move_table) on `device`, flat: (layers *
    2 * 4,) int64, the address and the strides of K and of V of each layer.
    """

    encode_kernel: TableKernel
    decode_kernel: TableKernel

    def __init__(self, pages: PagedKV, coder: LayerCoder, held: Extent) -> None:
        """Raises ValueError unless all pages are bf16, or all fp16, and are aligned to 16 bytes."""
        k = pages.layers[0].k
        dtypes = sorted({str(plane.dtype) for layer in pages.layers for plane in layer.planes})
        if dtypes not in (["torch.bfloat16"], ["torch.float16"]):  # engines may leave layers in the model's own dtype
            raise ValueError(f"pages of {', '.join(dtypes)}: the kernels take bfloat16 or float16")
        assert k.shape[2] == held.n_heads
        self._table = PageTable(pages)
        if self._table.bits % _ALIGNMENT:
            raise ValueError(f"pages' addresses and strides are not all multiples of {_ALIGNMENT} bytes")
        self._pages, self._coder, self.held = pages, coder, held
        self.tokens, self.block_tokens = coder.tokens, pages.block_tokens
        self.is_bf16 = k.dtype == torch.bfloat16
        self.device = k.device
        table_kernel.prepare(self.device)
        with on_device(self.device):
            self.planes = to_device(self._table.planes.reshape(-1), self.device)

    @abstractmethod
    def encode_arguments(self, group: Group, answers: TableAt) -> Sequence[Argument]:
        """Return the arguments of the encoding of a group.

        Its table: (moves, 2 + n_blocks + heads) int64: address of the slabs, position, block ids, seeds. answers:
        (moves, heads + 1) int64, zeros, where sums of slabs are added up and refusals marked.
        """

    @abstractmethod
    def decode_arguments(self, group: Group) -> Sequence[Argument]:
        """Return the arguments of the decoding of a group. Its table: (moves, 2 + n_blocks) int64: address of the
        slabs, first block, block ids."""

    def encode(self, moves: Sequence[Move]) -> PendingVerdicts:
        """Blocks -> slabs, on torch's current stream; padding is left as it is, and summed as it is.

        Sums are given for moves that fill all layers of their slabs. Raises ValueError, having launched nothing, when
        blocks, patches or slabs are out of range.
        """
        groups = [(group, self._rows_of(group, moves, True)) for group in self._groups(moves)]
        answers = []
        with on_device(self.device):
            for group, table in groups:
                n_answer = len(group.places) * (group.patch.n_heads + 1)
                words = np.concatenate([table.reshape(-1), np.zeros(n_answer, np.int64)])
                arguments = self.encode_arguments(group, TableAt(table.size))
                answer = self.encode_kernel.launch(group.grid, arguments, words, self.device, n_answer)
                is_whole = padded(self._end(group.patch)) == group.slab_bytes and group.patch.slab_layer == 0
                answers.append(_GroupAnswer(answer, group.places, is_whole))
            return PendingVerdicts(answers, list(moves))

    def decode(self, moves: Sequence[Move]) -> None:
        """Slabs -> blocks, but for those before each move's `first_block`, on torch's current stream. Raises as
        `encode` does."""
        groups = [(group, self._rows_of(group, moves, False)) for group in self._groups(moves)]
        with on_device(self.device):
            for group, table in groups:
                arguments = self.decode_arguments(group)
                self.decode_kernel.launch(group.grid, arguments, table.reshape(-1), self.device)

    def prepare(self) -> None:
        """Compile and load both kernels by empty launches, which an engine's thread must not do between forwards. Wait
        for all tables, because other streams than the current one will read them."""
        with on_device(self.device):
            table = np.zeros(1, np.int64)
            encode_arguments = self.encode_arguments(_NOTHING, TableAt(0))
            self.encode_kernel.launch(_NOTHING.grid, encode_arguments, table, self.device)
            self.decode_kernel.launch(_NOTHING.grid, self.decode_arguments(_NOTHING), table, self.device)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def place(self, group: Group) -> tuple[int, ...]:
        """Return the kernels' page_layer, first_head, page_heads, slab_start, slab_bytes."""
        patch = group.patch
        return patch.page_layer, patch.page_head, self.held.n_heads, group.slab_start, group.slab_bytes

    @property
    def is_fast(self) -> bool:
        """Return True if kernels may have inline PTX. Others are for older GPUs, and for the interpreter of tests."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 0)

    def first_layer(self, patch: Patch) -> int:
        """Return the number within the model of a patch's first layer."""
        return self.held.first_layer + patch.page_layer

    def _start(self, patch: Patch) -> int:
        """Return the byte of a slab at which the patch's first layer begins."""
        first = self.first_layer(patch)
        return self._coder.n_bytes(range(first - patch.slab_layer, first))

    def _end(self, patch: Patch) -> int:
        first = self.first_layer(patch)
        return self._coder.n_bytes(range(first - patch.slab_layer, first + patch.n_layers))

    def _groups(self, moves: Sequence[Move]) -> list[Group]:
        n_blocks = self.tokens // self.block_tokens
        groups = []
        for each in alike(moves):
            if each.n_blocks != n_blocks:
                raise ValueError(f"{each.n_blocks} blocks are out of range: chunks have {n_blocks}")
            if each.shape[0] != each.patch.n_heads:
                raise ValueError(f"{each.patch} is out of range of slabs {tuple(each.shape)}")
            groups.append(Group(each.patch, each.shape[-1], self._start(each.patch), each.places))
        return groups

    def _rows_of(self, group: Group, all_moves: Sequence[Move], with_seeds: bool) -> npt.NDArray[np.int64]:
        """(moves, 2 + n_blocks [+ heads]), as the kernels read it."""
        patch = group.patch
        if not self._table.holds(patch) or self._end(patch) > group.slab_bytes:
            raise ValueError(f"{patch} is out of range of pages or of slabs of {group.slab_bytes} bytes")
        moves = [all_moves[place] for place in group.places]
        table = self._table.rows(moves, not with_seeds)
        if (int(np.bitwise_or.reduce(table[:, 0])) | group.slab_bytes) % _ALIGNMENT:
            raise ValueError(f"not all slabs, of {group.slab_bytes} bytes, are aligned to {_ALIGNMENT} bytes")
        if not with_seeds:
            return table
        table[:, 1] = [move.position for move in moves]
        begin, head = self.first_layer(patch) - patch.slab_layer, self.held.first_head + patch.page_head
        seeds = slab_seeds(b"".join([move.key for move in moves]), head, patch.n_heads, begin)
        return np.concatenate([table, seeds.view(np.int64)], axis=1)
