"""int8 on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

The same bytes as the reference (kvtier.codecs.int8.codec). All chunks, layers and heads, K and V, are one launch.
"""

from typing import NamedTuple

import torch

from kvtier.codecs.coded_pages import CodedPages, Group
from kvtier.codecs.int8.chunks import Int8ChunkShape, PlaneShape, decode_chunks, encode_chunks
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import PagedKV

_ELEMENTS, _TOKENS = 8, 16  # units of the sizes of heads and of chunks: vectors and planes of codes are aligned then


class Int8Tiling(NamedTuple):
    """Elements of a head that a program works on at once, and its warps."""

    elements: int
    warps: int


# benchmarks/gpu/codec_kernels.py --tune tries these. The first of each is in use; none was measured yet.
ENCODE_TILINGS = (Int8Tiling(8192, 8), Int8Tiling(4096, 4), Int8Tiling(4096, 8), Int8Tiling(2048, 4))
DECODE_TILINGS = (Int8Tiling(4096, 4), Int8Tiling(8192, 4), Int8Tiling(8192, 8), Int8Tiling(4096, 2))


class CudaInt8(CodedPages):
    def __init__(
        self,
        pages: PagedKV,
        coder: LayerCoder,
        held: Extent,
        encode_tiling: Int8Tiling = ENCODE_TILINGS[0],
        decode_tiling: Int8Tiling = DECODE_TILINGS[0],
    ) -> None:
        """Compiles for these pages, which takes some seconds. Tilings: others than the first only to measure.

        Raises ValueError for pages, heads or chunks that the kernels cannot take.
        """
        sizes = [plane.shape[3] for plane in pages.layers[0].planes]
        if any(size % _ELEMENTS for size in sizes) or coder.tokens % _TOKENS:
            raise ValueError(
                f"heads of {sizes} elements, chunks of {coder.tokens} tokens: the kernels take multiples of {_ELEMENTS}"
                f" and {_TOKENS}"
            )
        super().__init__(pages, coder, held)
        self._k, self._v = (PlaneShape(size, max(64, 1 << (size - 1).bit_length())) for size in sizes)
        self._tilings = (encode_tiling, decode_tiling)
        self.prepare()

    def launch_encode(self, group: Group, table: torch.Tensor, answers: torch.Tensor) -> None:
        tiling, patch = self._tilings[0], group.patch
        encode_chunks[group.grid](
            self.planes,
            table,
            answers,
            patch.page_layer,
            patch.page_head,
            group.slab_start,
            group.slab_bytes,
            self._k,
            self._v,
            self._shape(tiling),
            PAIRS_PER_PAGE,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )

    def launch_decode(self, group: Group, table: torch.Tensor) -> None:
        tiling, patch = self._tilings[1], group.patch
        decode_chunks[group.grid](
            self.planes,
            table,
            patch.page_layer,
            patch.page_head,
            group.slab_start,
            group.slab_bytes,
            self._k,
            self._v,
            self._shape(tiling),
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )

    def _shape(self, tiling: Int8Tiling) -> Int8ChunkShape:
        rows = max(1, tiling.elements // max(self._k.padded, self._v.padded))
        return Int8ChunkShape(self.tokens, self.block_tokens, self.is_bf16, rows, self.is_fast)
