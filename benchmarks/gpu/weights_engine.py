"""Start of an engine, phase by phase, with several load formats, and with KV of its first prompt in storage or not.

    python -m benchmarks.gpu.weights_engine --out OUT/weights_engine.json [--formats auto,kvtier,...] [--wheels FOLDER]
        [--folder /dev/shm/engine] [--repetitions 2] [--tokens 32768] [--tiny]

Writes a random checkpoint of 8B's dimensions into the folder and reads it once. Each start is a process of its own, in
turns: eager ones compare the formats (seconds of `load_weights`; sums of all parameters and greedy tokens must be
equal), compiled ones show the whole start: `auto` without a tier, and `kvtier` with KV of the prompt in storage, which
the start before has saved. Seconds count from the start of the process. --tiny: on the CPU, to try this script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.models import DIMENSIONS, config_of, prompt
from benchmarks.gpu.setup import GRAPHS, TINY_CHUNK, TINY_ENGINE, TINY_ENVIRONMENT, TINY_TIER
from benchmarks.gpu.systems import environment_of, kvtier_transfer
from benchmarks.gpu.weights_files import MODELS, WeightShapes, make, parser, unpacked
from benchmarks.processes import EngineFailed, EngineProcess

QUESTION = "how long an engine takes from its start to its first token"
LIMIT_S = 200.0  # of one process
ANSWER_TOKENS = 8
PATTERNS = {  # of vLLM's log
    "compile_s": r"torch\.compile (?:takes|took) ([\d.]+) s",
    "graphs_s": r"Graph capturing finished in ([\d.]+) secs",
    "init_engine_s": r"init engine .* took ([\d.]+) s",
}
TINY_SHAPES = WeightShapes(1, 512, 128, 256, 2, 4, 2, 64, False, False)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Start one engine and ask it one prompt. Times count from the start of the process."""
    began = time.perf_counter() - (time.time() - float(job["started"]))
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.model_executor.model_loader import base_loader

    from kvtier.connectors.vllm.plugin import register

    register()
    found: dict[str, Any] = {"import_s": time.perf_counter() - began}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any) -> Any:
            before = time.perf_counter()
            result = function(*arguments)
            found[name] = time.perf_counter() - before
            return result

        return run

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        self.load_weights = timed("load_weights_s", self.load_weights)
        return original(self, vllm_config, model_config, prefix)

    original = base_loader.BaseModelLoader.load_model
    base_loader.BaseModelLoader.load_model = load_model
    base_loader.process_weights_after_loading = timed("after_loading_s", base_loader.process_weights_after_loading)
    transfer = None if job["tier"] is None else KVTransferConfig(**kvtier_transfer(job["tier"]))
    llm = vllm.LLM(job["model"], load_format=job["format"], kv_transfer_config=transfer, **job["llm"])
    found["ready_s"] = time.perf_counter() - began
    sampling = vllm.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": job["prompt"]}], sampling, use_tqdm=False)
    metrics = output.metrics
    found["answered_s"] = time.perf_counter() - began
    if metrics is not None and getattr(metrics, "first_token_ts", 0.0):
        found["answered_s"] -= metrics.last_token_ts - metrics.first_token_ts
    found |= {"answer": list(output.outputs[0].token_ids), "hit_tokens": output.num_cached_tokens or 0}
    if job["tier"] is not None:
        time.sleep(3.0)  # what was computed is stored in this time
    # At the end: kvtier begins an epoch after a function that names parameters, and drops saves that wait.
    found["sums"] = llm.collective_rpc(_sums)
    return found


def _sums(worker: Any) -> list[int]:
    import torch

    parameters = dict(worker.model_runner.model.named_parameters()).values()
    return [int(value.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64)) for value in parameters]


def run_start(options: argparse.Namespace, job: dict[str, Any], name: str) -> dict[str, Any]:
    paths = [os.environ.get("PYTHONPATH", ""), *unpacked(options.wheels)]
    environment = environment_of("kvtier", options.folder) | (TINY_ENVIRONMENT if options.tiny else {})
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "INFO"}
    job = job | {"started": time.time(), "environment": environment}
    try:
        process = EngineProcess(name, job, options.logs, LIMIT_S, "benchmarks.gpu.weights_engine")
        found = process.results(LIMIT_S)
    except EngineFailed as failure:
        print(failure, flush=True)
        return {"failed": str(failure)}
    text = (options.logs / f"{name}.log").read_text()
    for phase, pattern in PATTERNS.items():
        times = [float(value) for value in re.findall(pattern, text)]
        found |= {phase: times[-1]} if times else {}
    lines = [line for line in text.splitlines() if "loading weights took" in line.lower()]
    return found | {"log": [line[-300:] for line in lines]}


def start_rows(starts: dict[str, list[dict[str, Any]]]) -> report.Table:
    """Return columns and rows, one row a start."""
    keys = ("import_s", "load_weights_s", "compile_s", "graphs_s", "ready_s", "answered_s")
    cells = []
    for name, runs in starts.items():
        for number, run in enumerate(runs, 1):
            if "failed" not in run:
                times = [f"{run[key]:.2f}" if key in run else "-" for key in keys]
                cells.append([name, str(number), *times, f"{run['hit_tokens']:,}"])
    columns = ["start", "number", "import", "load_weights", "compile", "graphs", "ready", "first token", "tokens hit"]
    return columns, cells


def run_all(options: argparse.Namespace) -> int:
    kind, shapes = ("tiny", TINY_SHAPES) if options.tiny else ("8b", MODELS["8b"])
    size, tokens = DIMENSIONS[kind], min(options.tokens, 512) if options.tiny else options.tokens
    model = options.folder / "model"
    files = make(model, shapes)
    (model / "config.json").write_text(json.dumps(config_of(size)))
    for path in files:
        path.read_bytes()
    llm: dict[str, Any] = {"max_model_len": tokens + 256, "gpu_memory_utilization": 0.7, "skip_tokenizer_init": True}
    llm |= {"seed": 0, "disable_log_stats": False} | (TINY_ENGINE if options.tiny else {})
    job = {"model": str(model), "prompt": prompt("start", tokens, size.vocabulary), "tier": None}
    tier = {"root": str(options.folder / "kv"), "capacity_bytes": "32GiB"} | (TINY_TIER if options.tiny else {})
    plans = {"plan_cache": str(options.folder / "plans")}
    starts = [
        (f"{format} eager", job | {"format": format, "llm": llm | {"enforce_eager": True}})
        for format in options.formats.split(",")
    ]
    compiled = llm if options.tiny else llm | GRAPHS
    whole = [
        ("auto", job | {"format": "auto", "llm": compiled}),
        ("kvtier with its tier", job | {"format": "kvtier", "tier": tier, "llm": compiled}),
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    turns = [*whole * max(2, options.repetitions), *starts * options.repetitions]
    is_right = False
    for number, (name, each) in enumerate(turns):
        extra = {"model_loader_extra_config": plans} if each["format"] == "kvtier" else {}
        runs = found.setdefault(name, [])
        runs.append(run_start(options, each | {"llm": each["llm"] | extra}, f"start-{number}"))
        print(name, {key: value for key, value in runs[-1].items() if key not in ("sums", "failed")}, flush=True)
        is_right = write(options, {"tokens": tokens, "chunk_tokens": TINY_CHUNK if options.tiny else 256}, found)
    report.table(*start_rows(found))
    print(f"all starts worked, with equal parameters: {is_right}")
    shutil.rmtree(options.folder, ignore_errors=True)
    return int(not is_right)


def write(options: argparse.Namespace, content: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> bool:
    """Write the starts so far, without their sums. Return whether all worked and all parameters have equal sums."""
    runs = [run for each in found.values() for run in each]
    done = [run for run in runs if "failed" not in run]
    content["equal_parameters"] = all(run["sums"] == done[0]["sums"] for run in done)
    content["equal_answers"] = len({tuple(run["answer"]) for run in done}) == 1
    content["starts"] = {
        name: [{key: value for key, value in run.items() if key != "sums"} for run in each]
        for name, each in found.items()
    }
    report.write(options.out, QUESTION, content, "instanttensor", "fastsafetensors")
    return bool(content["equal_parameters"]) and len(done) == len(runs)


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1].endswith(".job"):
        Path(sys.argv[2]).write_text(json.dumps(child(json.loads(Path(sys.argv[1]).read_text()))))
        sys.stdout.flush()
        os._exit(0)
    made = parser("weights_engine", __doc__)
    made.set_defaults(folder=Path("/dev/shm/engine"), repetitions=2)
    made.add_argument("--formats", default="auto,kvtier,fastsafetensors,instanttensor", help="separated by commas")
    made.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    options = made.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    return run_all(options)


if __name__ == "__main__":
    raise SystemExit(main())
