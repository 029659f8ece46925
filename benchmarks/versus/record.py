"""The result file: one entry for each process that ran, so that pieces of it may run in several calls.

An entry: {"kind", "place", "system", "repetition", "boot", "commit", "date", ...what it showed}. Kinds: alone (no
engine), bare (an engine without a tier: computed, and from its own prefix cache), store, reload. An entry of the same
kind, place, system, repetition and machine stands there once, the last one counts; failures are entries too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import report

QUESTION = "kvtier, its peers and the machine's ceilings, side by side"
KEPT = ("tokens", "hit_tokens", "ttft_s", "token", "settle_s", "passes", "skipped")
COUNTED = ("load_bytes", "load_seconds", "load_tokens")


@dataclass(frozen=True)
class Run:
    """What an entry is of."""

    kind: str
    place: str
    system: str
    repetition: int = 0


def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("kind", "place", "system", "repetition", "boot"))


def short(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an engine's requests, with what a table or a reader wants of them."""
    found = []
    for row in rows:
        counted = {name: row["counted"][name] for name in COUNTED if name in row.get("counted", {})}
        found.append({name: row[name] for name in KEPT if name in row} | counted)
    return found


class Records:
    """The file at `path`, as it is and as it grows; it is whole after each entry."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.entries: list[dict[str, Any]] = known.get("runs", [])
        self._settings = known.get("settings", {}) | settings
        self._machine = report.machine()
        self.boot = self._machine["boot"]

    def find(self, run: Run) -> dict[str, Any] | None:
        """Of this machine since it was started, over these lengths or more; failures count as nothing."""
        wanted = (run.kind, run.place, run.system, run.repetition, self.boot)
        lengths = set(self._settings.get("lengths") or ())
        for entry in self.entries:
            if key_of(entry) == wanted and "failed" not in entry and lengths <= set(entry.get("lengths") or ()):
                return entry
        return None

    def add(self, run: Run, shown: dict[str, Any]) -> None:
        head = {
            "kind": run.kind,
            "place": run.place,
            "system": run.system,
            "repetition": run.repetition,
            "boot": self.boot,
            "lengths": self._settings.get("lengths"),
            "commit": os.environ.get("COMMIT"),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "gpus": self._machine["gpus"],
            "cores": self._machine["cores"],
        }
        self.entries = [*(one for one in self.entries if key_of(one) != key_of(head)), head | shown]
        self.write()

    def write(self) -> None:
        report.write(self._path, QUESTION, {"settings": self._settings, "runs": self.entries})


def merged(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and entries of several files; of an entry that stands in two, the later one's."""
    settings: dict[str, Any] = {}
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        content = json.loads(path.read_text())
        settings |= content["settings"]
        entries |= {key_of(entry): entry for entry in content["runs"]}
    return settings, list(entries.values())
