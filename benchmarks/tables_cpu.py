"""Tables of what ran on a CPU, from benchmarks/results/*.json; written by benchmarks/tables.py.

They stand in benchmarks/README.md; the README has a line on the demo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables_common import made, table

RESULTS = Path(__file__).resolve().parent / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo() -> list[str]:
    """`make demo`: time to the first token, computed against reloaded by another process."""
    result = read("demo")
    rows = [[row["name"], f"{row['tokens']:,}", f"{row['hit_tokens']:,}", f"{row['cold_s'] / row['warm_s']:.1f}x",
             "yes" if row["identical"] else "NO"] for row in result["rows"]]  # fmt: skip
    return [
        f"**A second vLLM process** (`make demo`, vLLM {result['vllm']}, {result['machine']}; {made(result)}):",
        "",
        *table(["prompt", "tokens", "hit tokens", "TTFT cold / reloaded", "outputs identical"], rows),
    ]


def demo_in_short() -> list[str]:
    """For the README: its longest prompt, and whether all outputs were those of the first process."""
    result = read("demo")
    longest = max(result["rows"], key=lambda row: int(row["hit_tokens"]))
    same = sum(row["identical"] for row in result["rows"])
    times = longest["cold_s"] / longest["warm_s"]
    return [
        f"**The demo** (`make demo`, vLLM {result['vllm']} on a CPU, {result['machine']}; {made(result)}): the first "
        f"token after {longest['tokens']:,} stored ones comes {times:.0f} times sooner in the second process; "
        f"{same} of {len(result['rows'])} outputs are identical."
    ]


def records() -> list[str]:
    """Records written and read at queue depth with checksums on, as a share of fio's direct I/O."""
    result = read("records_vs_fio")
    places: dict[str, dict[tuple[int, str], str]] = {}
    for cell in result["cells"]:
        shares = [100 * ours / fio for ours, fio in zip(cell["ours"], cell["fio"], strict=True)]
        text = f"{cell['percent_of_fio']:.0f}% ({min(shares):.0f}-{max(shares):.0f})"
        places.setdefault(cell["place"], {})[cell["record_mib"], cell["direction"]] = text
    columns = [(size, way) for size in (4, 32) for way in ("write", "read")]
    machine, pairs = result["machine"], len(result["cells"][0]["ours"])
    return [
        f"**Records against fio** (`benchmarks/records_vs_fio.py`, {machine['cores']} cores of {machine['cpu']}; "
        "direct I/O, checksums on, queue depth 8, 4 on tmpfs; 100% is fio's own rate at that depth in the same minute; "
        f"median of {pairs} paired runs, in brackets the lowest and the highest; {made(result)}):",
        "",
        *table(["file system", *(f"{size} MiB {way}" for size, way in columns)],
               [[place, *(row[column] for column in columns)] for place, row in places.items()]),
    ]  # fmt: skip


def lookup() -> list[str]:
    """Lookup of a 100,000-token prompt against its bounds and against bare LMDB gets."""
    result = read("lookup")
    parts, targets = result["parts"], result["targets_us"]
    total, index, bare_us = parts["total"], parts["index"], parts["bare LMDB gets"]["p50_us"]
    what = f"{result['chunks']} chunks, all hits, {result['chunks_in_index']:,} chunks in the index"
    when = made(result | {"commit": result["machine"]["commit"][:7]})
    return [
        f"**Lookup of a {result['tokens']:,}-token prompt** (`benchmarks/lookup.py`, {result['machine']['cpu']}; {what}"
        f"; {when}):",
        "",
        *table(["part", "may take", "median", "99th percentile"], [
            limited("tokens to keys, and the index", total, targets["total"]),
            limited("the index alone", index, targets["index"]),
        ]),
        "",
        f"Resolving costs {index['p50_us'] / bare_us:.1f}x the bare LMDB gets of the same keys.",
    ]  # fmt: skip


def limited(what: str, part: dict[str, float], target_us: float) -> list[str]:
    """A row: what a part took, and its share of what it may take."""
    took = [f"{part[name] / 1000:.2f} ms, {part[name] / target_us:.0%}" for name in ("p50_us", "p99_us")]
    return [what, f"{target_us / 1000:.0f} ms", *took]


SECTIONS: tuple[Callable[[], list[str]], ...] = (demo, records, lookup)
