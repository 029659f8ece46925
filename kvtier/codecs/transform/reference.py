"""The transform codec in torch: vectors to codes and back. The definition: every other version makes these very bytes.

Sums are of whole numbers, exact in any order; every other step is one fp32 operation, rounded to nearest even. For a
vector x of d elements, K with its rotary embedding taken off or V, and its head's tables (table.py):

    u = (x - mean) * scale;   2^p <= max |u| < 2^(p + 1);   e = max(0, p - 13);   q = rint(u * 2^-e)      |q| <= 2^14
    n = (q . forward) * unit                                components, each of variance 1 or so, times 2^e
    2^p <= max(2^-12, max |n|) < 2^(p + 1);  S = sum rint((n * 2^-p)^8 * 2^12)   over components of 1 bit or more
    g = 2^p * the 8th root of S * fp32(2^-12 / (105 * count)), but 2^-12 at least; rounded to 4 significant bits
    gain = (exponent and 3 bits of g) + 8 * e - GAIN_LEAST, held within 0 and 255; g is made of it again
    code = curve(n * (1 / g))                               kvtier.codecs.transform.curve
    x' = mean + (levels[code] . inverse) * (back * g * 2^e)

g would be 1 for a normal variable of variance 1. The eighth power follows a token's largest components, which the
quantizers would clip: it had less loss than lower powers, and than the better of the root mean square and the peak.
K is turned by its position within the chunk, then by the chunk's place in the prompt: angles are frequency * position,
in fp64, their cosines and sines fp32. The first RAW_TOKENS tokens of each chunk are stored as they are, too.

A slab is the record's layers one after the other, then padding. A layer of T tokens and R bytes a row:

    bytes                          content
    T * R                          codes: group after group of K, then of V. A token's 8 codes of a group, the first in
                                   the lowest bits, are a little-endian number of whole bytes. The number is cut into
                                   parts of 4, 2 and 1 bytes, or of 4 and 4, lowest first. A group has the first part
                                   of all tokens, then the second part of all tokens, then the third
    T, T                           gains of K, gains of V
    RAW_TOKENS * (dk + dv) * 2     K, then V of the first tokens: in the engine's dtype, bf16 where that is fp32
    16                             position of the chunk's first token in the prompt (u32, little-endian), zeros

Decoding sums in fp32, in any order: it may differ in the last bit of fp32, which rarely changes the engine's dtype.

Refused: a vector with NaN, infinity or |u| of 2^30 or more. The tests are written so that NaN fails them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from kvtier.codecs.transform.curve import CURVES
from kvtier.codecs.transform.table import GROUP, LEVELS, PlaneTable
from kvtier.codecs.vectors import EncodedLayer, octets, raw_dtype, rounded, square_root

RAW_TOKENS = 1  # tokens at the start of a chunk that are stored as they are
POSITION_BYTES = 16
U_MAX = 2.0**30
Q_EXPONENT = 13  # exponent of the largest q
POWER_UNIT = 2.0**12  # of eighth powers
GAIN_MIN, GAIN_LEAST = 2.0**-12, (127 - 12) * 8


def layer_bytes(row_bytes: int, tokens: int, k_size: int, v_size: int) -> int:
    """Bytes of a layer of one head. row_bytes: of a token's codes."""
    return tokens * (row_bytes + 2) + RAW_TOKENS * (k_size + v_size) * 2 + POSITION_BYTES


class PlaneCoder(NamedTuple):
    """Tables of a plane of one layer's heads, (heads, 1, d) where nothing else is said.

    mean, scale, unit, back: of PlaneTable. forward: (heads, d, d) fp64, inverse: fp32. bits: int64, of a component;
    counted: (heads, 1, 1), factor of S. first: the level of code 0.
    levels: all of the table, and a zero.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    unit: torch.Tensor
    back: torch.Tensor
    forward: torch.Tensor
    inverse: torch.Tensor
    bits: torch.Tensor
    counted: torch.Tensor
    first: torch.Tensor
    levels: torch.Tensor

    @classmethod
    def of(cls, table: PlaneTable, levels: torch.Tensor) -> PlaneCoder:
        """table: of one layer, (heads, ...)."""
        mean, scale, unit, back = (tensor.unsqueeze(1) for tensor in (table.mean, table.scale, table.unit, table.back))
        bits = table.bits.long()
        values = torch.cat([levels[: LEVELS - 2].float(), torch.zeros(2, device=levels.device)])
        first = torch.where(bits > 0, (1 << bits) - 2, LEVELS - 2)
        counted = (1 / POWER_UNIT) / (105 * (bits > 0).sum(-1, keepdim=True)).clamp(min=1).float()
        forward, inverse = table.forward.double(), table.inverse.float()
        bits, counted, first = (tensor.unsqueeze(1) for tensor in (bits, counted, first))
        return cls(mean, scale, unit, back, forward, inverse, bits, counted, first, values)


def encode_layer(
    k: torch.Tensor, v: torch.Tensor, coders: Sequence[PlaneCoder], frequencies: torch.Tensor, position: int
) -> EncodedLayer:
    """Encode one layer. k, v: (heads, T, size). coders: of K and V. frequencies: (dk / 2). position: of the chunk."""
    heads, tokens, _ = k.shape
    raw = [octets(x[:, :RAW_TOKENS].to(raw_dtype(x.dtype)).flatten(1)) for x in (k, v)]
    planes = turned(k.float(), frequencies, position, False), v.float()
    found = [_encode_vectors(x, coder) for x, coder in zip(planes, coders, strict=True)]
    bits = torch.cat([coder.bits for coder in coders], -1)
    packed = _pack(torch.cat([each.codes for each in found], -1), bits)
    place = np.array([position, 0, 0, 0], dtype="<u4").view(np.uint8)
    places = torch.from_numpy(place).to(k.device).expand(heads, -1)
    parts = [packed, *(each.gains for each in found), *raw, places]
    return EncodedLayer(torch.cat(parts, -1), found[0].refused | found[1].refused)


def decode_layer(
    data: torch.Tensor, tokens: int, coders: Sequence[PlaneCoder], frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (heads, T, size). data: (heads, bytes of the layer), at one position."""
    sizes = [coder.bits.shape[-1] for coder in coders]
    raw_bytes = [RAW_TOKENS * size * 2 for size in sizes]
    n_codes = data.shape[-1] - 2 * tokens - sum(raw_bytes) - POSITION_BYTES
    packed, *gains, raw_k, raw_v, place = torch.split(data, [n_codes, tokens, tokens, *raw_bytes, POSITION_BYTES], -1)
    bits = torch.cat([coder.bits for coder in coders], -1)
    codes = _unpack(packed, tokens, bits)
    parts = codes[..., : sizes[0]], codes[..., sizes[0] :]
    k, v = (_decode_vectors(*each) for each in zip(parts, gains, coders, strict=True))
    position = int(place[0, :4].cpu().numpy().view("<u4")[0])
    found = []
    for x, raw in ((turned(k, frequencies, position, True), raw_k), (v, raw_v)):
        x = rounded(x, dtype)
        first = x[:, :RAW_TOKENS]
        first.copy_(raw.contiguous().view(raw_dtype(dtype)).view(first.shape))
        found.append(x)
    return found[0], found[1]


class _PlaneCodes(NamedTuple):
    """codes: (heads, T, d) int64. gains: (heads, T) uint8. refused: (heads) bool."""

    codes: torch.Tensor
    gains: torch.Tensor
    refused: torch.Tensor


def _encode_vectors(x: torch.Tensor, coder: PlaneCoder) -> _PlaneCodes:
    u = (x - coder.mean) * coder.scale
    is_sound = u.abs() < U_MAX
    u = torch.where(is_sound, u, 0.0)
    e = (torch.frexp(u.abs().amax(-1, keepdim=True)).exponent - 1 - Q_EXPONENT).clamp(min=0)
    n = (torch.round(torch.ldexp(u, -e)).double() @ coder.forward).float() * coder.unit
    coded = n * (coder.bits > 0)
    power = (coded.abs().amax(-1, keepdim=True).clamp(min=GAIN_MIN).view(torch.int32) >> 23 << 23).view(torch.float32)
    fourths = (coded * (1 / power)).square().square()
    total = torch.round(fourths.square() * POWER_UNIT).sum(-1, keepdim=True, dtype=torch.float64).float()
    root = square_root(square_root(square_root(total * coder.counted)))
    g = (root * power).clamp(min=GAIN_MIN)
    gain = (((g.view(torch.int32) + (1 << 19)) >> 20) + 8 * e - GAIN_LEAST).clamp(0, 255)
    inverse = 1 / ((gain + GAIN_LEAST - 8 * e) << 20).view(torch.float32)
    rate, c1, c3, c5 = _curves(x.device)[:, coder.bits]
    t = (n * inverse * rate).clamp(-1, 1)
    t2 = t * t
    steps = 1 << coder.bits
    codes = torch.floor((t * (c1 + t2 * (c3 + t2 * c5)) + 1) * (steps / 2)).long()
    codes = torch.minimum(codes.clamp(min=0), steps - 1)
    return _PlaneCodes(codes, gain.squeeze(-1).to(torch.uint8), ~is_sound.flatten(1).all(-1))


def _decode_vectors(codes: torch.Tensor, gains: torch.Tensor, coder: PlaneCoder) -> torch.Tensor:
    """(heads, T, d) fp32."""
    g = ((gains.int() + GAIN_LEAST) << 20).view(torch.float32).unsqueeze(-1)
    return coder.mean + (coder.levels[codes + coder.first] @ coder.inverse) * (coder.back * g)


def turned(x: torch.Tensor, frequencies: torch.Tensor, position: int, is_back: bool) -> torch.Tensor:
    """Take the rotary embedding off (heads, T, dk) fp32, or put it back: pairs (j, j + dk / 2)."""
    if not frequencies.any():
        return x
    turns = [angles(frequencies, torch.arange(x.shape[-2])), angles(frequencies, torch.tensor([position]))]
    for cosines, sines in reversed(turns) if is_back else turns:
        a, b = x.chunk(2, -1)
        left, right, up, down = a * cosines, b * cosines, b * sines, a * sines
        x = torch.cat([left - up, right + down] if is_back else [left + up, right - down], -1)
    return x


def angles(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, (positions, pairs) fp32 each, on the device of `frequencies` (pairs)."""
    found = positions.numpy()[:, None] * frequencies.cpu().numpy()
    cosines, sines = (torch.from_numpy(turn(found).astype(np.float32)) for turn in (np.cos, np.sin))
    return cosines.to(frequencies.device), sines.to(frequencies.device)


@cache
def _curves(device: torch.device) -> torch.Tensor:
    """(4, 9) fp32: rate and coefficients, by bits."""
    return torch.tensor(CURVES, dtype=torch.float32, device=device).T.contiguous()


def _pack(codes: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """(heads, T * bytes of a token) uint8. codes: (heads, T, d) int64; bits: (heads, 1, d)."""
    numbers = (codes.view(*codes.shape[:2], -1, GROUP) << _shifts(bits)).sum(-1)
    octets = numbers.unsqueeze(-1).view(torch.uint8)
    return torch.stack(
        [
            torch.cat([tokens[:, part.group, part.first : part.end].flatten() for part in _parts(each)])
            for tokens, each in zip(octets, bits, strict=True)
        ]
    )


def _unpack(packed: torch.Tensor, tokens: int, bits: torch.Tensor) -> torch.Tensor:
    """(heads, T, d) int64. packed: of `_pack`."""
    shifts = _shifts(bits)
    numbers = torch.zeros(len(bits), tokens, shifts.shape[2], dtype=torch.int64, device=packed.device)
    octets = numbers.unsqueeze(-1).view(torch.uint8)
    for head, data, each in zip(octets, packed, bits, strict=True):
        start = 0
        for part in _parts(each):
            end = start + tokens * (part.end - part.first)
            head[:, part.group, part.first : part.end] = data[start:end].view(tokens, -1)
            start = end
    return (numbers.unsqueeze(-1) >> shifts).flatten(-2) & ((1 << bits) - 1)


def _shifts(bits: torch.Tensor) -> torch.Tensor:
    """(heads, 1, groups, GROUP), of codes within their group's number."""
    groups = bits.view(len(bits), 1, -1, GROUP)
    return groups.cumsum(-1) - groups


class _Part(NamedTuple):
    """Bytes [first, end) of a group's number."""

    group: int
    first: int
    end: int


def _parts(bits: torch.Tensor) -> list[_Part]:
    """Return the parts of all groups of a head, in the order of the slab. bits: (1, d)."""
    found = []
    for group, n_bytes in enumerate((bits.view(-1, GROUP).sum(-1) // 8).tolist()):
        first = 0
        for size in (4, 4, 2, 1):
            if n_bytes - first >= size:
                found.append(_Part(group, first, first + size))
                first += size
    return found
