"""Writes the tables of README.md, and those of benchmarks and tests, between their marks, from benchmarks/results.

python -m benchmarks.tables            # rewrites them
python -m benchmarks.tables --check    # exit status 1 when one of them is not what the results say
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    tables_codecs,
    tables_common,
    tables_cpu,
    tables_eviction,
    tables_faults,
    tables_gpu,
    tables_headline,
    tables_quality,
    tables_redis,
    tables_serving,
    tables_versus,
)

ROOT = Path(__file__).resolve().parent.parent
CPU_MARKS = ("<!-- measured: begin -->\n", "<!-- measured: end -->\n")
GPU_MARKS = ("<!-- measured on a GPU: begin -->\n", "<!-- measured on a GPU: end -->\n")

Sections = Sequence[Callable[[], list[str]]]


def between(text: str, marks: tuple[str, str], sections: Sections) -> str:
    """The text with what stands between the marks made anew. Raises ValueError where a mark is not there once."""
    begin, end = marks
    before, rest = text.split(begin)
    _, after = rest.split(end)
    texts = ("\n".join(section()) for section in sections)
    tables = "\n\n".join(text for text in texts if text)  # what was not run yet has none
    return f"{before}{begin}\n{tables}\n\n{end}{after}"


def files() -> dict[Path, tuple[tuple[tuple[str, str], Sections], ...]]:
    """What stands between which marks of which file."""
    is_known = tables_quality.RESULT.exists()
    quality, why_no_sketch = (tables_quality.SECTIONS, (tables_quality.sketch,)) if is_known else ((), ())
    return {
        ROOT / "README.md": ((CPU_MARKS, (*tables_headline.SECTIONS, *why_no_sketch, tables_cpu.demo_in_short)),),
        ROOT / "tests" / "README.md": ((CPU_MARKS, tables_faults.SECTIONS),),
        ROOT / "benchmarks" / "README.md": (
            (
                CPU_MARKS,
                (
                    *tables_cpu.SECTIONS,
                    tables_eviction.eviction,
                    tables_redis.redis_index,
                    *tables_serving.SECTIONS,
                ),
            ),
            (
                GPU_MARKS,
                (
                    tables_headline.others,
                    *tables_versus.SECTIONS,
                    *tables_gpu.SECTIONS,
                    *tables_codecs.SECTIONS,
                    *quality,
                ),
            ),
        ),
    }


def drawings() -> dict[Path, str]:
    """Plots that belong to the tables."""
    drawn = tables_versus.drawing()
    beside = {} if drawn is None else {tables_common.RESULTS / tables_versus.PLOT: drawn}
    return beside | tables_serving.drawings() | tables_quality.drawings()


def main() -> int:
    is_check = "--check" in sys.argv[1:]
    stale = []
    for path, drawn in drawings().items():
        if not path.exists() or path.read_text() != drawn:
            stale.append(path)
            if not is_check:
                path.write_text(drawn)
    for path, parts in files().items():
        text = new = path.read_text()
        for marks, sections in parts:
            new = between(new, marks, sections)
        if new != text:
            stale.append(path)
            if not is_check:
                path.write_text(new)
    return int(bool(stale) and is_check)


if __name__ == "__main__":
    sys.exit(main())
