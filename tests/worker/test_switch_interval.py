"""Python's switch interval in the engine's processes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import Engine

PYTHONS_OWN_S = 0.005


@pytest.fixture(autouse=True)
def _pythons_own() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_OWN_S)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize(("changes", "interval_s"), [({}, 1e-4), ({"switch_interval_s": PYTHONS_OWN_S}, PYTHONS_OWN_S)])
def test_threads_of_an_engine_hand_over_the_lock_sooner_unless_told_not_to(
    tmp_path: Path, changes: dict[str, object], interval_s: float
) -> None:
    Engine(tmp_path, changes=changes)
    assert sys.getswitchinterval() == pytest.approx(interval_s, rel=0.1)


def test_a_shorter_interval_of_the_process_stays(tmp_path: Path) -> None:
    sys.setswitchinterval(2e-5)
    Engine(tmp_path)
    assert sys.getswitchinterval() < 1e-4
