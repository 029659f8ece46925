"""Writes the tables of the README from benchmarks/results/*.json.

python -m benchmarks.tables            # rewrites README.md between its marks
python -m benchmarks.tables --check    # exit status 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


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
    return [
        f"**A second vLLM process** (`make demo`, vLLM {result['vllm']}, {result['machine']}):", "",
        "| prompt | tokens | hit tokens | TTFT cold / reloaded | outputs identical |", "| --- | --- | --- | --- | --- |",
        *rows,
    ]  # fmt: skip


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
    return [
        f"**Records against fio** (`benchmarks/records_vs_fio.py`; direct I/O, checksums on, depth "
        f"{result['settings']['depth']}, {machine['cores']} cores of {machine['cpu']}; 100% is fio's own rate in the same "
        "minute, median of the paired runs):", "",
        "| file system | " + " | ".join(f"{size} MiB {way}" for size, way in columns) + " |",
        "| --- |" + " --- |" * len(columns), *rows,
    ]  # fmt: skip


def lookup() -> list[str]:
    """Lookup of a 100,000-token prompt against its bounds and against bare LMDB gets."""
    result = read("lookup")
    parts, targets = result["parts"], result["targets_us"]
    total, index = parts["total"]["p99_us"], parts["index"]["p99_us"]
    bare = statistics.fmean([parts["bare LMDB gets"]["p50_us"]])
    return [
        f"**Lookup of a {result['tokens']:,}-token prompt** (`benchmarks/lookup.py`; {result['chunks']} chunks, all hits, "
        f"{result['chunks_in_index']:,} chunks in the index, {result['machine']['cpu']}): hashing and index together take "
        f"{total / targets['total']:.0%} of the {targets['total'] / 1000:.0f} ms they may (99th percentile), the index "
        f"{index / targets['index']:.0%} of its {targets['index'] / 1000:.0f} ms; resolving costs "
        f"{parts['index']['p50_us'] / bare:.1f}x the bare LMDB gets of the same keys.",
    ]  # fmt: skip


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n\n".join("\n".join(section()) for section in (demo, records, lookup))
    new = f"{before}{BEGIN}\n{tables}\n\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
