"""`kvtier serve` as a process of its own."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0  # start with the import of torch, on a busy machine, seconds
ANSWER_TIMEOUT_S = 60.0  # seconds


@dataclass
class Running:
    process: subprocess.Popen[str]
    address: str  # as it says itself, such as http://127.0.0.1:40123

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def connect(self, tls: ssl.SSLContext | None = None) -> HTTPConnection:
        if tls is not None:
            return HTTPSConnection("localhost", self.port, timeout=ANSWER_TIMEOUT_S, context=tls)
        return HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_S)

    def get(self, path: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
        connection = self.connect(tls)
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "kvtier.cli", "serve", str(config)]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")} | more


def write_config(folder: Path, root: Path, **server: Any) -> Path:
    path = folder / "serve.yaml"
    settings = {"root": str(root), "capacity_bytes": 64 << 20, "segment_bytes": 4 << 20, "chunk_tokens": 64}
    path.write_text(json.dumps(settings | {"server": {"port": 0, **server}}))  # JSON is YAML
    return path


@contextmanager
def running(config: Path, **more: str) -> Iterator[Running]:
    """Ends with the process's end, however it came."""
    process = subprocess.Popen(command(config), stderr=subprocess.PIPE, text=True, env=environment(**more))
    try:
        assert process.stderr is not None
        said = " "
        while said and " serves " not in said:  # after warnings, if there are any
            said = process.stderr.readline()
        assert said, f"it has ended with {process.wait(20)}"
        served = Running(process, said.split()[-1])
        wait_until_it_listens(served)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(ANSWER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stderr.close()


def wait_until_it_listens(served: Running) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", served.port), 1).close()
            return
        except OSError:
            assert served.process.poll() is None and time.monotonic() < deadline, "it does not listen"
            time.sleep(0.05)
