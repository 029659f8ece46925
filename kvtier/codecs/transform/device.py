"""The transform codec on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

Encodes to the same bytes as the reference (kvtier.codecs.transform.reference); what it decodes may differ from it by a
rounding. All chunks, layers and heads, K and V, are one launch. The kernels' tables, of the layers and heads held:

    tables   bytes of a row by layer; which angles by layer; angles of tokens within a chunk and of places of chunks,
             cosines then sines; levels, 0 where a component has no bits; sum of the bytes of a row before each layer
    of_k     of encoding the bytes of `forward` as int8, of decoding `inverse`; of each cell floats: means and scales of
             both halves, by component unit (0 if it is not coded), rate, c1, c3, c5 and half the number of codes, then
             the gain's factor and units of both halves; of each cell integers: shifts of codes in the numbers of their
             groups, levels of code 0, bits of a row before codes, first bytes and numbers of bytes of groups
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtier.codecs.coded_pages import CodedPages, Group
from kvtier.codecs.transform.chunks import TransformPlane, TransformShape, decode_chunks, encode_chunks
from kvtier.codecs.transform.curve import CURVES
from kvtier.codecs.transform.reference import PlaneCoder, angles
from kvtier.codecs.transform.table import GROUP, PlaneTable, TransformTable
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import Extent
from kvtier.kernels.launch import on_device
from kvtier.kernels.paged import PagedKV
from kvtier.kernels.table_kernel import Argument, TableAt, TableKernel

PLACES_MAX = 4096  # chunks of a prompt whose angles are kept; later ones are refused


class TransformTiling(NamedTuple):
    """Elements of a head that a program works on at once, its warps, and the registers that a thread may have."""

    elements: int
    warps: int
    registers: int | None = None

    def rows_of(self, padded: int) -> int:
        """Return how many tokens a program works on. padded: components of a vector, a power of two."""
        return max(16, self.elements // padded)


class TransformTilings(NamedTuple):
    encode: TransformTiling = TransformTiling(8192, 8)
    decode: TransformTiling = TransformTiling(8192, 8, 128)


TILINGS = TransformTilings()


class CudaTransform(CodedPages):
    def __init__(
        self,
        pages: PagedKV,
        coder: LayerCoder,
        held: Extent,
        table: TransformTable,
        tilings: TransformTilings = TILINGS,
        places: int = PLACES_MAX,
    ) -> None:
        """Compiles for these pages, which takes some seconds. tilings, places: others only to test.

        Raises ValueError for pages that are not bf16 or fp16, or not aligned to 16 bytes.
        """
        super().__init__(pages, coder, held)
        device = self.device
        sizes = [plane.shape[3] for plane in pages.layers[0].planes]
        self._k, self._v = (
            TransformPlane(size, max(32, _power_of_two(size // 2)), _power_of_two(size), number == 0)
            for number, size in enumerate(sizes)
        )
        widest = max(self._k.padded, self._v.padded)
        shapes = [
            TransformShape(coder.tokens, pages.block_tokens, self.is_bf16, tiling.rows_of(widest), places, self.is_fast)
            for tiling in tilings
        ]
        layers = slice(held.first_layer, held.end_layer)
        row_bytes = table.row_bytes[layers, 0].int()
        unique, bases = torch.unique(table.frequencies[layers], dim=0, return_inverse=True)
        positions = torch.arange(coder.tokens), torch.arange(places) * coder.tokens
        turns = [torch.stack([torch.cat(angles(each, at), -1) for each in unique]) for at in positions]
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), row_bytes.cumsum(0).int()])
        planes = [plane.of(held, torch.device("cpu")) for plane in (table.k, table.v)]
        coders = [PlaneCoder.of(PlaneTable(*(x.flatten(0, 1) for x in plane)), table.levels) for plane in planes]
        levels = coders[0].levels.half()
        before = planes[0].bits.flatten(0, 1).sum(-1, keepdim=True, dtype=torch.int64) // 8
        parts = [
            _PlaneParts.of(self._k, coders[0], torch.zeros_like(before)),
            _PlaneParts.of(self._v, coders[1], before),
        ]
        with on_device(device):
            self._tables = tuple(x.contiguous().to(device) for x in (row_bytes, bases.int(), *turns, levels, starts))
            self._encoding, self._decoding = (
                [tuple(x.contiguous().to(device) for x in (part[which], part.numbers, part.whole)) for part in parts]
                for which in (0, 1)
            )
        self.encode_kernel = self._kernel(encode_chunks, tilings.encode, shapes[0], {"PAIRS": PAIRS_PER_PAGE})
        self.decode_kernel = self._kernel(decode_chunks, tilings.decode, shapes[1], {})
        self.prepare()

    def encode_arguments(self, group: Group, answers: TableAt) -> Sequence[Argument]:
        return self.planes, TableAt(0), answers, self._tables, *self._encoding, *self.place(group)

    def decode_arguments(self, group: Group) -> Sequence[Argument]:
        return self.planes, TableAt(0), self._tables, *self._decoding, *self.place(group)

    def _kernel(
        self, kernel: Any, tiling: TransformTiling, shape: TransformShape, constants: dict[str, Any]
    ) -> TableKernel:
        constants |= {"K": self._k, "V": self._v, "C": shape, "maxnreg": tiling.registers}
        return TableKernel(kernel, constants | {"num_warps": tiling.warps, "num_stages": 1, "enable_fp_fusion": False})


class _PlaneParts(NamedTuple):
    """Tables of K or of V, (cells, ...). forward: int8. inverse: fp16. numbers: fp32. whole: int32."""

    forward: torch.Tensor
    inverse: torch.Tensor
    numbers: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, shape: TransformPlane, coder: PlaneCoder, before: torch.Tensor) -> _PlaneParts:
        """coder: of all cells. before: (cells, 1), bytes of a row before the plane's."""
        forward = _halved(coder.forward.to(torch.int32), shape, 1)
        forward = _wide(forward, shape.padded)
        low = ((forward + 128) & 255) - 128
        limbs = torch.stack([(forward - low) >> 8, low], 1).to(torch.int8)
        limbs = limbs.view(*limbs.shape[:2], 2, -1, shape.padded).mT
        inverse = _wide(_halved(coder.inverse.half(), shape, 2).mT, shape.padded).mT
        bits = coder.bits
        halves = [_halved(x, shape, 2).flatten(1) for x in (coder.mean, coder.scale, coder.back)]
        curves = torch.tensor(CURVES, dtype=torch.float32)[bits.flatten(1)].movedim(-1, 0)
        columns = [x.flatten(1) for x in (coder.unit * (bits > 0), *curves.unbind(0), (1 << bits) / 2)]
        padded = [_wide(x.float(), shape.padded) for x in columns]
        padded[-1] = padded[-1].clamp(min=0.5)
        counted = torch.nn.functional.pad(coder.counted.flatten(1), (0, 7))
        numbers = torch.cat([*halves[:2], *padded, counted, halves[2]], -1)
        groups = bits.view(len(bits), -1, GROUP)
        ends = groups.cumsum(-1)
        n_bytes = ends[..., -1] // 8
        starts = n_bytes.cumsum(-1) - n_bytes + before
        of_groups = [_wide(x, shape.padded // 8) for x in (starts, n_bytes)]
        firsts = torch.nn.functional.pad(coder.first.flatten(1), (0, shape.padded - shape.size), value=510)
        shifts = ends - groups
        places = [_wide(x.flatten(1), shape.padded) for x in (shifts, 8 * starts.unsqueeze(-1) + shifts)]
        whole = torch.cat([places[0], firsts, places[1], *of_groups], -1).int()
        return cls(limbs, inverse, numbers, whole)


def _halved(x: torch.Tensor, shape: TransformPlane, dim: int) -> torch.Tensor:
    """Pad both halves of a dimension with zeros."""
    x = x.movedim(dim, -1)
    x = _wide(x.reshape(*x.shape[:-1], 2, -1), shape.half).flatten(-2)
    return x.movedim(-1, dim)


def _wide(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension with zeros."""
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
