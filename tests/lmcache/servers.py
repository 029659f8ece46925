"""LMCache's own server and its own client (`lmcache bench server`) as processes, and what they print."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lmcache.lmcache_environment import OUTSIDE
from tests.objects.rig import SMALL
from tests.redis_server import free_port
from tests.waiting import wait_until

START_TIMEOUT_S, BENCH_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 240.0, 60.0
CHUNKS = 4  # of each of the client's requests: 1,024 tokens
SHAPE = "(2,256,16,4,64):float16:8"  # of the KV: 8 layers of 4 heads of 64; a chunk of 256 tokens is an object of 2 MiB
OBJECT_BYTES = 2 << 20
_LOOKUP = re.compile(r"\[seq (\d+)/(cold|warm)\] LOOKUP: (\d+)/\d+ chunks hit")
_CHECKSUM = re.compile(r"\[seq (\d+)/(cold|warm)\] CHECKSUM: (\w+) ")
_MOVED = re.compile(r"\[seq (\d+)/(cold|warm)\] (STORE|RETRIEVE): (\w+) ")


def adapter(root: Path) -> str:
    room = {"capacity_bytes": "512MiB", "segment_bytes": "32MiB", "host": {"arena_bytes": "32MiB"}}
    return json.dumps(
        {
            "type": "native_plugin",
            "module_path": "kvtier.connectors.lmcache",
            "class_name": "KVTierConnector",
            "adapter_params": {"settings": {"root": str(root), **SMALL, **room}, "object_bytes": [OBJECT_BYTES]},
        }
    )


@dataclass
class Request:
    """What the client said of one request. digest: of the KV, as it was stored or as it was loaded."""

    hits: int = -1
    digest: str = ""
    stored: str = ""
    retrieved: str = ""


class Server:
    """log: all that it printed."""

    def __init__(self, programs: Path, spec: str, folder: Path, name: str) -> None:
        self.programs = programs
        self.port, self.log_path = free_port(), folder / f"{name}.log"
        web = free_port()
        words = f"server --host 127.0.0.1 --port {self.port} --http-host 127.0.0.1 --http-port {web} --l1-size-gb 0.5"
        words += " --disable-metrics --eviction-policy LRU --supported-transfer-mode auto --l2-adapter"
        command = [str(programs / "lmcache"), *words.split(), spec]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **OUTSIDE})

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_up(self) -> None:
        wait_until(lambda: self._is_up(), "the server's start", START_TIMEOUT_S)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log[-4000:]
        return "Application startup complete" in self.log

    def loaded(self) -> list[tuple[int, int]]:
        """(chunks from its memory, chunks from L2) of each of its lookups that found something, in order."""
        found = re.findall(r"retained keys \((\d+) L1, (\d+) L2\)", self.log)
        return [(int(of_memory), int(of_l2)) for of_memory, of_l2 in found]

    def ask(self, first: int, end: int) -> dict[tuple[int, str], Request]:
        """Each request of [first, end) twice, cold and warm: what is missing is stored, what is found is loaded into
        KV that was zeroed before the warm one."""
        words = f"bench server --mode cpu --rpc-url tcp://127.0.0.1:{self.port} --num-tokens {CHUNKS * 256}"
        words += f" --start {first} --end {end} --interval 0.3 --kvcache-shape-spec"
        command = [str(self.programs / "lmcache"), *words.split(), SHAPE]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=BENCH_TIMEOUT_S, env={**os.environ, **OUTSIDE}
        )
        assert ran.returncode == 0 or "Done." in ran.stdout, ran.stdout[-3000:] + ran.stderr[-1000:]
        requests = {(number, kind): Request() for number in range(first, end) for kind in ("cold", "warm")}
        for number, kind, hits in _LOOKUP.findall(ran.stdout):
            requests[int(number), kind].hits = int(hits)
        for number, kind, digest in _CHECKSUM.findall(ran.stdout):
            requests[int(number), kind].digest = digest
        for number, kind, what, status in _MOVED.findall(ran.stdout):
            setattr(requests[int(number), kind], {"STORE": "stored", "RETRIEVE": "retrieved"}[what], status)
        return requests

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def server_on(root: Path, programs: Path, folder: Path, name: str, spec: str = "") -> Iterator[Server]:
    """spec: of its adapter; "": the usual one."""
    server = Server(programs, spec or adapter(root), folder, name)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()
