"""Fixture engines_end, for conftest.py of folders. It is not in `rig`, because programs without pytest import that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rig import all_ended


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    with all_ended():
        yield
