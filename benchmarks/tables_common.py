"""What the tables are made with: a GPU's results as they were written, rows, numbers as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "gpu"
CHUNK_TOKENS = 256
NAMES = {"computed": "computed", "floor": "floor", "kvtier": "kvtier", "native": "vLLM's own tiering",
         "lmcache": "LMCache's GDS backend"}  # fmt: skip
PEERS = ("native", "lmcache")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def has(name: str) -> bool:
    """Whether it has been run at all."""
    return (RESULTS / f"{name}.json").exists()


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def span(values: list[float], digits: int = 0) -> str:
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def milliseconds(row: dict[str, Any]) -> str:
    """The median; beside it the span, or every value where a prompt was not hit whole."""
    times = [1000 * seconds for seconds in row["all_s"]]
    text = f"{1000 * row['ttft_s']:,.0f}"
    if row["system"] != "computed" and row["hit_tokens"] <= row["tokens"] - CHUNK_TOKENS:
        every = ", ".join(f"{value:,.0f}" for value in times)
        return f"{text} ({every}: hits of {row['hit_tokens']:,} tokens and more)"
    return text if len(times) == 1 else f"{text} ({min(times):,.0f}-{max(times):,.0f})"


Rows = dict[int, dict[str, dict[str, Any]]]
"""Of benchmarks.gpu.ttft, by length and system."""


def by_length(result: dict[str, Any]) -> Rows:
    found: Rows = {}
    for row in result["rows"]:
        found.setdefault(row["tokens"], {})[row["system"]] = row
    return found


def code_of(result: dict[str, Any]) -> str:
    """Which kvtier ran: what who ran it noted of that, or the commit."""
    note = str(result.get("note", ""))
    commit = str(result.get("commit") or "")[:7] or "a commit not written down"
    return note if note.startswith("kvtier at ") else f"kvtier at {commit}"


def forwards(settings: dict[str, Any]) -> str:
    """How an engine with these arguments launched its forwards. Results that say nothing are of eager engines."""
    return "eager" if settings.get("enforce_eager", not settings) else "compiled and with CUDA graphs (vLLM's default)"


SHARED = ", on a machine of four GPUs while other experiments ran on the other ones"
"""Their kernels were not disturbed by that; what a CPU or the host's memory has part in was: the floor, which is
vLLM's alone, took twice as long there."""


MARK = "‡"


def mark(name: str) -> str:
    """What a line that is too short for `made` says of a run on a shared machine."""
    return f" {MARK}" * is_shared(read(name))


def made(result: dict[str, Any]) -> str:
    """Of which code a result is, of which day, and whether other work ran beside it (lanes of run_h200.sh)."""
    return f"{code_of(result)}, {result['date'][:10]}{SHARED * is_shared(result)}"


def is_shared(result: dict[str, Any]) -> bool:
    """Nothing else asks for a machine of four: no experiment has so many."""
    machine = result.get("machine")
    return isinstance(machine, dict) and len(machine.get("gpus", ())) == 4


def judged(goals: list[tuple[bool, str]]) -> str:
    """What was missed comes first; what was met is named too."""
    missed = [text for is_met, text in goals if not is_met]
    met = [text for is_met, text in goals if is_met]
    parts = ([f"**Missed: {'; '.join(missed)}.**"] if missed else []) + ([f"Met: {'; '.join(met)}."] if met else [])
    return " ".join(parts)
