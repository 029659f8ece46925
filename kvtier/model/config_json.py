"""Reader of a model's config.json, without vLLM and transformers, which may not be installed.

Keys that a file leaves out have the defaults of transformers' class for it, which differ from model to model:
`families` holds them, with facts that no key states. A model that kvtier cannot serve is refused with the connector's
reason. A model type that is in no table is refused as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from kvtier.errors import ConfigError
from kvtier.format.geometry import AttentionKind, Geometry
from kvtier.model.families import ENCODER, FAMILIES, REFUSED, ExpertKeys, Family
from kvtier.model.layer_kinds import CHUNK, FULL, WINDOW, refusal

KEY = "--model"
NAME_A_FOLDER = "name the folder of a Hugging Face model: `hf download NAME` prints that of a name on the Hub"
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_NOT_SERVED = "kvtier does not serve such models"
# Keys that multimodal models may have outside of their `text_config`.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
# NVIDIA's ModelOpt before 0.31 wrote the quantization_config into this file; vLLM reads both.
QUANTIZATION_FILE = "hf_quant_config.json"
NUMBER_MAX = 1 << 53
LAYERS_MAX = (1 << 16) - 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer. heads: of queries. k_size, v_size: elements of a vector in the KV cache, v_size 0 for
    MLA.

    qk_size, av_size: elements of a head in the computation of scores and outputs. latent: None without MLA.
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    k_size: int
    v_size: int
    qk_size: int
    av_size: int
    latent: LatentShape | None = None


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Ranks of MLA. q_rank None: queries are projected at once. rope_size: elements of K that hold positions."""

    q_rank: int | None
    kv_rank: int
    rope_size: int


@dataclass(frozen=True, slots=True)
class Experts:
    """size: inner size of one expert. shared_size: of the experts that every token takes. sparse: layers with
    experts."""

    n: int
    per_token: int
    size: int
    shared_size: int
    sparse: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """mlp_size: of layers without experts. max_tokens: the longest context that the model was made for, 0 if it does
    not say. dtype: of weights and activations; quantized: how weights are kept instead, {} where they are not.
    text: the text part of the file. notes: what was taken for granted."""

    family: str
    layers: int
    hidden_size: int
    attention: Attention
    mlp_matrices: int
    mlp_size: int
    experts: Experts | None
    vocabulary: int
    is_tied: bool
    max_tokens: int
    dtype: str
    quantized: Mapping[str, Any]
    text: Mapping[str, Any]
    notes: tuple[str, ...]

    def geometry(self, kv_dtype: Literal["auto", "fp8"], chunk_tokens: int) -> Geometry:
        """Return the geometry of its KV. auto: the model's own dtype, unless its checkpoint asks for another. Raises
        ConfigError for a dtype that kvtier does not move."""
        shape = self.attention
        asked = kv_dtype_asked(self.quantized)
        if kv_dtype == "auto" and asked == "nvfp4":
            fix = "the checkpoint asks for KV in nvfp4, which kvtier does not move: give fp8, to vLLM as well"
            raise ConfigError("--kv-dtype", kv_dtype, fix)
        is_fp8 = "fp8" in (kv_dtype, asked)
        dtype, element_bytes = ("fp8_e4m3", 1) if is_fp8 else (self.dtype, ELEMENT_BYTES[self.dtype])
        return Geometry(
            self.layers, shape.kv_heads, shape.k_size, shape.v_size, dtype, element_bytes, shape.kind, chunk_tokens
        )


class _Values:
    """Keys of one config.json. Every refusal names the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def all(self) -> Mapping[str, Any]:
        return self._values

    def get(self, key: str, default: T, null: T | None = None) -> T:
        """Return a value of the default's type. null: what a null in the file means, None: the same as no key."""
        value = self._values.get(key)
        if value is None:
            return null if key in self._values and null is not None else default
        if not isinstance(value, type(default)):
            self.refuse(f"its {key} is {value!r}, which is no {type(default).__name__}")
        return value

    def number(self, key: str, default: int | None = None, null: int | None = None) -> int:
        """Return a positive whole number. default: where the key is absent; null: where its value is null. None: the
        key must be there, or not be null."""
        value = self._values.get(key, default)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= NUMBER_MAX:
            self.refuse(f"its {key} is {value!r:.40}, it must be a positive whole number")
        return value

    def natural(self, key: str) -> int:
        """Return a whole number, 0 if the file has none."""
        return self.number(key) if self._values.get(key) else 0

    def refuse(self, reason: str) -> NoReturn:
        raise ConfigError(KEY, str(self._path), reason)


def read_model(folder: Path) -> ModelConfig:
    """Read the configuration of a Hugging Face model folder. Raises ConfigError."""
    path, quantization = folder / "config.json", folder / QUANTIZATION_FILE
    found = _read(path)
    if found.get("quantization_config") is None and quantization.is_file():
        found["quantization_config"] = {"quant_method": "modelopt"} | _read(quantization)
    families = [str(found.get("model_type"))]
    text = found.get("text_config")
    if isinstance(text, dict):  # the rest is for images and the like
        families.append(str(text.get("model_type")))
        # A null of the text part is an answer of its own, but for what the whole may say instead.
        found = {key: found[key] for key in _OF_THE_WHOLE if key in found} | {
            key: value for key, value in text.items() if value is not None or key not in _OF_THE_WHOLE
        }
    usual = FAMILIES[families[-1]].usual if families[-1] in FAMILIES else {}
    values = _Values(path, {**usual, **found})
    for family in families:
        if family in REFUSED:
            values.refuse(f"{family}: {REFUSED[family]}; {_NOT_SERVED}")
    if found.get("is_encoder_decoder"):
        values.refuse(f"{family}: {ENCODER}; {_NOT_SERVED}")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        unknown = f"its model_type {family!r} is not known to this command, which knows {known}"
        values.refuse(f"{unknown}; an engine serves other models too, if all their layers have full attention or MLA")
    kinds = _layer_kinds(values, FAMILIES[family])
    if FAMILIES[family].window_from is not None and set(kinds) == {FULL, WINDOW}:
        layers = f"max_window_layers and {values.number('num_hidden_layers')} layers"
        values.refuse(f"some of its layers have a window and others none ({layers}), which vLLM does not run")
    if why := refusal(kinds):
        fix = "for a plan of vLLM's --disable-sliding-window, which keeps that many tokens, set sliding_window to 0"
        values.refuse(f"{why}; {fix if WINDOW in kinds else _NOT_SERVED}")
    notes = ["the parts that are not for text have no KV, and their work is not counted"] if len(families) > 1 else []
    if set(kinds) != {FULL}:
        notes.append(
            "some layers attend within a window or chunk only: an engine keeps all their KV for kvtier, and their "
            "prefill is counted as if they attended to everything"
        )
    return _model(values, family, notes)


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        fix = f"cannot read {path.name} there ({error.strerror}); {NAME_A_FOLDER}"
        raise ConfigError(KEY, str(path.parent), fix) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(KEY, str(path), f"it is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(KEY, str(path), "it is not a JSON object; download it again")
    return found


def kv_dtype_asked(quantized: Mapping[str, Any]) -> str:
    """Return the KV dtype that a checkpoint asks for: "fp8" or "nvfp4"; "" where it asks for none, or for one that vLLM
    does not know. vLLM's kv_cache_dtype `auto` follows the same keys (vllm.utils.torch_utils)."""
    inner = quantized.get("quantization")
    places = (inner if isinstance(inner, dict) else {}, quantized)
    asked = [place.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places]
    scheme = next((value for value in asked if value), "")
    if isinstance(scheme, dict) and scheme.get("type", "float") == "float":
        return {8: "fp8", 4: "nvfp4"}.get(scheme.get("num_bits", 8), "")
    return scheme.lower() if str(scheme).lower() in ("fp8", "nvfp4") else ""


def _model(values: _Values, name: str, notes: list[str]) -> ModelConfig:
    family = FAMILIES[name]
    quantized: dict[str, Any] = values.get("quantization_config", {})
    if kv_dtype_asked(quantized) == "fp8":
        notes.append("the checkpoint asks for KV in 8 bits, and --kv-dtype auto follows it as vLLM does")
    dtype = (values.get("dtype", "") or values.get("torch_dtype", "") or "float32").removeprefix("torch.")
    if dtype not in ELEMENT_BYTES:
        values.refuse(f"its dtype is {dtype!r}, and one of {', '.join(ELEMENT_BYTES)} was expected")
    if dtype == "float32":  # or none is given
        dtype = "bfloat16"
        notes.append("config.json names no dtype of 16 bits: bfloat16 is taken, as vLLM does on GPUs that have it")
    layers = values.number("num_hidden_layers")
    if layers > LAYERS_MAX:
        values.refuse(f"its num_hidden_layers is {layers}, and a record has room for {LAYERS_MAX}")
    return ModelConfig(
        family=name,
        layers=layers,
        hidden_size=values.number("hidden_size"),
        attention=_attention(values, family),
        mlp_matrices=family.mlp_matrices,
        mlp_size=values.number(family.mlp_key),
        experts=None if family.experts is None else _experts(values, family.experts, layers),
        vocabulary=values.number("vocab_size"),
        is_tied=values.get("tie_word_embeddings", family.is_tied, null=False),
        max_tokens=values.natural("max_position_embeddings"),
        dtype=dtype,
        quantized=quantized,
        text={**values.all(), "model_type": name},
        notes=tuple(notes),
    )


def _attention(values: _Values, family: Family) -> Attention:
    heads = values.number("num_attention_heads")
    if family.is_mla:
        latent = LatentShape(
            values.natural("q_lora_rank") or None, values.number("kv_lora_rank"), values.number("qk_rope_head_dim")
        )
        qk_size = values.number("qk_nope_head_dim") + latent.rope_size
        kept = latent.kv_rank + latent.rope_size
        return Attention("mla", heads, 1, kept, 0, qk_size, values.number("v_head_dim"), latent)
    kv_heads = values.number("num_key_value_heads", family.kv_heads or heads, null=heads)
    if heads % kv_heads:
        values.refuse(f"its {heads} attention heads do not divide over {kv_heads} KV heads")
    size = values.natural("head_dim") if "head_dim" in values else family.head_size
    if not size:
        hidden = values.number("hidden_size")
        if hidden % heads:
            values.refuse(f"its hidden_size {hidden} does not divide over {heads} attention heads")
        size = hidden // heads
    return Attention("heads", heads, kv_heads, size, size, size, size)


def _experts(values: _Values, keys: ExpertKeys, layers: int) -> Experts | None:
    n_key = next((key for key in keys.n if key in values), keys.n[0])
    if keys.is_optional and not values.natural(n_key):
        return None
    size = values.number(keys.size)
    shared_size = values.natural(keys.shared_size)
    n_shared = values.natural(keys.n_shared) if keys.n_shared in values else keys.n_shared_usual
    sparse = _sparse_layers(values, keys, layers)
    return Experts(values.number(n_key), values.number(keys.per_token), size, shared_size + n_shared * size, sparse)


def _sparse_layers(values: _Values, keys: ExpertKeys, layers: int) -> frozenset[int]:
    """Return the layers with experts, as the file lists them, else by its rule."""
    kinds: list[str] = values.get("mlp_layer_types", [])
    if kinds:
        return frozenset(number for number, kind in enumerate(kinds[:layers]) if kind == "sparse")
    listed: list[int] = values.get(keys.sparse, [])
    if listed:
        return frozenset(listed)
    dense: list[int] = values.get(keys.dense, [])
    first = values.natural(keys.first) if keys.first in values else keys.first_usual
    step = values.number(keys.step, 1)
    return frozenset(n for n in range(first, layers) if n not in dense and (n + keys.offset) % step == 0)


def _layer_kinds(values: _Values, family: Family) -> list[str]:
    """Return each layer's kind of attention, as the file lists them, else as the model's class has them. A layer whose
    window or chunk the file says to be null or 0 attends to everything."""
    listed: list[str] = values.get("layer_types", [])
    layers = values.number("num_hidden_layers")
    if family.chunk:
        size = values.natural("attention_chunk_size") if "attention_chunk_size" in values else family.chunk
        return _chunked(values, layers) if size else [FULL] * layers
    if listed:
        is_off = "sliding_window" in values and not values.natural("sliding_window")
        return [FULL if kind == WINDOW and is_off else str(kind) for kind in listed]
    window = values.natural("sliding_window") if "sliding_window" in values else family.window
    if not window or not values.get("use_sliding_window", family.uses_window, null=False):
        return [FULL] * layers
    if family.window_from is not None:
        first = values.natural("max_window_layers") if "max_window_layers" in values else family.window_from
        return [WINDOW if number >= first else FULL for number in range(layers)]
    if not family.full_every:
        return [WINDOW] * layers
    every = values.number("sliding_window_pattern", family.full_every, null=family.full_every)
    return [WINDOW if number % every else FULL for number in range(1, layers + 1)]


def _chunked(values: _Values, layers: int) -> list[str]:
    """Return the kinds of a model whose layers attend within a chunk, but for those without rotary positions."""
    with_positions: list[int] = values.get("no_rope_layers", [])  # 1 for a layer with positions, whatever its name
    every = values.number("no_rope_layer_interval", 4)
    found = with_positions or [number % every for number in range(1, layers + 1)]
    return [CHUNK if has_positions else FULL for has_positions in found]
