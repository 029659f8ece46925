"""The admin service over a root that an engine filled, in this process and without a socket."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from kvtier.admin.opened import Opened, opened
from kvtier.config.settings import Settings
from kvtier.errors import IndexUnavailable
from kvtier.index.base import SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import Sweeper
from kvtier.runtime.metrics import HIT_TOKENS, LOAD_BYTES, LOOKUP_TOKENS, Metrics
from kvtier.scheduler.engine_report import NOTE_PREFIX, About, ArenaFill, RankFigures, Reporter
from kvtier.server.app import make_app
from kvtier.server.auth import Tokens
from kvtier.server.service import Service
from kvtier.storage.root import open_root
from tests.support.rig import Engine

ADMIN, READER = "admins-token-0123456789", "readers-token-0123456789"
NEW = "another-admins-token-0123456789"
TOKENS = Tokens(ADMIN, READER)
CHUNK_TOKENS, CHUNKS = 64, 5
PROMPT = list(range(CHUNK_TOKENS * CHUNKS))
OWNER = "host-1-abc"
JOB = "0" * 32


def put(path: Path, text: str) -> None:
    """Replace a file as Kubernetes does, by renaming another one over it."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


@dataclass(frozen=True)
class Filled:
    """A root with one engine's five chunks in one closed set, and what names them."""

    path: Path
    namespace: str
    keys: tuple[str, ...]

    def settings(self, **server: object) -> Settings:
        return Settings.load(
            {"root": str(self.path), "capacity_bytes": 64 << 20, "segment_bytes": 4 << 20, "server": server}
        )


def fill(path: Path) -> Filled:
    engine = Engine(path)
    assert len(engine.save(PROMPT, list(range(4 * CHUNKS)))) == CHUNKS
    keys = tuple(key.hex() for key in engine.keys(PROMPT))
    namespace = engine.store.namespace_id.hex()
    engine.close()
    return Filled(path, namespace, keys)


class Switch(MemoryIndex):
    """An index that can be taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("is_down", "close") and self.is_down:
            raise IndexUnavailable("no answer within 50 ms")
        return super().__getattribute__(name)


@dataclass
class Serving:
    """A service with a client to it. `index`: the service's own, made from the root's files."""

    filled: Filled
    service: Service
    client: TestClient
    index: Switch

    def call(self, method: str, path: str, token: str | None = ADMIN, **options: Any) -> Any:
        headers = {**({} if token is None else {"Authorization": f"Bearer {token}"}), **options.pop("headers", {})}
        return self.client.request(method, path, headers=headers, follow_redirects=False, **options)

    def set_id(self) -> str:
        return f"{self.index.sets()[0].set_id:016x}"


def report_of_an_engine(index: MemoryIndex, namespace: str, now_s: float) -> None:
    """A note as an engine's keeper leaves it."""
    metrics = Metrics()
    reporter = Reporter(OWNER, About(1, "vllm", "0.32.0", "a-model"), metrics, lambda: now_s - 10)
    metrics.add(LOOKUP_TOKENS, 1000)
    metrics.add(HIT_TOKENS, 750)
    reporter.add(RankFigures({LOAD_BYTES: 5e6}, (ArenaFill(tier="host", size_bytes=100, used_bytes=40),), 2e9))
    reporter.took("lookup", 0.002)
    reporter.saw_hit(bytes(16), 512)
    report = reporter.report(now_s, bytes.fromhex(namespace))
    index.put_note(NOTE_PREFIX + OWNER, report.note(), now_s + 3600)


@contextmanager
def serving(filled: Filled, tokens: Tokens = TOKENS, **server: object) -> Iterator[Serving]:
    settings = filled.settings(**server)
    root = open_root(settings)
    index = Switch()
    assert Sweeper(index, root.folder, "test").rebuild() is not None
    index.rebuilt(index.loss())
    report_of_an_engine(index, filled.namespace, time.time())

    def open_it() -> Opened:
        return opened(settings, root, index)

    service = Service(settings, lambda: tokens, open_it)
    with TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False) as client:
        yield Serving(filled, service, client, index)


def more_sets(index: MemoryIndex, namespace: str, count: int, tenant: str = "") -> list[str]:
    """Registers sets without files or records, each used a second after the one before, long ago."""
    rng = random.Random(7)
    ids = []
    for number in range(count):
        set_id = (number + 1) << 20 | rng.getrandbits(20)
        used_s = 1000.0 + number
        info = SetInfo(set_id, bytes.fromhex(namespace), "", 1 << 20, used_s, used_s, is_open=False, tenant=tenant)
        assert index.create_set(info)
        ids.append(f"{set_id:016x}")
    return ids
