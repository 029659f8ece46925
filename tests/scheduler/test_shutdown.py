"""An engine that ends while its keeper hangs in the index or the storage."""

import threading
from pathlib import Path

import pytest

from kvtier.maintenance.sweeper import Sweeper
from kvtier.scheduler import background
from tests.support.rig import Engine


def test_what_a_hanging_tick_is_at_is_not_done_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both took the same ids off the same queue: the tick found it empty, and its thread died with an IndexError."""
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 0.2)
    engine = Engine(tmp_path)
    engine.wait_for_set()
    ours, ticker = engine.store._keeper, engine.store._keeper._ticker
    assert ticker is not None
    hangs, goes_on = threading.Event(), threading.Event()
    closed: list[int] = []
    later: list[str] = []
    raised: list[object] = []

    def close_set(self: Sweeper, set_id: int) -> None:
        closed.append(set_id)
        hangs.set()
        assert len(closed) > 1 or goes_on.wait(20)

    monkeypatch.setattr(Sweeper, "close_set", close_set)
    monkeypatch.setattr(Sweeper, "sweep", lambda self: later.append("sweep"))
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ours._due.sweep.due_s = float("inf")
    ours._pending.to_close += [1, 2]
    ticker.wake()
    assert hangs.wait(20)
    ours._due.sweep.want()
    engine.close()
    goes_on.set()
    ticker._thread.join(20)
    assert not ticker._thread.is_alive()
    assert closed == [1, 2] and raised == []
    assert later == [], "the engine is gone: nothing further is begun"


def test_who_leaves_in_peace_tells_the_index(tmp_path: Path) -> None:
    engine, other = Engine(tmp_path), Engine(tmp_path)
    engine.wait_for_set()
    owner = engine.store._keeper._plan.owner
    index = other.store._keeper._index
    assert owner in {info.owner for info in index.sets()}
    engine.close()
    assert owner not in {info.owner for info in index.sets() if info.is_open}
