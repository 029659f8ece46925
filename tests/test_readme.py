"""What the README says was measured is what benchmarks/results holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_tables_are_those_of_the_results() -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0, "run python -m benchmarks.tables"
