"""Runs a module of the tests in a process of its own, where Triton compiles, from nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def lines_of(module: str, cache: Path, timeout_s: float) -> list[Any]:
    """What `python -m module` prints, a JSON value a line. cache: an empty folder, so that no kernel is an older one.

    The interpreter is off, whatever it is here. Raises AssertionError with the end of stderr when the module fails.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    answer = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]
