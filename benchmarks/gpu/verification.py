"""What does it cost that each load looks at its checksums?

    python -m benchmarks.gpu.verification --folder /dev/shm/kv --out OUT/verification.json

One process stores a prompt of 100,000 tokens, a fresh one reloads it many times, with the look and without it, in
turns; off exists here alone (steps_verification.py). The cost is the median over pairs of the difference of their
times to the first token, as a share of the median time without. Goal: 2 %. Ends with status 1 when it is missed, or
when a reload was no hit.
"""

from __future__ import annotations

import argparse
import json
import shutil
from statistics import median
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.ttft import setup_of

GOAL_PERCENT = 2.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.verification", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=170.0)
    options.of_kvtier(parser, usual='{"host": {"admit": "never"}}')
    options.of_timed_engines(parser, 0.6)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=15)
    return parser.parse_args()


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds with and without (medians over the pairs), and the median difference in percent of the second."""
    times: dict[int, dict[bool, float]] = {}
    for row in rows:
        if row["verifies"] is not None:
            times.setdefault(row["pair"], {})[row["verifies"]] = row["ttft_s"]
    without_s = median(pair[False] for pair in times.values())
    difference_s = median(pair[True] - pair[False] for pair in times.values())
    return {
        "with_s": median(pair[True] for pair in times.values()), "without_s": without_s,
        "cost_percent": 100 * difference_s / without_s, "pairs": len(times),
    }  # fmt: skip


def main() -> int:
    arguments = parse()
    n_tokens = 700 if arguments.tiny else arguments.tokens
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    setup = setup_of(arguments)
    warm: list[Any] = ["warm_up", 256 if arguments.tiny else 2048]
    setup.run("verification-store", "kvtier", [warm, ["store", [n_tokens], 1]])
    rows = setup.run("verification", "kvtier", [warm, ["verified_in_turns", n_tokens, arguments.pairs]])[
        "verified_in_turns"
    ]
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    found = summary(rows)
    are_hits = all(row["hit_tokens"] >= n_tokens - 512 for row in rows)
    report.write(arguments.out, "what verification costs", {
        "model": setup.kind, "tokens": n_tokens, "folder": str(arguments.folder), "extra": setup.extra,
        "goal_percent": GOAL_PERCENT, **found, "all_hit": are_hits, "rows": rows,
    })  # fmt: skip
    print(json.dumps({name: round(value, 4) for name, value in found.items()}), "all hit" if are_hits else "NO HIT")
    return int(not are_hits or found["cost_percent"] > GOAL_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
