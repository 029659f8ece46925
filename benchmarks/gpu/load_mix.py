"""Test of 32 requests at once on a full tier that evicts, half of them on one prefix: is every byte right, and bounded?

    python -m benchmarks.gpu.load_mix --folder /dev/shm/kv --out OUT/load_mix.json

Process A stores more prefixes than fit. Process B first gets only requests on the shared prefix (how often is it
read?), then rounds of mixed hits, misses and saves. A third process without the tier answers the same: in float32,
where the order of sums does not decide a token. A timeout ends a process that hangs, with the stacks in its log.
"""

from __future__ import annotations

from typing import Any

from benchmarks import report
from benchmarks.gpu.load_judge import faults, judge
from benchmarks.gpu.setup import EngineSetup, parser

SHAPE = {"requests": 32, "shared": 8192, "other": 2048, "others": 14, "tail": 40}
TINY_SHAPE = {"requests": 8, "shared": 512, "other": 256, "others": 6, "tail": 10}
ROUNDS, ANSWER_TOKENS = 4, 16
# A token takes 64 KiB in float32: the shared prefix 512 MiB, another one 128 MiB, and 15 of them 2.3 GiB. With
# min_load_tokens at its default kvtier finds that so small a model computes faster than it loads.
TIER: dict[str, Any] = {
    "capacity_bytes": 1536 << 20,
    "segment_bytes": "128MiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
TINY_LIMITS: dict[str, Any] = {
    "capacity_bytes": 6 << 20,
    "segment_bytes": "512KiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "2MiB"},
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 16384,
    "gpu_memory_utilization": 0.4,
    "max_num_seqs": 64,
}


def show(result: dict[str, Any]) -> None:
    control, more, arenas = result["control"]["other_order"], result["more_memory"], result["arenas"]
    rounds = result["rounds_counted"]
    report.table(
        ("", "value"),
        [
            ("blocks equal / wrong / unknown", " / ".join(str(count) for count in result["blocks"].values())),
            ("same answers with the tier; largest shift of a lead", _agreement(result)),
            ("the same without it, in another order (control)", _agreement(control)),
            ("differing: round, request, token, lead, moved", [list(row.values())[:5] for row in result["differing"]]),
            ("tokens that lead by no more than a tie", f"{result['tokens_within_tie']} of {result['tokens']}"),
            ("copies of the shared prefix read", f"{result['copies_read']:.2f}"),
            ("most on disk, of capacity, MiB", f"{result['most_on_disk'] >> 20} {result['capacity_bytes'] >> 20}"),
            ("more MiB than without the tier", {name: value >> 20 for name, value in more.items()}),
            ("MiB of arenas", {name: value >> 20 for name, value in arenas.items()}),
            ("tokens loaded in each round", [int(counted.get("load_tokens", 0)) for counted in rounds]),
            ("MiB evicted in each round", [int(counted.get("evicted_bytes", 0)) >> 20 for counted in rounds]),
            ("failed loads", result["failed_loads"]),
            ("seconds a round, without the tier", [round(seconds, 2) for seconds in result["bare_round_s"]]),
            ("seconds a round, with it", [round(seconds, 2) for seconds in result["round_s"]]),
        ],
    )


def _agreement(found: dict[str, Any]) -> str:
    shared = f"{found['same_shared_answers']}/{found['shared_answers']} on the prefix alone"
    return f"{found['same_answers']}/{found['answers']}, {shared}; {found['largest_shift']:.6f}"


def main() -> int:
    options = parser("gpu.load_mix", __doc__, 100.0).parse_args()
    shape = TINY_SHAPE if options.tiny else SHAPE
    setup = EngineSetup.of(options, "small", ENGINE, TIER)
    setup.extra.update(TINY_LIMITS if options.tiny else {})
    setup.clear()
    rounds = [["shared_prefix", shape, ANSWER_TOKENS], ["mixed_rounds", shape, ROUNDS, ANSWER_TOKENS]]
    stored = setup.run_watched("load-store", [["warm_up", shape["other"]], ["store_mix", shape]])
    loaded = setup.run_watched("load-mix", rounds)
    bare = setup.run("load-bare", "none", [*rounds, ["other_order", shape, ANSWER_TOKENS, ROUNDS]])
    setup.clear()
    limits = {"token_bytes": setup.token_bytes, "capacity_bytes": setup.extra["capacity_bytes"]}
    result = judge(stored, loaded, bare, limits)
    bad = faults(result)
    content = {"good": not bad, "faults": bad, "shape": shape, "rounds": ROUNDS, "result": result}
    report.write(options.out, "concurrent mixed hits at capacity", content)
    show(result)
    print("\n".join(["NOT GOOD", *bad]) if bad else "GOOD")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
