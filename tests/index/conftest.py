"""One Redis for the tests of a file, and indexes in it that end with their test."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvtier.index.redis.index import RedisIndex
from tests.redis_server import Connect, Server, index_settings, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with standalone(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Yield the server, emptied, with all rights of its default user restored."""
    running.cli("flushall")
    running.cli("acl", "setuser", "default", "reset", "on", "nopass", "~*", "&*", "+@all")
    yield running


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    """Yield a function that opens an index of the server, optionally with a prefix and a clock of its own."""
    with ExitStack() as stack:

        def connected(clock: Callable[[], float] = time.time, prefix: str = "kvtier") -> RedisIndex:
            index = RedisIndex(index_settings(server.url, prefix), clock)
            stack.callback(index.close)
            return index

        yield connected
