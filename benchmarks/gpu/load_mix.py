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


def table_rows(found: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a measure."""
    controls = ", ".join(f"{one['same_answers']} of {one['answers']}" for one in found["control"].values())
    blocks = found["blocks"]
    return ["measure", "value"], [
        ["answers equal to an engine without the tier", f"{found['same_answers']} of {found['answers']}"],
        ["answers of that engine equal to its own, asked again (control)", controls],
        [
            "loaded blocks equal / not equal",
            f"{blocks['equal']:,} / {report.bold(blocks['wrong'] + blocks['unknown'])}",
        ],
        ["failed loads", report.bold(found["failed_loads"])],
    ]


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
    report.table(*table_rows(result))
    print("\n".join(["NOT GOOD", *bad]) if bad else "GOOD")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
