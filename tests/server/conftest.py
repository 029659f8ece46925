import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.server.serving import Filled, Serving, fill, serving


@pytest.fixture(scope="session")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return fill(tmp_path_factory.mktemp("served") / "kv")


@pytest.fixture
def filled(filled_once: Filled, tmp_path: Path) -> Filled:
    """A copy, to change."""
    copy = Path(
        shutil.copytree(filled_once.path, tmp_path / "kv", ignore=shutil.ignore_patterns("index", "owner.json"))
    )
    return Filled(copy, filled_once.namespace, filled_once.keys)


@pytest.fixture
def served(filled: Filled) -> Iterator[Serving]:
    with serving(filled) as running:
        yield running


@pytest.fixture
def served_here(filled: Filled) -> Iterator[Serving]:
    """Without tokens: whoever is on this machine may do everything."""
    from kvtier.server.auth import Tokens

    with serving(filled, Tokens()) as running:
        yield running
