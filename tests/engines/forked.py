"""The test's side of forker.py: engines as processes that start in two seconds instead of ten."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

HERE = Path(__file__).parent
POLL_S = 0.02


class Forker:
    """One for each Python and each of vLLM's model runners, in each process of the tests."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-forker-")
        self._log = Path(self._folder.name) / "log"
        self._lock = Lock()
        self._count = 0
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / "forker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=HERE,
                text=True,
                env=os.environ | environment,
            )
        self._read("ready")

    def start(self, argv: Sequence[str], stdin: Path, stdout: Path, stderr: Path) -> Forked:
        """`argv`: a script and its arguments, as sys.argv has them there. What it prints is appended to the files."""
        with self._lock:
            self._count += 1
            ended = Path(self._folder.name) / f"{self._count}.ended"
            job = {"argv": list(argv), "stdin": str(stdin), "stdout": str(stdout), "stderr": str(stderr)}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job | {"ended": str(ended)}) + "\n")
            self._process.stdin.flush()
            return Forked(int(self._read()), ended)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._folder.cleanup()

    def _read(self, wanted: str | None = None) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if wanted in (None, line.strip()):  # vLLM's import may print as well
                return line
        raise AssertionError(f"the forker ended:\n{self._log.read_text()[-6000:]}")


class Forked:
    """A process that a forker became; as much of subprocess.Popen as is used of one."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        if self.returncode is None and self._ended.exists():
            self.returncode = int(self._ended.read_text())
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} runs after {timeout_s} s")
            time.sleep(POLL_S)
        return status

    def kill(self) -> None:
        """It and what it started, and waits until it is gone."""
        os.killpg(self.pid, signal.SIGKILL)
        self.wait(10.0)


_forkers: dict[tuple[str, bool], Forker] = {}
_starting = Lock()


def start(
    argv: Sequence[str],
    stdout: Path,
    stderr: Path,
    stdin: Path = Path(os.devnull),
    python: Path | str = sys.executable,
    second_runner: bool = False,
) -> Forked:
    """A new process, forked from one that has imported vLLM; in a session of its own."""
    key = (str(python), second_runner)
    with _starting:
        if key not in _forkers:
            forker = _forkers[key] = Forker(str(python), {"ENGINE_SECOND_RUNNER": "1"} if second_runner else {})
            atexit.register(forker.close)
    return _forkers[key].start(argv, stdin, stdout, stderr)
