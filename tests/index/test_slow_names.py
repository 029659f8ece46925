"""A name server that does not answer: redis-py waits for it, and the scheduler's thread does not."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.index import BreakerSettings
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.open import LOOKUP_THREADS, open_lookups
from kvtier.index.redis.index import RedisIndex
from kvtier.runtime.metrics import Metrics
from tests.redis_server import has_redis, index_settings, standalone

from index_data import key

HANGS_S = 20.0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """As with name servers that drop every question."""
    is_over, look_up = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "redis.test":
            is_over.wait(HANGS_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield is_over
    is_over.set()


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.test:6379/0",
        "rediss://redis.test:6379/0",
        "redis+cluster://redis.test:6379",
        "redis+sentinel://redis.test:26379/kv",
    ],
)
def test_lookups_do_not_wait_for_a_name_server(hanging: threading.Event, url: str) -> None:
    index = RedisIndex(index_settings(url))
    breaker = Breaker(BreakerSettings(failures=3, pause_first_ms=500, pause_max_ms=15000), random.Random(1))
    lookups = open_lookups(GuardedIndex(index, breaker, QueueBounds(10, 10_000), Metrics()))
    for number in range(LOOKUP_THREADS + 2):  # also when all threads hang
        began = time.monotonic()
        assert lookups.resolve([key(number)], str(number)) is None
        assert time.monotonic() - began < HANGS_S / 2
    hanging.set()
    deadline_s, found = time.monotonic() + HANGS_S, None
    while found is None and time.monotonic() < deadline_s:
        found = lookups.resolve([key(0)], "0")
    assert found is not None and found.entries == [] and not found.is_answer
    lookups.close()


@has_redis
def test_a_name_that_is_found_leads_there(tmp_path: Path) -> None:
    with standalone(tmp_path) as server:
        index = RedisIndex(index_settings(f"redis://localhost:{server.port}/0"))
        index.bind("a root")
        assert index.was_reset
        index.close()
