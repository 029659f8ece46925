"""Processes of engines and servers: started in a session of their own, and stopped with this process."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

PORTS = (10_000, 20_000)  # below those that systems give to connections; a Redis cluster's bus takes 10,000 above
REDIS_START_S = 30.0
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


def free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def redis_server(logs: Path, *words: str, program: Path | None = None) -> Iterator[int]:
    """Run a server that keeps nothing on disk; yield its port. program: folder with it and its libraries."""
    port, log = free_port(), logs / "redis.log"
    command = ["redis-server" if program is None else str(program / "redis-server"), "--port", str(port)]
    command += ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(logs), *words]
    if program is not None:
        Path(command[0]).chmod(0o755)  # a transfer may lose it
    process = launch(command, log, os.environ | ({} if program is None else {"LD_LIBRARY_PATH": str(program)}))
    try:
        deadline = time.monotonic() + REDIS_START_S
        while True:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"redis-server does not start: {log.read_text()}")
            time.sleep(0.05)
        yield port
    finally:
        stop(process)


def tail(log_path: Path, n_chars: int = LOG_TAIL) -> str:
    return f"the end of {log_path}:\n" + log_path.read_text(errors="replace")[-n_chars:]


def _end_with_parent(last_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last_signal)
