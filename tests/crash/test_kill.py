"""SIGKILL at 20 random moments of a writer: what is offered afterwards is right, and `verify` finds nothing bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = 20
SEED = 20261120


def test_killed_writers_leave_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.kill_writers", str(tmp_path), str(KILLS), str(SEED)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # the rig derives a block's content from hashes
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == KILLS
    assert [result["bad"] for result in results] == [[]] * KILLS
    assert sum(result["wrong"] for result in results) == 0
    assert sum(result["failed"] for result in results) == 0
    assert results[-1]["loaded"] >= 20, "the writers saved next to nothing; the test proves nothing"
