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
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.load_judge import CONTROLS, faults, judge, more_memory, parts
from benchmarks.gpu.models import DIMENSIONS, make_model
from benchmarks.gpu.processes import run_engine
from benchmarks.gpu.tiny import TINY_ENGINE, TINY_ENVIRONMENT, TINY_TIER

SHAPE = {"requests": 32, "shared": 8192, "other": 2048, "others": 14, "tail": 40}
TINY_SHAPE = {"requests": 8, "shared": 512, "other": 256, "others": 6, "tail": 10}
TIER: dict[str, Any] = {
    "capacity_bytes": "1536MiB",
    "segment_bytes": "128MiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
"""Of float32, 64 KiB a token: the shared prefix takes 512 MiB, another one 128 MiB, and 15 of them 2.3 GiB.
min_load_tokens: left to itself, kvtier finds that so small a model computes faster than it loads."""
TINY_LIMITS: dict[str, Any] = {
    "capacity_bytes": "6MiB",
    "segment_bytes": "512KiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "2MiB"},
}
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 16384,
    "gpu_memory_utilization": 0.4,
    "max_num_seqs": 64,
}
ANSWER_TOKENS = 16


def job_of(arguments: argparse.Namespace, system: str, steps: list[list[Any]]) -> dict[str, Any]:
    kind = "tiny" if arguments.tiny else "small"
    tier = TINY_TIER | TINY_LIMITS if arguments.tiny else TIER
    llm = TINY_ENGINE if arguments.tiny else ENGINE | {"dtype": arguments.dtype}
    return {
        "model": str(make_model(kind, arguments.models)),
        "vocabulary": DIMENSIONS[kind].vocabulary,
        "system": system,
        "folder": str(arguments.folder),
        "extra": tier | json.loads(arguments.extra) if system == "kvtier" else {},
        "llm": llm,
        "steps": steps,
        "watch": system == "kvtier",
        "environment": TINY_ENVIRONMENT if arguments.tiny else {},
    }


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.load_mix", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=100.0)
    options.of_kvtier(parser)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(text)


def show(result: dict[str, Any]) -> None:
    blocks, memory = result["blocks"], result["memory"]
    more = [f"{more_memory(memory, kind) >> 20}" for kind in ("device_used", "own_max", "mapped_max")]
    arenas = [f"{sum(of[kind] for of in memory['arenas']) >> 20}" for kind in ("device", "host")]
    controls = [(f"control, {name}", _agreement(result["control"][name])) for name in CONTROLS]
    report.table(
        ("what", "value"),
        [
            ("blocks equal / wrong / unknown", f"{blocks['equal']} / {blocks['wrong']} / {blocks['unknown']}"),
            ("same answers: rounds, shared alone; largest shift", ""),
            ("with the tier", _agreement(result)),
            *controls,
            (
                "tokens that lead by no more than a tie's width",
                f"{result['tokens_within_tie']}/{result['tokens']} by {result['tie_width']:.6f}",
            ),
            ("where not the same: round, request, token, lead, moved", _differing(result)),
            *((f"{name}: the same", _differing(result["control"][name])) for name in CONTROLS),
            ("tier against own_hits, rounds", f"{result['same_answers_as_own_hits']}/{result['answers']}"),
            (
                "tokens hit in the rounds, with the tier and own_hits",
                f"{result['hit_tokens']:,} {result['control']['own_hits']['hit_tokens']:,}",
            ),
            ("shared prefix hit, of", f"{max(result['shared_hit_tokens'])} of {result['shared_tokens']}"),
            ("copies of it read", f"{result['copies_read']:.2f}"),
            ("most on disk of capacity", f"{result['most_on_disk'] >> 20} of {result['capacity_bytes'] >> 20} MiB"),
            ("MiB more than without the tier: GPU, host, mapped files", " ".join(more)),
            ("MiB of arenas, GPU and host", " ".join(arenas)),
            (
                "tokens loaded in each round",
                " ".join(f"{c.get('load_tokens', 0):,.0f}" for c in result["rounds_counted"]),
            ),
            (
                "evicted in each round, MiB",
                " ".join(f"{c.get('evicted_bytes', 0) / (1 << 20):,.1f}" for c in result["rounds_counted"]),
            ),
            ("evicted in all", f"{result['evicted_bytes'] / (1 << 20):.1f} MiB"),
            ("failed loads", result["failed_loads"]),
            ("seconds a round, without the tier", " ".join(f"{s:.2f}" for s in result["bare_round_s"])),
            ("seconds a round, with it", " ".join(f"{s:.2f}" for s in result["round_s"])),
        ],
    )


def _agreement(found: dict[str, Any]) -> str:
    return (
        f"{found['same_answers']}/{found['answers']}, {found['same_shared_answers']}/{found['shared_answers']}; "
        f"{found['largest_shift']:.6f}"
    )


def _differing(found: dict[str, Any]) -> str:
    return (
        "; ".join(
            f"{d['round']}, {d['request']}, {d['token']}, {d['lead']:.6f}, {d['moved']:.6f}" for d in found["differing"]
        )
        or "-"
    )


def main() -> int:
    arguments = parse()
    shape = TINY_SHAPE if arguments.tiny else SHAPE
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rounds = [["shared_prefix", shape, ANSWER_TOKENS], ["mixed_rounds", shape, arguments.rounds, ANSWER_TOKENS]]
    storing = job_of(arguments, "kvtier", [["warm_up", shape["other"]], ["store_mix", shape]])
    stored = run_engine("load-store", storing, arguments.logs, arguments.timeout)
    loaded = run_engine("load-mix", job_of(arguments, "kvtier", rounds), arguments.logs, arguments.timeout)
    hits = [[answer["hit_tokens"] for answer in part] for part in parts(loaded)]
    again = [["other_order", shape, ANSWER_TOKENS, arguments.rounds], ["own_hits", shape, ANSWER_TOKENS, hits]]
    bare = run_engine("load-bare", job_of(arguments, "none", rounds + again), arguments.logs, arguments.timeout)
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    kind, element_bytes = ("tiny", 4) if arguments.tiny else ("small", 4 if arguments.dtype == "float32" else 2)
    limits = {
        "shared_tokens": shape["shared"],
        "token_bytes": DIMENSIONS[kind].token_bytes(element_bytes),
        "capacity_bytes": 6 << 20 if arguments.tiny else 1536 << 20,
    }
    result = judge(stored, loaded, bare, limits)
    bad = faults(result)
    report.write(
        arguments.out,
        "concurrent mixed hits at capacity",
        {
            "good": not bad,
            "faults": bad,
            "dtype": arguments.dtype,
            "shape": shape,
            "rounds": arguments.rounds,
            "process_s": [process["process_s"] for process in (stored, loaded, bare)],
            "result": result,
        },
    )
    show(result)
    print("\n".join(["NOT GOOD", *bad]) if bad else "GOOD")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
