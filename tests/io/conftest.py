"""A ring, a file and a double of CUDA's driver for the tests of this folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.ring import Ring
from kvtier.storage.filesystem import IN_MEMORY, file_system_of

from cuda_double import CudaDouble, build
from records import PIECE_BYTES, open_file

SHM = Path("/dev/shm")


@pytest.fixture(name="ring")
def _ring() -> Iterator[Ring]:
    with Ring(4, PIECE_BYTES) as ring:
        yield ring


@pytest.fixture(name="tmpfs")
def _tmpfs() -> Iterator[Path | None]:
    """A folder of a file system in memory; None: there is none."""
    if not SHM.is_dir() or file_system_of(SHM).kind not in IN_MEMORY or not os.access(SHM, os.W_OK):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir=SHM) as folder:
        yield Path(folder)


@pytest.fixture(name="fd", params=["direct", "buffered", "in memory"])
def _fd(request: pytest.FixtureRequest, tmp_path: Path, tmpfs: Path | None) -> Iterator[int]:
    if request.param == "in memory":
        if tmpfs is None:
            pytest.skip("no file system in memory here")
        (tmp_path / "segment").symlink_to(tmpfs / "segment")
    fd = open_file(tmp_path / "segment", request.param == "direct")
    yield fd
    os.close(fd)


@pytest.fixture(name="fake_driver", scope="session")
def _fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(name="cuda")
def _cuda(fake_driver: Path) -> Iterator[CudaDouble]:
    with CudaDouble(fake_driver) as cuda:
        yield cuda
