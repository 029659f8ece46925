"""SIGKILL at 12 random moments of a writer: chunks that are offered afterwards are right, chunks that were reported as
saved are offered, and `verify` finds nothing bad."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEED = 20261120


def kill_writers(root: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """What was found after each kill; asserts that nothing of it is wrong."""
    command = [sys.executable, "-m", "tests.crash.kill_writers", str(root), str(kills), str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # the rig derives a block's content from hashes
    done = subprocess.run(command, capture_output=True, text=True, timeout=90 * kills, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == kills
    assert [result["bad"] for result in results] == [[]] * kills
    assert sum(result["wrong"] for result in results) == 0
    assert sum(result["failed"] for result in results) == 0
    assert [result["lost"] for result in results] == [0] * kills, "it was told to be saved"
    return results


def test_killed_writers_leave_nothing_wrong(tmp_path: Path) -> None:
    results = kill_writers(tmp_path, 12, SEED)
    assert results[-1]["loaded"] >= 15, "the writers saved next to nothing; the test proves nothing"
    assert results[-1]["claimed"] >= 15


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_many_killed_writers_leave_nothing_wrong(tmp_path: Path, seed: int) -> None:
    """200 kills; each root is killed 20 times over, so that what was left is met by the next writer."""
    results = kill_writers(tmp_path, 20, seed)
    print(f"seed {seed}: {results[-1]['records']} records verified, {results[-1]['loaded']} chunks loaded, none wrong")
