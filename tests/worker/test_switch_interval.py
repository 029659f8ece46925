"""Python's switch interval in the engine's processes: short while a lookup or a load is under way."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.runtime import switch_interval
from tests.support.rig import Engine

PYTHONS_OWN_S, SHORT_S = 0.005, 1e-4
TOKENS = list(range(1000, 1128))


@pytest.fixture(autouse=True)
def _pythons_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    monkeypatch.setattr(switch_interval, "_holders", 0)  # a simulated process that was killed releases nothing
    sys.setswitchinterval(PYTHONS_OWN_S)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize(("changes", "interval_s"), [({}, SHORT_S), ({"switch_interval_s": 0.002}, 0.002)])
def test_it_is_short_during_lookups_and_loads(
    tmp_path: Path, changes: dict[str, object], interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, noted = Engine(tmp_path, changes=changes), list[float]()
    engine.save(TOKENS, list(range(8)))
    monkeypatch.setattr(sys, "setswitchinterval", noted.append)
    assert engine.store.lookup(engine.keys(TOKENS))
    assert noted == [interval_s, PYTHONS_OWN_S]
    engine.load(TOKENS, list(range(20, 28)))
    assert noted[2:] == 2 * [interval_s, PYTHONS_OWN_S], "a lookup and a load"


def test_the_last_one_that_holds_it_restores_it() -> None:
    switch_interval.use(SHORT_S)
    with switch_interval.held():
        switch_interval.hold()
    assert sys.getswitchinterval() < PYTHONS_OWN_S
    switch_interval.release()
    assert sys.getswitchinterval() == pytest.approx(PYTHONS_OWN_S)


def test_a_shorter_interval_of_the_process_stays() -> None:
    switch_interval.use(SHORT_S)
    sys.setswitchinterval(2e-5)
    with switch_interval.held():
        assert sys.getswitchinterval() < SHORT_S
