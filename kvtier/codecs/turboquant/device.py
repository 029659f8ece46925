"""Turboquant on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

The same bytes as the reference (kvtier.codecs.turboquant.reference). All chunks, layers and heads, K and V, are one
launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.codecs.coded_pages import CodedPages, Group
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.decode import decode_chunks
from kvtier.codecs.turboquant.encode import encode_chunks
from kvtier.codecs.turboquant.layout import SlabFormat
from kvtier.codecs.turboquant.rotation import K_PLANE, V_PLANE
from kvtier.codecs.turboquant.rotation import signs as signs_of
from kvtier.codecs.turboquant.tables import (
    PlaneCode,
    TurboquantChunkShape,
    decode_matrix,
    encode_matrix,
    padded_size,
    plane_code,
    signed_centroids,
    squares,
)
from kvtier.codecs.turboquant.turns import takes_turns, tile_angles
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import Extent
from kvtier.kernels.launch import on_device
from kvtier.kernels.paged import PagedKV
from kvtier.kernels.table_kernel import Argument, TableAt, TableKernel


class TurboquantTiling(NamedTuple):
    """Tiling of a kernel. rows: tokens of a head that a program works on at once, a multiple of 16 for each warp (of 8
    in warps.py). registers: limit of a thread; 0: the compiler chooses."""

    rows: int
    warps: int
    registers: int = 0

    def registers_for(self, k: PlaneCode, v: PlaneCode) -> int | None:
        """Return the limit of registers a thread; None: no limit, because vectors above 128 elements, and padded ones
        of more than 4 bits, would spill."""
        is_small = all(code.padded <= 128 and (code.bits <= 4 or code.padded == code.size) for code in (k, v))
        return self.registers if is_small and self.registers else None


# benchmarks/gpu/codec_kernels.py --tune tries all of these. The first of each was the fastest for k6v5 on an H200. With
# fewer registers the kernels spill. The register file of an SM has room for three programs of 4 warps with 168
# registers a thread, and for four with 128.
ENCODE_TILINGS = tuple(TurboquantTiling(*each) for each in ((32, 4, 128), (32, 4, 168), (64, 8, 128), (32, 4, 96)))
WHOLE_TILING = TurboquantTiling(64, 4, 128)  # of the encoding that is not by warps
DECODE_TILINGS = tuple(TurboquantTiling(*each) for each in ((64, 4, 168), (64, 4), (64, 4, 128), (32, 2)))


class _DeviceTables(NamedTuple):
    """Tables of K or V with some number of bits, in device memory."""

    code: PlaneCode
    encode_matrix: torch.Tensor
    squares: torch.Tensor
    decode_matrix: torch.Tensor
    centroids: torch.Tensor


class CudaTurboquant(CodedPages):
    def __init__(
        self,
        pages: PagedKV,
        coder: TurboquantCoder,
        held: Extent,
        encode_tiling: TurboquantTiling = ENCODE_TILINGS[0],
        decode_tiling: TurboquantTiling = DECODE_TILINGS[0],
        whole_tiling: TurboquantTiling = WHOLE_TILING,
    ) -> None:
        """Compiles for these pages, which takes some seconds. Tilings: others than the first only to measure.

        Raises ValueError for pages that are not bf16 or fp16, or not aligned to 16 bytes.
        """
        super().__init__(pages, coder, held)
        self._format = slab_format = coder.format
        with on_device(self.device):
            self._signs = self._to_device(_sign_words(slab_format, held))
            self._tables = self._make_tables()
            angles = tile_angles(slab_format.tokens, slab_format.k_size, slab_format.rope_base)
            self._angles = self._to_device(angles.reshape(-1))
        k, v = (tables.code for tables in self._tables)
        by_warps = k.suits_warps and v.suits_warps
        tiling = encode_tiling if by_warps else whole_tiling
        self.encode_kernel = self._kernel(
            encode_chunks, tiling, self._shape(tiling, by_warps), {"PAIRS": PAIRS_PER_PAGE}
        )
        self.decode_kernel = self._kernel(decode_chunks, decode_tiling, self._shape(decode_tiling, False), {})
        self.prepare()

    def encode_arguments(self, group: Group, answers: TableAt) -> Sequence[Argument]:
        k, v = self._tables
        tables = self._signs, k.encode_matrix, v.encode_matrix, k.squares, v.squares, self._angles
        return self.planes, TableAt(0), *tables, answers, *self.place(group)

    def decode_arguments(self, group: Group) -> Sequence[Argument]:
        k, v = self._tables
        tables = self._signs, k.decode_matrix, v.decode_matrix, k.centroids, v.centroids, self._angles
        return self.planes, TableAt(0), *tables, *self.place(group)

    def _kernel(
        self, kernel: Any, tiling: TurboquantTiling, shape: TurboquantChunkShape, constants: dict[str, Any]
    ) -> TableKernel:
        k, v = (tables.code for tables in self._tables)
        constants |= {"K": k, "V": v, "C": shape, "maxnreg": tiling.registers_for(k, v)}
        return TableKernel(kernel, constants | {"num_warps": tiling.warps, "num_stages": 1, "enable_fp_fusion": False})

    def _shape(self, tiling: TurboquantTiling, by_warps: bool) -> TurboquantChunkShape:
        sizes = self.tokens, self.block_tokens
        return TurboquantChunkShape(*sizes, self.is_bf16, tiling.rows, tiling.warps, self.is_fast, by_warps)

    def _make_tables(self) -> tuple[_DeviceTables, _DeviceTables]:
        """Return those of K and of V."""
        sizes, bits = (self._format.k_size, self._format.v_size), self._format.bits
        is_turned = takes_turns(self._format.k_size, self._format.rope_base)
        codes = (
            plane_code(sizes[plane], bits[plane], plane == K_PLANE, is_turned and plane == K_PLANE, self.is_fast)
            for plane in (K_PLANE, V_PLANE)
        )
        k, v = (
            _DeviceTables(
                code,
                self._to_device(encode_matrix(code.size, self.is_bf16, self.is_fast)),
                self._to_device(squares(code.bits)),
                self._to_device(decode_matrix(code)),
                self._to_device(signed_centroids(code.bits)),
            )
            for code in codes
        )
        return k, v

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _sign_words(slab_format: SlabFormat, held: Extent) -> npt.NDArray[np.int32]:
    """(layers, heads, 2, words): a word for each two elements of K and V, the top bit set of each that is flipped."""
    widest = max(padded_size(slab_format.k_size), padded_size(slab_format.v_size))
    flips = np.zeros((held.n_layers, held.n_heads, 2, widest), dtype=np.uint16)
    for plane, size in ((K_PLANE, slab_format.k_size), (V_PLANE, slab_format.v_size)):
        flips[:, :, plane, :size] = (signs_of(slab_format.seed, held, plane, size) < 0) * np.uint16(0x8000)
    return flips.view(np.int32)
