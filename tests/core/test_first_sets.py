"""A segment set is ready before the engine's first step: without one, the first prompt would not be saved."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvtier import keeper
from kvtier.assemble import open_store
from kvtier.index.base import SetInfo
from kvtier.index.embedded import LmdbIndex
from kvtier.store import Store, WantedChunk
from tests.core.rig import Engine, geometry, namespace, settings, shares

BLOCKS = (0, 1, 2, 3)


def plans_a_save(store: Store) -> bool:
    return store.plan_save([WantedChunk(bytes(16), store.namespace_id, BLOCKS)]) is not None


def test_the_first_chunk_of_a_fresh_engine_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LmdbIndex.create_set

    def slow(self: LmdbIndex, info: SetInfo) -> bool:
        time.sleep(0.1)
        return create(self, info)

    monkeypatch.setattr(LmdbIndex, "create_set", slow)
    store = open_store(settings(tmp_path), namespace(geometry()), shares(geometry()))
    assert plans_a_save(store)
    store.close()


def test_an_index_that_hangs_holds_up_the_start_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_TICK_TIMEOUT_S", 0.2)
    create, answers = LmdbIndex.create_set, threading.Event()

    def hang(self: LmdbIndex, info: SetInfo) -> bool:
        assert answers.wait(20)
        return create(self, info)

    monkeypatch.setattr(LmdbIndex, "create_set", hang)
    engine = Engine(tmp_path)
    assert not plans_a_save(engine.store)
    answers.set()
    engine.wait_for_set()
    assert plans_a_save(engine.store)
    engine.close()


def test_after_a_reset_sets_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "TICK_INTERVAL_S", 20.0)
    engine = Engine(tmp_path)
    engine.wait_for_set()
    engine.store.reset()
    engine.wait_for_set(5.0)
    assert plans_a_save(engine.store)
    engine.close()
