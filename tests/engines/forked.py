"""The test's side of forker.py: engines as processes that start in two seconds instead of ten."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
POLL_S = 0.02
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
"""The test session, which has a forker for all of its workers."""


class Forker:
    """A forker of the session: one for each Python and each of vLLM's model runners. The worker that needs it first
    starts it."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-forker-")
        self._log = Path(self._folder.name) / "log"
        self._lock = Lock()
        self._count = 0
        about = json.dumps([RUN, python, environment])
        name = f"kvtier-forker-{hashlib.sha256(about.encode()).hexdigest()}"
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [python, str(HERE / "forker.py"), name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=HERE,
                env=os.environ | environment,
            )
        self._socket = socket.socket(socket.AF_UNIX)
        while self._socket.connect_ex(f"\0{name}"):
            assert process.poll() in (None, 0), f"the forker ended:\n{self._log.read_text()[-6000:]}"
            time.sleep(POLL_S)
        self._answers = self._socket.makefile("r")
        self._read()

    def start(
        self, argv: Sequence[str], stdin: Path, stdout: Path, stderr: Path, environment: Mapping[str, str]
    ) -> Forked:
        """`argv`: a script and its arguments, as sys.argv has them there. What it prints is appended to the files."""
        with self._lock:
            self._count += 1
            ended = Path(self._folder.name) / f"{self._count}.ended"
            job: dict[str, Any] = {"argv": list(argv)}
            job |= {"stdin": str(stdin), "stdout": str(stdout), "stderr": str(stderr)}
            job |= {"ended": str(ended), "environment": dict(environment)}
            self._socket.sendall(json.dumps(job).encode() + b"\n")
            return Forked(int(self._read()), ended)

    def close(self) -> None:
        """What still runs of its engines is killed."""
        self._answers.close()
        self._socket.close()
        self._folder.cleanup()

    def _read(self) -> str:
        answer = self._answers.readline()
        assert answer, f"the forker ended:\n{self._log.read_text()[-6000:]}"
        return answer


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
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Forked:
    """A new process, forked from one that has imported vLLM; in a session of its own."""
    key = (str(python), second_runner)
    with _starting:
        if key not in _forkers:
            forker = _forkers[key] = Forker(str(python), {"ENGINE_SECOND_RUNNER": "1"} if second_runner else {})
            atexit.register(forker.close)
    return _forkers[key].start(argv, stdin, stdout, stderr, environment)
