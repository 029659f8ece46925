"""Tables of the transform codec for tests, and KV that is as they were made for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from kvtier.codecs.transform.calibrate import PlaneStatistics, table_tensors
from kvtier.codecs.transform.reference import turned
from kvtier.codecs.transform.table import write_table

N_TOKENS = 512
MODEL, WEIGHTS = "test-model", "test"


@cache
def vectors(layers: int, heads: int, size: int, seed: int) -> torch.Tensor:
    """(layers, heads, N_TOKENS, size) fp32: correlated, with a large mean, K as it is without its rotary embedding."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(layers, heads, size, size, generator=draw) * torch.logspace(-1.5, 1, size)
    x = torch.randn(layers, heads, N_TOKENS, size, generator=draw) @ mix.mT
    return x + 30 * torch.randn(layers, heads, 1, size, generator=draw)


def frequencies(layers: int, size: int) -> torch.Tensor:
    """(layers, size / 2): a base of 10,000 and one of 1,000,000 in turn, but none in the last layer."""
    bases = torch.tensor([1e4, 1e6], dtype=torch.float64).repeat(layers)[:layers, None]
    found = bases ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    found[-1] = 0
    return found


def kv(layers: int, heads: int, size: int, position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K as an engine has it from `position` on, and V."""
    k = vectors(layers, heads, size, 0)
    turns = frequencies(layers, size)
    return torch.stack([turned(x, turn, position, True) for x, turn in zip(k, turns, strict=True)]), vectors(
        layers, heads, size, 1
    )


def make_table(path: Path, layers: int, heads: int, size: int) -> Path:
    """Write a table of `kv` of these sizes."""
    draw = torch.Generator().manual_seed(2)
    planes = [
        PlaneStatistics.of(x, torch.randn(x.shape, generator=draw) * 1e-3)
        for x in (vectors(layers, heads, size, 0), vectors(layers, heads, size, 1))
    ]
    write_table(path, table_tensors(*planes, frequencies(layers, size)), MODEL, WEIGHTS)
    return path
