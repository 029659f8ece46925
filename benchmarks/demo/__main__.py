"""Demo: engine A answers and exits; engine B, another process, answers the same without the prefill. Prints both.

    python -m benchmarks.demo [--output FOLDER]

Exit status 1 if an output differs or nothing was reused.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.systems import environment_of
from benchmarks.processes import EngineFailed, EngineProcess

PROMPT_TOKENS = (1600, 3200, 6400)
SHARED_PREFIX_TOKENS = 2560
OWN_TOKENS = 640
FOLLOW_UP_TOKENS = 120
ENGINE_TIMEOUT_S = 600
COLUMNS = ("", "tokens", "hit tokens", "cold TTFT", "warm TTFT", "speed-up", "outputs")
# Small segments, because the disk may be small. Every hit is loaded: at its default kvtier leaves to a fast GPU what
# that computes sooner than a slow disk is read.
KVTIER = {
    "capacity_bytes": "2GiB",
    "segment_bytes": "256MiB",
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 16384, "block_size": 32, "max_num_seqs": 4}
ENGINE |= {"max_num_batched_tokens": 2048, "enable_prefix_caching": False}  # every reused token comes from the tier
# A KV cache of a fixed size, so that the tier's staging has room; vLLM picks Triton's attention there, which takes
# float32. On the CPU the environment gives the size.
ON_A_GPU = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # with a connector vLLM would reserve another core
}

Answers = list[dict[str, Any]]


def questions(tokens: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Cut real text into prompts that share only what the demo means them to share."""
    prompts, used = [], 0
    for number, size in enumerate(PROMPT_TOKENS, start=1):
        prompts.append({"name": f"prompt {number}", "tokens": tokens[used : used + size]})
        used += size
    own = tokens[used : used + OWN_TOKENS]
    follow_up = tokens[used + OWN_TOKENS : used + OWN_TOKENS + FOLLOW_UP_TOKENS]
    return prompts, [
        {"name": "shares a prefix", "tokens": prompts[-1]["tokens"][:SHARED_PREFIX_TOKENS] + own},
        {"name": "second turn", "tokens": follow_up, "follows": prompts[-1]["name"]},
    ]


def run_engine(name: str, folder: Path, model: Path, asked: list[dict[str, Any]]) -> Answers:
    """Run one engine process and show that it is alive. Raise SystemExit with its output if it fails."""
    llm = ENGINE | (ON_A_GPU if torch.cuda.is_available() else {})
    extra = {"root": str(folder / "tier"), **KVTIER}
    job = {"model": str(model), "vocabulary": 0, "system": "kvtier", "folder": str(folder), "extra": extra, "llm": llm}
    job |= {"environment": environment_of("kvtier", folder) | ENVIRONMENT, "steps": [["answer_questions", asked]]}
    process = EngineProcess(f"engine-{name}", job, folder, ENGINE_TIMEOUT_S)
    started = time.monotonic()
    while not process.is_over and time.monotonic() < started + ENGINE_TIMEOUT_S:
        seconds = time.monotonic() - started
        show_progress(f"engine {name}: starts and answers {len(asked)} prompts ... {seconds:.0f} s")
        time.sleep(0.25)
    try:
        found: Answers = process.results(1.0)["answer_questions"]
    except EngineFailed as failure:
        raise SystemExit(f"\n{failure}") from None
    show_progress(f"engine {name}: its process has answered {len(asked)} prompts\n")
    return found


def show_progress(line: str) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)
    elif line.endswith("\n"):
        print(line, end="", flush=True)


def rows_of(cold: Answers, warm: Answers) -> list[dict[str, Any]]:
    return [
        {
            "name": after["name"],
            "tokens": after["tokens"],
            "hit_tokens": after["hit_tokens"],
            "cold_s": before["ttft_s"],
            "warm_s": after["ttft_s"],
            "identical": before["answer"] == after["answer"],
        }
        for before, after in zip(cold, warm, strict=True)
    ]


def shown(row: dict[str, Any]) -> tuple[object, ...]:
    cold, warm = row["cold_s"], row["warm_s"]
    same = "identical" if row["identical"] else "DIFFERENT"
    return row["name"], row["tokens"], row["hit_tokens"], f"{cold:.3f} s", f"{warm:.3f} s", f"{cold / warm:.1f}x", same


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for model, tier and logs")
    parser.add_argument("--result", type=Path, help="a JSON file to write the table to")
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    root = folder / "tier"
    shutil.rmtree(root, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)

    show_progress("making a model with random weights ...")
    from transformers import AutoTokenizer

    from benchmarks.demo.model import make_model_here
    from benchmarks.serving.documents import python_text

    model = make_model_here(folder)
    needed = sum(PROMPT_TOKENS) + OWN_TOKENS + FOLLOW_UP_TOKENS
    tokens = AutoTokenizer.from_pretrained(model)(python_text()[: needed * 8])["input_ids"]
    show_progress(f"the model is in {model}\n")

    prompts, others = questions(tokens)
    # A computes all of them; of the last two it stores nothing, so that B finds no more than what they share.
    asked = [{**q, "shared": True} for q in prompts] + [{**q, "shared": False} for q in others]
    cold = run_engine("A", folder, model, asked)
    warm = run_engine("B", folder, model, [{**q, "shared": True} for q in prompts + others])

    rows = rows_of(cold, warm)
    print()
    report.table(COLUMNS, [shown(row) for row in rows])
    if arguments.result:
        report.write(arguments.result, "what does a second vLLM process save", {"rows": rows})
    print("\nContent of the tier now (kvtier stats):", flush=True)
    subprocess.run([sys.executable, "-m", "kvtier.cli", "stats", str(root)], check=True)
    identical = all(row["identical"] for row in rows)
    if not identical or not all(row["hit_tokens"] for row in rows):
        print("\nFAILED: " + ("an output differs" if not identical else "something was not reused"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
