"""Starts vLLM's server for a benchmark and stops it, whatever happens in between.

The server runs in a session of its own, so that Ctrl-C on the terminal reaches the benchmark alone, which then stops
the server in order: what kvtier has on its way is stored. It does not outlive a benchmark that is killed.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.gpu.processes import start, tail
from benchmarks.gpu.systems import kvtier_transfer, native_transfer

ROOT_NAME = "benchmark-tier"
MODULE = "vllm.entrypoints.openai.api_server"
SHUTDOWN_TIMEOUT_S = 15
"""vLLM's default, 0, kills its workers before they have stored what is on its way."""
STOP_TIMEOUT_S = SHUTDOWN_TIMEOUT_S + 45.0
POLL_S = 0.1
LOG_TAIL = 3000


@dataclass(frozen=True)
class System:
    """tier: what is connected, "kvtier", "native" (vLLM's own tiering) or nothing. has_prefix_cache: vLLM keeps its own
    KV for the next request. keeps: the tier's root is left as the system before it left it. extra: the tier's settings
    that make the difference."""

    what: str
    tier: str
    has_prefix_cache: bool
    keeps: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


SYSTEMS = {
    "nocache": System("every prompt computed", "", has_prefix_cache=False),
    "prefix": System("vLLM's own prefix cache, no tier", "", has_prefix_cache=True),
    "cache": System("kvtier alone", "kvtier", has_prefix_cache=False),
    "kvtier": System("kvtier below vLLM's own prefix cache", "kvtier", has_prefix_cache=True),
    "restarted": System("another process on what kvtier stored", "kvtier", has_prefix_cache=True, keeps=True),
    "kvtier-k4v4": System("kvtier with codec k4v4", "kvtier", True, extra={"codec": "k4v4"}),
    "native": System("vLLM's own tiering, on GPUs alone", "native", True),
}


@dataclass(frozen=True)
class Setup:
    """What all systems of a comparison have in common.

    program: the command that becomes the server. arguments: more of vLLM's. tier: kvtier's settings; native: those of
    vLLM's own tiering. work: for logs, and for the tier's root where kvtier's settings name none.
    """

    model: str
    work: Path
    tier: dict[str, Any]
    arguments: Sequence[str] = ()
    program: Sequence[str] = (sys.executable, "-m", MODULE)
    start_timeout_s: float = 1800.0
    native: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """A folder of its own below the one that is named: it is emptied, and others may use that one."""
        return Path(self.tier.get("root", self.work)) / ROOT_NAME

    def command(self, system: System, port: int) -> list[str]:
        caching = "--enable-prefix-caching" if system.has_prefix_cache else "--no-enable-prefix-caching"
        words = [
            *self.program,
            "--model",
            self.model,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            caching,
            "--enable-prompt-tokens-details",
            "--shutdown-timeout",
            str(SHUTDOWN_TIMEOUT_S),
        ]
        if system.tier:
            words += ["--kv-transfer-config", json.dumps(self.transfer(system))]
        return [*words, *self.arguments]

    def transfer(self, system: System) -> dict[str, Any]:
        if system.tier == "native":
            return native_transfer(self.root, self.native | system.extra)
        return kvtier_transfer(self.tier | system.extra | {"root": str(self.root)})


class ServerFailed(Exception):
    """The server ended or did not come up; the text has the end of its log."""


PORTS = (10_000, 30_000)


def free_port() -> int:
    """Below those that systems give to connections: between now and the server's start, one of them may get such a one
    (vLLM's own processes connect to each other meanwhile)."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def running(setup: Setup, name: str) -> Iterator[str]:
    """The URL (without /v1) of a server of this system, which is up; it is stopped at the end. Raises ServerFailed."""
    port = free_port()
    log = setup.work / f"server-{name}.log"
    process = launch(setup.command(SYSTEMS[name], port), log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, url, log, setup.start_timeout_s)
        yield url
    finally:
        stop(process)


class Process(Protocol):
    """As much of subprocess.Popen as is used of a server."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def launch(command: Sequence[str], log: Path) -> Process:
    """Raises ServerFailed."""
    with log.open("w") as out:
        print(f"$ {shlex.join(command)}", file=out, flush=True)
        try:
            return start(command, out, os.environ | environment(), signal.SIGTERM)
        except OSError as error:
            raise ServerFailed(f"{command[0]}: {error.strerror}") from None


def environment() -> dict[str, str]:
    """Return the environment of a server's process: nothing is downloaded or reported; what is set already stays."""
    usual = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By itself vLLM computes on one core less where any kv_transfer_config is set: systems would not be alike.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }
    return {name: os.environ.get(name, value) for name, value in usual.items()}


def stop(process: Process) -> None:
    """Asks it to end, and kills it and all that it started when it does not, or when this is interrupted too."""
    try:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"server {process.pid} did not end within {STOP_TIMEOUT_S:.0f} s and is killed", file=sys.stderr)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(process: Process, url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with status {process.poll()}\n{tail(log, LOG_TAIL)}")
        try:
            if httpx.get(f"{url}/health", timeout=POLL_S * 20).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server is not up after {timeout_s:.0f} s\n{tail(log, LOG_TAIL)}")
        time.sleep(POLL_S)
