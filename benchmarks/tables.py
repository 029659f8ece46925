"""Writes the tables of the README from benchmarks/results/*.json; those of a GPU are made by tables_gpu.py.

python -m benchmarks.tables            # rewrites README.md between its marks
python -m benchmarks.tables --check    # exit status 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables_gpu

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CPU_MARKS = ("<!-- measured: begin -->\n", "<!-- measured: end -->\n")
GPU_MARKS = ("<!-- measured on a GPU: begin -->\n", "<!-- measured on a GPU: end -->\n")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo() -> list[str]:
    """`make demo`: time to the first token, computed against reloaded by another process."""
    result = read("demo")
    rows = [
        f"| {row['name']} | {row['tokens']:,} | {row['hit_tokens']:,} | {row['cold_s'] / row['warm_s']:.1f}x | "
        f"{'yes' if row['identical'] else 'NO'} |"
        for row in result["rows"]
    ]
    where = f"`make demo`, vLLM {result['vllm']}, {result['machine']}"
    return [
        f"**A second vLLM process** ({where}):",
        "",
        "| prompt | tokens | hit tokens | TTFT cold / reloaded | outputs identical |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]


def records() -> list[str]:
    """Records written and read at queue depth with checksums on, as a share of fio's direct I/O."""
    result = read("records_vs_fio")
    cells: dict[str, dict[tuple[int, str], float]] = {}
    for cell in result["cells"]:
        cells.setdefault(cell["place"], {})[cell["record_mib"], cell["direction"]] = cell["percent_of_fio"]
    columns = [(size, way) for size in (4, 32) for way in ("write", "read")]
    rows = [
        f"| {place} | " + " | ".join(f"{row[column]:.0f}%" for column in columns) + " |" for place, row in cells.items()
    ]
    machine = result["machine"]
    where = f"`benchmarks/records_vs_fio.py`, {machine['cores']} cores of {machine['cpu']}"
    what = (
        "direct I/O, checksums on, queue depth 8, 4 on tmpfs; 100% is fio's own rate at that depth in the same minute"
    )
    return [
        f"**Records against fio** ({where}; {what}; median of the paired runs):",
        "",
        "| file system | " + " | ".join(f"{size} MiB {way}" for size, way in columns) + " |",
        "| --- |" + " --- |" * len(columns),
        *rows,
    ]


def lookup() -> list[str]:
    """Lookup of a 100,000-token prompt against its bounds and against bare LMDB gets."""
    result = read("lookup")
    parts, targets = result["parts"], result["targets_us"]
    total, index, bare_us = parts["total"], parts["index"], parts["bare LMDB gets"]["p50_us"]
    where = f"`benchmarks/lookup.py`, {result['machine']['cpu']}"
    what = f"{result['chunks']} chunks, all hits, {result['chunks_in_index']:,} chunks in the index"
    return [
        f"**Lookup of a {result['tokens']:,}-token prompt** ({where}; {what}):",
        "",
        "| part | share of what it may take, median | 99th percentile |",
        "| --- | --- | --- |",
        share("tokens to keys, and the index", total, targets["total"]),
        share("the index alone", index, targets["index"]),
        "",
        f"Resolving costs {index['p50_us'] / bare_us:.1f}x the bare LMDB gets of the same keys.",
    ]


def share(what: str, part: dict[str, float], target_us: float) -> str:
    """A row: what a part took of what it may take."""
    return (
        f"| {what}: {target_us / 1000:.0f} ms | {part['p50_us'] / target_us:.0%} | {part['p99_us'] / target_us:.0%} |"
    )


def between(text: str, marks: tuple[str, str], sections: Sequence[Callable[[], list[str]]]) -> str:
    """The text with what stands between the marks made anew. Raises ValueError where a mark is not there once."""
    begin, end = marks
    before, rest = text.split(begin)
    _, after = rest.split(end)
    texts = ("\n".join(section()) for section in sections)
    tables = "\n\n".join(text for text in texts if text)  # what was not run yet has none
    return f"{before}{begin}\n{tables}\n\n{end}{after}"


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = between(text, CPU_MARKS, (demo, records, lookup))
    new = between(new, GPU_MARKS, tables_gpu.SECTIONS)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
