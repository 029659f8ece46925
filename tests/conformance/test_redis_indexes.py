"""The index in Redis under the one suite: one server, one behind TLS and an ACL, and a cluster of three masters."""

import random
import uuid
from collections.abc import Iterator

import pytest

from kvtier.config.index import BreakerSettings, IndexSettings
from kvtier.index.base import Index
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.memory import MemoryIndex
from kvtier.index.redis.index import RedisIndex
from kvtier.runtime.metrics import Metrics
from tests.redis_server import (
    Server,
    cluster,
    cluster_url,
    has_openssl,
    has_redis,
    index_settings,
    standalone,
    tls_and_acl,
)

from index_suite import IndexSuite

pytestmark = has_redis


def opened(settings: IndexSettings) -> Iterator[Index]:
    """An empty index: one under a prefix of its own."""
    index = RedisIndex(settings.model_copy(update={"prefix": f"kvtier-{uuid.uuid4().hex[:8]}"}))
    index.bind("a root")
    yield index
    index.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with standalone(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, IndexSettings]]:
    """A server that speaks TLS only, and lets nobody in but one user with a client certificate and few rights."""
    with tls_and_acl(tmp_path_factory.mktemp("tls")) as found:
        yield found


class TestStandalone(IndexSuite):
    @pytest.fixture
    def index(self, server: Server) -> Iterator[Index]:
        yield from opened(index_settings(server.url))


class TestCluster(IndexSuite):
    @pytest.fixture
    def index(self, servers: list[Server]) -> Iterator[Index]:
        yield from opened(index_settings(cluster_url(servers[:1])))


@has_openssl
class TestTlsAndAcl(IndexSuite):
    @pytest.fixture
    def index(self, guarded: tuple[Server, IndexSettings]) -> Iterator[Index]:
        yield from opened(guarded[1])


class TestGuarded(IndexSuite):
    """The guard forgets no method, and changes nothing of an index that answers."""

    @pytest.fixture
    def index(self) -> Index:
        breaker = Breaker(BreakerSettings(failures=1, pause_first_ms=60000, pause_max_ms=60000), random.Random(1))
        return GuardedIndex(MemoryIndex(), breaker, QueueBounds(0, 0), Metrics())
