"""Result of these benchmarks: one JSON file for all systems that got the same prompts, each added when measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report

PERCENTILES = (50, 90, 95, 99)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles (linear between two values), min and max; {} for no values."""
    if not seconds:
        return {}
    values = np.percentile(seconds, PERCENTILES)
    found = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(np.mean(seconds)), **found, "min": min(seconds), "max": max(seconds)}


def known(path: Path, question: str, settings: dict[str, Any], system: str) -> dict[str, Any]:
    """Return what the file holds of other systems. Call it before anything is measured.

    Raise SystemExit if it holds a measurement with other settings (two systems are compared on the same prompts or not
    at all) or something else, and if it or what is beside it cannot be written.
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
    """Make the file if it is missing, and return it. Raise SystemExit if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None
    return path


def add(path: Path, question: str, settings: dict[str, Any], system: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write one system's figures into the file beside those of others, and return the whole.

    Each system keeps the command, the time and the commit of its own measurement. Raise SystemExit as `known` does.
    """
    others = known(path, question, settings, system).get("systems", {})
    head = report.head(question)
    one = {"command": " ".join(sys.argv), "date": head["date"], "commit": head["commit"], **found}
    content = {"settings": settings, "systems": others | {system: one}}
    report.write(path, question, content, "kvtier", "httpx")
    return head | content
