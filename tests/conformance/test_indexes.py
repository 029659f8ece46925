"""Every index, under the one suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.index.base import Index
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex

from index_suite import IndexSuite


class TestMemoryIndex(IndexSuite):
    @pytest.fixture
    def index(self) -> Index:
        return MemoryIndex()


class TestLmdbIndex(IndexSuite):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[Index]:
        index = LmdbIndex(str(tmp_path / "index"), map_bytes=64 << 20)
        yield index
        index.close()
