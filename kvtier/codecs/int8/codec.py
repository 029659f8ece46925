"""Codec `int8`: half the bytes of bf16, nearly without loss. K by channel of a chunk, V by token.

For one head and layer of a chunk of T tokens, K as it is after RoPE, of which the first RAW_TOKENS are left out:

    K, each channel:  low, high = least and largest k;  middle = (low + high) / 2
                      scale = bf16(max(high - middle, middle - low) * fp32(1 / 127)), 0 where it is below 2^-50
    V, each token:    scale = bf16(max |v| * fp32(1 / 127)), likewise;  middle = 0

    inverse = 1 / scale, 0 where scale is 0
    code = rint((x - middle) * inverse), held within +-127
    x' = middle + code * scale, rounded to the engine's dtype and held within its finite values

Each step is one fp32 operation, rounded to nearest even; code * scale is exact. A biased channel costs nothing: its
middle takes the bias. RAW_TOKENS tokens at the start of every chunk are stored as they are, beside their codes: the
first token of a prompt is unlike all others, and would take most of the range of its channels. All slabs have one
size, so the bytes are there in every chunk, and no chunk has to know its place in the prompt.

A slab is the record's layers one after the other, then padding. A layer of head sizes dk and dv:

    bytes                     what
    T * dk, T * dv            codes of K, codes of V, int8
    T * 2                     scales of V, bf16
    dk * 4, dk * 2            middles of K, fp32; scales of K, bf16
    RAW_TOKENS * (dk + dv) * 2    K, then V of the first tokens: in the engine's dtype, bf16 where that is fp32

Refused: a chunk with NaN, or an element whose magnitude is 2^50 or more.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from kvtier.codecs.base import BaseCodec, Mover
from kvtier.codecs.error_watch import Sampled, WatchedMover
from kvtier.codecs.vectors import EncodedLayer, VectorPages, check_vectors
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import PagedKV

log = logging.getLogger("kvtier")

CODE_MAX = 127.0
CODE_UNIT = float(np.float32(1 / 127))  # the share of a range that one step of a code is
SCALE_MIN, ELEMENT_MAX = 2.0**-50, 2.0**50  # kernels invert scales between 2^-60 and 2^60
RAW_TOKENS = 1  # tokens at the start of a chunk that are stored as they are


class Int8Codec(BaseCodec):
    """The torch reference in host memory, with Triton kernels on CUDA: the same bytes."""

    name = "int8"

    def check(self, geometry: Geometry) -> None:
        check_vectors(self.name, geometry)

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return Int8Coder(geometry.chunk_tokens, geometry.k_head_size, geometry.v_head_size).n_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        coder = Int8Coder(geometry.chunk_tokens, geometry.k_head_size, geometry.v_head_size)
        mover = _make_mover(pages, coder, held)
        self._movers[id(pages)] = WatchedMover(mover, self.name, coder, Sampled(pages, held))


class Int8Coder:
    """kvtier.codecs.vectors.LayerCoder: all layers and heads alike."""

    def __init__(self, tokens: int, k_size: int, v_size: int) -> None:
        self.tokens = tokens
        self._sizes = (k_size, v_size)

    def n_bytes(self, layers: range) -> int:
        k_size, v_size = self._sizes
        return len(layers) * ((self.tokens + 2 * RAW_TOKENS) * (k_size + v_size) + 2 * self.tokens + 6 * k_size)

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent, position: int = 0) -> EncodedLayer:
        raw_dtype = torch.bfloat16 if k.dtype == torch.float32 else k.dtype
        raw = [x[..., :RAW_TOKENS, :].to(raw_dtype) for x in (k, v)]
        k, v = k.float(), v.float()
        low, high = k[..., RAW_TOKENS:, :].amin(-2), k[..., RAW_TOKENS:, :].amax(-2)
        middle = (low + high) * 0.5
        middle = torch.where(middle == 0, 0.0, middle)  # zeros have no sign, for which of two a minimum is may differ
        k_scale = _scale(torch.maximum(high - middle, middle - low))
        v_scale = _scale(v.abs().amax(-1))
        codes = _codes(k - middle.unsqueeze(-2), k_scale.unsqueeze(-2)), _codes(v, v_scale.unsqueeze(-1))
        refused = ~((k.abs() < ELEMENT_MAX).all(-1) & (v.abs() < ELEMENT_MAX).all(-1)).all(-1)
        parts = [*codes, v_scale, middle, k_scale, *raw]
        return EncodedLayer(torch.cat([_bytes(part, k.ndim - 2) for part in parts], -1), refused)

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, (k_size, v_size) = self.tokens, self._sizes
        sizes = (tokens * k_size, tokens * v_size, tokens * 2, k_size * 4, k_size * 2)
        raw_sizes = (RAW_TOKENS * k_size * 2, RAW_TOKENS * v_size * 2)
        parts = torch.split(data, [*sizes, *raw_sizes], -1)
        raw_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        dtypes = (torch.int8, torch.int8, torch.bfloat16, torch.float32, torch.bfloat16, raw_dtype, raw_dtype)
        k, v, v_scale, middle, k_scale, raw_k, raw_v = (
            part.contiguous().view(kind) for part, kind in zip(parts, dtypes, strict=True)
        )
        k, v = (x.view(*x.shape[:-1], tokens, -1).float() for x in (k, v))
        k = _rounded(middle.unsqueeze(-2) + k * k_scale.float().unsqueeze(-2), dtype)
        v = _rounded(v * v_scale.float().unsqueeze(-1), dtype)
        k[..., :RAW_TOKENS, :] = raw_k.view(*raw_k.shape[:-1], RAW_TOKENS, k_size).to(dtype)
        v[..., :RAW_TOKENS, :] = raw_v.view(*raw_v.shape[:-1], RAW_TOKENS, v_size).to(dtype)
        return k, v


def _make_mover(pages: PagedKV, coder: Int8Coder, held: Extent) -> Mover:
    device = pages.layers[0].k.device
    if device.type == "cpu":
        return VectorPages(pages, coder, held)
    from kvtier.codecs.coded_pages import SlabShape
    from kvtier.codecs.int8.device import CudaInt8  # needs Triton, which hosts without a GPU may lack

    try:
        return CudaInt8(pages, SlabShape(coder.tokens, coder.n_bytes), held)
    except ValueError as fault:
        log.warning("codec int8 runs without its kernels, many times slower: %s", fault)
        return VectorPages(pages, coder, held)


def _scale(reach: torch.Tensor) -> torch.Tensor:
    """Return the scales, bf16, of codes that reach so far either way."""
    exact = reach * CODE_UNIT
    return torch.where(exact < SCALE_MIN, 0.0, exact).to(torch.bfloat16)


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0.0, torch.ones_like(scale).float() / scale.float())
    # NaN, of which a chunk is refused, has no int8 that all machines agree on.
    return torch.round((x * inverse).clamp(-CODE_MAX, CODE_MAX)).nan_to_num(0.0).to(torch.int8)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _bytes(part: torch.Tensor, n_outer: int) -> torch.Tensor:
    """Return the bytes of a part, its first `n_outer` dimensions (heads) as they are."""
    return part.contiguous().flatten(n_outer).view(torch.uint8)
