"""Runs one engine process to its end, or stops it: a process that hangs must not use up the machine."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.systems import environment_of

LOG_TAIL = 1500
_PR_SET_PDEATHSIG = 1


class EngineFailed(Exception):
    """The process ended badly or not in time; the text says where its log is and how it ends."""


class EngineProcess:
    """One engine (`benchmarks.gpu.engine`), started. It does not outlive this process. Whoever made it calls
    `results`, or `stop`."""

    def __init__(self, name: str, job: dict[str, Any], out: Path, timeout_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        job_path, self._result_path, self._log_path = (out / f"{name}{end}" for end in (".job", ".result", ".log"))
        job_path.write_text(json.dumps(job))
        self._result_path.unlink(missing_ok=True)
        self.name = name
        self._started_s = time.monotonic()
        environment = os.environ | environment_of(job["system"], Path(job["folder"])) | job.get("environment", {})
        words = [sys.executable, "-m", "benchmarks.gpu.engine", str(job_path), str(self._result_path), str(timeout_s)]
        self._process = launch(words, self._log_path, environment)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def results(self, timeout_s: float) -> dict[str, Any]:
        """Step -> what it returned, once the process has ended. Raises EngineFailed."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise EngineFailed(f"{self.name}: not done after {timeout_s:.0f} s\n{tail(self._log_path)}") from None
        except BaseException:
            self.stop()
            raise
        seconds = time.monotonic() - self._started_s
        if self._process.returncode != 0 or not self._result_path.exists():
            status = self._process.returncode
            raise EngineFailed(f"{self.name}: exit status {status} after {seconds:.0f} s\n{tail(self._log_path)}")
        print(f"  {self.name}: {seconds:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(self._result_path.read_text())
        return found | {"process_s": round(seconds, 1)}

    def stop(self) -> None:
        stop(self._process)


def run_engine(name: str, job: dict[str, Any], out: Path, timeout_s: float) -> dict[str, Any]:
    """Results of one engine: step -> what it returned. Raises EngineFailed."""
    return EngineProcess(name, job, out, timeout_s).results(timeout_s)


def launch(words: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own, killed with this process."""
    with log_path.open("w") as log:
        return start(words, log, environment, signal.SIGKILL)


def start(
    words: Sequence[str], log: IO[str], environment: Mapping[str, str], last_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C on the terminal does not reach it. last_signal: what it gets when this
    process ends."""
    return subprocess.Popen(
        words,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(_end_with_parent, last_signal),
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills it and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log_path: Path, n_chars: int = LOG_TAIL) -> str:
    return f"the end of {log_path}:\n" + log_path.read_text(errors="replace")[-n_chars:]


def _end_with_parent(last_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last_signal)
