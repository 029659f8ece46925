"""Runs one engine process to its end, or stops it: a process that hangs must not use up the machine."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.systems import environment_of

LOG_TAIL = 1500
_PR_SET_PDEATHSIG = 1


class EngineFailed(Exception):
    """The process ended badly or not in time; the text says where its log is and how it ends."""


def run_engine(name: str, job: dict[str, Any], out: Path, timeout_s: float) -> dict[str, Any]:
    """Results of one engine (`benchmarks.gpu.engine`): step -> what it returned. Raises EngineFailed."""
    out.mkdir(parents=True, exist_ok=True)
    job_path, result_path, log_path = (out / f"{name}{end}" for end in (".job", ".result", ".log"))
    job_path.write_text(json.dumps(job))
    result_path.unlink(missing_ok=True)
    environment = os.environ | environment_of(job["system"], Path(job["folder"])) | job.get("environment", {})
    command = [sys.executable, "-m", "benchmarks.gpu.engine", str(job_path), str(result_path), str(timeout_s)]
    started = time.monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise EngineFailed(f"{name}: not done after {timeout_s:.0f} s\n{_tail(log_path)}") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    seconds = time.monotonic() - started
    if process.returncode != 0 or not result_path.exists():
        raise EngineFailed(f"{name}: exit status {process.returncode} after {seconds:.0f} s\n{_tail(log_path)}")
    print(f"  {name}: {seconds:.0f} s", flush=True)
    results: dict[str, Any] = json.loads(result_path.read_text())
    return results | {"process_s": round(seconds, 1)}


def _tail(log_path: Path) -> str:
    return f"the end of {log_path}:\n" + log_path.read_text(errors="replace")[-LOG_TAIL:]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
