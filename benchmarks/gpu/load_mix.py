"""32 requests at once on a tier that is full and evicts, half of them on one prefix: is every byte right, and bounded?

    python -m benchmarks.gpu.load_mix --folder /dev/shm/kv --out OUT/load_mix.json

Process A stores more prefixes than fit. Process B first gets nothing but requests on the shared prefix (how often is
it read?), then rounds of mixed hits, misses and saves. A third process without the tier answers the same: in float32,
where the order of sums does not decide a token. Whatever hangs is ended by a timeout, with the stacks in its log.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.models import DIMENSIONS, make_model
from benchmarks.gpu.processes import run_engine
from benchmarks.gpu.tiny import TINY_ENGINE, TINY_ENVIRONMENT, TINY_TIER
from benchmarks.gpu.watch import compare

SHAPE = {"requests": 32, "shared": 8192, "other": 2048, "others": 14, "tail": 40}
TINY_SHAPE = {"requests": 8, "shared": 512, "other": 256, "others": 6, "tail": 10}
TIER: dict[str, Any] = {
    "capacity_bytes": "1536MiB", "segment_bytes": "128MiB", "touch_interval_s": 0.2,
    "host": {"arena_bytes": "512MiB"}, "min_load_tokens": 256,
}  # fmt: skip
"""Of float32, 64 KiB a token: the shared prefix takes 512 MiB, another one 128 MiB, and 15 of them 2.3 GiB.
min_load_tokens: left to itself, kvtier finds that so small a model computes faster than it loads."""
TINY_LIMITS: dict[str, Any] = {"capacity_bytes": "3MiB", "segment_bytes": "256KiB", "touch_interval_s": 0.2,
                               "host": {"arena_bytes": "1MiB"}}  # fmt: skip
ENGINE: dict[str, Any] = {"enforce_eager": True, "max_model_len": 16384, "gpu_memory_utilization": 0.4,
                          "max_num_seqs": 64}  # fmt: skip
ANSWER_TOKENS = 16
TIE = 1e-3
"""A lead (nats) that another order of sums may turn round: float32 with 24 bits, through tf32 products of 11."""


def job_of(arguments: argparse.Namespace, system: str, steps: list[list[Any]]) -> dict[str, Any]:
    kind = "tiny" if arguments.tiny else "small"
    tier = TINY_TIER | TINY_LIMITS if arguments.tiny else TIER
    llm = TINY_ENGINE if arguments.tiny else ENGINE | {"dtype": arguments.dtype}
    return {
        "model": str(make_model(kind, arguments.models)), "vocabulary": DIMENSIONS[kind].vocabulary, "system": system,
        "folder": str(arguments.folder), "extra": tier | json.loads(arguments.extra) if system == "kvtier" else {},
        "llm": llm, "steps": steps, "watch": system == "kvtier",
        "environment": TINY_ENVIRONMENT if arguments.tiny else {},
    }  # fmt: skip


def judge(stored: dict[str, Any], loaded: dict[str, Any], bare: dict[str, Any], limits: dict[str, int]) -> Any:
    saved = [seen for process in (stored, loaded) for worker in process["watch"] for seen in worker["saved"]]
    seen_loaded = [seen for worker in loaded["watch"] for seen in worker["loaded"]]
    rounds = loaded["mixed_rounds"]["rounds"]
    pairs = [
        (number, request, a, b)
        for number, (mine, theirs) in enumerate(zip(rounds, bare["mixed_rounds"]["rounds"], strict=True))
        for request, (a, b) in enumerate(zip(mine["answers"], theirs["answers"], strict=True))
    ]
    differing = [_difference(*pair) for pair in pairs if pair[2]["answer"] != pair[3]["answer"]]
    shared, shared_bare = loaded["shared_prefix"], bare["shared_prefix"]
    same_shared = sum(a["answer"] == b["answer"]
                      for a, b in zip(shared["answers"], shared_bare["answers"], strict=True))  # fmt: skip
    shared_hits = [answer["hit_tokens"] for answer in shared["answers"]]
    prefix_bytes = max(1, max(shared_hits)) * limits["token_bytes"]  # what was there of it to be read
    # What the kernel counted holds all reads of the process; what kvtier counted, those of segment files alone.
    counted = shared["counted"]
    return {
        "blocks": compare(saved, seen_loaded), "failed_loads": sum(w["failed_loads"] for w in loaded["watch"]),
        "same_answers": len(pairs) - len(differing), "answers": len(pairs), "differing": differing,
        "hit_tokens": sum(a["hit_tokens"] for _, _, a, _ in pairs), "same_shared_answers": same_shared,
        "shared_answers": len(shared["answers"]), "shared_hit_tokens": shared_hits,
        "shared_tokens": limits["shared_tokens"],
        "prefix_bytes": prefix_bytes, "copies_read": counted.get("file_read_bytes", counted["rchar"]) / prefix_bytes,
        "copies_by_kernel": counted["rchar"] / prefix_bytes,
        "evicted_bytes": rounds_counter(loaded, "evicted_bytes") + stored["counters"].get("evicted_bytes", 0),
        "most_on_disk": max(stored["store_mix"]["most_on_disk"], loaded["mixed_rounds"]["most_on_disk"]),
        "capacity_bytes": limits["capacity_bytes"],
        "memory": {"kvtier": loaded["mixed_rounds"]["memory"], "bare": bare["mixed_rounds"]["memory"]},
        "round_s": [r["elapsed_s"] for r in rounds], "rounds_counted": [r["counted"] for r in rounds],
        "bare_round_s": [r["elapsed_s"] for r in bare["mixed_rounds"]["rounds"]],
        "counted": loaded["mixed_rounds"]["counted"],
    }  # fmt: skip


def _difference(round_number: int, request: int, mine: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    """Where an answer begins to differ, and how sure the engine without the tier was of its token there."""
    first = next(i for i, (a, b) in enumerate(zip(mine["answer"], bare["answer"], strict=True)) if a != b)
    return {"round": round_number, "request": request, "token": first, "lead": bare["leads"][first],
            "hit_tokens": mine["hit_tokens"]}  # fmt: skip


def rounds_counter(result: dict[str, Any], name: str) -> float:
    return float(result["mixed_rounds"]["counted"].get(name, 0))


def is_good(result: dict[str, Any], exact: bool) -> bool:
    blocks = result["blocks"]
    ties = all(difference["lead"] <= TIE for difference in result["differing"])
    answers = ties and result["same_shared_answers"] == result["shared_answers"]
    bounded = result["most_on_disk"] <= result["capacity_bytes"]
    # Reads by the kernel's count include little things (a Python module, /proc); one copy is far below two.
    once = result["copies_read"] < 1.5
    # Or the rounds show nothing of loads among evictions.
    has_loaded = all(counted.get("load_tokens") for counted in result["rounds_counted"])
    has_evicted = result["counted"].get("evicted_bytes")
    return bool(blocks["equal"] and not blocks["wrong"] and not blocks["unknown"] and bounded and once and has_loaded
                and has_evicted and (answers or not exact))  # fmt: skip


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.load_mix", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/bench/logs"))
    parser.add_argument("--models", type=Path, default=Path("/tmp/bench/models"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--extra", default="{}", help="more settings of kvtier, as JSON")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for one engine's process")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try this script")
    return parser.parse_args(text)


def main() -> int:
    arguments = parse()
    shape = TINY_SHAPE if arguments.tiny else SHAPE
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rounds = [["shared_prefix", shape, ANSWER_TOKENS], ["mixed_rounds", shape, arguments.rounds, ANSWER_TOKENS]]
    storing = job_of(arguments, "kvtier", [["warm_up", shape["other"]], ["store_mix", shape]])
    stored = run_engine("load-store", storing, arguments.logs, arguments.timeout)
    loaded = run_engine("load-mix", job_of(arguments, "kvtier", rounds), arguments.logs, arguments.timeout)
    bare = run_engine("load-bare", job_of(arguments, "none", rounds), arguments.logs, arguments.timeout)
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    kind, element_bytes = ("tiny", 4) if arguments.tiny else ("small", 4 if arguments.dtype == "float32" else 2)
    limits = {
        "shared_tokens": shape["shared"], "token_bytes": DIMENSIONS[kind].token_bytes(element_bytes),
        "capacity_bytes": 3 << 20 if arguments.tiny else 1536 << 20,
    }  # fmt: skip
    result = judge(stored, loaded, bare, limits)
    good = is_good(result, exact=arguments.dtype == "float32")
    report.write(arguments.out, "concurrent mixed hits at capacity", {
        "good": good, "dtype": arguments.dtype, "shape": shape, "rounds": arguments.rounds, "result": result,
    })  # fmt: skip
    blocks = result["blocks"]
    report.table(("what", "value"), [
        ("blocks equal / wrong / unknown", f"{blocks['equal']} / {blocks['wrong']} / {blocks['unknown']}"),
        ("answers as without the tier", f"{result['same_answers']}/{result['answers']}"),
        ("where not: round, request, token, lead",
         "; ".join(f"{d['round']}, {d['request']}, {d['token']}, {d['lead']:.6f}" for d in result["differing"]) or "-"),
        ("the same, shared prefix alone", f"{result['same_shared_answers']}/{result['shared_answers']}"),
        ("tokens hit in the rounds", f"{result['hit_tokens']:,}"),
        ("shared prefix hit, of", f"{max(result['shared_hit_tokens'])} of {result['shared_tokens']}"),
        ("copies of it read", f"{result['copies_read']:.2f}"),
        ("most on disk of capacity", f"{result['most_on_disk'] >> 20} of {result['capacity_bytes'] >> 20} MiB"),
        ("tokens loaded in each round", " ".join(f"{c.get('load_tokens', 0):,.0f}" for c in result["rounds_counted"])),
        ("evicted in each round, MiB",
         " ".join(f"{c.get('evicted_bytes', 0) / (1 << 20):,.0f}" for c in result["rounds_counted"])),
        ("evicted in all", f"{result['evicted_bytes'] / (1 << 20):.0f} MiB"),
        ("failed loads", result["failed_loads"]),
        ("seconds a round, without the tier", " ".join(f"{s:.2f}" for s in result["bare_round_s"])),
        ("seconds a round, with it", " ".join(f"{s:.2f}" for s in result["round_s"])),
    ])  # fmt: skip
    print("GOOD" if good else "NOT GOOD")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
