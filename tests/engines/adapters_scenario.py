"""Scenarios: LoRA adapters that vLLM is told to load before the first request for them, and ones that change in use."""

import json
from pathlib import Path
from typing import Any

import torch
from engine import CHUNK_TOKENS
from failed_forward_scenario import records
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

PROJECTIONS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}  # rows of those of models.py's "llama"
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


def adapters_in_use(engine: Any) -> dict[str, int]:
    """Records that the index has of a request's four chunks, by what happens to its adapter meanwhile."""
    core, found = engine.llm.llm_engine, {}
    engine.wait_for_set()
    for number, what in enumerate(("nothing", "replaced in place", "overwritten while it waits"), 11):
        folder = engine.root.parent / f"{engine.root.name}-{number}"
        lora = LoRARequest(what, number, str(write(folder, seed=number)))
        before = records(engine)
        if what == "overwritten while it waits":
            core.add_request("filler", _prompt(5, 600), _parameters(30))
            _steps(core, 3)
        core.add_request(f"asked-{number}", _prompt(number, 300), _parameters(8), lora_request=lora)
        _steps(core, 2)
        if what == "replaced in place":
            other = write(folder.with_name(f"{folder.name}-other"), seed=9)
            assert core.add_lora(LoRARequest(what, number, str(other), load_inplace=True))
        if what == "overwritten while it waits":
            assert engine.scheduler.waiting, "it was to wait for the filler's blocks"
            write(folder, seed=9)
        while core.has_unfinished_requests():
            core.step()
        engine.settle()
        found[what] = records(engine) - before - (600 // CHUNK_TOKENS if "waits" in what else 0)
        engine.forget()
    return found


def _steps(core: Any, n: int) -> None:
    for _ in range(n):
        core.step()


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
    (answer,) = engine.llm.generate([_prompt(7, 300)], _parameters(8), use_tqdm=False, lora_request=lora)
    return answer


def _prompt(stride: int, n_tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(stride * place) % 500 + 3 for place in range(n_tokens)]}


def _parameters(n_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=n_tokens, temperature=0, detokenize=False, ignore_eos=True)
