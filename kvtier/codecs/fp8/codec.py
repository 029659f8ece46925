"""Codec `fp8`: half the bytes of bf16. Per vector x (K or V of one token, layer and head):

    scale = fp16(m / 448), m = max |x|;   code = e4m3fn(x / scale), held within +-448, rounded to nearest even
    x' = code * scale, rounded to the engine's dtype and held within its finite values

Each step is one fp32 operation. A slab is the record's layers one after the other, then padding; a layer of T tokens is
codes of K (T * k_size bytes), codes of V, scales of K (T x fp16), scales of V. A zero vector has scale and codes 0.

Refused: a vector with NaN or infinity, and one that is not zero and whose scale, in fp32, is below 2^-20 or above
65504. The test is written so that NaN fails it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kvtier.codecs.base import Encoded, Mover, Movers
from kvtier.codecs.vectors import EncodedLayer, VectorPages, check_vectors
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import Move, PagedKV

log = logging.getLogger("kvtier")

CODE_MAX = 448.0
"""The largest number of e4m3fn."""
SCALE_MIN, SCALE_MAX = 2.0**-20, 65504.0
SCALE_BYTES = 2


class Fp8Codec:
    """The torch reference in host memory, with Triton kernels on CUDA: the same bytes."""

    name = "fp8"
    version = 1
    seed = 0

    def __init__(self) -> None:
        self._movers = Movers()

    def check(self, geometry: Geometry) -> None:
        check_vectors(self.name, geometry)

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return Fp8Coder(geometry.chunk_tokens, geometry.k_head_size, geometry.v_head_size).n_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        coder = Fp8Coder(geometry.chunk_tokens, geometry.k_head_size, geometry.v_head_size)
        self._movers.add(pages, _make_mover(pages, coder, held))

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> Encoded | None:
        return self._movers.of(pages).encode(moves)

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._movers.of(pages).decode(moves)


class Fp8Coder:
    """kvtier.codecs.vectors.LayerCoder: all layers and heads alike."""

    def __init__(self, tokens: int, k_size: int, v_size: int) -> None:
        self.tokens = tokens
        self._sizes = (k_size, v_size)

    def n_bytes(self, layers: range) -> int:
        return len(layers) * self.tokens * (sum(self._sizes) + 2 * SCALE_BYTES)

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent) -> EncodedLayer:
        (k_codes, k_scales, k_refused), (v_codes, v_scales, v_refused) = _encode(k), _encode(v)
        return EncodedLayer(torch.cat([k_codes, v_codes, k_scales, v_scales], -1), k_refused | v_refused)

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, (k_size, v_size) = self.tokens, self._sizes
        sizes = [tokens * k_size, tokens * v_size, tokens * SCALE_BYTES, tokens * SCALE_BYTES]
        k_codes, v_codes, k_scales, v_scales = torch.split(data, sizes, -1)
        return _decode(k_codes, k_scales, dtype), _decode(v_codes, v_scales, dtype)


def _make_mover(pages: PagedKV, coder: Fp8Coder, held: Extent) -> Mover:
    device = pages.layers[0].k.device
    if device.type == "cpu":
        return VectorPages(pages, coder, held)
    from kvtier.codecs.coded_pages import SlabShape
    from kvtier.codecs.fp8.device import CudaFp8  # needs Triton, which hosts without a GPU may lack

    try:
        return CudaFp8(pages, SlabShape(coder.tokens, coder.n_bytes), held)
    except ValueError as fault:
        log.warning("codec fp8 runs without its kernels, many times slower: %s", fault)
        return VectorPages(pages, coder, held)


def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (..., T * d) and scales (..., T * 2) as bytes, refused (...). x: (..., T, d)."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    # A division by a number would be a product with its reciprocal on a GPU.
    exact = top / torch.full_like(top, CODE_MAX)
    is_good = (top == 0) | ((exact >= SCALE_MIN) & (exact <= SCALE_MAX))
    scales = exact.to(torch.float16)
    divisor = torch.where(top == 0, 1.0, scales.float())
    codes = (x / divisor).clamp(-CODE_MAX, CODE_MAX).to(torch.float8_e4m3fn)
    refused = ~is_good.all(-2).squeeze(-1)
    return codes.view(torch.uint8).flatten(-2), scales.flatten(-2).view(torch.uint8), refused


def _decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., T, d) in `dtype`."""
    factor = scales.contiguous().view(torch.float16).float().unsqueeze(-1)
    rows = codes.reshape(*factor.shape[:-1], -1).view(torch.float8_e4m3fn)
    limit = torch.finfo(dtype).max
    return (rows.float() * factor).clamp(-limit, limit).to(dtype)
