"""What benchmarks.gpu.codec_kernels measures: KV caches, and the codecs' kernels and references over them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvtier.codecs.coded_pages import SlabShape
from kvtier.codecs.fp8 import device as fp8_device
from kvtier.codecs.fp8.codec import Fp8Coder
from kvtier.codecs.fp8.device import CudaFp8
from kvtier.codecs.turboquant import device as turboquant_device
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.device import CudaTurboquant
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.vectors import VectorPages
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch

CHUNK_TOKENS, BLOCK_TOKENS, SEED = 256, 16, 7
NMSE_OF_THEORY_MAX = 1.02
THEORY = {2: 0.1175, 3: 0.0345, 4: 0.0095, 5: 0.0025047, 6: 0.00064424}
"""Mean squared error of Lloyd and Max's quantizers of N(0, 1) (kvtier.codecs.turboquant.codebooks)."""
FP8_NMSE_MAX = 0.0007
"""Of fp8: the reference has 0.00063 to 0.00069 with heads of 64 to 256 elements of N(0, 1)."""

CodecTiling = turboquant_device.TurboquantTiling | fp8_device.Fp8Tiling


@dataclass(frozen=True)
class Case:
    """A KV cache, (B,2,N,H,D) or (B,H,N,2D), and how it is coded: fp8, or a preset of turboquant."""

    codec: str
    layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    size: int = 128
    chunks: int = 128
    layers: int = 32
    heads: int = 8

    @property
    def name(self) -> str:
        return f"{self.codec} {self.layout} {str(self.dtype).removeprefix('torch.')} d={self.size}"

    @property
    def n_blocks(self) -> int:
        return self.chunks * CHUNK_TOKENS // BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        return self.chunks * CHUNK_TOKENS * self.layers * self.heads * 2 * self.size * self.dtype.itemsize

    @property
    def held(self) -> Extent:
        return Extent(0, self.layers, 0, self.heads)

    @property
    def slab_bytes(self) -> int:
        return padded(self._slabs.n_bytes(range(self.layers)))

    @property
    def encoded_bytes(self) -> int:
        return self.chunks * self.heads * self.slab_bytes

    @property
    def nmse_max(self) -> dict[str, float]:
        """Of Gaussian K and V: squared error over energy."""
        if self.codec == "fp8":
            return {"k": FP8_NMSE_MAX, "v": FP8_NMSE_MAX}
        bits = PRESETS[self.codec]
        return {name: NMSE_OF_THEORY_MAX * THEORY[width] for name, width in (("k", bits.k), ("v", bits.v))}

    @property
    def tilings(self) -> tuple[tuple[CodecTiling, ...], tuple[CodecTiling, ...]]:
        """For encoding and for decoding; the first of each is the one in use."""
        module = fp8_device if self.codec == "fp8" else turboquant_device
        return module.ENCODE_TILINGS, module.DECODE_TILINGS

    def mover(
        self, pages: PagedKV, encode: CodecTiling | None = None, decode: CodecTiling | None = None
    ) -> CudaFp8 | CudaTurboquant:
        """The kernels. None: the tiling that is in use."""
        pair = (encode or self.tilings[0][0], decode or self.tilings[1][0])
        if self.codec == "fp8":
            return CudaFp8(pages, self._slabs, self.held, *(fp8_device.Fp8Tiling(*each) for each in pair))
        return CudaTurboquant(
            pages, self._format, self.held, *(turboquant_device.TurboquantTiling(*each) for each in pair)
        )

    def reference(self, pages: PagedKV) -> VectorPages:
        """In torch operations, on the GPU."""
        coder = self._fp8 if self.codec == "fp8" else TurboquantCoder(self._format, self.held, torch.device("cuda"))
        return VectorPages(pages, coder, self.held)

    @property
    def _slabs(self) -> SlabShape:
        return SlabShape(CHUNK_TOKENS, (self._fp8 if self.codec == "fp8" else self._format).n_bytes)

    @property
    def _fp8(self) -> Fp8Coder:
        return Fp8Coder(CHUNK_TOKENS, self.size, self.size)

    @property
    def _format(self) -> SlabFormat:
        return SlabFormat(self.layers, CHUNK_TOKENS, self.size, self.size, PRESETS[self.codec], 0, SEED)

    def buffer(self) -> torch.Tensor:
        """(kv_bytes,) uint8, poisoned: all bits are set, which is NaN."""
        return torch.full((self.kv_bytes,), 0xFF, dtype=torch.uint8, device="cuda")

    def pages(self, buffer: torch.Tensor) -> PagedKV:
        layers = [self._layer(part.view(self.dtype)) for part in buffer.chunk(self.layers)]
        return PagedKV(tuple(layers), BLOCK_TOKENS)

    def _layer(self, values: torch.Tensor) -> PagedLayer:
        if self.layout == "NHD":
            both = values.view(self.n_blocks, 2, BLOCK_TOKENS, self.heads, self.size)
            return PagedLayer(both[:, 0], both[:, 1])
        vectors = values.view(self.n_blocks, self.heads, BLOCK_TOKENS, 2 * self.size).permute(0, 2, 1, 3)
        return PagedLayer(vectors[..., : self.size], vectors[..., self.size :])

    def moves(self, slabs: torch.Tensor, seed: int) -> list[Move]:
        """All blocks, shuffled. slabs: (chunks, heads, slab_bytes)."""
        rng = random.Random(seed)
        ids = rng.sample(range(self.n_blocks), self.n_blocks)
        each, patch = CHUNK_TOKENS // BLOCK_TOKENS, Patch(0, 0, self.layers, 0, self.heads)
        return [
            Move(patch, tuple(ids[each * n : each * (n + 1)]), slabs[n], 0, rng.randbytes(16))
            for n in range(self.chunks)
        ]
