"""Models without downloads: dimensions of known ones for timing, and small ones with saved random weights.

Timing needs no meaning, so vLLM fills those weights itself (`dummy`). Their output hardly depends on the KV: where
tokens are compared, the weights are random with a wide spread, and saved, so that every process has the same.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_TOKEN = 10  # smaller ids are special tokens
LATENT_RANK, LATENT_ROTARY, LATENT_PLAIN = 512, 64, 128  # MLA: a token keeps rank + rotary elements a layer


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a Llama, or of a DeepSeek-V2 without experts where `is_mla`.

    is_saved: its weights are written to the folder; else vLLM makes them up. spread: standard deviation of saved
    weights; spread**2 x hidden is the same for all sizes, so that their layers amplify errors alike.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_tokens: int
    is_saved: bool = False
    is_mla: bool = False
    spread: float = 0.15

    def token_bytes(self, element_bytes: int = 2) -> int:
        """Return the bytes of one token's KV over all layers and heads."""
        elements = LATENT_RANK + LATENT_ROTARY if self.is_mla else 2 * self.kv_heads * self.head_size
        return self.layers * elements * element_bytes


DIMENSIONS = {
    "8b": Dimensions(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "70b": Dimensions(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "70b-half": Dimensions(40, 8192, 28672, 64, 8, 128, 128256, 131072),  # fits two GPUs of 80 GB, with room for KV
    "small": Dimensions(8, 1024, 2816, 16, 8, 128, 4096, 32768, is_saved=True),
    "mla": Dimensions(4, 1024, 2816, 16, 16, 128, 4096, 32768, is_saved=True, is_mla=True),
    "tiny": Dimensions(2, 128, 256, 4, 2, 64, 512, 8192, is_saved=True),  # for a CPU, to try the scripts
}


def prompt(seed: str, n_tokens: int, vocabulary: int) -> list[int]:
    """Return random tokens: the same in every process for a seed, and nothing in common between two seeds."""
    return random.Random(seed).choices(range(FIRST_TOKEN, vocabulary), k=n_tokens)


def make_model(kind: str, folder: Path) -> Path:
    """Write config.json, and the weights of a saved kind, unless the folder has them. Return the folder."""
    target, size = folder / kind, DIMENSIONS[kind]
    if (target / "model.safetensors").exists() or (not size.is_saved and (target / "config.json").exists()):
        return target
    made = folder / f"{kind}.{os.getpid()}"
    made.mkdir(parents=True)
    if size.is_saved:
        save_weights(size, made, "bfloat16")
    else:
        (made / "config.json").write_text(json.dumps(config_of(size), indent=1))
    try:
        made.rename(target)
    except OSError:  # another lane of the same run was first
        shutil.rmtree(made)
    return target


def config_of(size: Dimensions) -> dict[str, Any]:
    """Return config.json of a Llama."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _common(size) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "head_dim": size.head_size,
        "rope_theta": 500000.0,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
        "initializer_range": 0.02,
    }


def _common(size: Dimensions) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.context_tokens,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def save_weights(size: Dimensions, target: Path, dtype: str) -> None:
    """Write config.json and random weights, the same each time."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    common = _common(size) | {"pad_token_id": 2, "initializer_range": size.spread}
    torch.manual_seed(0)
    model: PreTrainedModel
    if not size.is_mla:
        model = LlamaForCausalLM(LlamaConfig(head_dim=size.head_size, **common))
    else:
        # All layers are dense: the KV is measured, and experts need an extension that the GPU host's vLLM lacks.
        experts = {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        }
        config = DeepseekV2Config(
            kv_lora_rank=LATENT_RANK,
            q_lora_rank=None,
            qk_rope_head_dim=LATENT_ROTARY,
            qk_nope_head_dim=LATENT_PLAIN,
            v_head_dim=size.head_size,
            head_dim=LATENT_ROTARY,
            first_k_dense_replace=size.layers,
            moe_intermediate_size=64,
            **experts,
            **common,
        )
        model = DeepseekV2ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(target)
