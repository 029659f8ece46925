"""What tests of benchmarks that ask a server have in common: a stand-in for vLLM, and the wrapper around it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAKE_ENGINE = f"{sys.executable} {HERE / 'fake_engine.py'}"
TIMEOUT_S = 300
# The stand-in has counted before it answers, so nothing waits for that.
WRAPPER = "import runpy\nfrom benchmarks.serving import counters\ncounters.COUNTED_S = 0.0\n"
WRAPPER += "runpy.run_module('benchmarks.serving', run_name='__main__')"


class Wrapper:
    """python -m benchmarks.serving in a process of its own, with results and logs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "result.json"
        self._engines = folder / "engines.jsonl"

    def start(
        self, benchmark: str, own: Sequence[str] = (), flags: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WRAPPER, benchmark, "--model", "a-model", "--program", FAKE_ENGINE]
        words += ["--work", str(self.folder), "--out", str(self.out), *own, "--", *flags]
        variables = os.environ | {"FAKE_ENGINE_LOG": str(self._engines)} | environment
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        )

    def run(
        self, benchmark: str, own: Sequence[str] = (), flags: Sequence[str] = (), **environment: str
    ) -> tuple[int, str]:
        """Status, and all that it printed."""
        process = self.start(benchmark, own, flags, **environment)
        printed, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, printed

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found

    def engines(self) -> list[Any]:
        """Lines that the stand-ins for vLLM wrote."""
        return [json.loads(line) for line in self._engines.read_text().splitlines()] if self._engines.exists() else []

    def wait_for(self, line: object) -> None:
        self.wait_until(lambda: line in self.engines())

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < deadline, f"engines: {self.engines()}"
            time.sleep(0.05)

    def engine_pid(self) -> int:
        return int(next(line["pid"] for line in self.engines() if "pid" in line))


def is_gone(pid: int) -> bool:
    """Waits for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
