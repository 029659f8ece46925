"""A name server that does not answer: a connection is waited for as long as the settings say, and no longer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from redis.connection import Connection

from kvtier.errors import IndexUnavailable
from kvtier.index.redis_connections import THREADS, Connector, is_address
from kvtier.index.redis_index import RedisIndex
from tests.redis_server import has_redis, index_settings, standalone

CONNECT_MS = 150.0
HANGS_S = 20.0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with name servers that drop every question."""
    is_over, look_up = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "redis.test":
            is_over.wait(HANGS_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield
    is_over.set()


@pytest.mark.parametrize(
    "url",
    ["redis://redis.test:6379/0", "rediss://redis.test:6379/0", "redis+cluster://redis.test:6379",
     "redis+sentinel://redis.test:26379/kv"],
)  # fmt: skip
def test_a_name_that_is_not_found_costs_no_more_than_a_dead_server(hanging: None, url: str) -> None:
    index = RedisIndex(index_settings(url).model_copy(update={"connect_timeout_ms": CONNECT_MS}))
    for _ in range(THREADS + 2):  # also when all threads hang
        began = time.monotonic()
        with pytest.raises(IndexUnavailable):
            index.bind("a root")
        assert time.monotonic() - began < CONNECT_MS / 1000 + 2.0
    index.close()


@has_redis
def test_a_name_that_is_found_leads_there(tmp_path: Path) -> None:
    with standalone(tmp_path) as server:
        index = RedisIndex(index_settings(f"redis://localhost:{server.port}/0"))
        index.bind("a root")
        assert index.was_reset
        index.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that drops what is sent to it, as IPv6 does behind many a firewall: nobody takes what waits there."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.2", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(server.getsockname())
        yield server.getsockname()


def test_a_name_of_two_addresses_leads_to_the_one_that_answers(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def both(host: Any, *rest: Any, **options: Any) -> Any:
        return [found for ip in (silent[0], "127.0.0.1") for found in look_up(ip, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    connector = Connector()
    with socket.create_server(("127.0.0.1", silent[1])):
        timely = connector.timely(Connection)
        made = timely(host="redis.test", port=silent[1], socket_connect_timeout=1.0)._connect()
        assert made.getpeername() == ("127.0.0.1", silent[1])
        made.close()
    connector.close()


class Made:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_what_comes_too_late_is_closed_and_a_fault_is_passed_on() -> None:
    connector, made, may_go = Connector(), Made(), threading.Event()

    def late() -> Made:
        assert may_go.wait(HANGS_S)
        return made

    def refused() -> Made:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(TimeoutError):
        connector.run(late, 0.05)
    assert not made.is_closed
    may_go.set()
    deadline = time.monotonic() + HANGS_S
    while not made.is_closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.is_closed
    assert connector.run(Made, 5.0).is_closed is False
    with pytest.raises(ConnectionRefusedError):
        connector.run(refused, 5.0)
    connector.close()


def test_addresses_need_no_thread() -> None:
    assert all(map(is_address, ("127.0.0.1", "::1", "fe80::1%eth0")))
    assert not any(map(is_address, ("localhost", "redis.example", "10.0.0")))
