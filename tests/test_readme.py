"""What the README says was measured is what benchmarks/results holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables, tables_gpu


def test_tables_are_those_of_the_results() -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0, "run python -m benchmarks.tables"


def test_a_lost_mark_is_an_error() -> None:
    """Without its marks a table would go stale unseen."""
    with pytest.raises(ValueError):
        tables.between("no marks here", tables.GPU_MARKS, tables_gpu.SECTIONS)


def test_shares_are_not_taken_of_another_runs_ceiling() -> None:
    result, ceilings = tables_gpu.read("ttft_tmpfs"), tables_gpu.read("ceilings_host")
    assert tables_gpu.ceiling_of(result, ceilings) == result["limit_bytes_s"]
    with pytest.raises(ValueError):
        tables_gpu.ceiling_of(result, tables_gpu.read("ceilings"))


def test_a_goal_that_is_missed_is_named() -> None:
    text = "\n".join(tables_gpu.ttft())
    missed, met = text.split("Met: ")
    for row in tables_gpu.read("ttft_tmpfs")["rows"]:
        if row["system"] == "kvtier":
            is_met = row["ttft_s"] <= tables_gpu.TTFT_GOALS_S[row["tokens"]]
            assert f"{row['tokens']:,} tokens from tmpfs" in (met if is_met else missed.split("Missed: ")[1])
