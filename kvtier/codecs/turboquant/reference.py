"""Turboquant in torch: vectors to codes and back. The definition: every other version makes these very bytes.

That is possible because only whole numbers are summed, exactly, in whatever order, and every other step is one
operation rounded to nearest even. After TurboQuant (arXiv 2504.19874, algorithm 1: rotate, then quantize), with the
scale as in DRIVE and EDEN, and without QJL. For a vector x of d elements in the engine's dtype (K with its mean taken
off, or V), where 2^e <= max |x| < 2^(e + 1):

    r = 2^(15 - e);   q = rint(x * r)                        |q| <= 2^16
    E = max(1, sum rint((x * r)^2 / 2^17));  F = sum C^2     C: the codes' whole centroids
    z = fp16((H (s * q)) / 2^9)                              |z| <= 2^15; about normal, of deviation sqrt(E / 2)
    n = fp16(fp32(1 / (sqrt(2) * reach)) / sqrt(E))
    code = how many thresholds are at most z * n             (`buckets`, `codebooks`)
    scale = fp16((sqrt(E / F) * fp32(2^(17/2) / (unit * sqrt d))) / r)    a zero vector: 0
    x' = s * (H^T C * (scale * unit))                        as long as x, so coding it again changes no code

`unit` is the least power of two not below the centroids' unit / sqrt d. Square roots and quotients are of fp32.

K first has its rotary embedding taken off (turns.py), then its mean over the chunk, which is where biases of K are.
The mean is that of every `mean_step`-th token, the last of each so many: of 128 it has an error of a 128th of what is
left of the energy. Coded again, K has another mean, and some other codes: five times add a fifth or a quarter to the
error of 4 bits, two thirds to that of 6.

    2^e <= max |k| < 2^(e + 1), or e = -16 if that is more;   g = rint(k * 2^(15 - e))         |g| <= 2^16
    mean[j] = bf16((S[j] * fp32(1 / n)) * 2^(e - 15)), S[j] the sum of g over the n tokens
    x = k - mean, in fp32, rounded to the engine's dtype;   k' = fp32(x' + mean), turned back

The first RAW_TOKENS tokens are stored as they are too, and decoding takes those: the first token of a prompt is unlike
all others, and all heads lean on it. Every chunk has room for them, because all slabs have one size.

All that is rounded to the engine's dtype is held within its finite values (that matters for fp16).

Refused: a vector with NaN, infinity or an element of 65536 or more, and one that is not zero and whose scale, in fp32,
is below 2^-20 or above 65504. The tests are written so that NaN fails them.
"""

import math
from functools import cache
from typing import NamedTuple

import torch

from kvtier.codecs.turboquant.buckets import thresholds
from kvtier.codecs.turboquant.codebooks import CODEBOOKS
from kvtier.codecs.turboquant.layout import PLANE_WIDTHS, RAW_TOKENS, SlabFormat
from kvtier.codecs.turboquant.rotation import K_PLANE, V_PLANE, hadamard, signs
from kvtier.codecs.turboquant.turns import turned
from kvtier.codecs.vectors import EncodedLayer, octets, raw_dtype, rounded, square_root
from kvtier.format.geometry import Extent

# The largest element of a vector becomes a whole number of so many bits and one: 256 of them sum to 2^24, fp32's.
TOP_EXPONENT = 15
# Exponents of the powers of two that rotated elements, and squares, are divided by: so that fp16 holds the former, and
# sums of the latter are exact in fp32.
ROTATED_SHIFT, ENERGY_SHIFT = 9, 17
ELEMENT_MAX = 65536.0
SCALE_MIN, SCALE_MAX = 2.0**-20, 65504.0
MEAN_TOKENS, MEAN_LEAST = 128, -16  # least number of tokens that the mean is taken of; least exponent of its elements


class Signs(NamedTuple):
    """(..., k_size) and (..., v_size) of +-1, fp32: one row for each layer and head."""

    k: torch.Tensor
    v: torch.Tensor


class _Vectors(NamedTuple):
    """codes: (..., T, d) uint8. scales: (..., T) fp16. refused: (...) bool."""

    codes: torch.Tensor
    scales: torch.Tensor
    refused: torch.Tensor


def signs_of(slabs: SlabFormat, extent: Extent, device: torch.device) -> Signs:
    """(layers, heads, size) each."""
    k = signs(slabs.seed, extent, K_PLANE, slabs.k_size)
    v = signs(slabs.seed, extent, V_PLANE, slabs.v_size)
    return Signs(*(torch.from_numpy(plane).to(device, torch.float32) for plane in (k, v)))


def encode_layer(k: torch.Tensor, v: torch.Tensor, slabs: SlabFormat, signs: Signs) -> EncodedLayer:
    """Encode one or more layers, heads and chunks alike.

    k: (..., T, k_size), v: (..., T, v_size): bf16, fp16 or fp32. signs: of shapes that broadcast to (..., size).
    """
    raw = [x[..., :RAW_TOKENS, :].to(raw_dtype(x.dtype)).flatten(-2) for x in (k, v)]
    whole = turned(k.float(), slabs.rope_base, False)
    mean = _mean(whole)
    coded_k = _encode_vectors(rounded(whole - mean.float().unsqueeze(-2), k.dtype), signs.k, slabs.bits.k)
    coded_v = _encode_vectors(v, signs.v, slabs.bits.v)
    parts = [
        *_pack(coded_k.codes, slabs.bits.k),
        *_pack(coded_v.codes, slabs.bits.v),
        octets(coded_k.scales),
        octets(coded_v.scales),
        octets(mean),
        *(octets(part) for part in raw),
    ]
    is_turnable = (k.abs() < ELEMENT_MAX).all(-1).all(-1)  # what is not finite may look finite once it is turned
    return EncodedLayer(torch.cat(parts, -1), coded_k.refused | coded_v.refused | ~is_turnable)


def decode_layer(
    data: torch.Tensor, slabs: SlabFormat, signs: Signs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode to K (..., T, k_size) and V (..., T, v_size) in `dtype`.

    data: (..., slabs.layer_bytes) uint8. signs: those of the encoding.
    """
    tokens = slabs.tokens
    k_codes = _unpack(data[..., : slabs.v_codes], tokens, slabs.bits.k)
    v_codes = _unpack(data[..., slabs.v_codes : slabs.k_scales], tokens, slabs.bits.v)
    k_scales = _floats(data, slabs.k_scales, tokens, torch.float16)
    v_scales = _floats(data, slabs.v_scales, tokens, torch.float16)
    mean = _floats(data, slabs.k_mean, slabs.k_size, torch.bfloat16).double().unsqueeze(-2)
    flips = signs.k.double().unsqueeze(-2)
    k = _decode_vectors(k_codes, k_scales, slabs.bits.k) + mean * flips  # in fp64, so that it is rounded once
    v = _decode_vectors(v_codes, v_scales, slabs.bits.v)
    k = rounded(turned(k.float() * flips.float(), slabs.rope_base, True), dtype)
    v = rounded(v.float() * signs.v.unsqueeze(-2), dtype)
    raw_k = _floats(data, slabs.raw, RAW_TOKENS * slabs.k_size, raw_dtype(dtype))
    raw_v = _floats(data, slabs.raw + raw_k.shape[-1] * 2, RAW_TOKENS * slabs.v_size, raw_dtype(dtype))
    for x, raw in ((k, raw_k), (v, raw_v)):
        first = x[..., :RAW_TOKENS, :]
        first.copy_(raw.view(first.shape))
    return k, v


def decode_unit(bits: int, size: int) -> float:
    """Return the value of an element of H^T C in units of the scale: a power of two, so that its product with scales
    and whole numbers has few bits."""
    return 2.0 ** math.ceil(math.log2(CODEBOOKS[bits].unit / math.sqrt(size)))


def scale_unit(bits: int, size: int) -> float:
    """Return the factor that makes sqrt(E / F) the scale of a vector whose r is 1, about the root mean square of its
    elements."""
    return _fp32(2 ** (ENERGY_SHIFT / 2) / (decode_unit(bits, size) * math.sqrt(size)))


def spread(bits: int) -> float:
    """n * sqrt(E)."""
    return _fp32(1 / (math.sqrt(2) * CODEBOOKS[bits].reach))


def mean_step(tokens: int) -> int:
    """Return the number of tokens of which one counts for the mean of K."""
    return max(1, tokens // MEAN_TOKENS)


def _mean(k: torch.Tensor) -> torch.Tensor:
    """(..., d) bf16 of (..., T, d) fp32. Where k is not finite or hardly anything at all, it is as it comes: there the
    vectors are refused."""
    step = mean_step(k.shape[-2])
    k = k[..., step - 1 :: step, :].double()
    exponent = _exponent(k.abs().amax((-2, -1), keepdim=True)).clamp(min=MEAN_LEAST)
    unit = _power(exponent - TOP_EXPONENT)
    sums = torch.round(k / unit).sum(-2, keepdim=True) + 0.0  # whole numbers have no -0
    return ((sums.float() * _fp32(1 / k.shape[-2])) * unit.float()).to(torch.bfloat16).squeeze(-2)


def _encode_vectors(x: torch.Tensor, signs: torch.Tensor, bits: int) -> _Vectors:
    """x: (..., T, d). signs: (..., d)."""
    tables = _tables(bits, x.shape[-1], x.device)
    top = x.abs().amax(-1, keepdim=True).float()
    factor = _power(TOP_EXPONENT - _exponent(top))
    scaled = x.double() * factor
    energy = torch.round(scaled.square() * 2.0**-ENERGY_SHIFT).sum(-1, keepdim=True).clamp(min=1).float()
    rotated = (torch.round(scaled) * signs.unsqueeze(-2)) @ tables.rotation.T * 2.0**-ROTATED_SHIFT
    normal = (spread(bits) / square_root(energy).double()).float().to(torch.float16)
    heights = rotated.float().to(torch.float16).float() * normal.float()
    codes = torch.bucketize(heights, tables.thresholds, right=True, out_int32=True).to(torch.uint8)
    of_codes = _looked_up(tables.squares, codes).sum(-1, keepdim=True).float()
    scales = (square_root(energy / of_codes) * scale_unit(bits, x.shape[-1])) / factor.float()
    is_zero = top == 0
    is_sound = (top < ELEMENT_MAX) & (scales >= SCALE_MIN) & (scales <= SCALE_MAX)
    refused = ~(is_zero | is_sound).all(-2).squeeze(-1)
    return _Vectors(codes, torch.where(is_zero, 0.0, scales).to(torch.float16).squeeze(-1), refused)


def _decode_vectors(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., T, d) fp64, not yet flipped. codes: (..., T, d) uint8; scales: (..., T) fp16."""
    size = codes.shape[-1]
    tables = _tables(bits, size, codes.device)
    units = scales.double() * decode_unit(bits, size)
    return (_looked_up(tables.centroids, codes) @ tables.rotation) * units.unsqueeze(-1)


class _Tables(NamedTuple):
    """rotation: (d, d) fp64, because the precision of fp32 products is a global setting that engines change.
    centroids: by code, fp64. squares: of centroids. thresholds: fp32."""

    rotation: torch.Tensor
    centroids: torch.Tensor
    squares: torch.Tensor
    thresholds: torch.Tensor


@cache
def _tables(bits: int, size: int, device: torch.device) -> _Tables:
    positive = torch.tensor(CODEBOOKS[bits].centroids, dtype=torch.float64, device=device)
    centroids = torch.cat([-positive.flip(0), positive])
    return _Tables(
        torch.from_numpy(hadamard(size)).to(device, torch.float64),
        centroids,
        centroids.square(),
        torch.tensor(thresholds(bits), device=device),
    )


def _exponent(top: torch.Tensor) -> torch.Tensor:
    """e, where 2^e <= top < 2^(e + 1); anything where top is 0 or not finite."""
    return torch.frexp(top).exponent - 1


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, fp64."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


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


def _floats(data: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return data[..., start : start + count * dtype.itemsize].contiguous().view(dtype)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
