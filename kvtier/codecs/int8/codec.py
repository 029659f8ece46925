"""Codec `int8`: half the bytes of bf16, nearly without loss. K by channel of a chunk, V by token.

For one head and layer of a chunk of T tokens, K as it is after RoPE, of which the first RAW_TOKENS are left out:

    K, each channel:  least;  range = largest - least
    K, each pair:     two channels a, b, whose codes share 16 bits so that both have steps of one size
                      n_a = floor(256 * sqrt(r_a / r_b));  n_b = floor(65536 / n_a)
                      r = max(range, other's range / 256, 2^-50)
                      step = max(range_a * (1 / (n_a - 1)), range_b * (1 / (n_b - 1))), rounded up to bf16;
                      0 if below 2^-50
                      code = rint((k - least) * inverse), clamped to 0 and n - 1
                      stored is code_a * n_b + code_b
    V, each token:    step = bf16(max |v| * fp32(1 / 127)), 0 if below 2^-50
                      code = rint(v * inverse), clamped to +-127

    inverse = 1 / step, 0 where step is 0
    x' = least + code * step, rounded to the engine's dtype and clamped to its finite values; least of V = 0

Each step is one fp32 operation, rounded to nearest even; code * step is exact. A biased channel costs nothing: its
least takes the bias. Errors of K count most in channels that vary most, so these get more of the 16 bits. The first
half of a head is paired with the second, taken backwards by runs of gcd(dk / 2, 8) elements: of half-split RoPE that
pairs the channels that rotate fastest with those that rotate slowest, and puts channels of one rotation frequency into
different pairs.

RAW_TOKENS tokens at the start of every chunk are stored as they are, beside their codes: the first token of a prompt is
unlike all others, and would take most of the range of its channels. All slabs have one size, so the bytes are there in
every chunk, and no chunk has to know its place in the prompt.

A slab is the record's layers one after the other, then padding. A layer of head sizes dk and dv:

    bytes                     what
    T * dk, T * dv            codes of K's pairs, uint16, in the order of the first half; codes of V, int8
    T * 2                     steps of V, bf16
    dk * 4                    least of K's channels, fp32: of the even channels of the first half, of its odd ones,
                              of the partners of the even ones, of those of the odd ones
    dk, dk                    steps of K's pairs, bf16; n_b of each, uint16
    RAW_TOKENS * (dk + dv) * e    K, then V of the first tokens: in the engine's dtype, of e bytes

Refused: a chunk with NaN, or an element whose magnitude is 2^50 or more; heads of K whose size is not a multiple of 4,
and heads of V of an odd size.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import numpy as np
import torch

from kvtier.codecs.base import BaseCodec, Mover
from kvtier.codecs.error_watch import WatchedMover
from kvtier.codecs.vectors import EncodedLayer, VectorPages, check_vectors, rounded
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import PagedKV

log = logging.getLogger("kvtier")

CODE_MAX = 127.0
CODE_UNIT = float(np.float32(1 / 127))  # the share of a range that one step of a code of V is
STEP_MIN, ELEMENT_MAX = 2.0**-50, 2.0**50  # kernels invert steps between 2^-60 and 2^60
PAIR_CODES = 65536.0  # codes that two channels of K share
RATIO_MAX = 256.0  # largest ratio of the two ranges of a pair: codes have 4 to 12 bits
RUN = 8  # elements side by side whose partners are side by side: 16 bytes, which kernels move at once
RAW_TOKENS = 1  # tokens at the start of a chunk that are stored as they are


class Int8Codec(BaseCodec):
    """The torch reference in host memory, with Triton kernels on CUDA: the same bytes."""

    name = "int8"
    version = 3

    def check(self, geometry: Geometry) -> None:
        check_vectors(self.name, geometry)
        sizes = geometry.k_head_size, geometry.v_head_size
        if sizes[0] % 4 or sizes[1] % 2:
            fix = f"heads of K must be multiples of 4, of V of 2 elements; they have {sizes[0]} and {sizes[1]}: use raw"
            raise ConfigError("codec", self.name, fix)

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return Int8Coder.of(geometry).n_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        coder = Int8Coder.of(geometry)
        mover = _make_mover(pages, coder, held)
        self._movers[id(pages)] = WatchedMover(mover, self.name, VectorPages(pages, coder, held))


class Int8Coder:
    """kvtier.codecs.vectors.LayerCoder: all layers and heads alike."""

    def __init__(self, tokens: int, k_size: int, v_size: int, element_bytes: int = 2) -> None:
        """element_bytes: of the engine's dtype. With 2, float32 vectors are coded as those of an engine in bf16."""
        self.tokens = tokens
        self._sizes = (k_size, v_size)
        self._raw_token_bytes = RAW_TOKENS * element_bytes

    @classmethod
    def of(cls, geometry: Geometry) -> Int8Coder:
        sizes = geometry.k_head_size, geometry.v_head_size
        return cls(geometry.chunk_tokens, *sizes, geometry.element_bytes)

    def n_bytes(self, layers: range) -> int:
        k_size, v_size = self._sizes
        of_vectors = (self.tokens + self._raw_token_bytes) * (k_size + v_size)
        return len(layers) * (of_vectors + 2 * self.tokens + 6 * k_size)

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent, position: int = 0) -> EncodedLayer:
        raw = [x[..., :RAW_TOKENS, :].to(self._raw_dtype(x.dtype)) for x in (k, v)]
        k, v = k.float(), v.float()
        v_step = _v_step(v.abs().amax(-1))
        v_codes = _codes(v, v_step.unsqueeze(-1), -CODE_MAX, CODE_MAX).to(torch.int8)
        in_k = _encode_k(k)
        refused = ~((k.abs() < ELEMENT_MAX).all(-1) & (v.abs() < ELEMENT_MAX).all(-1)).all(-1)
        parts = [in_k.codes, v_codes, v_step, in_k.least, in_k.step, in_k.n_b, *raw]
        return EncodedLayer(torch.cat([_bytes(part, k.ndim - 2) for part in parts], -1), refused)

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, (k_size, v_size) = self.tokens, self._sizes
        sizes = (tokens * k_size, tokens * v_size, tokens * 2, k_size * 4, k_size, k_size)
        raw_sizes = (self._raw_token_bytes * k_size, self._raw_token_bytes * v_size)
        parts = torch.split(data, [*sizes, *raw_sizes], -1)
        raw = self._raw_dtype(dtype)
        dtypes = (torch.uint16, torch.int8, torch.bfloat16, torch.float32, torch.bfloat16, torch.uint16, raw, raw)
        k_codes, v_codes, v_step, least, step, n_b, raw_k, raw_v = (
            part.contiguous().view(kind) for part, kind in zip(parts, dtypes, strict=True)
        )
        k_codes, v_codes = (x.view(*x.shape[:-1], tokens, -1) for x in (k_codes, v_codes))
        k = rounded(_decode_k(EncodedK(k_codes, least, step, n_b)), dtype)
        v = rounded(v_codes.float() * v_step.float().unsqueeze(-1), dtype)
        k[..., :RAW_TOKENS, :] = raw_k.view(*raw_k.shape[:-1], RAW_TOKENS, k_size).to(dtype)
        v[..., :RAW_TOKENS, :] = raw_v.view(*raw_v.shape[:-1], RAW_TOKENS, v_size).to(dtype)
        return k, v

    def _raw_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype.itemsize * RAW_TOKENS == self._raw_token_bytes else torch.bfloat16


class EncodedK(NamedTuple):
    """Parts of a slab. codes: (..., tokens, pairs) uint16. least: (..., 2 * pairs) float32. step: (..., pairs) bf16.
    n_b: (..., pairs) uint16: number of codes of the second channel of each pair."""

    codes: torch.Tensor
    least: torch.Tensor
    step: torch.Tensor
    n_b: torch.Tensor


def _encode_k(k: torch.Tensor) -> EncodedK:
    """Encode K by pairs of channels. k: (..., tokens, size) float32."""
    k = _in_pairs(k)
    least, largest = k[..., RAW_TOKENS:, :].amin(-2), k[..., RAW_TOKENS:, :].amax(-2)
    least = torch.where(least == 0, 0.0, least)  # zeros have no sign, for which of two a minimum is may differ
    a_range, b_range = (largest - least).chunk(2, -1)
    floor = (torch.maximum(a_range, b_range) * (1 / RATIO_MAX)).clamp_min(STEP_MIN)
    ratio = torch.maximum(a_range, floor) / torch.maximum(b_range, floor)
    # NaN, of which a chunk is refused, has no whole number that all machines agree on.
    n_a = torch.floor(ratio.sqrt() * PAIR_CODES**0.5).nan_to_num(PAIR_CODES**0.5)
    n_b = torch.floor(PAIR_CODES / n_a)
    step = _rounded_up(torch.maximum(a_range * (1 / (n_a - 1)), b_range * (1 / (n_b - 1))))
    last = torch.cat([n_a, n_b], -1) - 1
    whole = _codes(k - least.unsqueeze(-2), torch.cat([step, step], -1).unsqueeze(-2), 0.0, last.unsqueeze(-2))
    a_codes, b_codes = whole.chunk(2, -1)
    codes = a_codes * n_b.unsqueeze(-2) + b_codes
    least = least.view(*step.shape[:-1], 2, -1, 2).transpose(-1, -2).flatten(-3)
    return EncodedK(codes.to(torch.uint16), least, step, n_b.to(torch.uint16))


def _decode_k(found: EncodedK) -> torch.Tensor:
    """Return what the codes stand for, (..., tokens, size) float32."""
    codes, n_b = found.codes.float(), found.n_b.float().unsqueeze(-2)
    a_codes = torch.floor(codes / n_b)
    whole = torch.cat([a_codes, codes - a_codes * n_b], -1)
    step = torch.cat([found.step, found.step], -1).float()
    least = found.least.view(*step.shape[:-1], 2, 2, -1).transpose(-1, -2).flatten(-3)
    return _in_pairs(least.unsqueeze(-2) + whole * step.unsqueeze(-2))


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    """Put the second half of the last dimension into the order of the partners in the first, or back."""
    first, second = x.chunk(2, -1)
    run = math.gcd(second.shape[-1], RUN)
    return torch.cat([first, second.reshape(*second.shape[:-1], -1, run).flip(-2).flatten(-2)], -1)


def _make_mover(pages: PagedKV, coder: Int8Coder, held: Extent) -> Mover:
    if pages.layers[0].k.device.type == "cpu":
        return VectorPages(pages, coder, held)
    from kvtier.codecs.int8.device import CudaInt8  # needs Triton, which hosts without a GPU may lack

    try:
        return CudaInt8(pages, coder, held)
    except ValueError as fault:
        log.warning("codec int8 runs without its kernels, many times slower: %s", fault)
        return VectorPages(pages, coder, held)


def _v_step(reach: torch.Tensor) -> torch.Tensor:
    """Return the steps of V's codes, bf16. reach: largest magnitude of each vector."""
    exact = reach * CODE_UNIT
    return torch.where(exact < STEP_MIN, 0.0, exact).to(torch.bfloat16)


def _rounded_up(step: torch.Tensor) -> torch.Tensor:
    """Return steps of K as bf16, none smaller than it was: all codes are in range."""
    bits = torch.where(step < STEP_MIN, 0.0, step).view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _codes(x: torch.Tensor, step: torch.Tensor, least: float, last: torch.Tensor | float) -> torch.Tensor:
    """Return whole numbers between `least` and `last`, float32."""
    inverse = torch.where(step == 0, 0.0, torch.ones_like(step).float() / step.float())
    # NaN, of which a chunk is refused, has no code that all machines agree on.
    return torch.round((x * inverse).clamp_min(least).clamp_max(last)).nan_to_num(0.0)


def _bytes(part: torch.Tensor, n_outer: int) -> torch.Tensor:
    """Return the bytes of a part, its first `n_outer` dimensions (heads) as they are."""
    return part.contiguous().flatten(n_outer).view(torch.uint8)
