"""Models without downloads: dimensions of known ones for timing, and small ones with saved random weights.

Timing needs no meaning, so vLLM fills those weights itself (`dummy`). Their output hardly depends on the KV: where
tokens are compared, the weights are random with a wide spread, and saved, so that every process has the same.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

WEIGHT_SPREAD = 0.15


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: a token keeps `rank` + `rotary` elements a layer. plain: of K, unrotated."""

    rank: int = 512
    rotary: int = 64
    plain: int = 128


@dataclass(frozen=True)
class Dimensions:
    """Of a Llama, or of a DeepSeek-V2 without experts where there is a latent.

    is_saved: its weights are written to the folder; else vLLM makes them up. latent: MLA instead of K and V of heads.
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
    latent: Latent | None = None

    def token_bytes(self, element_bytes: int = 2) -> int:
        """KV of one token over all layers and heads."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rotary) * element_bytes
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


DIMENSIONS = {
    "8b": Dimensions(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "70b": Dimensions(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "small": Dimensions(8, 1024, 2816, 16, 8, 128, 4096, 32768, is_saved=True),
    "mla": Dimensions(4, 1024, 2816, 16, 16, 128, 4096, 32768, is_saved=True, latent=Latent()),
    "tiny": Dimensions(2, 128, 256, 4, 2, 64, 512, 8192, is_saved=True),
}
"""tiny: for a CPU, to try the scripts."""


def make_model(kind: str, folder: Path) -> Path:
    """Writes config.json, and the weights of a saved kind; a folder that has them is left as it is."""
    target, size = folder / kind, DIMENSIONS[kind]
    if (target / "model.safetensors").exists() or (not size.is_saved and (target / "config.json").exists()):
        return target
    made = folder / f"{kind}.{os.getpid()}"
    made.mkdir(parents=True)
    if size.is_saved:
        _save_weights(size, made)
    else:
        (made / "config.json").write_text(json.dumps(config_of(size), indent=1))
    try:
        made.rename(target)
    except OSError:  # another lane of the same run was quicker
        shutil.rmtree(made)
    return target


def config_of(size: Dimensions) -> dict[str, object]:
    """Of a Llama; config.json as transformers has it."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _save_weights(size: Dimensions, target: Path) -> None:
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

    common = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.context_tokens,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": WEIGHT_SPREAD,
    }
    torch.manual_seed(0)
    model: PreTrainedModel
    if size.latent is None:
        model = LlamaForCausalLM(LlamaConfig(head_dim=size.head_size, **common))
    else:
        # All layers are dense: what is asked is the KV, and experts need an extension that the GPU host's vLLM lacks.
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(
                kv_lora_rank=size.latent.rank,
                q_lora_rank=None,
                qk_rope_head_dim=size.latent.rotary,
                qk_nope_head_dim=size.latent.plain,
                v_head_dim=size.head_size,
                head_dim=size.latent.rotary,
                first_k_dense_replace=size.layers,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                n_group=1,
                topk_group=1,
                **common,
            )
        )
    model.to(torch.bfloat16).save_pretrained(target)
