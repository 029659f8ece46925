"""Starts vLLM's server for a benchmark and stops it, also after errors.

The server runs in a session of its own, so that Ctrl-C on the terminal reaches only the benchmark, which then stops the
server in order: what kvtier has on its way is stored. It does not outlive a benchmark that is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.systems import kvtier_transfer, native_transfer
from benchmarks.processes import free_port, start, tail

ROOT_NAME = "benchmark-tier"
MODULE = "vllm.entrypoints.openai.api_server"
SHUTDOWN_TIMEOUT_S = 15  # vLLM's default, 0, kills its workers before they have stored what is on its way
STOP_TIMEOUT_S = SHUTDOWN_TIMEOUT_S + 45.0
POLL_S = 0.1
LOG_TAIL = 3000  # characters


@dataclass(frozen=True)
class ServedSystem:
    """tier: "kvtier", "native" (vLLM's own tiering) or "". has_prefix_cache: vLLM keeps its own KV for later requests.
    keeps: the tier's root stays as the system before it left it. extra: settings of the tier."""

    what: str
    tier: str
    has_prefix_cache: bool
    keeps: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


SYSTEMS = {
    "nocache": ServedSystem("every prompt computed", "", has_prefix_cache=False),
    "prefix": ServedSystem("vLLM's own prefix cache, no tier", "", has_prefix_cache=True),
    "cache": ServedSystem("kvtier alone", "kvtier", has_prefix_cache=False),
    "kvtier": ServedSystem("kvtier below vLLM's own prefix cache", "kvtier", has_prefix_cache=True),
    "restarted": ServedSystem("another process on what kvtier stored", "kvtier", has_prefix_cache=True, keeps=True),
    "kvtier-k4v4": ServedSystem("kvtier with codec k4v4", "kvtier", True, extra={"codec": "k4v4"}),
    "native": ServedSystem("vLLM's own tiering, on GPUs alone", "native", True),
}


@dataclass(frozen=True)
class ServerSetup:
    """Common part of all systems of a comparison.

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
        """A folder below the one that is named: it is emptied, and others may use the named one."""
        return Path(self.tier.get("root", self.work)) / ROOT_NAME

    def command(self, system: ServedSystem, port: int) -> list[str]:
        caching = "--enable-prefix-caching" if system.has_prefix_cache else "--no-enable-prefix-caching"
        words = [*self.program, "--model", self.model, "--host", "127.0.0.1", "--port", str(port), caching]
        words += ["--enable-prompt-tokens-details", "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
        if system.tier == "native":
            words += ["--kv-transfer-config", json.dumps(native_transfer(self.root, self.native | system.extra))]
        elif system.tier:
            settings = self.tier | system.extra | {"root": str(self.root)}
            words += ["--kv-transfer-config", json.dumps(kvtier_transfer(settings))]
        return [*words, *self.arguments]


class ServerFailed(Exception):
    """The server ended or did not come up; the text has the end of its log."""


@contextmanager
def running(setup: ServerSetup, name: str) -> Iterator[str]:
    """Start a server of this system, yield its URL (without /v1), and stop it. Raise ServerFailed."""
    port = free_port()
    log = setup.work / f"server-{name}.log"
    process = launch(setup.command(SYSTEMS[name], port), log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, url, log, setup.start_timeout_s)
        yield url
    finally:
        stop(process)


def launch(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the server. Raise ServerFailed."""
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


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server; kill it and all that it started if it does not end, or if this is interrupted too."""
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


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
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
