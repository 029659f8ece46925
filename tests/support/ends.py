"""Fixtures for conftest.py of folders. They are not in `rig`, because programs without pytest import that."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import all_ended


@pytest.fixture(autouse=True)
def engines_end(tmp_path: Path) -> Iterator[None]:  # they end before tmp_path is removed
    """Close the engines that a test leaves open."""
    with all_ended():
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing: these tests cause what is warned of."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
