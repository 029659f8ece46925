"""The tables of faults: what must be 0 and is not stands out, and what was not tried is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables_cpu, tables_faults

ROW = {"fault": "bits flipped", "tried": 1200, "wrong": 0, "failed_requests": 0, "lost": 0, "met": 7}
HALVES = {"first": 100.0, "last": 101.0, "most": 103.0}


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, result: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"commit": "abc", "date": "2026-11-22", "command": "x"} | result))
    for module in (tables_cpu, tables_faults):
        monkeypatch.setattr(module, "RESULTS", folder)


def test_there_is_no_table_of_what_was_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables_faults, "RESULTS", tmp_path)
    assert [section() for section in tables_faults.SECTIONS] == [[], []]


def test_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = {"engine-0": dict.fromkeys(("memory_mib", "descriptors", "segment_descriptors"), HALVES)}
    rows = [ROW, ROW | {"fault": "reads hang", "wrong": 1, "lost": 20}]
    about = {"minutes": 30.2, "requests": 9000, "machine": "2 cores", "memory": kept, "left_out": ["the disk full"]}
    put(monkeypatch, tmp_path, "faults_engines", about | {"faults": rows})
    text = "\n".join(tables_faults.engines())
    assert "| bits flipped | 1,200 | 0 | 0 | 0 |" in text
    assert "| reads hang | 1,200 | **1** | 0 | **20** |" in text
    assert "Not tried on that machine: the disk full." in text
    assert "| engine-0 | 100 to 101 (103) |" in text and "30 minutes, 9,000 requests" in text


def test_simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(monkeypatch, tmp_path, "faults_simulation", {"faults": [ROW]})
    assert "| bits flipped | 1,200 | 0 | 0 | 0 |" in tables_faults.simulation()
