"""Figures of `kvtier plan`, computed from its options and a model's folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvtier.errors import ConfigError
from kvtier.format.geometry import Geometry, RankShare
from kvtier.model.config_json import ModelConfig, read_model
from kvtier.planner.capacity import ChunkBytes, EngineSizes, HbmPlan, Prefill, TransferRates, plan_hbm
from kvtier.planner.model_parameters import active_parameters, total_parameters
from kvtier.planner.model_weights import Weights, read_weights
from kvtier.runtime.units import counted, size

if TYPE_CHECKING:
    from kvtier.planner.codecs import Staging

GIB = 1 << 30
# Seconds that a reload takes beside its bytes at the transfer's rate. On one H200 with Llama-3.1-8B's dimensions the
# reloads of benchmarks/results/gpu/versus.json take 18 ms more than that at 8,192 tokens and 84 ms at 100,000, most of
# it the floor that a hit in the engine's own cache has too.
LOAD_OVERHEAD_S = 0.02


class PrefillRate(NamedTuple):
    """Rate of a prefill, tokens a second, with a prompt of `tokens`."""

    tokens_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Parsed options. Seconds, bytes, tokens; None: not given."""

    model: Path
    engine: EngineSizes
    kv_dtype: Literal["auto", "fp8"]
    chunk_tokens: int
    step_tokens: int
    staging_bytes: int | None
    host_bytes: int | None
    storage_bytes: int | None
    rates: TransferRates
    prefill_rate: PrefillRate | None
    context: int | None


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """Figures of one codec. Tokens per GiB of files and of an arena on each rank, and of the given sizes. Of a context:
    seconds from files and from host memory, including the fixed cost of a load. Of a reload from files, else from host
    memory: tokens a second, and the length from which it is no slower than a prefill."""

    chunk: ChunkBytes
    staging: Staging
    ratio: float
    per_gib_of_files: int
    per_gib_of_arena: int
    tokens_in_storage: int | None
    tokens_in_host: int | None
    from_files_s: float | None
    from_host_s: float | None
    reload_tokens_s: float | None
    break_even_tokens: int | None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """context: tokens of the reload and prefill, whole chunks. prefill_s: None without a rate."""

    model: ModelConfig
    parameters: int
    active_parameters: int
    geometry: Geometry
    weights: Weights
    engine: EngineSizes
    hbm: HbmPlan
    codecs: dict[str, CodecPlan]
    refused: dict[str, str]
    context: int
    prefill_flops: float
    prefill_s: float | None
    assumptions: tuple[str, ...]


def make_plan(asked: PlanRequest) -> CapacityPlan:
    """Compute a plan. Raises ConfigError."""
    # With torch, which takes seconds: the other commands do not wait for it.
    from kvtier.planner.codecs import chunks_of_codecs, staging_of

    model = read_model(asked.model)
    geometry = model.geometry(asked.kv_dtype, asked.chunk_tokens)
    engine = asked.engine
    shares = _shares(geometry, engine, model)
    weights = read_weights(asked.model, model)
    hbm = plan_hbm(model, geometry, weights.n_bytes, engine)
    if hbm.kv_bytes <= 0:
        has_room = hbm.kv_bytes + hbm.weights_bytes > 0  # for weights, if they were fewer
        fix = (
            f"a rank has {size(hbm.weights_bytes)} of weights and {size(engine.reserve_bytes)} of reserve, of "
            f"{size(engine.gpu_bytes * engine.utilization)}: "
            + ("raise --tensor-parallel or --pipeline-parallel" if has_room else "lower --reserve")
        )
        raise ConfigError("--gpu-memory", engine.gpu_bytes, fix)
    sizes, refused = chunks_of_codecs(geometry, shares)
    prefill, context = _prefill(asked, model), _context(asked, model)
    codecs = {}
    for name, chunk in sizes.items():
        staging = staging_of(chunk, asked.staging_bytes, asked.step_tokens, engine)
        codecs[name] = _codec_plan(asked, chunk, sizes["raw"], staging, prefill, context)
    return CapacityPlan(
        model,
        total_parameters(model),
        active_parameters(model),
        geometry,
        weights,
        engine,
        hbm,
        codecs,
        refused,
        context,
        prefill.flops(context),
        prefill.seconds(context) if prefill.flop_s < math.inf else None,
        _assumptions(asked, model),
    )


def _codec_plan(
    asked: PlanRequest, chunk: ChunkBytes, raw: ChunkBytes, staging: Staging, prefill: Prefill, context: int
) -> CodecPlan:
    from_files, from_host = asked.rates.from_files(chunk), asked.rates.from_host(chunk)
    token_s = from_host if from_files is None else from_files
    even = None
    if token_s is not None and prefill.flop_s < math.inf:
        tokens = prefill.break_even_tokens(LOAD_OVERHEAD_S, token_s)
        even = -(-tokens // chunk.tokens) * chunk.tokens
    return CodecPlan(
        chunk=chunk,
        staging=staging,
        ratio=raw.encoded / chunk.encoded,
        per_gib_of_files=GIB * chunk.tokens // chunk.file,
        per_gib_of_arena=GIB * chunk.tokens // chunk.slot,
        tokens_in_storage=_whole_chunks(asked.storage_bytes, chunk.file, chunk.tokens),
        tokens_in_host=_whole_chunks(asked.host_bytes, chunk.slot, chunk.tokens),
        from_files_s=None if from_files is None else LOAD_OVERHEAD_S + from_files * context,
        from_host_s=None if from_host is None else LOAD_OVERHEAD_S + from_host * context,
        reload_tokens_s=None if token_s is None else 1 / token_s,
        break_even_tokens=even,
    )


def _whole_chunks(n_bytes: int | None, chunk_bytes: int, chunk_tokens: int) -> int | None:
    return None if n_bytes is None else n_bytes // chunk_bytes * chunk_tokens


def _shares(geometry: Geometry, engine: EngineSizes, model: ModelConfig) -> tuple[RankShare, ...]:
    """Return the shares of all ranks. Raises ConfigError where an engine would not cut the model so."""
    heads = model.attention.heads
    if engine.pipeline_size > model.layers:
        fix = f"the model has {counted(model.layers, 'layer')}: choose at most as many stages"
        raise ConfigError("--pipeline-parallel", engine.pipeline_size, fix)
    if heads % engine.tensor_size:
        fix = f"the model's {heads} attention heads do not divide over so many ranks: choose another"
        raise ConfigError("--tensor-parallel", engine.tensor_size, fix)
    try:
        return engine.shares(geometry)
    except ValueError as error:
        raise ConfigError("--tensor-parallel", engine.tensor_size, f"{error}: choose another") from None


def _context(asked: PlanRequest, model: ModelConfig) -> int:
    """Return the tokens of the whole chunks of a prompt: a partial one is not stored. Raises ConfigError."""
    context = asked.context or model.max_tokens
    if context < asked.chunk_tokens:
        fix = f"give the tokens of a prompt, at least a chunk ({asked.chunk_tokens}): only whole chunks are stored"
        raise ConfigError("--context", asked.context, fix)
    return context // asked.chunk_tokens * asked.chunk_tokens


def _prefill(asked: PlanRequest, model: ModelConfig) -> Prefill:
    prefill = Prefill.of(model)
    if asked.prefill_rate is None:
        return prefill
    rate, tokens = asked.prefill_rate
    return replace(prefill, flop_s=prefill.flops(tokens) * rate / tokens)


def _assumptions(asked: PlanRequest, model: ModelConfig) -> tuple[str, ...]:
    engine = asked.engine
    found = [
        *model.notes,
        f"{size(engine.reserve_bytes)} of each GPU are for activations, CUDA graphs and NCCL (--reserve); an engine "
        "measures them when it starts",
        "weights are spread over ranks in proportion to their parameters, and parameters are those of matrices",
        "storage and PCIe keep the given rates; chunks go over PCIe while others are read; what the GPU does to verify "
        "and decode them is not counted",
        "storage serves all ranks together, PCIe one GPU each",
    ]
    if asked.staging_bytes is None:
        found.append(
            f"a step of the engine computes up to {asked.step_tokens:,} tokens (--max-num-batched-tokens): staging is "
            "for three such steps, and for loads"
        )
    if asked.rates != TransferRates(None, None):
        found.append(f"any load takes {LOAD_OVERHEAD_S:g} s beside its bytes")
    if asked.prefill_rate is not None:
        found.append("a prefill does all its work at one rate; what of it is not matrices takes nothing")
    return tuple(found)
