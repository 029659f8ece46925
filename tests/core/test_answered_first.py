"""An engine that waits for a load waits for its blocks, and not for what is done with slots afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvtier.fetch import Fetch, Fetcher
from tests.core.rig import reader_of_saved
from tests.waiting import wait_until

TOKENS = list(range(1000, 1064))
BLOCKS = list(range(4))
SOON_S = 5.0


def test_a_load_is_answered_before_its_slots_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reader_of_saved(tmp_path, TOKENS, BLOCKS)
    transfer = engine.transfers[0]
    arena, answered = transfer._worker.arena, threading.Event()
    keep_or_free = Fetcher.keep_or_free

    def after_the_answer(self: Fetcher, fetch: Fetch) -> None:
        assert answered.wait(SOON_S)
        keep_or_free(self, fetch)

    monkeypatch.setattr(Fetcher, "keep_or_free", after_the_answer)
    keys = engine.keys(TOKENS)
    transfer.load(engine.store.plan_load("r", keys, engine.store.lookup(keys), BLOCKS, 0))
    (done,) = transfer.poll(SOON_S / 2).loads
    assert not done.failed_blocks and arena._table.available < arena.n_slots
    answered.set()
    wait_until(lambda: arena._table.available == arena.n_slots, "a slot was lost", SOON_S)
    engine.close()
