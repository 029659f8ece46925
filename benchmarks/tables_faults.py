"""The tables of faults, from what tests/engines/test_chaos.py and the simulation wrote; written by benchmarks/tables.py
into tests/README.md."""

from __future__ import annotations

from typing import Any

from benchmarks.tables_common import made, table
from benchmarks.tables_cpu import RESULTS, read

COLUMNS = ["fault", "tried", "wrong tokens", "failed requests", "lost beyond what was unpublished"]


def engines() -> list[str]:
    """Real engines; nothing where they were not run yet."""
    if not has("faults_engines"):
        return []
    result = read("faults_engines")
    return [
        f"**Real engines** (`make soak`, {result['minutes']:.0f} minutes, {result['requests']:,} "
        f"requests, {result['machine']}; {made(result)}):",
        "",
        *table(COLUMNS, rows(result)),
        *(f"\nNot tried on that machine: {name}." for name in result.get("left_out", ())),
        "",
        *(["Kept over that time, medians of its first and second half after a third of it as warm-up (most):", "",
           *table(["engine", "memory of its own, MiB", "descriptors", "of segments"], kept(result))]
          if result["memory"] else []),
    ]  # fmt: skip


def simulation() -> list[str]:
    if not has("faults_simulation"):
        return []
    result = read("faults_simulation")
    return [
        f"**Simulation** ({result.get('command', 'make soak')}; {made(result)}):",
        "",
        *table(COLUMNS, rows(result)),
    ]


def has(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def rows(result: dict[str, Any]) -> list[list[str]]:
    """What must be 0 stands out where it is not."""
    return [
        [row["fault"], f"{row['tried']:,}", *(bold(row[name]) for name in ("wrong", "failed_requests", "lost"))]
        for row in result["faults"]
    ]


def bold(count: int) -> str:
    return f"**{count:,}**" if count else "0"


def kept(result: dict[str, Any]) -> list[list[str]]:
    return [[name, *(_span(one[what]) for what in ("memory_mib", "descriptors", "segment_descriptors"))]
            for name, one in result["memory"].items()]  # fmt: skip


def _span(one: dict[str, float]) -> str:
    return f"{one['first']:,.0f} to {one['last']:,.0f} ({one['most']:,.0f})"


SECTIONS = (engines, simulation)
