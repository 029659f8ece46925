"""Capacity and reload times: the arithmetic of `kvtier plan`. Pure; no torch, no I/O.

    HBM          gpu_bytes x utilization - weights - reserve is left for the engine's own KV, on each rank
    reload       of a chunk: its bytes for all ranks at the storage's rate, or those of one rank at PCIe's; the longer
    prefill      (b n + a n^2) / rate,   b = 2 x parameters, a = layers x heads x (d_qk + d_av)
    break-even   the least n with   fixed + n x reload of a token <= prefill of n

The FLOPs are those of Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B): forward, a third of its
6 N + 12 L H Q T a token. There 4 Q T are the scores and outputs of a head that attends to T tokens; in a prompt of n a
token attends to n / 2 at the mean, and MLA's heads have a size for each of both. N counts the matrices of layers that a
token is multiplied with, of a mixture of experts those that it is sent to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.format.geometry import Geometry, RankShare, share_of_rank
from kvtier.model.config_json import ModelConfig
from kvtier.planner.model_parameters import active_parameters, rank_parameters, total_parameters


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Parallel sizes of an engine, and memory of one GPU; reserve_bytes: for activations and the like."""

    tensor_size: int
    pipeline_size: int
    gpu_bytes: int
    utilization: float
    reserve_bytes: int

    @property
    def ranks(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def outside_bytes(self) -> int:
        """Return the bytes of each GPU that the engine leaves to others."""
        return self.gpu_bytes - int(self.gpu_bytes * self.utilization)

    def stages(self, layers: int) -> tuple[range, ...]:
        """Return the layers of each pipeline stage as vLLM cuts them (vllm.distributed.utils.get_pp_indices): remaining
        layers are given to one stage each, from the last but one backwards. Each stage must have a layer."""
        each, remaining = divmod(layers, self.pipeline_size)
        stages, first = [], 0
        for stage in range(self.pipeline_size):
            has_one_more = self.pipeline_size - 1 - remaining <= stage < self.pipeline_size - 1
            end = first + each + has_one_more
            stages.append(range(first, end))
            first = end
        return tuple(stages)

    def shares(self, geometry: Geometry) -> tuple[RankShare, ...]:
        """Return the shares of all ranks, by rank. Raises ValueError when KV heads and tensor ranks do not divide."""
        return tuple(
            share_of_rank(geometry, tensor_rank, self.tensor_size, number * self.tensor_size + tensor_rank, stage)
            for number, stage in enumerate(self.stages(geometry.layers))
            for tensor_rank in range(self.tensor_size)
        )


@dataclass(frozen=True, slots=True)
class HbmPlan:
    """HBM of the rank that holds the fewest tokens. kv_bytes: left for the engine's own KV, `token_bytes` a token;
    negative when not even the weights fit. outside_bytes: left by the engine, for kvtier's staging."""

    weights_bytes: int
    kv_bytes: int
    token_bytes: int
    outside_bytes: int

    @property
    def tokens(self) -> int:
        return max(0, self.kv_bytes) // self.token_bytes


def plan_hbm(model: ModelConfig, geometry: Geometry, weights_bytes: int, engine: EngineSizes) -> HbmPlan:
    """Plan the HBM of the fullest rank. weights_bytes: of the whole model, spread over ranks by their parameters."""
    each = weights_bytes / total_parameters(model)
    usable = engine.gpu_bytes - engine.outside_bytes
    plans = []
    for share in engine.shares(geometry):
        reads = share.reads
        stage = range(reads.first_layer, reads.end_layer)
        weights = math.ceil(each * rank_parameters(model, stage, engine.tensor_size))
        kv_bytes = usable - weights - engine.reserve_bytes
        plans.append(HbmPlan(weights, kv_bytes, geometry.vector_bytes * reads.cells, engine.outside_bytes))
    return min(plans, key=lambda plan: plan.kv_bytes / plan.token_bytes)


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Sizes of a chunk of `tokens` tokens with a codec, bytes.

    encoded: the codec's own, of all layers and heads, scales and means included, without padding.
    file: in segment files, over all ranks: slabs in whole pages, and header pages.
    slot: of an arena in memory, on the rank where it is largest.
    read: slabs that a rank reads, where it reads most; read_in_all: over all ranks, duplicates included.
    """

    tokens: int
    encoded: int
    file: int
    slot: int
    read: int
    read_in_all: int

    @property
    def token_bytes(self) -> float:
        return self.encoded / self.tokens


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Bytes a second. storage: to all ranks together; pcie: to one GPU."""

    storage: float | None
    pcie: float | None

    def from_files(self, chunk: ChunkBytes) -> float | None:
        """Return seconds a token: files pass PCIe while the next ones are read. None: a rate is unknown."""
        if self.storage is None:
            return None
        return max(chunk.read_in_all / self.storage, chunk.read / self.pcie if self.pcie else 0.0) / chunk.tokens

    def from_host(self, chunk: ChunkBytes) -> float | None:
        """Return seconds a token out of host memory."""
        return None if self.pcie is None else chunk.read / self.pcie / chunk.tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """FLOPs of a prompt of n tokens: linear x n + square x n^2. flop_s: how many all ranks together do in a second."""

    linear: float
    square: float
    flop_s: float = math.inf

    @classmethod
    def of(cls, model: ModelConfig) -> Prefill:
        shape = model.attention
        return cls(2.0 * active_parameters(model), float(model.layers * shape.heads * (shape.qk_size + shape.av_size)))

    def flops(self, tokens: int) -> float:
        return self.linear * tokens + self.square * tokens * tokens

    def seconds(self, tokens: int) -> float:
        return self.flops(tokens) / self.flop_s

    def break_even_tokens(self, fixed_s: float, token_s: float) -> int:
        """Return the least n from which on a reload of fixed_s + n x token_s is no slower than a prefill. It always
        exists, if beyond any context, for attention makes each further token of a prompt dearer."""
        square_s = self.square / self.flop_s
        gain_s = self.linear / self.flop_s - token_s
        root = math.sqrt(gain_s * gain_s + 4 * square_s * fixed_s)
        # The root of square_s n^2 + gain_s n - fixed_s, in the form that subtracts nothing from its like.
        exact = 2 * fixed_s / (root + gain_s) if gain_s > 0 else (root - gain_s) / (2 * square_s)
        return max(1, math.ceil(exact))


def read_by(share: RankShare, shares: Sequence[RankShare], slab_bytes: dict[int, int]) -> int:
    """Return the bytes that a rank reads of a chunk written by the same engine: whole slabs of every record that has
    layers and heads of its own. slab_bytes: of each writing rank."""
    total = 0
    for writer in shares:
        common = writer.writes.intersect(share.reads) if writer.writes else None
        total += common.n_heads * slab_bytes[writer.rank] if common else 0
    return total
