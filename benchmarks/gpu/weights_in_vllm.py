"""Loads of weights by vLLM's own loaders, without an engine: arms `vllm:...` of weights_rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.weights_files import WeightShapes, position_sum


def config_of(model: WeightShapes) -> dict[str, Any]:
    """Return the config.json of a Llama, Qwen3 or Qwen3-MoE with these sizes."""
    kind = "qwen3_moe" if model.experts else "qwen3" if model.norms_heads else "llama"
    name = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    experts = {
        "num_experts": model.experts, "num_experts_per_tok": 2, "moe_intermediate_size": model.inner,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {
        "model_type": kind, "architectures": [name], "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "vocab_size": model.vocabulary, "hidden_size": model.hidden, "intermediate_size": model.inner,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size, "tie_word_embeddings": model.tied, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    } | (experts if model.experts else {})  # fmt: skip


def load(arm: str, folder: Path, device: str) -> Iterator[Any]:
    """Yield after the imports, after the model is built on the device, after the load, and then the parameters' sums.

    arm: a load format, or kvtier-stored: kvtier with a plan that an earlier load has stored.
    """
    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from kvtier.connectors.vllm import plugin
    from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config

    plugin.register_load_format()
    is_ours = arm.startswith("kvtier")
    extra = {"plan_cache": str(folder / "plans") if arm == "kvtier-stored" else False} if is_ours else {}
    config = engine_config(str(folder), 1)
    load_format = "kvtier" if is_ours else arm
    loader = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra))
    yield None
    with as_rank(config, 0):
        model = build_model(config, torch.device(device).type)
        yield None
        loader.load_weights(model, config.model_config)
        yield None
    yield [position_sum(value) for _, value in sorted(model.named_parameters())]
