"""vLLM's settings that change KV and have no field of their own in the namespace, as one text.

A setting counts where it is not plain: not what vLLM does by itself. So the text of most engines is "", and one setting
more in this file leaves what others have stored. What is plain is written here and not asked of the release that runs:
where a release changes a default, its KV then differs in name, too. A setting that a release lacks is plain.

Not here: what changes KV by rounding only (kernels, parallel sizes, where a step computes), and what the keys tell of a
request (which adapter, which image, its own processor arguments).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from kvtier.connectors.vllm_files import folder_of
from kvtier.connectors.vllm_forms import torch_name
from kvtier.errors import ConfigError
from kvtier.fingerprint import config_fingerprint, file_fingerprint
from kvtier.identity import canonical_text

NOTHING: tuple[Any, ...] = (None, False, 0, "", {}, [])
"""Plain, whatever the setting."""

# name -> values that are plain besides NOTHING
MODEL: Mapping[str, tuple[Any, ...]] = {
    "config_format": ("auto",),
    "model_class_overrides": (),
    "model_impl": ("auto", "vllm"),
}
MULTIMODAL: Mapping[str, tuple[Any, ...]] = {
    "media_io_kwargs": (),
    "mm_encoder_attn_dtype": (),
    "video_pruning_rate": (),
}
LORA: Mapping[str, tuple[Any, ...]] = {
    "enable_tower_connector_lora": (),
    "enable_mixed_moe_lora_format": (),
    "enable_moe_shared_loras": (),
}
ENVIRONMENT: Mapping[str, tuple[Any, ...]] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": (),
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": (),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("highest",),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": (),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": (),
    "VLLM_HUMMING_USE_F16_ACCUM": (),
    "VLLM_MARLIN_INPUT_DTYPE": (),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": (),
}
"""Of vllm.envs: what quantizes weights or activations, or routes tokens to experts, past all configuration."""
ON_BY_DEFAULT = ("VLLM_CPU_INT4_W4A8", "VLLM_USE_DEEP_GEMM_E8M0")
"""The same, of switches that are plain as long as nobody turns them off."""


def settings_text(vllm_config: Any, has_tag: bool, has_draft: bool) -> str:
    """canonical_text of all settings here that are not plain, by vLLM's name of each; "" where all are.

    has_tag: a model_tag stands for the weights, however they are loaded. has_draft: a draft model's KV is stored too.
    Raises ConfigError where a value cannot be written down.
    """
    import vllm.envs

    model, load = vllm_config.model_config, vllm_config.load_config
    found = _model(model, load)
    load_format = _settled("load_format", getattr(load, "load_format", "auto"))
    if load_format != "auto" and not has_tag:  # of one folder, different formats may read different files
        found["load_format"] = load_format
    parts = {
        "multimodal": _multimodal(getattr(model, "multimodal_config", None)),
        "lora": _lora(getattr(vllm_config, "lora_config", None), model),
        "draft": _draft(vllm_config.speculative_config, model, load) if has_draft else {},
        "environment": _environment(vllm.envs),
    }
    found |= {name: part for name, part in parts.items() if part}
    return canonical_text(found) if found else ""


def _environment(envs: Any) -> dict[str, Any]:
    return _named(envs, ENVIRONMENT) | {name: False for name in ON_BY_DEFAULT if not getattr(envs, name, True)}


def _model(model: Any, load: Any) -> dict[str, Any]:
    found = _named(model, MODEL)
    online = _online_quantization(model)
    if online is not None:
        found["quantization_config"] = _settled("quantization_config", online)
    elsewhere = getattr(model, "hf_config_path", None)
    if elsewhere and elsewhere != model.model:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        found["hf_config_path"] = config_fingerprint(folder_of(elsewhere, revision, load, "hf_config_path"))
    return found


def _online_quantization(model: Any) -> Any:
    """How weights are quantized as they are loaded, if otherwise than the name in `quantization` says by itself."""
    config = getattr(model, "quantization_config", None)
    if not config:
        return None
    try:
        from vllm.config.quantization import resolve_quantization_config
    except ImportError:
        return config
    return None if config == resolve_quantization_config(model.quantization, None) else config


def _multimodal(config: Any) -> dict[str, Any]:
    """What the identifier of an image does not tell: vLLM hashes the item and the request's own arguments."""
    if config is None:
        return {}
    found = _named(config, MULTIMODAL)
    arguments = dict(getattr(config, "mm_processor_kwargs", None) or {})
    arguments.pop("device", None)  # where, not what
    if arguments:
        found["mm_processor_kwargs"] = _settled("mm_processor_kwargs", arguments)
    if "video_pruning_rate" in found:
        found["video_pruning_method"] = _settled("video_pruning_method", getattr(config, "video_pruning_method", None))
    scales = getattr(config, "mm_encoder_fp8_scale_path", None)
    if scales:
        found["mm_encoder_fp8_scale_path"] = file_fingerprint(Path(scales), "mm_encoder_fp8_scale_path")
    return found


def _lora(config: Any, model: Any) -> dict[str, Any]:
    """How adapters are applied. Requests without one are kept apart with it, which costs hits and nothing else."""
    if config is None:
        return {}
    found = _named(config, LORA)
    modules = getattr(config, "target_modules", None)
    if modules is not None:  # an empty list is none of them
        found["target_modules"] = sorted(modules)
    dtype = torch_name(getattr(config, "lora_dtype", None) or "auto")
    if dtype not in ("auto", torch_name(model.dtype)):
        found["lora_dtype"] = dtype
    return found


def _draft(speculative: Any, model: Any, load: Any) -> dict[str, Any]:
    draft = speculative.draft_model_config
    found = _model(draft, getattr(speculative, "draft_load_config", None) or load)
    quantization = getattr(speculative, "quantization", None)
    if quantization not in (None, model.quantization):
        found["quantization"] = str(quantization)
    return found


def _named(config: Any, names: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    values = {name: _settled(name, getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value not in (*NOTHING, *names[name])}


def _settled(name: str, value: Any) -> Any:
    """`value` as JSON has it. Raises ConfigError where a part of it has no lasting text."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return _settled(name, value.value)
    if isinstance(value, torch.dtype):
        return torch_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        value = {part: below for part, below in parts.items() if below is not None}  # a release may have more fields
    if isinstance(value, Mapping):
        return {str(key): _settled(name, below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_settled(name, below) for below in value]
    if isinstance(value, set | frozenset):
        return sorted((_settled(name, below) for below in value), key=canonical_text)
    fix = f"has a {type(value).__name__}, which cannot be written down and compared; use numbers, texts and lists"
    raise ConfigError(name, value, fix)
