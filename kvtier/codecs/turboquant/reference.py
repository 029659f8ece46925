"""Turboquant in torch: vectors to codes and back. The definition: every other version makes these very bytes.

That is possible because only whole numbers are summed, exactly, in whatever order; and because every other step is one
fp32 operation, rounded to nearest even. After TurboQuant (arXiv 2504.19874, algorithm 1: rotate, then Lloyd-Max), with
the scale as in DRIVE and EDEN, and without QJL. For a vector x of d elements (K with its mean taken off, or V):

    m = max |x|;   q = rint(x * (2047 / m));   R = sqrt(sum q^2)        a zero vector: scale 0, codes 0
    y = H (s * q)                                                       |y| <= 2^19; about normal, of deviation R
    magnitude = number of thresholds t with |y| > t * R;  sign = y < 0
    scale = fp16(((m * R) / sqrt(sum C^2)) * fp32(1 / (2047 * unit)))   C: the codes' whole centroids
    x' = s * (H^T (+-C) * (scale * fp32(unit / sqrt d)))                as long as x, so coding it again changes nothing

The mean of K over the chunk is taken off where it has an eighth of the energy or more: that gains a tenth of a bit.

    M = max |k|;   g = rint(k * (2047 / M));   S[j] = sum over tokens of g;   E = sum of g^2
    where 8 * sum S[j]^2 >= T * E:  mean[j] = bf16(S[j] * ((M * fp32(1 / 2047)) * fp32(1 / T))), else 0
    x = k - mean;   k' = x' + mean

`x'` is rounded to the engine's dtype, held within its finite values (that matters for fp16).

Refused: a vector with NaN or infinity, and one that is not zero and whose scale, in fp32, is below 2^-20 or above
65504. The test is written so that NaN fails it, which also covers what overflows on the way for want of a normal m.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from kvtier.codecs.turboquant.codebooks import CODEBOOKS
from kvtier.codecs.turboquant.layout import PLANE_WIDTHS, LayerLayout
from kvtier.codecs.turboquant.rotation import K_PLANE, V_PLANE, hadamard, signs
from kvtier.codecs.vectors import EncodedLayer
from kvtier.geometry import Extent

Q_MAX = 2047
"""Vectors become whole numbers up to this: exact in fp16, and 256 products of two sum to less than 2^31."""
SCALE_MIN, SCALE_MAX = 2.0**-20, 65504.0
MEAN_SHARE = 8
"""The mean is taken off when it has one part in so many of the energy."""


class Signs(NamedTuple):
    """(..., k_size) and (..., v_size) of +-1, fp32: one row for each layer and head."""

    k: torch.Tensor
    v: torch.Tensor


class _Vectors(NamedTuple):
    """codes: (..., T, d) uint8. scales: (..., T) fp16. refused: (...) bool."""

    codes: torch.Tensor
    scales: torch.Tensor
    refused: torch.Tensor


def signs_of(seed: int, extent: Extent, layout: LayerLayout, device: torch.device) -> Signs:
    """(layers, heads, size) each."""
    k = signs(seed, extent, K_PLANE, layout.k_size)
    v = signs(seed, extent, V_PLANE, layout.v_size)
    return Signs(*(torch.from_numpy(plane).to(device, torch.float32) for plane in (k, v)))


def encode_layer(k: torch.Tensor, v: torch.Tensor, layout: LayerLayout, signs: Signs) -> EncodedLayer:
    """Of one or more layers, heads and chunks alike.

    k: (..., T, k_size), v: (..., T, v_size): bf16, fp16 or fp32. signs: of shapes that broadcast to (..., size).
    """
    k, v = k.float(), v.float()
    mean = _mean(k)
    coded_k = _encode_vectors(k - mean.float().unsqueeze(-2), signs.k, layout.bits.k)
    coded_v = _encode_vectors(v, signs.v, layout.bits.v)
    parts = [
        *_pack(coded_k.codes, layout.bits.k), *_pack(coded_v.codes, layout.bits.v),
        _bytes(coded_k.scales), _bytes(coded_v.scales), _bytes(mean),
    ]  # fmt: skip
    return EncodedLayer(torch.cat(parts, -1), coded_k.refused | coded_v.refused)


def decode_layer(
    data: torch.Tensor, layout: LayerLayout, signs: Signs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K (..., T, k_size) and V (..., T, v_size) in `dtype`. data: (..., layout.n_bytes) uint8. signs: as encoded."""
    tokens = layout.tokens
    k_codes = _unpack(data[..., : layout.v_codes], tokens, layout.bits.k)
    v_codes = _unpack(data[..., layout.v_codes : layout.k_scales], tokens, layout.bits.v)
    k = _decode_vectors(k_codes, _floats(data, layout.k_scales, tokens, torch.float16), signs.k, layout.bits.k)
    v = _decode_vectors(v_codes, _floats(data, layout.v_scales, tokens, torch.float16), signs.v, layout.bits.v)
    mean = _floats(data, layout.k_mean, layout.k_size, torch.bfloat16)
    return _rounded(k + mean.float().unsqueeze(-2), dtype), _rounded(v, dtype)


def decode_unit(bits: int, size: int) -> float:
    """What an element of H^T (+-C) is worth, in units of the scale."""
    return _fp32(CODEBOOKS[bits].unit / math.sqrt(size))


def scale_unit(bits: int) -> float:
    """What makes `m * R` over the length of the centroids the scale: about the root mean square of the vector."""
    return _fp32(1 / (Q_MAX * CODEBOOKS[bits].unit))


def _mean(k: torch.Tensor) -> torch.Tensor:
    """(..., d) bf16 of (..., T, d) fp32. Where k is not finite or hardly anything at all, it is as it comes: there the
    vectors are refused."""
    tokens = k.shape[-2]
    top = k.abs().amax((-2, -1), keepdim=True)
    whole = torch.round(k * _factor(top)).double()
    sums = whole.sum(-2, keepdim=True) + 0.0  # whole numbers have no -0
    pays = MEAN_SHARE * sums.square().sum(-1, keepdim=True) >= tokens * whole.square().sum((-2, -1), keepdim=True)
    unit = (top * _fp32(1 / Q_MAX)) * _fp32(1 / tokens)
    return torch.where(pays, sums.float() * unit, 0.0).to(torch.bfloat16).squeeze(-2)


def _encode_vectors(x: torch.Tensor, signs: torch.Tensor, bits: int) -> _Vectors:
    """x: (..., T, d) fp32. signs: (..., d)."""
    tables = _tables(bits, x.shape[-1], x.device)
    top = x.abs().amax(-1, keepdim=True)
    whole = torch.round(x * _factor(top)).double()
    length = torch.sqrt(whole.square().sum(-1, keepdim=True).float())
    rotated = ((whole * signs.unsqueeze(-2)) @ tables.rotation.T).float()
    height, magnitudes = rotated.abs(), torch.zeros_like(rotated, dtype=torch.uint8)
    for threshold in CODEBOOKS[bits].thresholds:
        magnitudes += height > length * threshold
    energy = _looked_up(tables.squares, magnitudes).sum(-1, keepdim=True).float()
    is_zero = top == 0
    scales = ((top * length) / torch.sqrt(energy)) * scale_unit(bits)
    codes = magnitudes | (rotated < 0).to(torch.uint8) << (bits - 1)
    refused = ~(is_zero | ((scales >= SCALE_MIN) & (scales <= SCALE_MAX))).all(-2).squeeze(-1)
    return _Vectors(codes, torch.where(is_zero, 0.0, scales).to(torch.float16).squeeze(-1), refused)


def _decode_vectors(codes: torch.Tensor, scales: torch.Tensor, signs: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., T, d) fp32. codes: (..., T, d) uint8; scales: (..., T) fp16; signs: (..., d)."""
    size = codes.shape[-1]
    tables = _tables(bits, size, codes.device)
    whole = (_looked_up(tables.centroids, codes) @ tables.rotation).float()
    return (whole * (scales.float() * decode_unit(bits, size)).unsqueeze(-1)) * signs.unsqueeze(-2)


class _Tables(NamedTuple):
    """rotation: (d, d) fp64, because the precision of fp32 products is a global setting that engines change.
    centroids: by code, fp64. squares: of centroids, by magnitude, fp64."""

    rotation: torch.Tensor
    centroids: torch.Tensor
    squares: torch.Tensor


@cache
def _tables(bits: int, size: int, device: torch.device) -> _Tables:
    book = CODEBOOKS[bits]
    centroids = torch.tensor(book.centroids, dtype=torch.float64, device=device)
    return _Tables(
        torch.from_numpy(hadamard(size)).to(device, torch.float64),
        torch.cat([centroids, -centroids]),
        centroids.square(),
    )


def _factor(top: torch.Tensor) -> torch.Tensor:
    """2047 / top, 0 where that is 0. (A number divided by a tensor would be torch's reciprocal times the number, which
    rounds twice.)"""
    return torch.where(top == 0, 0.0, torch.full_like(top, Q_MAX) / top)


def _looked_up(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """table[numbers], several times as fast. numbers: uint8."""
    return table.index_select(0, numbers.flatten().int()).view(numbers.shape)


def _pack(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """The planes, (..., T * d * width / 8) uint8 each. codes: (..., T, d) uint8."""
    planes, shift = [], 0
    for width in PLANE_WIDTHS[bits]:
        fields = (codes >> shift) & ((1 << width) - 1)
        parts = fields.view(*codes.shape[:-1], 8 // width, -1).unbind(-2)
        plane = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            plane = plane | (part << (number * width))
        planes.append(plane.flatten(-2))
        shift += width
    return planes


def _unpack(data: torch.Tensor, tokens: int, bits: int) -> torch.Tensor:
    """(..., T, d) uint8. data: the planes, (..., T * d * bits / 8) uint8."""
    size = data.shape[-1] * 8 // (tokens * bits)
    codes, shift, start = None, 0, 0
    for width in PLANE_WIDTHS[bits]:
        end = start + tokens * size * width // 8
        plane = data[..., start:end].reshape(*data.shape[:-1], tokens, -1)
        fields = [(plane >> (number * width)) & ((1 << width) - 1) for number in range(8 // width)]
        part = torch.cat(fields, -1) << shift
        codes = part if codes is None else codes | part
        start, shift = end, shift + width
    assert codes is not None
    return codes


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _floats(data: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return data[..., start : start + count * dtype.itemsize].contiguous().view(dtype)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:
        return values
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
