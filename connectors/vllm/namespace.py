"""Namespace of an engine's KV and share of each rank, made from vLLM's configuration.

Settings of vLLM that change KV and have no field of their own in the namespace become one text. A setting is in it
where it is not plain, that is not vLLM's default. So the text of most engines is "", and a setting that is added to
this file does not invalidate what other engines have stored. The plain values are listed here and not read from the
running release: where a release changes a default, its KV gets another name. A setting that a release lacks is plain.

Not in the text: settings that change KV by rounding only (kernels, parallel sizes, the cut of steps), and parts of a
request that its keys contain (adapter, image, processor arguments).

The module also finds the files of a model on this machine by the name that vLLM was given.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from kvtier.build import check_chunks, make_codec
from kvtier.config.settings import Settings
from kvtier.connectors.vllm.kv_dtypes import PLAIN, forms_of, is_slot, torch_name
from kvtier.connectors.vllm.kv_layout import layer_number
from kvtier.connectors.vllm.platform import Packing, packing_of
from kvtier.errors import ConfigError
from kvtier.format.geometry import Geometry, RankShare, share_of_rank
from kvtier.format.namespace import CodecId, Namespace, canonical_text
from kvtier.model.families import FAMILIES
from kvtier.model.weights_fingerprint import config_fingerprint, file_fingerprint, weights_fingerprint
from kvtier.storage.cache_folder import FOLDER

# Drafting methods that keep no KV of their own.
DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
# Model types whose rotary embedding turns neighbouring elements, not those of a vector's two halves.
INTERLEAVED_ROPES = frozenset(
    {
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "glm",
        "glm4",
        "gptj",
        "llama4_text",
    }
)
# Encodings that scale only the frequencies that turn little within a chunk.
NEARLY_PLAIN_ROPES = ("yarn", "llama3")
LENGTH_DEPENDENT_ROPES = frozenset({"longrope", "su", "dynamic"})  # encodings that depend on the maximum length
# Models whose queries vLLM scales by position, unless told otherwise, where a prompt may be longer than so many tokens.
LENGTH_TUNED = {"llama4_text": 32768}
# vLLM's MLA models rename these encodings in the processes that build them; other models keep both names, as different
# encodings.
RENAMED_ROPES = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}

FINGERPRINTS = FOLDER / "fingerprints"

NOTHING: tuple[Any, ...] = (None, False, 0, "", {}, [])  # plain values of every setting

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
# Variables of vllm.envs that choose the frames of a video, which vLLM hashes as the file that a client sent.
MEDIA: Mapping[str, tuple[Any, ...]] = {"VLLM_VIDEO_LOADER_BACKEND": ("opencv",)}
LORA: Mapping[str, tuple[Any, ...]] = {
    "enable_tower_connector_lora": (),
    "enable_mixed_moe_lora_format": (),
    "enable_moe_shared_loras": (),
}
# Variables of vllm.envs that quantize weights or activations, or route tokens to experts, without a configuration
# field.
ENVIRONMENT: Mapping[str, tuple[Any, ...]] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": (),
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": (),
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": (),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("highest",),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": (),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": (),
    "VLLM_HUMMING_USE_F16_ACCUM": (),
    "VLLM_MARLIN_INPUT_DTYPE": (),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": (),
}
# Variables of the same kind that are plain unless they are switched off.
ON_BY_DEFAULT = ("VLLM_CPU_INT4_W4A8", "VLLM_USE_DEEP_GEMM_E8M0")


@dataclass(frozen=True, slots=True)
class Identity:
    """namespace: of this engine's KV. shares: of all ranks, by rank."""

    namespace: Namespace
    shares: tuple[RankShare, ...]
    packing: Packing


def identity_of(vllm_config: Any, spec: Any, layer_names: Sequence[str], settings: Settings) -> Identity:
    """Return the identity of this engine's KV. Raises ConfigError.

    spec: of any layer of its only KV-cache group; layer_names: the layers of that group, on this rank, in order.
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
    codec, signer = make_codec(settings, rope_base(model)), settings.signing.signer()
    packing = packing_of(spec, vllm_config)
    packing.check_codec(settings.codec)
    namespace = Namespace(
        # Before "-k1" codecs took K of a CPU's pages, which is packed by element, as if it were by token.
        engine=packing.family + ("-k1" if packing.is_k_by_element and settings.codec != "raw" else ""),
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
    return Identity(namespace, _shares(geometry, parallel), packing)


def check_sizes(vllm_config: Any, settings: Settings, device: str) -> None:
    """Refuse segments and arenas that are too small for this model's chunks before its weights are loaded. Raises
    ConfigError.

    The sizes are the least that its KV can take, because its layers do not exist yet: a draft's are not counted.
    device: "cpu" or "cuda".
    """
    model, kv_dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    family = FAMILIES.get(getattr(getattr(model, "hf_text_config", None), "model_type", ""))
    if family is None or family.is_mla != model.use_mla or is_slot(kv_dtype):
        return
    dtype = model.dtype if kv_dtype == "auto" else getattr(torch, kv_dtype, torch.uint8)
    # The layers of a quantized checkpoint may turn "auto" into fp8, which is known only once they exist.
    may_be_fp8 = kv_dtype == "auto" and model.quantization is not None and settings.codec == "raw"
    geometry = Geometry(
        layers=model.get_total_num_hidden_layers(),
        kv_heads=1 if family.is_mla else model.get_total_num_kv_heads(),
        k_head_size=model.get_head_size(),
        v_head_size=0 if family.is_mla else model.get_head_size(),
        dtype=torch_name(dtype) if kv_dtype in PLAIN else kv_dtype,
        element_bytes=1 if may_be_fp8 else dtype.itemsize,
        attention="mla" if family.is_mla else "heads",
        chunk_tokens=settings.chunk_tokens,
    )
    check_chunks(settings, geometry, _shares(geometry, vllm_config.parallel_config), device)


def check_share(share: RankShare, spec: Any, layer_names: Sequence[str], geometry: Geometry) -> None:
    """Check on a worker that its tensors match its share. Raises ConfigError."""
    if len(layer_names) != share.reads.n_layers:
        fix = f"vLLM put {len(layer_names)} attention layers on this rank, kvtier expected {share.reads.n_layers}"
        raise ConfigError("pipeline_parallel_size", share.rank, f"{fix}; run without the kvtier connector")
    if geometry.attention == "heads" and spec.num_kv_heads != share.reads.n_heads:
        fix = f"vLLM put {spec.num_kv_heads} KV heads on this rank, kvtier expected {share.reads.n_heads}"
        raise ConfigError("tensor_parallel_size", share.rank, f"{fix}; run without the kvtier connector")


def positions_text(model: Any) -> str:
    """Return the settings of the positional encoding of K, in a form that is the same in all releases of vLLM."""
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
    # With max_model_len -1 vLLM builds the model for its own maximum, and fits the length to its memory later.
    is_fitted = getattr(model, "original_max_model_len", None) == -1
    kinds = {kind, *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}  # of kinds of layers
    if not LENGTH_DEPENDENT_ROPES.isdisjoint(kinds):
        settings["max_model_len"] = "auto" if is_fitted else model.max_model_len
    longest = LENGTH_TUNED.get(getattr(config, "model_type", ""))
    if longest is not None:
        is_long = (settings["max_position_embeddings"] if is_fitted else model.max_model_len) > longest
        given = model.try_get_generation_config() | model.override_generation_config
        settings["is_temperature_tuned"] = bool(given.get("attn_temperature_tuning", is_long))
    return canonical_text({name: value for name, value in settings.items() if value is not None})


def rope_base(model: Any) -> float:
    """Return the base of the rotary embedding that a codec may take off K; 0 where K has another embedding or none."""
    found = json.loads(positions_text(model))["rope"]
    base, share = found.get("rope_theta"), found.get("partial_rotary_factor", 1.0)
    is_known = found.get("rope_type") in (None, *NEARLY_PLAIN_ROPES) and share == 1.0 and isinstance(base, float)
    if getattr(model, "use_mla", False) or getattr(model.hf_text_config, "model_type", "") in INTERLEAVED_ROPES:
        return 0.0
    return base if is_known else 0.0


def _number(value: Any) -> Any:
    # 10000 and 10000.0 are the same setting.
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _overrides_text(model: Any) -> str:
    overrides = getattr(model, "hf_overrides", None)
    if not overrides:
        return ""
    if callable(overrides):  # start-up asked for a model_tag, which stands for the result
        return f"function {getattr(overrides, '__qualname__', '')}"
    file = overrides.get("quantization_config_file")
    if isinstance(file, str):  # its name does not say what is in it
        overrides = overrides | {"quantization_config_file": file_fingerprint(Path(file), "hf_overrides")}
    try:
        return canonical_text(overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError("hf_overrides", overrides, f"cannot be written as JSON: {error}") from None


def _weights(model: Any, load_config: Any) -> str:
    return weights_fingerprint(folder_of(model.model, model.revision, load_config), FINGERPRINTS)


def _draft(vllm_config: Any, settings: Settings) -> str:
    """Return the identity of the draft model if its layers may be among the cached ones; "" without one."""
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
    """Return the number of attention layers over all pipeline stages, those of a draft model included."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return len(layer_names)
    if has_draft:
        fix = "a draft model with KV of its own is on one stage only; use pipeline_parallel_size 1 or no draft model"
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


def settings_text(vllm_config: Any, has_tag: bool, has_draft: bool) -> str:
    """Return canonical_text of all settings here that are not plain, by vLLM's name of each; "" if all are plain.

    has_tag: a model_tag stands for the weights, however they are loaded. has_draft: a draft model's KV is stored too.
    Raises ConfigError for a value that has no lasting text.
    """
    import vllm.envs

    model, load = vllm_config.model_config, vllm_config.load_config
    found = _model_settings(model, load)
    load_format = _settled("load_format", getattr(load, "load_format", "auto"))
    # Formats may read different files of one folder. kvtier reads the files that "auto" reads.
    if load_format not in ("auto", "kvtier") and not has_tag:
        found["load_format"] = load_format
    parts = {
        "multimodal": _multimodal(getattr(model, "multimodal_config", None)),
        "lora": _lora(getattr(vllm_config, "lora_config", None), model),
        "draft": _draft_settings(vllm_config.speculative_config, model, load) if has_draft else {},
        "environment": _named(vllm.envs, ENVIRONMENT)
        | {name: False for name in ON_BY_DEFAULT if not getattr(vllm.envs, name, True)},
    }
    found |= {name: part for name, part in parts.items() if part}
    return canonical_text(found) if found else ""


def _model_settings(model: Any, load: Any) -> dict[str, Any]:
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
    """Return the quantization of weights while they are loaded, where the name in `quantization` does not define it."""
    config = getattr(model, "quantization_config", None)
    if not config:
        return None
    try:
        from vllm.config.quantization import resolve_quantization_config
    except ImportError:
        return config
    return None if config == resolve_quantization_config(model.quantization, None) else config


def _multimodal(config: Any) -> dict[str, Any]:
    """Return multimodal settings that the identifier of an image lacks: vLLM hashes the item and the request's
    arguments."""
    import vllm.envs

    if config is None:
        return {}
    found = _named(config, MULTIMODAL) | _named(vllm.envs, MEDIA)
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
    """Return the settings of LoRA. They also separate requests without an adapter, which only costs hits."""
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


def _draft_settings(speculative: Any, model: Any, load: Any) -> dict[str, Any]:
    draft = speculative.draft_model_config
    found = _model_settings(draft, getattr(speculative, "draft_load_config", None) or load)
    quantization = getattr(speculative, "quantization", None)
    if quantization not in (None, model.quantization):
        found["quantization"] = str(quantization)
    return found


def _named(config: Any, names: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    values = {name: _settled(name, getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value not in (*NOTHING, *names[name])}


def _settled(name: str, value: Any) -> Any:
    """Return `value` as JSON. Raises ConfigError if a part of it has no lasting text."""
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


def folder_of(name: str, revision: str | None, load_config: Any, key: str = "model") -> Path:
    """Return a model's own folder, or its snapshot in the Hugging Face cache. Raises ConfigError if there is neither.

    key: vLLM's setting that `name` is of.
    """
    if os.path.isdir(name):
        return Path(name)
    import vllm.envs
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if getattr(vllm.envs, "VLLM_USE_MODELSCOPE", False):  # the Hugging Face cache may have another model under the name
        raise ConfigError(key, name, "its files come from ModelScope; give their folder, or set model_tag")
    try:
        cache = getattr(load_config, "download_dir", None)
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        fix = "its files are neither in a folder nor in the Hugging Face cache; set model_tag to a name for its weights"
        raise ConfigError(key, name, fix) from None
