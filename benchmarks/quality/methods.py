"""The rows of the table: what becomes of a prefix's KV between a save and a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.quality import controls
from benchmarks.quality.model import Cache
from kvtier.codecs.fp8.codec import Fp8Coder
from kvtier.codecs.turboquant.layout import PRESETS, Bits, LayerLayout
from kvtier.codecs.turboquant.reference import decode_layer, encode_layer, signs_of
from kvtier.format.geometry import Extent

CHUNK_TOKENS = 256
SEED = 0
BATCH_ELEMENTS = 1 << 25
"""Elements of K that are encoded together: the reference takes some 50 bytes for each."""
SHIPPED = ("k6v4", "k5v3", "k4v4", "k4v3", "k3v3", "k4v2")


class Loaded(NamedTuple):
    """k, v: each (chunks, layers, KV heads, CHUNK_TOKENS, head size). refused: (chunks,) bool: these mean nothing."""

    k: Tensor
    v: Tensor
    refused: Tensor


@dataclass(frozen=True)
class Method:
    """`round_trip` takes K and V as they are in Loaded. None for raw: the KV is computed in another way instead."""

    name: str
    vector_bytes: float
    """Of one K and one V vector of one head, with all that is stored beside the codes."""
    round_trip: Callable[[Tensor, Tensor], Loaded] | None
    is_control: bool = False

    def apply(self, cache: Cache) -> tuple[Cache, int]:
        """The cache as a load brings it back, and how many of its chunks are refused: those are computed again, as the
        tier has it, so they stay as they were. The cache's tokens are whole chunks."""
        if self.round_trip is None:
            return cache, 0
        k, v = (_chunks(x) for x in (cache.k, cache.v))
        step = max(1, BATCH_ELEMENTS // k[0].numel())
        parts = [self.round_trip(k[i : i + step], v[i : i + step]) for i in range(0, len(k), step)]
        back_k, back_v, refused = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        stays = refused[:, None, None, None, None]
        n_rows = cache.k.shape[1]
        loaded = Cache(_rows(torch.where(stays, k, back_k), n_rows), _rows(torch.where(stays, v, back_v), n_rows))
        return loaded, int(refused.sum())


def _chunks(x: Tensor) -> Tensor:
    """(layers, rows, heads, tokens, size) -> (rows x chunks, layers, heads, CHUNK_TOKENS, size)."""
    return x.unflatten(3, (-1, CHUNK_TOKENS)).permute(1, 3, 0, 2, 4, 5).flatten(0, 1)


def _rows(x: Tensor, n_rows: int) -> Tensor:
    return x.unflatten(0, (n_rows, -1)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def turboquant(k: Tensor, v: Tensor, bits: Bits) -> Loaded:
    """The tier's codec."""
    _, layers, heads, tokens, size = k.shape
    layout = LayerLayout(tokens, size, size, bits)
    signs = signs_of(SEED, Extent(0, layers, 0, heads), layout, k.device)
    encoded = encode_layer(k, v, layout, signs)
    return Loaded(*decode_layer(encoded.data, layout, signs, k.dtype), encoded.refused.flatten(1).any(dim=1))


def fp8(k: Tensor, v: Tensor) -> Loaded:
    """The tier's codec, too."""
    _, layers, heads, tokens, size = k.shape
    coder, cells = Fp8Coder(tokens, size, size), Extent(0, layers, 0, heads)
    encoded = coder.encode(k, v, cells)
    return Loaded(*coder.decode(encoded.data, cells, k.dtype), encoded.refused.flatten(1).any(dim=1))


def paper(k: Tensor, v: Tensor, quantize_k: Callable[[Tensor, int], Tensor], bits: Bits) -> Loaded:
    refused = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    return Loaded(quantize_k(k, bits.k).to(k.dtype), controls.mse(v, bits.v).to(v.dtype), refused)


def methods(size: int) -> list[Method]:
    """All rows, for a head size, from the safest on; controls last."""

    def vector_bytes(bits: Bits) -> float:
        return LayerLayout(CHUNK_TOKENS, size, size, bits).n_bytes / CHUNK_TOKENS

    def from_paper(name: str, quantize_k: Callable[[Tensor, int], Tensor], bits: Bits, norms: int) -> Method:
        n_bytes = size * (bits.k + bits.v) / 8 + 2 * norms
        return Method(name, n_bytes, partial(paper, quantize_k=quantize_k, bits=bits), is_control=True)

    return [
        Method("raw", 4 * size, None),
        Method("fp8", 2 * size + 4, fp8),
        *(Method(name, vector_bytes(PRESETS[name]), partial(turboquant, bits=PRESETS[name])) for name in SHIPPED),
        Method("k2v2", vector_bytes(PRESETS["k2v2"]), partial(turboquant, bits=PRESETS["k2v2"]), is_control=True),
        from_paper("paper mse k4v4", controls.mse, Bits(4, 4), 2),
        from_paper("paper QJL k4v4", controls.prod, Bits(4, 4), 3),
        from_paper("paper QJL k3v3", controls.prod, Bits(3, 3), 3),
    ]
