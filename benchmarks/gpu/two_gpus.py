"""Two GPUs: what one tensor-parallel size stored is loaded at another, bit for bit, and how fast a reload is at TP=2.

    python -m benchmarks.gpu.two_gpus --folder /dev/shm/kv --out OUT/two_gpus_equal.json [--parts equal,ttft]

equal: saved random weights; stored at TP=2 and loaded at TP=1, and the other way. Blocks are compared head by head.
Tokens may differ without a wrong bit, because another TP sums in another order: beside them stands a control that
computes the same questions at the other TP. ttft: the dimensions of a 70B model at TP=2; with --one-process all of it,
computed (and saved) and reloaded from the folder --count times, in one process, because its start takes most of the
time. In both, whether each process keeps to one GPU (contexts.py).
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from benchmarks.gpu import contexts, options, report
from benchmarks.gpu.cases import cases
from benchmarks.gpu.equality import job_of
from benchmarks.gpu.models import DIMENSIONS
from benchmarks.gpu.processes import run_engine
from benchmarks.gpu.tiny import TINY_TIER
from benchmarks.gpu.ttft import (
    WARM_UP_TOKENS,
    Asked,
    encoded_token_bytes,
    measure,
    print_summary,
    setup_of,
    summary,
)
from benchmarks.gpu.watch import compare

EAGER = {"enforce_eager": True}
"""Graphs are equality.py's question; without them four engines start in half the time."""


def agreement(answers: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, int]:
    """How many answers, and how many of their tokens up to the first difference, are those of the reference."""
    same = tokens = total = 0
    for mine, theirs in zip(answers, reference, strict=True):
        a, b = mine["answer"], theirs["answer"]
        same += a == b
        total += len(b)
        tokens += next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))
    return {"same_answers": same, "answers": len(answers), "same_tokens": tokens, "tokens": total}


def across(arguments: argparse.Namespace, stored_at: int, loaded_at: int) -> dict[str, Any]:
    chunk = TINY_TIER["chunk_tokens"] if arguments.tiny else 256
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    steps: list[list[Any]] = [["warm_up", chunk], ["answer_cases", chunk]]
    first_job = job_of(arguments, steps, {"tensor_parallel_size": stored_at} | EAGER)
    first = run_engine(f"tp{stored_at}-save-for-{loaded_at}", first_job, arguments.logs, arguments.timeout)
    histories = first["answer_cases"]["histories"]
    steps = [["ask_cases", chunk, histories], ["compute_cases", chunk, histories]]
    second_job = job_of(arguments, steps, {"tensor_parallel_size": loaded_at} | EAGER)
    second = run_engine(f"tp{loaded_at}-load-of-{stored_at}", second_job, arguments.logs, arguments.timeout)
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    saved = [seen for worker in first["watch"] for seen in worker["saved"]]
    loaded = [seen for worker in second["watch"] for seen in worker["loaded"]]
    own = first["answer_cases"]["own"]
    asked = second["ask_cases"]
    return {
        "stored_at": stored_at,
        "loaded_at": loaded_at,
        "blocks": compare(saved, loaded),
        "hits": sum(a["hit_tokens"] == case.shared for a, case in zip(asked, cases(chunk), strict=True)),
        "loaded_agrees": agreement(asked, own),
        "control_agrees": agreement(second["compute_cases"], own),
        "failed_loads": sum(worker["failed_loads"] for worker in second["watch"]),
        "contexts": [first["contexts"], second["contexts"]],
    }


def is_equal(result: dict[str, Any]) -> bool:
    blocks = result["blocks"]
    return bool(blocks["equal"] and not blocks["wrong"] and not blocks["unknown"] and not result["failed_loads"])


def contexts_of(results: dict[str, Any]) -> list[list[list[int]]]:
    """Of the engines of a TTFT run: for each rank the GPUs it has a context on."""
    engines = [engine for result in results.values() for engine in (result, result.get("store"), result.get("reload"))]
    return [engine["contexts"] for engine in engines if engine and "contexts" in engine]


FILES_ALONE: dict[str, Any] = {"host": {"admit": "never"}}
"""So that a process reloads from the folder what it has just saved, and not from its host arena."""


def ttft(arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes into the result file, and `results` of each engine."""
    setup = setup_of(arguments)
    lengths = [300, 600] if arguments.tiny else [int(part) for part in arguments.lengths.split(",")]
    if arguments.one_process:
        steps = [["warm_up", min(WARM_UP_TOKENS, lengths[0])], ["all_in_one", lengths, arguments.count]]
        found = setup.run("two-all-in-one", "kvtier", steps, FILES_ALONE)
        rows = found["all_in_one"]
        results = {
            "none": {"computed_and_own": rows},
            "kvtier": {"store": found, "reload": {"first_tokens": rows["reloaded"]}},
        }
        shutil.rmtree(setup.folder / "kvtier", ignore_errors=True)
    else:
        results = dict(measure(setup, arguments.systems.split(","), Asked(lengths, arguments.count, 1)))
    # One rank's bytes: what passes through its PCIe. (The counters are sums over ranks, of bytes and tokens alike.)
    token_bytes = DIMENSIONS[setup.kind].token_bytes() // arguments.tp
    if setup.extra.get("codec", "raw") != "raw":
        token_bytes = encoded_token_bytes(results) or token_bytes
    rows = summary(results, lengths, token_bytes)
    return {
        "model": setup.kind,
        "folder": str(setup.folder),
        "extra": setup.extra,
        "llm": setup.llm,
        "rows": rows,
        "results": results,
        "one_process": arguments.one_process,
    }


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.two_gpus", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=280.0)
    options.of_kvtier(parser)
    options.of_timed_engines(parser, 0.85, "70b", 2)
    parser.add_argument("--parts", default="equal,ttft")
    parser.add_argument("--lengths", default="32768,100000")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--systems", default="none,kvtier")
    parser.add_argument("--one-process", action="store_true", help="ttft in one process, kvtier alone")
    arguments = parser.parse_args(text)
    return arguments


def main() -> int:
    arguments = parse()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {}
    by_rank: list[list[list[int]]] = []
    good = True
    watch = contexts.ContextWatch()
    if "equal" in arguments.parts:
        with watch:  # not while times are taken: nvidia-smi holds the driver up
            content["equal"] = [across(arguments, 2, 1), across(arguments, 1, 2)]
        good = all(is_equal(result) for result in content["equal"])
        by_rank += [engine for result in content["equal"] for engine in result["contexts"]]
    if "ttft" in arguments.parts:
        content |= ttft(arguments)
        good = good and not any("failed" in result for result in content["results"].values())
        by_rank += contexts_of(content["results"])
    content["contexts"] = contexts.judge(watch.seen(), by_rank)
    good = good and (contexts.is_good(content["contexts"]) or arguments.tiny)
    report.write(arguments.out, "two GPUs: across tensor-parallel sizes, and TTFT at TP=2", content)
    for result in content.get("equal", []):
        loaded, control = result["loaded_agrees"], result["control_agrees"]
        print(
            f"TP={result['stored_at']} -> TP={result['loaded_at']}: blocks {result['blocks']}, "
            f"hits {result['hits']}, tokens as stored {loaded['same_tokens']}/{loaded['tokens']}, computed instead "
            f"{control['same_tokens']}/{control['tokens']}"
        )
    if "rows" in content:
        print_summary(content["rows"])
    print(
        f"contexts: nvidia-smi {watch.samples} samples {content['contexts']['listed']}, "
        f"primary contexts by rank {content['contexts']['by_rank']}"
    )
    print("GOOD" if good else "NOT GOOD")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
