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
    tables_cpu,
    tables_eviction,
    tables_faults,
    tables_gpu,
    tables_headline,
    tables_quality,
    tables_redis,
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
    quality = tables_quality.SECTIONS if tables_quality.RESULT.exists() else ()
    return {
        ROOT / "README.md": ((CPU_MARKS, (*tables_headline.SECTIONS, tables_cpu.demo_in_short)),),
        ROOT / "tests" / "README.md": ((CPU_MARKS, tables_faults.SECTIONS),),
        ROOT / "benchmarks" / "README.md": (
            (CPU_MARKS, (*tables_cpu.SECTIONS, tables_eviction.eviction, tables_redis.redis_index)),
            (GPU_MARKS, (tables_headline.others, *tables_gpu.SECTIONS, *tables_codecs.SECTIONS, *quality)),
        ),
    }


def main() -> int:
    stale = []
    for path, parts in files().items():
        text = new = path.read_text()
        for marks, sections in parts:
            new = between(new, marks, sections)
        if new != text:
            stale.append(path)
            if "--check" not in sys.argv[1:]:
                path.write_text(new)
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
