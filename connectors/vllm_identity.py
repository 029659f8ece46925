"""From vLLM's configuration to the namespace of its KV, and to the share of it that each rank holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.assemble import make_codec
from kvtier.config import Settings
from kvtier.connectors.vllm_files import folder_of
from kvtier.connectors.vllm_forms import forms_of, torch_name
from kvtier.connectors.vllm_layouts import layer_number
from kvtier.connectors.vllm_platforms import packing_of
from kvtier.connectors.vllm_settings import settings_text
from kvtier.errors import ConfigError
from kvtier.fingerprint import weights_fingerprint
from kvtier.geometry import Geometry, RankShare, share_of_rank
from kvtier.identity import CodecId, Namespace, canonical_text

DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Ways of drafting that keep no KV of their own."""
LENGTH_DEPENDENT_ROPES = frozenset({"longrope", "su", "dynamic"})
"""Positional encodings that look at the engine's own maximum length."""
RENAMED_ROPES = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
"""What vLLM's models with MLA make of the configuration's names, in the processes that they are made in. Other models
take both, as different encodings."""

FINGERPRINTS = Path(f"/var/tmp/kvtier-{os.getuid()}/fingerprints")


@dataclass(frozen=True, slots=True)
class Identity:
    """namespace: of this engine's KV. shares: of all ranks, by rank. is_halved: see vllm_layouts."""

    namespace: Namespace
    shares: tuple[RankShare, ...]
    is_halved: bool


def identity_of(vllm_config: Any, spec: Any, layer_names: Sequence[str], settings: Settings) -> Identity:
    """What this engine's KV is.

    spec: of any layer of its only KV-cache group; layer_names: the layers of that group, on this rank, in order.
    Raises ConfigError.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = _draft(vllm_config, settings)
    layers = _total_layers(vllm_config, layer_names, bool(draft))
    is_mla = type(spec).__name__ == "MLAAttentionSpec"
    # Over several stages layers are numbered as the model has them; on one, a draft model's may follow with a gap.
    numbers = range(layers) if parallel.pipeline_parallel_size > 1 else [layer_number(name) for name in layer_names]
    forms = forms_of(vllm_config, spec, numbers)
    geometry = Geometry(
        layers=layers,
        kv_heads=1 if is_mla else model.get_total_num_kv_heads(),
        k_head_size=forms.main.k_head_size,
        v_head_size=forms.main.v_head_size,
        dtype=forms.main.dtype,
        element_bytes=forms.main.element_bytes,
        attention="mla" if is_mla else "heads",
        chunk_tokens=settings.chunk_tokens,
        plain_layers=forms.plain_layers,
        plain=forms.plain,
    )
    codec, signer = make_codec(settings), settings.signing.signer()
    packing = packing_of(spec, vllm_config)
    namespace = Namespace(
        engine=packing.family,
        weights=settings.model_tag or _weights(model, vllm_config.load_config),
        geometry=geometry,
        model_dtype=torch_name(model.dtype),
        quantization=str(model.quantization or ""),
        positions=positions_text(model),
        hf_overrides=_overrides_text(model),
        codec=CodecId(codec.name, codec.version, codec.seed),
        draft=draft,
        epoch=str(settings.epoch),
        settings=settings_text(vllm_config, settings.model_tag is not None, bool(draft)),
        signing=signer.fingerprint if signer else "",
    )
    return Identity(namespace, _shares(geometry, parallel), packing.is_halved)


def check_share(share: RankShare, spec: Any, layer_names: Sequence[str], geometry: Geometry) -> None:
    """On a worker: its tensors must be what its share says. Raises ConfigError."""
    if len(layer_names) != share.reads.n_layers:
        fix = f"vLLM put {len(layer_names)} attention layers on this rank, kvtier expected {share.reads.n_layers}"
        raise ConfigError("pipeline_parallel_size", share.rank, f"{fix}; run without the kvtier connector")
    if geometry.attention == "heads" and spec.num_kv_heads != share.reads.n_heads:
        fix = f"vLLM put {spec.num_kv_heads} KV heads on this rank, kvtier expected {share.reads.n_heads}"
        raise ConfigError("tensor_parallel_size", share.rank, f"{fix}; run without the kvtier connector")


def positions_text(model: Any) -> str:
    """What decides how positions enter K, in a form that does not change with the version that read it."""
    config = model.hf_text_config
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            rope |= found
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind)
    if getattr(model, "use_mla", False):
        kind = RENAMED_ROPES.get(str(kind), kind)
    for name in ("rope_theta", "partial_rotary_factor"):
        value = getattr(config, name, None)
        if value is not None:
            rope.setdefault(name, value)
    if kind not in (None, "default"):
        rope["rope_type"] = kind
    settings: dict[str, Any] = {
        "rope": {name: _number(value) for name, value in rope.items() if value is not None},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "sliding_window": getattr(config, "sliding_window", None),
    }
    if kind in LENGTH_DEPENDENT_ROPES:
        settings["max_model_len"] = model.max_model_len
    return canonical_text({name: value for name, value in settings.items() if value is not None})


def _number(value: Any) -> Any:
    """10000 and 10000.0 are the same setting."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _overrides_text(model: Any) -> str:
    overrides = getattr(model, "hf_overrides", None)
    if not overrides:
        return ""
    if callable(overrides):  # start-up asked for a model_tag, which stands for the result
        return f"function {getattr(overrides, '__qualname__', '')}"
    try:
        return canonical_text(overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError("hf_overrides", overrides, f"cannot be written as JSON: {error}") from None


def _weights(model: Any, load_config: Any) -> str:
    return weights_fingerprint(folder_of(model.model, model.revision, load_config), FINGERPRINTS)


def _draft(vllm_config: Any, settings: Settings) -> str:
    """Who the draft model is, if its layers may be among the cached ones; "" if there is none."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", None) or "")
    if speculative is None or method in DRAFTS_WITHOUT_KV:
        return ""
    model = getattr(speculative, "draft_model_config", None)
    if model is None:
        raise ConfigError("speculative_config.method", method, "this draft model is not known to kvtier; use another")
    if os.path.isdir(model.model) or settings.model_tag is None:
        return f"{method}:{_weights(model, vllm_config.load_config)}"
    return f"{method}:{model.model}"


def _total_layers(vllm_config: Any, layer_names: Sequence[str], has_draft: bool) -> int:
    """Attention layers over all pipeline stages, those of a draft model included."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return len(layer_names)
    if has_draft:
        fix = "a draft model with KV of its own lies on one stage only; use pipeline_parallel_size 1 or no draft model"
        raise ConfigError("pipeline_parallel_size", stages, fix)
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def _shares(geometry: Geometry, parallel: Any) -> tuple[RankShare, ...]:
    from vllm.distributed.utils import get_pp_indices

    tensor_size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shares = []
    for stage in range(stages):
        first, end = get_pp_indices(geometry.layers, stage, stages)
        for tensor_rank in range(tensor_size):
            rank = stage * tensor_size + tensor_rank
            try:
                shares.append(share_of_rank(geometry, tensor_rank, tensor_size, rank, range(first, end)))
            except ValueError as error:
                raise ConfigError("tensor_parallel_size", tensor_size, str(error)) from None
    return tuple(shares)
