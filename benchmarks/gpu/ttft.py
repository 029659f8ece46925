"""Times to the first token in one process: computed, from vLLM's own prefix cache (the floor), and from kvtier.

    python -m benchmarks.gpu.ttft --folder /mnt/kv --out OUT/ttft.json [--hbm-arena 4GiB] [--extra '{"codec": "k4v4"}']
    python -m benchmarks.gpu.ttft --model 70b --tp 2 --out OUT/two_gpus_ttft.json       # two GPUs

One prompt of each length is computed and saved, asked again from vLLM's own cache, and then reloaded --count times from
the folder, with vLLM's cache emptied before each. --arena, --hbm-arena: also from an arena, the longest prompt alone.
benchmarks.versus reloads in new processes, beside other systems.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.setup import WARM_UP_TOKENS, EngineSetup, add_timed_engine, check_room, parser
from benchmarks.processes import EngineFailed
from benchmarks.report import spread
from benchmarks.serving.arguments import numbers

COLUMNS = ("tokens", "system", "TTFT", "of the limit")

Rows = list[dict[str, Any]]


def summary(found: dict[str, Rows], name: str) -> Rows:
    """Return a row for each length and kind: median time, hits, rate, and whether the first tokens are right."""
    rows = []
    for n_tokens in dict.fromkeys(row["tokens"] for row in found["computed"]):
        computed, own, reloaded = (
            [row for row in found[kind] if row["tokens"] == n_tokens] for kind in ("computed", "own", "reloaded")
        )
        # The first of two hits is left out, for it may still compile for the shape of a hit, and so is the first
        # reload, which fills an arena.
        for system, measured in (("computed", computed), ("floor", own[1:]), (name, reloaded[1:])):
            times = [row["ttft_s"] for row in measured]
            counted = [row["counted"] for row in measured]
            rates = [one["load_bytes"] / one["load_seconds"] for one in counted if one.get("load_seconds")]
            rows.append(
                {
                    "system": system,
                    "tokens": n_tokens,
                    "hit_tokens": min(row["hit_tokens"] for row in measured),
                    "ttft_s": median(times),
                    "all_s": times,
                    "load_bytes_s": median(rates) if rates else None,
                    "same_first_token": all(row["token"] == computed[0]["token"] for row in measured),
                }
            )
    return rows


def table_rows(rows: Rows) -> list[list[str]]:
    """Return the row of each length and system. The last column is empty ("-") in results without a limit."""
    limits = [f"{row['times_limit']:.2f}" if row.get("times_limit") else "-" for row in rows]
    return [
        [f"{row['tokens']:,}", row["system"], spread(row["all_s"]), limit]
        for row, limit in zip(rows, limits, strict=True)
    ]


def main() -> int:
    made = parser("gpu.ttft", __doc__, 280.0)
    add_timed_engine(made, 0.6)
    made.add_argument("--lengths", type=numbers, help="tokens, separated by commas")
    made.add_argument("--count", type=int, default=3, help="reloads of each prompt")
    made.add_argument("--arena", help="also from a host arena of this size")
    made.add_argument("--hbm-arena", help="also from an hbm arena of this size")
    options = made.parse_args()
    lengths = options.lengths or numbers("300,600" if options.tiny else "8192,32768,100000")
    setup = EngineSetup.timed(options)
    if not options.tiny:  # as in benchmarks.versus: what vLLM compiled for one of them serves both
        setup.llm["max_model_len"] = max(lengths) + 256
    setup.clear()
    check_room(setup.folder, sum(lengths) * setup.token_bytes)
    no_host: dict[str, Any] = {"host": {"admit": "never"}}
    runs = {"kvtier": (lengths, no_host)}
    if options.arena:
        runs["kvtier, host arena"] = (lengths[-1:], {"host": {"arena_bytes": options.arena, "admit": "always"}})
    if options.hbm_arena:
        runs["kvtier, hbm arena"] = (
            lengths[-1:],
            no_host | {"hbm": {"arena_bytes": options.hbm_arena, "admit": "saved"}},
        )
    about = {"model": setup.kind, "tp": options.tp, "folder": str(setup.folder), "extra": setup.extra, "llm": setup.llm}
    rows: Rows = []
    results: dict[str, Any] = {}
    for number, (name, (sizes, extra)) in enumerate(runs.items()):
        steps = [["warm_up", min(WARM_UP_TOKENS, lengths[0])], ["in_one_process", sizes, options.count + 1]]
        try:
            results[name] = setup.run(f"ttft-{number}", "kvtier", steps, extra)
            rows += summary(results[name]["in_one_process"], name)[0 if name == "kvtier" else 2 :]
        except EngineFailed as failure:
            print(f"FAILED {failure}", flush=True)
            results[name] = {"failed": str(failure)}
        setup.clear()
        # Written after each run: a time limit cuts off only those that follow.
        report.write(options.out, "time to the first token of a reload", about | {"rows": rows, "results": results})
    report.table(COLUMNS, table_rows(rows))
    print("first tokens are", "equal" if all(row["same_first_token"] for row in rows) else "NOT equal")
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
