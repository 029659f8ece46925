"""Codec fp8 is refused for models whose K has biases, by their checkpoint or else by their configuration."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, get_args

import pytest

from kvtier.codecs.measured_loss import KL_NATS, MODELS, check_key_bias, key_bias, loss_text
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError


def checkpoint(folder: Path, name: str, value: bytes = bytes([0, 0, 1, 0])) -> Path:
    header = {
        "model.embed_tokens.weight": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        name: {"dtype": "U8", "shape": [len(value)], "data_offsets": [8, 8 + len(value)]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes([1] * 8) + value)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.bias",
        "model.language_model.layers.3.self_attn.k_proj.bias",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.encoder.layers.0.self_attention.query_key_value.bias",
        "gpt_neox.layers.0.attention.query_key_value.bias",
        "thinker.model.layers.0.self_attn.k_proj.bias",
    ],
)
def test_a_bias_in_the_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    assert key_bias(checkpoint(tmp_path, name), {"model_type": "llama"}) == name


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_norm.bias",
        "model.layers.0.k_proj.weight",
        "visual.blocks.0.attn.qkv_proj.bias",
        "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.bias",
        "audio_tower.layers.0.self_attn.k_proj.bias",
        "vpm.encoder.layers.0.self_attn.k_proj.bias",
        "model.vision_tower.encoder.layers.0.self_attn.k_proj.bias",
        "talker.model.layers.0.self_attn.k_proj.bias",
    ],
)
def test_other_biases_are_not(tmp_path: Path, name: str) -> None:
    assert key_bias(checkpoint(tmp_path, name), {"model_type": "qwen2"}) == ""


def test_a_bias_of_zeros_is_none(tmp_path: Path) -> None:
    """GPTQ writes one for each projection."""
    assert key_bias(checkpoint(tmp_path, "model.layers.0.self_attn.k_proj.bias", bytes(4)), {}) == ""


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "qwen2"}, "model_type qwen2"),
        ({"model_type": "qwen2_5_vl_text"}, "model_type qwen2_5_vl_text"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias true"),
        ({"model_type": "x", "qkv_bias": True}, "qkv_bias true"),
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"model_type": "qwen3", "attention_bias": False}, ""),
        ({"model_type": "llama"}, ""),
        ({}, ""),
    ],
)
def test_without_tensors_the_configuration_decides(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    assert key_bias(tmp_path, config) == key_bias(None, config) == found


def test_only_fp8_is_refused_and_not_where_it_is_accepted() -> None:
    qwen = {"model_type": "qwen2"}
    with pytest.raises(ConfigError, match="codec = 'fp8': K of this model has biases .* codec_accept_key_bias"):
        check_key_bias("fp8", False, None, qwen)
    check_key_bias("fp8", True, None, qwen)
    check_key_bias("fp8", False, None, {"model_type": "llama"})
    for codec in ("raw", "k6v4", "k4v4"):
        check_key_bias(codec, False, None, qwen)


def test_each_lossy_codec_says_on_what_it_was_measured() -> None:
    assert {"raw", *KL_NATS} == set(get_args(Settings.model_fields["codec"].annotation))
    assert loss_text("raw") == ""
    assert loss_text("fp8").endswith("Qwen2.5-Coder-1.5B 0.78, Gemma 3 270M 0.0017 and on no other model")
    assert all(len(figures) == len(MODELS) for figures in KL_NATS.values())
