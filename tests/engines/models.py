"""Makes a small model whose outputs depend on its KV: python models.py llama|wide|windows|mla FOLDER.

"wide" has heads of 64 elements, the fewest that turboquant takes. "windows" looks back 128 tokens
only in every second layer.
"""

import sys
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}


def main(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module
    if kind in ("llama", "wide"):
        size = 32 if kind == "llama" else 64
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, head_dim=size, **COMMON))
    elif kind == "windows":
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=32,
            layer_types=layers,
            sliding_window=128,
            **COMMON | {"tie_word_embeddings": True},
        )
        model = Gemma3ForCausalLM(config)
    else:  # 512 + 64 is the one size of a latent that vLLM's MLA for CPUs knows
        config = DeepseekV2Config(
            num_hidden_layers=3,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            head_dim=64,
            moe_intermediate_size=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=3,
            n_group=1,
            topk_group=1,
            **COMMON,
        )
        model = DeepseekV2ForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder)
    words = WordLevel({f"t{number}": number for number in range(COMMON["vocab_size"])}, unk_token="t0")
    # vLLM does not pool without a tokenizer.
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="t0", eos_token="t1").save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
