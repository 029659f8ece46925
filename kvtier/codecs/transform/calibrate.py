"""Tables of the transform codec from statistics of a model's KV: transforms, bits of components.

g is the gradient of the likelihood of what follows with respect to a token's vector, M the mean of |g|^2 over tokens.
N, the mean of g g^T / |g|, says which errors cost the model most. C is the covariance of a plane's vectors, in which
a token counts 1 - GRADIENT_SHARE + GRADIENT_SHARE * |g|^2 / M: the few tokens to which all others attend, such as the
first punctuation of a prompt, have vectors unlike the rest, and without this weight they got few bits:
Qwen2.5-Coder-0.5B lost 5 to 7 times as much after a chat template. In one head:

    N' = N / (trace(N) / d) + METRIC_FLOOR * I;   S = sqrt(N');   C' = C + COVARIANCE_FLOOR * (trace(C) / d) * I
    U, l = eigenvectors and eigenvalues, descending, of S C' S
    components = (x - mean) S U diag(l)^-1/2

A component's error of one bit more or less costs its l times the head's weight, (M * E)^WEIGHT_POWER / E: E the mean
of l. The power below 1 keeps a calibration on other text than is served from starving a plane. Each byte of a group
goes to the 8 bits that gain most. A step gives each head of one layer a byte, for the group that gains most of it;
steps go to the layers that gain most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvtier.codecs.transform.curve import levels
from kvtier.codecs.transform.table import BITS_MAX, FORWARD_MAX, GROUP, PRESET_BITS

METRIC_FLOOR, COVARIANCE_FLOOR, WEIGHT_POWER, GRADIENT_SHARE = 0.1, 1e-4, 0.6, 0.3
SCALE_EXPONENT = 8  # a channel's deviation becomes a whole number of 2^8 to 2^9


class PlaneStatistics(NamedTuple):
    """Means over tokens, for each layer and head. mean: (L, H, d). moment: C + mean mean^T, and metric: N, (L, H, d, d)
    each. power: M, (L, H)."""

    mean: torch.Tensor
    moment: torch.Tensor
    metric: torch.Tensor
    power: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, gradient: torch.Tensor) -> PlaneStatistics:
        """x, gradient: (L, H, tokens, d)."""
        x, gradient = x.double(), gradient.double()
        norm = gradient.norm(dim=-1, keepdim=True)
        robust = gradient / (norm.sqrt() + 1e-20)
        power = norm.square().mean(2, keepdim=True)
        mean = x.mean(2, keepdim=True)
        share = torch.where(power > 0, norm.square() / power.clamp(min=1e-300), 1.0)
        weight = 1 - GRADIENT_SHARE + GRADIENT_SHARE * share
        around = ((x - mean) * weight).mT @ (x - mean) / x.shape[2]
        return cls(mean[:, :, 0], around + mean.mT @ mean, robust.mT @ robust / x.shape[2], power[:, :, 0, 0])


def table_tensors(k: PlaneStatistics, v: PlaneStatistics, frequencies: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a table (kvtier.codecs.transform.table)."""
    values, errors = levels()
    tensors = {"levels": torch.from_numpy(values), "frequencies": frequencies.double()}
    costs = []
    for name, plane in (("k", k), ("v", v)):
        with _one_thread():
            found, cost = _plane(plane)
        tensors |= {f"{name}.{field}": tensor for field, tensor in found.items()}
        costs.append(cost)
    gains = torch.tensor(errors[:-1], dtype=torch.float64) - torch.tensor(errors[1:], dtype=torch.float64)
    gained = torch.cat(costs, -1).unsqueeze(-1) * gains  # (L, H, components, bits)
    in_groups = gained.view(*gained.shape[:2], -1, GROUP * BITS_MAX).sort(-1, descending=True)
    shape = in_groups.values.shape
    of_bytes = in_groups.values.view(*shape[:2], -1, 8).sum(-1).sort(-1, descending=True)
    of_steps = of_bytes.values.sum(1)  # (L, steps), descending
    for preset, bits in PRESET_BITS.items():
        n_steps = bits * gained.shape[0] * gained.shape[2] // 8
        is_taken = torch.zeros(of_steps.numel()).scatter(0, of_steps.flatten().topk(n_steps).indices, 1.0)
        taken = is_taken.view(of_steps.shape).sum(-1, keepdim=True).unsqueeze(1)
        is_given = (of_bytes.indices.argsort(-1) < taken).view(*shape[:3], BITS_MAX)
        n_bits = 8 * is_given.sum(-1, keepdim=True)
        is_coded = (in_groups.indices.argsort(-1) < n_bits).view(gained.shape)
        given = is_coded.sum(-1).to(torch.uint8)
        n_k = costs[0].shape[-1]
        tensors[f"{preset}.k"], tensors[f"{preset}.v"] = given[..., :n_k], given[..., n_k:]
    return tensors


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute on one thread. With matrices of a head, 32 threads took over a minute, one takes seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plane(plane: PlaneStatistics) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a plane's tensors, and what the error of each component costs, (L, H, d)."""
    size = plane.mean.shape[-1]
    unit = torch.eye(size, dtype=torch.float64)
    covariance = plane.moment - plane.mean.unsqueeze(-1) * plane.mean.unsqueeze(-2)
    covariance = covariance + COVARIANCE_FLOOR * _trace(covariance) * unit
    metric = plane.metric / _trace(plane.metric).clamp(min=1e-300) + METRIC_FLOOR * unit
    values, vectors = torch.linalg.eigh(metric)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    inverse_root = (vectors / values.sqrt().unsqueeze(-2)) @ vectors.mT
    variances, axes = torch.linalg.eigh(root @ covariance @ root)
    variances, axes = variances.flip(-1).clamp(min=1e-30), axes.flip(-1)
    deviations = variances.sqrt()
    mean_variance = variances.mean(-1, keepdim=True)
    weight = (plane.power.unsqueeze(-1) * mean_variance).clamp(min=1e-300) ** WEIGHT_POWER / mean_variance
    exponents = torch.floor(covariance.diagonal(dim1=-2, dim2=-1).sqrt().log2())
    scale = torch.exp2(SCALE_EXPONENT - exponents)
    forward = (root @ axes) / deviations.unsqueeze(-2) / scale.unsqueeze(-1)
    step = forward.abs().amax(-2) / FORWARD_MAX
    inverse = deviations.unsqueeze(-1) * (axes.mT @ inverse_root)
    back = inverse.abs().amax(-2)
    tensors = {
        "mean": plane.mean.float(),
        "scale": scale.float(),
        "forward": torch.round(forward / step.unsqueeze(-2)).to(torch.int16),
        "unit": step.float(),
        "inverse": (inverse / back.unsqueeze(-2)).to(torch.float16),
        "back": back.float(),
    }
    return tensors, variances * weight


def _trace(matrix: torch.Tensor) -> torch.Tensor:
    """Return the mean of the diagonal, (L, H, 1, 1)."""
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
