"""Is what a fresh process loads bit for bit what another saved, and are its tokens those of vLLM's own prefix hit?

    python -m benchmarks.gpu.equality --folder /dev/shm/kv --out OUT/equality.json [--model mla] \\
        [--kv-cache-dtype turboquant_4bit_nc] [--skip-layers 0 3]

Saved random weights in bf16, CUDA graphs on, 20 cases (cases.py). Process A answers and saves, and asks each case's
question again from vLLM's own prefix cache. Processes B, one with prefix caching and one without, ask the questions
with nothing but the tier. Digests of all blocks are taken on the engine's stream when they are saved and when a load is
answered (watch.py).
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.cases import cases
from benchmarks.gpu.models import DIMENSIONS, make_model
from benchmarks.gpu.processes import run_engine
from benchmarks.gpu.tiny import TINY_ENGINE, TINY_ENVIRONMENT, TINY_TIER
from benchmarks.gpu.watch import compare

COLUMNS = ("engine B", "hits", "same tokens, same shape", "same tokens, all", "blocks equal", "wrong", "unknown")
COLUMNS += ("failed loads",)


def job_of(
    arguments: argparse.Namespace, steps: list[list[Any]], llm: dict[str, Any], model: str = "small"
) -> dict[str, Any]:
    """One engine of a model with saved weights, with a watch on its blocks; `llm` overrides engine arguments."""
    kind = "tiny" if arguments.tiny else model
    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 64,
    }
    extra: dict[str, Any] = {"capacity_bytes": "32GiB", "host": {"arena_bytes": "2GiB"}, "segment_bytes": "256MiB"}
    return {
        "model": str(make_model(kind, arguments.models)),
        "vocabulary": DIMENSIONS[kind].vocabulary,
        "system": "kvtier",
        "folder": str(arguments.folder),
        "extra": TINY_TIER if arguments.tiny else extra,
        "llm": (TINY_ENGINE if arguments.tiny else engine) | llm,
        "steps": steps,
        "watch": True,
        "environment": TINY_ENVIRONMENT if arguments.tiny else {},
    }


def judge(first: dict[str, Any], second: dict[str, Any], chunk: int) -> dict[str, Any]:
    """One fresh process against the one that saved."""
    asked, own = second["ask_cases"], first["answer_cases"]["own"]
    rows = []
    for number, case in enumerate(cases(chunk)):
        expected_hit = case.shared
        rows.append(
            {
                "first": case.n_first,
                "answer": case.n_answer,
                "shared": case.shared,
                "more": case.n_more,
                "hit_tokens": asked[number]["hit_tokens"],
                "own_hit_tokens": own[number]["hit_tokens"],
                "is_hit": asked[number]["hit_tokens"] == expected_hit,
                "is_same_shape": own[number]["hit_tokens"] == asked[number]["hit_tokens"],
                "same_tokens": asked[number]["answer"] == own[number]["answer"],
            }
        )
    saved = [seen for process in (first, second) for worker in process["watch"] for seen in worker["saved"]]
    loaded = [seen for worker in second["watch"] for seen in worker["loaded"]]
    return {
        "cases": rows,
        "blocks": compare(saved, loaded),
        "chunks_loaded": len(loaded),
        "failed_loads": sum(worker["failed_loads"] for worker in second["watch"]),
    }


def is_good(result: dict[str, Any]) -> bool:
    """Every expected hit was one, no block differs, and tokens are equal wherever the shapes are."""
    rows = result["cases"]
    blocks = result["blocks"]
    tokens = all(row["same_tokens"] for row in rows if row["is_same_shape"])
    return (
        tokens
        and all(row["is_hit"] for row in rows)
        and blocks["equal"] > 0
        and not (blocks["wrong"] or blocks["unknown"] or result["failed_loads"])
    )


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.equality", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=150.0)
    parser.add_argument("--model", choices=("small", "mla"), default="small", help="mla: a latent instead of heads")
    parser.add_argument("--kv-cache-dtype", default="auto", help="the engine's own, as vLLM takes it")
    parser.add_argument("--skip-layers", nargs="*", default=[], help="that vLLM leaves out of --kv-cache-dtype")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    return parser.parse_args(text)


def main() -> int:
    arguments = parse()
    chunk = TINY_TIER["chunk_tokens"] if arguments.tiny else 256
    llm: dict[str, Any] = {"enforce_eager": True} if arguments.eager else {}
    if arguments.kv_cache_dtype != "auto":
        llm |= {"kv_cache_dtype": arguments.kv_cache_dtype, "kv_cache_dtype_skip_layers": arguments.skip_layers}
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    saving = job_of(arguments, [["warm_up", chunk], ["answer_cases", chunk]], llm, arguments.model)
    first = run_engine("equality-save", saving, arguments.logs, arguments.timeout)
    results = {}
    for name, caching in (("prefix caching", True), ("no prefix caching", False)):
        steps = [["ask_cases", chunk, first["answer_cases"]["histories"]]]
        job = job_of(arguments, steps, llm | {"enable_prefix_caching": caching}, arguments.model)
        second = run_engine(f"equality-load-{int(caching)}", job, arguments.logs, arguments.timeout)
        results[name] = judge(first, second, chunk)
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    good = all(is_good(result) for result in results.values())
    report.write(
        arguments.out,
        "are loaded blocks and tokens the ones that were saved",
        {
            "good": good,
            "model": "tiny" if arguments.tiny else arguments.model,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "skip_layers": arguments.skip_layers,
            "cuda_graphs": not (arguments.eager or arguments.tiny),
            "results": results,
        },
    )
    rows = []
    for name, result in results.items():
        cases_ = result["cases"]
        exact = [row for row in cases_ if row["is_same_shape"]]
        rows.append(
            (
                name,
                f"{sum(row['is_hit'] for row in cases_)}/{len(cases_)}",
                f"{sum(row['same_tokens'] for row in exact)}/{len(exact)}",
                f"{sum(row['same_tokens'] for row in cases_)}/{len(cases_)}",
                result["blocks"]["equal"],
                result["blocks"]["wrong"],
                result["blocks"]["unknown"],
                result["failed_loads"],
            )
        )
    report.table(COLUMNS, rows)
    print("GOOD" if good else "NOT GOOD")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
