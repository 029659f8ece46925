"""Time of loading weights in vLLM's own loaders, without an engine: `auto`, kvtier with a new plan, with a stored one.

    python -m benchmarks.gpu.weights_in_vllm --out OUT/weights_in_vllm.json [--models 8b,0.6b,moe]
        [--arms auto,kvtier,kvtier-stored] [--folder /dev/shm/weights] [--ranks 1] [--repetitions 3] [--tiny]

Makes the checkpoints of weights_rate, with a config.json, and reads them once. Then each arm builds the model of the
last rank of `--ranks` on the GPU, in a process of its own, and calls `load_weights` of its load format. Seconds are
those of this call and of a synchronization behind it; imports, CUDA's context and the model do not count. The sha256
of all parameters must be equal. kvtier-stored is preceded by a run that stores the plan. --tiny: on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.weights_files import MODELS, WeightShapes, add_models, make, parser

QUESTION = "how long vLLM's load formats take to fill the parameters"
ARMS = ("auto", "kvtier", "kvtier-stored", "instanttensor", "fastsafetensors")
LIMIT_S = 200  # of one process
COLUMNS = ("model", "arm", "s", "min-max", "GB/s", "x auto", "plan s", "parameters")


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


def child(options: argparse.Namespace) -> int:
    """Load once, and print the figures as the last line."""
    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from kvtier.connectors.vllm import plugin
    from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config

    plugin.register_load_format()
    device, stored = "cpu" if options.tiny else "cuda", options.child == "kvtier-stored"
    extra = {"plan_cache": str(options.folder / "plans") if stored else False}
    is_ours = options.child.startswith("kvtier")
    config = engine_config(str(options.folder), options.ranks)
    load_format = "kvtier" if is_ours else options.child
    loader = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra if is_ours else {}))
    with as_rank(config, options.ranks - 1):
        model = build_model(config, device)
        if device == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        loader.load_weights(model, config.model_config)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
    digest, n_bytes = hashlib.sha256(), 0
    for name, tensor in sorted(model.named_parameters()):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + raw.cpu().numpy().tobytes())
        n_bytes += raw.numel()
    print(json.dumps({"seconds": seconds, "bytes": n_bytes, "sha256": digest.hexdigest()}))
    return 0


def run(options: argparse.Namespace, folder: Path, arm: str) -> dict[str, Any]:
    """Return the figures of one process, or {"error"}."""
    argv = [sys.executable, "-m", "benchmarks.gpu.weights_in_vllm", "--child", arm, "--folder", str(folder)]
    argv += ["--out", "-", "--ranks", str(options.ranks), *(["--tiny"] if options.tiny else [])]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    except (IndexError, ValueError):
        return {"error": (ended.stderr or ended.stdout)[-1500:]}
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "loading weights took" in line]
    found["log"] = lines[-1].partition("kvtier: ")[2] if lines else ""
    return found


def rows_of(model: str, runs: dict[str, list[dict[str, Any]]]) -> list[list[object]]:
    rows: list[list[object]] = []
    times = {arm: [run["seconds"] for run in found if "seconds" in run] for arm, found in runs.items()}
    sums = {run["sha256"] for found in runs.values() for run in found if "sha256" in run}
    for arm, seconds in times.items():
        if not seconds:
            rows.append([model, arm, *["-"] * 5, runs[arm][0]["error"].splitlines()[-1][:60]])
            continue
        n_bytes, plan = runs[arm][0]["bytes"], runs[arm][-1]["log"].partition(" in ")[2].partition(" seconds, ")[0]
        ratio = f"{median(times['auto']) / median(seconds):.2f}" if times.get("auto") else "-"
        spread = f"{min(seconds):.3f}-{max(seconds):.3f}"
        rate = f"{n_bytes / median(seconds) / 1e9:.1f}"
        equal = "equal" if len(sums) == 1 else "DIFFER"
        rows.append([model, arm, f"{median(seconds):.3f}", spread, rate, ratio, plan or "-", equal])
    return rows


def run_all(options: argparse.Namespace) -> int:
    content: dict[str, Any] = {"ranks": options.ranks, "models": {}}
    rows: list[list[object]] = []
    arms = ["auto", "kvtier", "kvtier-stored"] if options.tiny else options.arms.split(",")
    for model in ["tiny"] if options.tiny else options.models.split(","):
        folder = options.folder / model
        for path in make(folder, MODELS[model]):
            path.read_bytes()
        (folder / "config.json").write_text(json.dumps(config_of(MODELS[model])))
        if "kvtier-stored" in arms:
            run(options, folder, "kvtier-stored")
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _ in range(options.repetitions):
            for arm in arms:
                runs[arm].append(run(options, folder, arm))
        content["models"][model] = runs
        rows += rows_of(model, runs)
        report.table(COLUMNS, rows_of(model, runs))
        if not options.keep:
            shutil.rmtree(folder)
    report.write(options.out, QUESTION, content, "instanttensor", "fastsafetensors", "safetensors")
    report.table(COLUMNS, rows)
    return int(any("DIFFER" in row for row in rows))


def main() -> int:
    made = parser("weights_in_vllm", __doc__)
    add_models(made)
    made.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    made.add_argument("--ranks", type=int, default=1, help="tensor-parallel size; the last rank is loaded")
    options = made.parse_args()
    return child(options) if options.child else run_all(options)


if __name__ == "__main__":
    raise SystemExit(main())
