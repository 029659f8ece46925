"""Processes of engines and servers: started in a session of their own, and stopped with this process."""

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

LOG_TAIL = 1500  # characters of a log in an error message
_PR_SET_PDEATHSIG = 1  # prctl option: signal to send when the parent ends


class EngineFailed(Exception):
    """The process ended with an error or not in time; the text has the path and the end of its log."""


class EngineProcess:
    """One started engine. The caller must call `results` or `stop`.

    job: with "environment". module: takes the paths of job and result, and the timeout.
    """

    def __init__(
        self, name: str, job: dict[str, Any], out: Path, timeout_s: float, module: str = "benchmarks.gpu.engine"
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        job_path, self._result_path, self._log_path = (out / f"{name}{end}" for end in (".job", ".result", ".log"))
        job_path.write_text(json.dumps(job))
        self._result_path.unlink(missing_ok=True)
        self.name = name
        self._started_s = time.monotonic()
        words = [sys.executable, "-m", module, str(job_path), str(self._result_path), str(timeout_s)]
        self._process = launch(words, self._log_path, os.environ | job["environment"])

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def results(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the end of the process and return {step: its result}. Raise EngineFailed."""
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


def launch(words: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that is killed when this process ends."""
    with log_path.open("w") as log:
        return start(words, log, environment, signal.SIGKILL)


def start(
    words: Sequence[str], log: IO[str], environment: Mapping[str, str], last_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C on the terminal does not reach it.

    last_signal: sent to it when this process ends.
    """
    return subprocess.Popen(
        words,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(_end_with_parent, last_signal),
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log_path: Path, n_chars: int = LOG_TAIL) -> str:
    return f"the end of {log_path}:\n" + log_path.read_text(errors="replace")[-n_chars:]


def _end_with_parent(last_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last_signal)
