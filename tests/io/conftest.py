"""A ring, a file and a double of CUDA's driver for the tests of this folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.ring import Ring

from cuda_double import CudaDouble, build
from hang import HungRead
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


def _released() -> Iterator[HungRead]:
    hung = HungRead()
    yield hung
    hung.release()


hung = pytest.fixture(_released, name="hung")
second_hung = pytest.fixture(_released, name="second_hung")


@pytest.fixture(name="fake_driver", scope="session")
def _fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(name="cuda")
def _cuda(fake_driver: Path) -> Iterator[CudaDouble]:
    with CudaDouble(fake_driver) as cuda:
        yield cuda
