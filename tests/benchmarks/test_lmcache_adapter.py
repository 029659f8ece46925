"""benchmarks/lmcache_adapter.py over a program that answers as `lmcache bench l2` does: rates, turns, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lmcache_adapter
from benchmarks.lmcache_adapter import Case, adapters, copy, main, run_lmcache

CASE_BYTES = 1 << 20
FAKE = """#!{python}
import json, sys
words = sys.argv[1:]
flags = dict(zip(words, words[1:]))
assert words[:2] == ["bench", "l2"] and json.loads(flags["--l2-adapter"])["type"]
n = int(flags["--num-keys"])
row = {{"duration_avg_ms": 100.0, "total_keys": n, "total_success": n - {lost}, "rounds_timed_out": 0}}
metrics = {{"config": {{}}, "op_0": row | {{"operation": "Store"}}, "op_1": row | {{"operation": "Load"}}}}
open(flags["--output"], "w").write(json.dumps({{"metrics": metrics}}))
print({verdict!r})
"""


def fake(folder: Path, lost: int = 0, verdict: str = "[Verify] All 2 keys data verified OK.") -> Path:
    program = folder / "lmcache"
    program.write_text(FAKE.format(python=sys.executable, lost=lost, verdict=verdict))
    program.chmod(0o755)
    return folder


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, CASE_BYTES, 2, 1)


def test_the_rate_is_that_of_all_objects_of_a_task(case: Case, tmp_path: Path) -> None:
    rates = run_lmcache(fake(tmp_path), {"type": "fs"}, case)
    assert rates == {"Store": pytest.approx(2 * CASE_BYTES / 0.1 / 1e9), "Load": pytest.approx(2 * CASE_BYTES / 1e8)}


@pytest.mark.parametrize(("lost", "verdict"), [(1, "data verified OK"), (0, "[Verify] 1/2 keys have data mismatches!")])
def test_what_did_not_come_back_is_no_rate(case: Case, tmp_path: Path, lost: int, verdict: str) -> None:
    with pytest.raises(SystemExit, match="went well|did not come back"):
        run_lmcache(fake(tmp_path, lost, verdict), {"type": "fs"}, case)


def test_the_ceiling_writes_and_reads_all_of_it(case: Case) -> None:
    rates = copy(case.folder, case)
    assert rates.keys() == {"Store", "Load"} and min(rates.values()) > 0
    written = sorted(case.folder.iterdir())
    assert [path.stat().st_size for path in written] == [CASE_BYTES] * 4


def test_each_system_has_its_turn_and_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lmcache_adapter, "environment", lambda version: fake(tmp_path))
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    flags = ["--dir", str(work), "--object-mib", "1", "--submit-bytes", str(2 << 20), "--rounds", "1", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["lmcache_adapter", *flags, "--out", str(out), "--note", "alone"])
    assert main() == 0
    found: dict[str, Any] = json.loads(out.read_text())
    systems = ["copy", *adapters(Case(work, CASE_BYTES, 2, 1))]
    assert [row["system"] for row in found["rows"]] == [name for name in systems for _ in range(2)]
    assert all(len(row["gb_s"]) == 2 for row in found["rows"]) and found["note"] == "alone"
    assert list(work.iterdir()) == [] and "of copy" in capsys.readouterr().out
