"""A ring and a file for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.ring import Ring

from records import PIECE_BYTES, open_file


@pytest.fixture(name="ring")
def _ring() -> Iterator[Ring]:
    with Ring(4, PIECE_BYTES) as ring:
        yield ring


@pytest.fixture(name="fd", params=["direct", "buffered"])
def _fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    fd = open_file(tmp_path / "segment", request.param == "direct")
    yield fd
    os.close(fd)
