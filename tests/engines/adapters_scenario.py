"""A scenario: LoRA adapters that vLLM is told to load before the first request for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

PROJECTIONS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
"""Rows of those of models.py's "llama"."""
HIDDEN, RANK, LAYERS = 128, 8, 4


def adapters(engine: Any) -> dict[str, Any]:
    """Tokens found of a prompt that was asked before, by whether the files changed between the load and the request."""
    found: dict[str, Any] = {}
    for number, name in enumerate(("as they were", "overwritten"), 1):
        lora = LoRARequest(name, number, str(write(engine.root.parent / f"{engine.root.name}-{number}", seed=number)))
        assert engine.llm.llm_engine.add_lora(lora)
        if name == "overwritten":
            write(Path(lora.lora_path), seed=9)
        tokens = []
        for _ in range(2):
            answer = _ask(engine, lora)
            tokens.append(list(answer.outputs[0].token_ids))
            engine.settle()
            engine.forget()
        found[name] = {"cached": answer.num_cached_tokens, "differs": tokens[0] != tokens[1]}
    return found


def write(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(PROJECTIONS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in PROJECTIONS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _ask(engine: Any, lora: LoRARequest) -> Any:
    parameters = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": [(7 * place) % 500 + 3 for place in range(300)]}
    (answer,) = engine.llm.generate([prompt], parameters, use_tqdm=False, lora_request=lora)
    return answer
