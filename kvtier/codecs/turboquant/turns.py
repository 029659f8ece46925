"""Rotary embedding taken off K within a chunk, and put back: K as it would be if all tokens had the chunk's position.

A bias of K is the same for every token, but RoPE turns it with the position, so the mean over a chunk misses it. Token
t of a chunk is turned back by t positions. The position of the chunk's start does not matter, for it turns all of its
tokens alike. So a chunk's bytes need no position. Elements j and j + d/2 are a pair, turned by t * base^(-2j/d):

    off:   a' = a * cos + b * sin;   b' = b * cos - a * sin
    on:    a' = a * cos - b * sin;   b' = b * cos + a * sin

Each product and each sum is one fp32 operation. The two are inverse, so a base that is not the model's only costs
accuracy.
"""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

SIZES = (64, 128, 256)  # of heads that are turned: their halves are whole groups of a kernel's tile


def takes_turns(size: int, rope_base: float) -> bool:
    """Tell whether the rotary embedding of heads of this size is taken off."""
    return rope_base > 0 and size in SIZES


@cache
def angles(tokens: int, size: int, rope_base: float) -> npt.NDArray[np.float32]:
    """(2, tokens, size / 2): cosines and sines of each token and pair."""
    frequencies = rope_base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    found = np.arange(tokens, dtype=np.float64)[:, None] * frequencies
    return np.stack([np.cos(found), np.sin(found)]).astype(np.float32)


def turned(x: torch.Tensor, rope_base: float, is_back: bool) -> torch.Tensor:
    """(..., T, d) fp32 with its rotary embedding taken off, or put back. x: fp32."""
    size = x.shape[-1]
    if not takes_turns(size, rope_base):
        return x
    cosines, sines = torch.from_numpy(angles(x.shape[-2], size, rope_base)).to(x.device)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    if is_back:
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)
    return torch.cat([a * cosines + b * sines, b * cosines - a * sines], -1)


def tile_angles(tokens: int, size: int, rope_base: float) -> npt.NDArray[np.float32]:
    """(tokens, 4, size / 4) for kernels: cosines of the lower and of the upper elements of words, sines likewise."""
    if not takes_turns(size, rope_base):
        return np.zeros((1, 4, 1), dtype=np.float32)
    found = angles(tokens, size, rope_base).reshape(2, tokens, size // 4, 2)
    return np.ascontiguousarray(found.transpose(1, 0, 3, 2).reshape(tokens, 4, size // 4))
