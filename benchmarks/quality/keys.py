"""What the model's keys are like, for a small model can be kinder to a codec than a large one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.quality.methods import CHUNK_TOKENS
from benchmarks.quality.model import Cache


def describe(cache: Cache) -> dict[str, Any]:
    """Of each layer and KV head, spans over them: energy share of the chunk's mean in K, kurtosis, norms of K and V."""
    k, v = cache.k.float(), cache.v.float()
    chunks = k.unflatten(3, (-1, CHUNK_TOKENS))  # layers, rows, heads, chunks, tokens, size
    mean_energy = chunks.mean(dim=4).square().sum(-1)
    energy = chunks.square().sum(-1).mean(dim=4)
    by_head = k.transpose(1, 2).flatten(2)  # layers, heads, all elements
    centred = by_head - by_head.mean(-1, keepdim=True)
    channels = k.square().mean(dim=(1, 3)).sqrt()  # layers, heads, size
    norm_k, norm_v = (x.norm(dim=-1).mean(dim=(1, 3)) for x in (k, v))
    return {
        "mean_energy_share": _span((mean_energy / energy).mean(dim=(1, 3))),
        "kurtosis": _span(centred.pow(4).mean(-1) / centred.square().mean(-1).square()),
        "norm_k": _span(norm_k),
        "norm_v": _span(norm_v),
        "norm_k_over_v": _span(norm_k / norm_v),
        "largest_channel_over_median": _span(channels.amax(-1) / channels.median(-1).values),
    }


def _span(values: Tensor) -> dict[str, float]:
    return {"mean": values.mean().item(), "min": values.min().item(), "max": values.max().item()}
