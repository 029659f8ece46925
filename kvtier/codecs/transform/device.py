"""The transform codec on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

Encodes to the same bytes as the reference (kvtier.codecs.transform.reference); what it decodes may differ from it by a
rounding. All chunks, layers and heads, K and V, are one launch. Both kernels take tables of the layers and heads held:

    tables      bytes of a row by layer; which angles by layer; angles of tokens within a chunk and of places of chunks;
                levels; sum of the bytes of a row before each layer
    of_k, of_v  K's and V's matrices and numbers by cell (kvtier.codecs.transform.tables)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtier.codecs.coded_pages import CodedPages, Group
from kvtier.codecs.transform.decode import decode_chunks
from kvtier.codecs.transform.encode import encode_chunks
from kvtier.codecs.transform.reference import PlaneCoder
from kvtier.codecs.transform.slab import TransformPlane, TransformShape
from kvtier.codecs.transform.table import PlaneTable, TransformTable
from kvtier.codecs.transform.tables import decode_tables, encode_tables, kernel_angles, kernel_levels
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import Extent
from kvtier.kernels.launch import on_device
from kvtier.kernels.paged import PagedKV
from kvtier.kernels.table_kernel import Argument, TableAt, TableKernel

PLACES_MAX = 4096  # chunks of a prompt whose angles are kept; later ones are refused


class TransformTiling(NamedTuple):
    """Tiling of a kernel. elements: those of a head that a program works on at once. warps: those of a program.
    registers: limit of a thread; 0: the compiler chooses."""

    elements: int
    warps: int
    registers: int = 0

    def rows_of(self, padded: int) -> int:
        """Return how many tokens a program works on. padded: components of a vector, a power of two."""
        return max(16 * self.warps, self.elements // padded)


# benchmarks/gpu/codec_kernels.py --tune tries these. The first of each was the fastest for tc4 on an H200.
ENCODE_TILINGS = tuple(TransformTiling(*each) for each in ((8192, 8, 128), (8192, 4, 168), (8192, 4, 128)))
DECODE_TILINGS = tuple(TransformTiling(*each) for each in ((8192, 4, 168), (8192, 4, 128), (8192, 8, 128)))
# Above 128 components fewer registers would spill.
WIDE_ENCODE_TILING, WIDE_DECODE_TILING = TransformTiling(16384, 4), TransformTiling(32768, 8)


class CudaTransform(CodedPages):
    def __init__(
        self,
        pages: PagedKV,
        coder: LayerCoder,
        held: Extent,
        table: TransformTable,
        tilings: tuple[TransformTiling, TransformTiling] = (ENCODE_TILINGS[0], DECODE_TILINGS[0]),
        places: int = PLACES_MAX,
    ) -> None:
        """Compiles for these pages, which takes some seconds. tilings: of encoding and of decoding. They and places are
        parameters for tests and benchmarks.

        Raises ValueError for pages that are not bf16 or fp16, or not aligned to 16 bytes.
        """
        super().__init__(pages, coder, held)
        sizes = [plane.shape[3] for plane in pages.layers[0].planes]
        self._k, self._v = (
            TransformPlane(size, max(32, _power_of_two(size // 2)), _power_of_two(size), number == 0)
            for number, size in enumerate(sizes)
        )
        self._make_tables(coder.tokens, held, table, places)
        encode_tiling, decode_tiling = tilings
        widest = max(self._k.padded, self._v.padded)
        if widest > 128:
            encode_tiling, decode_tiling = WIDE_ENCODE_TILING, WIDE_DECODE_TILING
        shapes = [
            TransformShape(
                self.tokens, self.block_tokens, self.is_bf16, tiling.rows_of(widest), tiling.warps, places, self.is_fast
            )
            for tiling in (encode_tiling, decode_tiling)
        ]
        self.encode_kernel = self._kernel(encode_chunks, encode_tiling, shapes[0], {"PAIRS": PAIRS_PER_PAGE})
        self.decode_kernel = self._kernel(decode_chunks, decode_tiling, shapes[1], {})
        self.prepare()

    def encode_arguments(self, group: Group, answers: TableAt) -> Sequence[Argument]:
        return self.planes, TableAt(0), answers, self._tables, *self._encoding, *self.place(group)

    def decode_arguments(self, group: Group) -> Sequence[Argument]:
        return self.planes, TableAt(0), self._tables, *self._decoding, *self.place(group)

    def _make_tables(self, tokens: int, held: Extent, table: TransformTable, places: int) -> None:
        layers = slice(held.first_layer, held.end_layer)
        row_bytes = table.row_bytes[layers, 0].int()
        unique, bases = torch.unique(table.frequencies[layers], dim=0, return_inverse=True)
        positions = torch.arange(tokens), torch.arange(places) * tokens
        turns = [kernel_angles(self._k, unique, at) for at in positions]
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), row_bytes.cumsum(0).int()])
        planes = [plane.of(held, torch.device("cpu")) for plane in (table.k, table.v)]
        coders = [PlaneCoder.of(PlaneTable(*(x.flatten(0, 1) for x in plane)), table.levels) for plane in planes]
        before = planes[0].bits.flatten(0, 1).sum(-1, keepdim=True, dtype=torch.int64) // 8
        of_planes = list(zip((self._k, self._v), coders, (torch.zeros_like(before), before), strict=True))
        tables = row_bytes, bases.int(), *turns, kernel_levels(coders[0]), starts
        with on_device(self.device):
            self._tables = tuple(x.contiguous().to(self.device) for x in tables)
            self._encoding, self._decoding = (
                [tuple(tables_of(*each, tokens).to(self.device)) for each in of_planes]
                for tables_of in (encode_tables, decode_tables)
            )

    def _kernel(
        self, kernel: Any, tiling: TransformTiling, shape: TransformShape, constants: dict[str, Any]
    ) -> TableKernel:
        constants |= {"K": self._k, "V": self._v, "C": shape, "maxnreg": tiling.registers or None}
        return TableKernel(kernel, constants | {"num_warps": tiling.warps, "num_stages": 1, "enable_fp_fusion": False})


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
