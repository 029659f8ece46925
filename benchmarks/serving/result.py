"""What these benchmarks write: one JSON file for all systems that were asked the same, each added as it is measured."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.report import machine, versions
from benchmarks.serving.client import Answer

PERCENTILES = (50, 90, 95, 99)
ROUND_COLUMNS = ("prompt_id", "request_start", "ttft", "request_end", "successful", "is_miss", "ttft_time",
                 "prompt_tokens", "cached_tokens", "error")  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """mean, percentiles (linear between two values), min and max; empty of nothing."""
    if not seconds:
        return {}
    values = np.percentile(seconds, PERCENTILES)
    found = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(np.mean(seconds)), **found, "min": min(seconds), "max": max(seconds)}


def commit() -> str | None:
    """Of this checkout; the variable COMMIT where there is no git."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        ran = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("COMMIT")
    return os.environ.get("COMMIT") or ran.stdout.strip() or None


def cpu() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def add(path: Path, question: str, settings: dict[str, Any], system: str, found: dict[str, Any]) -> dict[str, Any]:
    """Writes what one system showed into the file, beside what is there of others; the whole as it now is.

    Each system keeps the command and the time of its own measurement. Raises SystemExit where the file holds a
    measurement with other settings: two systems are compared on the same prompts or not at all.
    """
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if known and (known.get("question"), known.get("settings")) != (question, json.loads(json.dumps(settings))):
        raise SystemExit(f"{path} holds a measurement with other settings: remove it, or give another --out")
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    head = {
        "question": question, "machine": machine() | {"cpu": cpu()}, "versions": versions("kvtier", "httpx"),
        "date": date, "commit": commit(), "settings": settings,
    }  # fmt: skip
    one = {"command": " ".join(sys.argv), "date": date, **found}
    whole = head | {"systems": known.get("systems", {}) | {system: one}}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.rename(path)
    return whole


def write_csv(path: Path, answers: Sequence[Answer]) -> None:
    """One row for each request, in the order in which they were sent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ROUND_COLUMNS)
        writer.writerows([getattr(answer, column) for column in ROUND_COLUMNS] for answer in answers)
