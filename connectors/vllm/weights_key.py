"""Facts that decide the plan of a load: what a stored plan is found by."""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.envs
from blake3 import blake3
from vllm.config import get_current_vllm_config
from vllm.distributed import parallel_state

from kvtier.model.safetensors import header_size
from kvtier.weights.plan_cache import plan_key

# vLLM's groups of ranks, by their names in parallel_state. From 0.32 on, tables of n-grams have groups of their own.
GROUPS = ("_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_ETP", "_ENGRAM_DP")
EXPERTS = ("enable_expert_parallel", "enable_eplb", "eplb_config", "expert_placement_strategy")  # of ParallelConfig
MAP_ELEMENTS_MAX = 1 << 16  # longest map of experts, elements

Named = Sequence[tuple[str, torch.Tensor]]  # tensors of a model with their names


def key_of(
    model: torch.nn.Module, tensors: Named, model_config: Any, files: Sequence[Path], is_tracked: bool | None = None
) -> str:
    """Return the name of the plan that loads `files` into `model` on this rank. Raises Corrupt, OSError.

    tensors: all parameters and buffers of the model, by name. is_tracked: enable_weights_track of the loader, as set:
    without the check, a plan may leave out parameters that the checkpoint lacks.
    """
    config = get_current_vllm_config()
    source = Path(inspect.getfile(type(model)))
    facts = {
        "release": [vllm.__version__, torch.__version__],
        "model": [type(model).__module__, type(model).__qualname__, source.stat().st_size, source.stat().st_mtime_ns],
        "config": model_config.hf_config.to_json_string(use_diff=False),
        "dtype": str(model_config.dtype),
        "quantization": [str(model_config.quantization), repr(getattr(model_config, "quantization_config", None))],
        "experts": [repr(getattr(config.parallel_config, name, None)) for name in EXPERTS],
        "lora": repr(config.lora_config),
        "engram": repr(getattr(config, "engram_config", None)),
        "environment": sorted((name, repr(value)) for name, value in vllm.envs.compile_factors().items()),
        # vLLM builds a model that is set to take no images without its vision tower.
        "tensors": [name for name, _ in tensors],
        "ranks": [_rank_in(name) for name in GROUPS],
        "maps": _maps(tensors),
        "tracked": is_tracked,
        "files": [[path.name, *_header_hash(path)] for path in files],
    }
    return plan_key(facts)


def _rank_in(name: str) -> list[int]:
    group = getattr(parallel_state, name, None)
    return [] if group is None else [group.rank_in_group, group.world_size]


def _maps(tensors: Named) -> list[list[str]]:
    """Return the content of short buffers of whole numbers, as maps of experts: loaders ask them what to take."""
    return [
        [name, blake3(buffer.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, buffer in tensors
        if buffer.dtype in (torch.int32, torch.int64)
        and not isinstance(buffer, torch.nn.Parameter)
        and 0 < buffer.numel() <= MAP_ELEMENTS_MAX
        and buffer.dim()
    ]


def _header_hash(path: Path) -> list[Any]:
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        first = file.read(8)
        return [n_bytes, blake3(first + file.read(header_size(first, n_bytes))).hexdigest()]
