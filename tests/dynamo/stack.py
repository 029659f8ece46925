"""Dynamo's processes for a test: the scripts of configs/dynamo, a small model, requests, and the router's log."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.model import make_model, size_of

SCRIPTS = Path(__file__).resolve().parents[2] / "configs" / "dynamo"
START_TIMEOUT_S = 400
REPLY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 40
MODEL = size_of(256, 512, 4, 2, 64, 0.26)
NAME = "tiny"
PROMPT_TOKENS = 1500
CHUNK_TOKENS, BLOCK_TOKENS = 256, 32
STORED_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
STORED_BLOCKS = STORED_TOKENS // BLOCK_TOKENS
CACHE_BLOCKS = 160  # of each engine's own cache: three prompts and a bit, so that four more push one out
ENGINE = f"--max-model-len 4096 --enforce-eager --dtype float32 --num-gpu-blocks-override {CACHE_BLOCKS}".split()
SETTINGS = """\
root: {root}
capacity_bytes: 1GiB
segment_bytes: 16MiB
min_load_tokens: 256
host:
  arena_bytes: 64MiB
"""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUERIED = re.compile(r"Queried lower-tier indexer storage_tier=(\w+) queried_workers=(\d+) matched_workers=(\d+)")
SELECTED = re.compile(
    r'Selected worker router_mode="kv" request_id="[^"]*" worker_id=(\d+) worker_type=(\w+).* logit=([\d.]+)'
    r".* disk_blocks=(\d+)"
)


@dataclass(frozen=True)
class Choice:
    """What the router wrote when it chose a worker. disk_workers: that have blocks of the prompt in the tier, behind
    what is in their own caches; disk_blocks: how many the chosen one has."""

    worker: int
    kind: str
    logit: float
    disk_blocks: int
    disk_workers: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Reply:
    """cached: prompt tokens that were not computed. choices: of the router, for prefill and decode workers."""

    text: str
    cached: int
    worker: int
    choices: tuple[Choice, ...]


def prompt(seed: int, n_tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 4000) for _ in range(n_tokens)]


class Stack:
    """Scripts that run, in `folder`. python: of the environment that has ai-dynamo, vLLM and kvtier."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder = folder
        make_model(folder / "model", MODEL)
        self.settings = folder / "kvtier.yaml"
        self.settings.write_text(SETTINGS.format(root=folder / "root"))
        self._python = python
        self._scripts: list[subprocess.Popen[bytes]] = []
        self._ports = free_ports(40)
        self._read_to = 0

    def launch(self, script: str, **variables: str) -> None:
        """Runs one of the scripts, beside those that run already: RUN is its folder for logs."""
        environment = (
            os.environ
            | {
                "MODEL": str(self.folder / "model"),
                "NAME": NAME,
                "PYTHON": str(self._python),
                "DEVICE": "cpu",
                "KVTIER_CONFIG": str(self.settings),
                "STORE": str(self.folder / "store"),
                "RUN": str(self.folder / "run"),
                "HTTP_PORT": str(self._ports),
                "SYSTEM_PORT": str(self._ports + 10),
                "EVENTS_PORT": str(self._ports + 20),
                "NIXL_PORT": str(self._ports + 30),
                "DYN_LOG": "debug",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            | variables
        )
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        command = [str(SCRIPTS / script), *ENGINE]
        self._scripts.append(subprocess.Popen(command, env=environment, cwd=self.folder, start_new_session=True))

    def wait_for(self, n_workers: int) -> list[int]:
        """Ids of the workers, when so many are there and answer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = [script.args for script in self._scripts if script.poll() is not None]
            assert not ended, f"{ended} ended; see the logs in {self.folder}"
            workers = self._workers()
            if len(workers) == n_workers and self._models():
                return workers
            time.sleep(1.0)
        raise TimeoutError(f"{n_workers} workers did not come; see the logs in {self.folder}")

    def ask(self, tokens: list[int], n_tokens: int = 32, worker: int | None = None, salt: str | None = None) -> Reply:
        """worker: sends it there, whatever the router would do."""
        self.choices()
        answer = self.generate(tokens, n_tokens, worker, salt)
        where = answer["nvext"]["worker_id"]["decode_worker_id"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Reply(answer["choices"][0]["text"], cached, where, tuple(self.choices()))

    def generate(self, tokens: list[int], n_tokens: int, worker: int | None = None, salt: str | None = None) -> Any:
        """The frontend's answer."""
        extra: dict[str, Any] = {"extra_fields": ["worker_id"]}
        if worker is not None:
            extra["backend_instance_id"] = worker
        body = {"model": NAME, "prompt": tokens, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        if salt is not None:
            body["cache_salt"] = salt
        return self._http("/v1/completions", body | {"nvext": extra})

    def choices(self) -> list[Choice]:
        """What the router wrote since this was asked last."""
        (log,) = self.folder.glob("run*/frontend.log")
        with log.open("rb") as file:
            file.seek(self._read_to)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        self._read_to += sum(len(line.encode()) for line in lines)
        found, before = [], ""
        disk_workers = 0
        for line in (COLOURS.sub("", line).strip() for line in lines):
            if (queried := QUERIED.search(line)) and queried[1] == "Disk":
                disk_workers, before = int(queried[3]), queried[0]
            elif selected := SELECTED.search(line):
                worker, kind, logit, blocks = selected.groups()
                shown = tuple(text for text in (before, selected[0]) if text)
                found.append(Choice(int(worker), kind, float(logit), int(blocks), disk_workers, shown))
                disk_workers, before = 0, ""
        return found

    def counter(self, number: int, name: str) -> float:
        """One of vLLM's counters in the process whose metrics are at the system port + `number`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports + 10 + number}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    def worker_at(self, number: int) -> int:
        """The id of the worker whose metrics are there: they bear it in hexadecimal."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports + 10 + number}/metrics", timeout=10) as answer:
            found = re.search(r'worker_id="([0-9a-f]+)"', answer.read().decode())
        assert found is not None
        return int(found[1], 16)

    def evict_all(self) -> str:
        """All of the tier, as somebody at a shell does."""
        done = subprocess.run(
            [str(self._python.parent / "kvtier"), "evict", "--all", "--yes", str(self.settings)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.splitlines()[-1]

    def stop(self) -> None:
        for script in self._scripts:
            script.send_signal(signal.SIGTERM)
        for script in self._scripts:
            try:
                script.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)

    def _workers(self) -> list[int]:
        try:
            instances = self._http("/health")["instances"]
        except (OSError, KeyError):
            return []
        return sorted({each["instance_id"] for each in instances if each["endpoint"] == "generate"})

    def _models(self) -> bool:
        try:
            return bool(self._http("/v1/models")["data"])
        except OSError:
            return False

    def _http(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._ports}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return json.load(error)
            raise


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody listens on, below those that connections are given."""
    for first in random.Random().sample(range(15_000, 30_000, count), 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free ports")
