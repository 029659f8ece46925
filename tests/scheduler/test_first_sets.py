"""A segment set is ready before the engine's first step: without one, the first prompt would not be saved."""

import threading
import time
from pathlib import Path

import pytest

from kvtier.build import open_store
from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.index.base import SetInfo
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.scheduler import background
from kvtier.scheduler.load_threshold import FixedThreshold
from kvtier.scheduler.segment_allocator import SET_COMES_S, SlotAllocator
from kvtier.scheduler.store import Store, WantedChunk
from tests.support.rig import Engine, geometry, namespace, settings, shares

BLOCKS = (0, 1, 2, 3)


def plans_a_save(store: Store) -> bool:
    return store.plan_save([WantedChunk(bytes(16), store.namespace_id, BLOCKS)]) is not None


def test_the_first_chunk_of_a_fresh_engine_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LmdbIndex.create_set

    def slow(self: LmdbIndex, info: SetInfo) -> bool:
        time.sleep(0.1)
        return create(self, info)

    monkeypatch.setattr(LmdbIndex, "create_set", slow)
    monkeypatch.setattr(background, "FIRST_TICK_TIMEOUT_S", 20.0)
    store = open_store(settings(tmp_path), namespace(geometry()), shares(geometry()))
    assert plans_a_save(store)
    store.close()


def test_an_index_that_hangs_holds_up_the_start_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_TICK_TIMEOUT_S", 0.2)
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


def test_after_a_reset_sets_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TICK_INTERVAL_S", 20.0)
    engine = Engine(tmp_path)
    engine.wait_for_set()
    engine.store.reset()
    engine.wait_for_set(5.0)
    assert plans_a_save(engine.store)


# --- a set that is not there yet ---


def test_the_first_prompt_of_a_tenant_waits_for_its_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its set is asked for when the request comes, in the same call that plans its first step: without the wait, a
    tenant whose requests come minutes apart had nothing saved, ever."""
    tenants = [{"name": "red", "cache_salts": ["red"]}]
    engine = Engine(tmp_path, changes={"capacity": {"tenants": tenants}})
    engine.wait_for_set()
    create, may_come = LmdbIndex.create_set, threading.Event()

    def create_later(self: LmdbIndex, info: SetInfo) -> bool:
        assert may_come.wait(20)
        return create(self, info)

    monkeypatch.setattr(LmdbIndex, "create_set", create_later)
    tokens = list(range(256))
    bridge = SchedulerBridge(engine.store, BlockShape(64, 16), FixedThreshold(64), 2.0, Faults())
    bridge.track(RequestView("r", tokens, {}, may_load=False, may_save=True, tenant="red"))
    steps, deadline, plan = 0, time.monotonic() + 10, None
    while plan is None and time.monotonic() < deadline:
        if bridge.chunks_pending("r", 256):
            bridge.advance("r", 256, list(range(16)))
        plan, steps = bridge.take_step().after, steps + 1
        may_come.set()
        time.sleep(0.002)
    assert plan is not None and steps > 1
    assert [(chunk.key, chunk.tenant) for chunk in plan.chunks] == [(key, "red") for key in engine.keys(tokens)]
    assert not any(name.startswith("skipped") for name in engine.store.metrics.total())
    assert not bridge.chunks_pending("r", 256)


def test_a_set_is_waited_for_from_when_it_is_missed_and_not_for_long() -> None:
    allocator = SlotAllocator(1, 1)
    assert allocator.is_coming(10.0) and allocator.is_coming(10.0 + SET_COMES_S / 2)
    assert not allocator.is_coming(10.0 + SET_COMES_S), "chunks are given up, and counted"
    allocator.offer(1)
    assert not allocator.is_coming(50.0) and allocator.take(50.0) == (1, 0)
    assert allocator.is_coming(60.0) and not allocator.is_coming(60.0 + SET_COMES_S)


def test_a_tenant_that_gets_no_set_is_not_waited_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.wait_for_set()
    engine.store._keeper._ticker.close(5.0)  # type: ignore[union-attr]
    assert engine.store.is_set_coming("blue")
    engine.store._keeper.allocators.of("blue", time.time()).backoff.refused(time.time())
    assert not engine.store.is_set_coming("blue"), "it is at its quota"
