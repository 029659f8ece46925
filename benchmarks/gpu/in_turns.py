"""What does a constant of kvtier's change for a reload? Machines differ, and one machine from minute to minute, by more
than most constants do: so its values take turns in one process.

    python -m benchmarks.gpu.in_turns --folder /dev/shm/kv --out OUT/in_turns.json --tokens 8192 \
        --constant kvtier.load_walk:TOGETHER_AT_LEAST=8,1000000 \
        --constant kvtier.connectors.bridge:IDLE_WAIT_S=0.01,0.03

One process stores the prompt, a fresh one reloads it. Printed for each value: the median time to the first token and of
the load alone, and the median over rounds of the difference to the first value. Values are JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.report import median
from benchmarks.gpu.ttft import setup_of


def constant(text: str) -> tuple[str, str, list[Any]]:
    """MODULE:NAME=VALUE,VALUE... Raises ValueError."""
    place, _, values = text.partition("=")
    module, _, name = place.partition(":")
    found = json.loads(f"[{values}]")
    if not (module and name and len(found) > 1):
        raise ValueError(text)
    return module, name, found


def parse(text: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.in_turns", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=170.0)
    options.of_kvtier(parser, usual='{"host": {"admit": "never"}}')
    options.of_timed_engines(parser, 0.6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--constant", type=constant, action="append", required=True, help="MODULE:NAME=VALUE,VALUE...")
    return parser.parse_args(text)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a value, in the order of the first round; seconds."""
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        rounds.setdefault(row["round"], {})[json.dumps(row["value"])] = row
    kept = [found for number, found in sorted(rounds.items()) if number]
    values = list(rounds[0])
    return [
        {
            "value": value, "ttft_s": median([found[value]["ttft_s"] for found in kept]),
            "load_s": median([found[value]["counted"]["load_seconds"] for found in kept]),
            "over_first_s": median([found[value]["ttft_s"] - found[values[0]]["ttft_s"] for found in kept]),
            "rounds": len(kept),
        }
        for value in values
    ]  # fmt: skip


def main(text: Sequence[str] | None = None) -> int:
    arguments = parse(text)
    n_tokens = 700 if arguments.tiny else arguments.tokens
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    setup = setup_of(arguments)
    warm: list[Any] = ["warm_up", 256 if arguments.tiny else 2048]
    setup.run("turns-store", "kvtier", [warm, ["store", [n_tokens], 1]])
    step = ["constants_in_turns", n_tokens, arguments.rounds, arguments.constant]
    every = setup.run("turns", "kvtier", [warm, step])["constants_in_turns"]
    found = [
        {"constant": f"{module}:{name}", "values": summary(rows), "rows": rows}
        for (module, name, _), rows in zip(arguments.constant, every, strict=True)
    ]
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    report.write(arguments.out, "one constant of kvtier's at different values, in turns", {
        "tokens": n_tokens, "llm": setup.llm, "extra": setup.extra, "constants": found,
    })  # fmt: skip
    cells = [
        (each["constant"], row["value"], f"{1e3 * row['ttft_s']:.1f}", f"{1e3 * row['load_s']:.1f}",
         f"{1e3 * row['over_first_s']:+.2f}", row["rounds"])
        for each in found for row in each["values"]
    ]  # fmt: skip
    report.table(("constant", "value", "TTFT ms", "load ms", "to the first value", "rounds"), cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
