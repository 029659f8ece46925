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
ROUND_COLUMNS = (
    "prompt_id",
    "request_start",
    "ttft",
    "request_end",
    "successful",
    "is_miss",
    "ttft_time",
    "prompt_tokens",
    "cached_tokens",
    "error",
)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """mean, percentiles (linear between two values), min and max; empty of nothing."""
    if not seconds:
        return {}
    values = np.percentile(seconds, PERCENTILES)
    found = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(np.mean(seconds)), **found, "min": min(seconds), "max": max(seconds)}


def commit() -> str | None:
    """The variable COMMIT, or that of this checkout."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        ran = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("COMMIT")
    return os.environ.get("COMMIT") or ran.stdout.strip() or None


def cpu() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def known(path: Path, question: str, settings: dict[str, Any], system: str) -> dict[str, Any]:
    """What the file holds of other systems; to be asked before anything is measured, which would else be for nothing.

    Raises SystemExit where it holds a measurement with other settings (two systems are compared on the same prompts or
    not at all) or something else, and where it or what lies beside it could not be written.
    """
    if not system or "/" in system:
        raise SystemExit(f"--system {system!r}: it becomes the name of a folder")
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} holds no result: {error}") from None
    if not isinstance(found, dict):
        raise SystemExit(f"{path} holds no result")
    if found and (found.get("question"), found.get("settings")) != (question, json.loads(json.dumps(settings))):
        raise SystemExit(f"{path} holds a measurement with other settings: remove it, or give another --out")
    writable(path.with_name(f"{path.name}.part")).unlink()
    return found


def writable(path: Path) -> Path:
    """The file, which is there then. Raises SystemExit."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None
    return path


def add(path: Path, question: str, settings: dict[str, Any], system: str, found: dict[str, Any]) -> dict[str, Any]:
    """Writes what one system showed into the file, beside what is there of others; the whole as it now is.

    Each system keeps the command, the time and the commit of its own measurement. Raises SystemExit as `known` does.
    """
    others = known(path, question, settings, system).get("systems", {})
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    head = {
        "question": question,
        "machine": machine() | {"cpu": cpu()},
        "versions": versions("kvtier", "httpx"),
        "date": date,
        "commit": commit(),
        "settings": settings,
    }
    one = {"command": " ".join(sys.argv), "date": date, "commit": head["commit"], **found}
    whole = head | {"systems": others | {system: one}}
    part = path.with_name(f"{path.name}.part")
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
