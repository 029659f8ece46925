"""int8 on the device: the mover of kvtier.codecs.base over one engine's pages, in Triton.

The same bytes as the reference (kvtier.codecs.int8.codec). All chunks, layers and heads, K and V, are one launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.codecs.coded_pages import CodedPages, Group
from kvtier.codecs.int8.chunks import Int8ChunkShape, PlaneShape, decode_chunks, encode_chunks
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import PagedKV
from kvtier.kernels.table_kernel import Argument, TableAt, TableKernel

_ELEMENTS, _TOKENS = 8, 16  # units of the sizes of heads and of chunks: vectors and planes of codes are aligned then


class Int8Tiling(NamedTuple):
    """Tiling of a kernel. elements: those of a head that a program works on at once. warps: those of a program.
    registers: limit of a thread; 0: the compiler chooses."""

    elements: int
    warps: int
    registers: int = 0

    def registers_for(self, *planes: PlaneShape) -> int | None:
        """Return the limit for the kernel; None for none. Above 128 elements a head's values would spill."""
        return self.registers if self.registers and all(plane.padded <= 128 for plane in planes) else None


# benchmarks/gpu/codec_kernels.py --tune tries these. The first of each was the fastest on an H200, with heads of 128
# elements. With 64 registers a thread, the register file of an SM has room for 32 warps.
ENCODE_TILINGS = (Int8Tiling(8192, 8, 64), Int8Tiling(8192, 4), Int8Tiling(4096, 4), Int8Tiling(4096, 4, 64))
DECODE_TILINGS = (Int8Tiling(4096, 4, 64), Int8Tiling(8192, 8, 64), Int8Tiling(4096, 4), Int8Tiling(8192, 4))


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
        self.encode_kernel = self._kernel(encode_chunks, encode_tiling, {"PAIRS": PAIRS_PER_PAGE})
        self.decode_kernel = self._kernel(decode_chunks, decode_tiling, {})
        self.prepare()

    def encode_arguments(self, group: Group, answers: TableAt) -> Sequence[Argument]:
        return self.planes, TableAt(0), answers, *self._place(group)

    def decode_arguments(self, group: Group) -> Sequence[Argument]:
        return self.planes, TableAt(0), *self._place(group)

    def _place(self, group: Group) -> tuple[int, ...]:
        return group.patch.page_layer, group.patch.page_head, group.slab_start, group.slab_bytes

    def _kernel(self, kernel: Any, tiling: Int8Tiling, constants: dict[str, Any]) -> TableKernel:
        constants |= {"K": self._k, "V": self._v, "C": self._shape(tiling)}
        constants |= {"maxnreg": tiling.registers_for(self._k, self._v), "num_warps": tiling.warps}
        return TableKernel(kernel, constants | {"enable_fp_fusion": False})

    def _shape(self, tiling: Int8Tiling) -> Int8ChunkShape:
        rows = max(2, tiling.elements // max(self._k.padded, self._v.padded))
        return Int8ChunkShape(self.tokens, self.block_tokens, self.is_bf16, rows, self.is_fast)
