"""Small checkpoints with random weights, one for each way in which loaders of vLLM cut and move tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 1000,  # no multiple of 64: padded
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
HYBRID = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 128,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
MAMBA = {
    "num_heads": 16,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 8,
    "expand": 2,
}
OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,  # vLLM has no gpt-oss with fewer of them than ranks
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {"head_dim": 16, "num_key_value_heads": 8}),
    "mamba2": ("mamba2", MAMBA),
    "granite": ("granitemoehybrid", HYBRID),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "gpt_oss": ("gpt_oss", OSS),
    "embedding": ("qwen3", {}),  # vLLM's loaders clone its first tensors
}
QUANTIZED = ("awq", "awq_part", "gptq", "int8", "fp8")
KINDS = (*MODELS, *QUANTIZED)
GROUP = 32  # of the AWQ and GPTQ checkpoints, elements


def make(kind: str, folder: Path) -> Path:
    """Writes the checkpoint in bfloat16, and returns its folder."""
    torch.manual_seed(0)
    model_type, changes = MODELS["llama" if kind in QUANTIZED else kind]
    config = AutoConfig.for_model(model_type, **SIZES | changes)
    config.dtype = "bfloat16"
    made_by = AutoModel if kind == "embedding" else AutoModelForCausalLM
    model = made_by.from_config(config).to(torch.bfloat16)
    for tensor in model.parameters():  # also those that begin as ones or zeros
        tensor.data.normal_()
    model.save_pretrained(folder, max_shard_size="700KB")
    if kind in QUANTIZED:
        _quantize(folder, kind)
    return folder


def add_head(folder: Path) -> None:
    """Adds an output head to a checkpoint whose config.json says that it has none."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    embeddings = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(folder / embeddings)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / embeddings, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = embeddings
    index_path.write_text(json.dumps(index))


def _quantize(folder: Path, kind: str) -> None:
    """Replaces linear layers by random quantized ones, of the right shapes."""
    for path in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            is_left = kind == "awq_part" and ("layers.0.self_attn" in name or "layers.1.mlp" in name)
            if is_left or not name.endswith("proj.weight"):
                tensors[name] = tensor
                continue
            (n_out, n_in), layer = tensor.shape, name.removesuffix(".weight")
            if kind == "gptq":
                words = torch.randint(-(2**31), 2**31 - 1, (n_in // 8, n_out), dtype=torch.int32)
                zeros = torch.randint(-(2**31), 2**31 - 1, (n_in // GROUP, n_out // 8), dtype=torch.int32)
                scales, groups = torch.rand(n_in // GROUP, n_out).half(), torch.arange(n_in, dtype=torch.int32) // GROUP
                tensors |= {f"{layer}.qweight": words, f"{layer}.qzeros": zeros}
                tensors |= {f"{layer}.scales": scales, f"{layer}.g_idx": groups}
            elif kind.startswith("awq"):
                words = torch.randint(-(2**31), 2**31 - 1, (n_in, n_out // 8), dtype=torch.int32)
                zeros = torch.randint(-(2**31), 2**31 - 1, (n_in // GROUP, n_out // 8), dtype=torch.int32)
                scales = torch.rand(n_in // GROUP, n_out).to(torch.bfloat16)
                tensors |= {f"{layer}.qweight": words, f"{layer}.qzeros": zeros, f"{layer}.scales": scales}
            elif kind == "fp8":
                tensors[name] = tensor.to(torch.float8_e4m3fn)
                tensors[f"{layer}.weight_scale"] = torch.rand(())
            else:
                tensors[name] = torch.randint(-128, 127, (n_out, n_in), dtype=torch.int8)
                tensors[f"{layer}.weight_scale"] = torch.rand(n_out, 1).to(torch.bfloat16)
        save_file(tensors, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    names = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
OF_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": OF_INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": OF_INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
CONFIGS = {"awq": AWQ, "awq_part": AWQ, "gptq": GPTQ, "int8": INT8, "fp8": FP8}
