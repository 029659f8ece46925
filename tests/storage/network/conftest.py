"""Nodes that share a double of a network file system."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import Server, standalone
from tests.storage.network.nodes import Nodes, two_nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path / "fs") as nodes:
        yield nodes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with standalone(tmp_path / "redis") as server:
        yield server
