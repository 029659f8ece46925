"""TurboQuant as its paper has it (arXiv 2504.19874), the control beside what the tier ships.

Algorithm 1 (`mse`): rotate, nearest Lloyd-Max centroid; the norm is kept, no mean is taken off, no norm corrected.
Algorithm 2 (`prod`): Algorithm 1 with a bit less, and the signs of a Gaussian sketch of what is left over (QJL, arXiv
2406.03482). Its products with a query are right on average, but their variance is that of one bit less times pi / 2,
and softmax does not average over keys: so it must do worse than `mse` at the same bits, or this benchmark sees nothing.

Written for itself, not on the tier's codec, and in floats: nothing here is stored.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

CENTROIDS = {
    2: (0.45278, 1.51042),
    3: (0.24509, 0.75601, 1.34391, 2.15195),
    4: (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
}
"""By bits: the positive centroids of the Lloyd-Max quantizer of N(0, 1)."""
ROTATION_SEED, SKETCH_SEED = 1, 2


@cache
def gaussian(size: int, seed: int, device: torch.device) -> Tensor:
    """(size, size) float32, the same on every device."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).to(device)


@cache
def rotation(size: int, device: torch.device) -> Tensor:
    q, r = torch.linalg.qr(gaussian(size, ROTATION_SEED, torch.device("cpu")).double())
    return (q * r.diagonal().sign()).float().to(device)


def mse(x: Tensor, bits: int) -> Tensor:
    """Algorithm 1 there and back: x (..., d) of any float dtype, float32 out."""
    x = x.float()
    size = x.shape[-1]
    norm = x.norm(dim=-1, keepdim=True)
    positive = torch.tensor(CENTROIDS[bits], device=x.device)
    centroids = torch.cat((-positive.flip(0), positive))
    turn = rotation(size, x.device)
    y = (x / norm.clamp_min(1e-30)) @ turn.T * math.sqrt(size)
    nearest = torch.bucketize(y, (centroids[1:] + centroids[:-1]) / 2)
    return centroids[nearest] @ turn * (norm / math.sqrt(size))


def prod(x: Tensor, bits: int) -> Tensor:
    """Algorithm 2 there and back, as `mse`."""
    x = x.float()
    size = x.shape[-1]
    rough = mse(x, bits - 1)
    left = x - rough
    sketch = gaussian(size, SKETCH_SEED, x.device)
    signs = torch.where(left @ sketch.T < 0, -1.0, 1.0)
    return rough + left.norm(dim=-1, keepdim=True) * (math.sqrt(math.pi / 2) / size) * (signs @ sketch)
