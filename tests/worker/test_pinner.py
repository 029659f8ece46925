"""Pinning of the host arena: at start, for which the engine waits, and between the loads of an engine at work."""

import time

import pytest
import torch

from kvtier.arena.arena import Arena
from kvtier.io import cuda
from kvtier.io.ring import AlignedBuffer
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker import arenas
from kvtier.worker.arenas import PIN_BYTES, Pinner
from tests.waiting import wait_until

CALL_S = 0.05
CALLS = 8


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(when, address) of each call to pin; each takes a while."""
    calls: list[tuple[float, int]] = []

    def pin(address: int, n_bytes: int, ordinal: int) -> None:
        assert n_bytes == PIN_BYTES
        calls.append((time.monotonic(), address))
        time.sleep(CALL_S)

    monkeypatch.setattr(cuda, "pin", pin)
    monkeypatch.setattr(cuda, "unpin", lambda address: None)
    return calls


def make() -> Pinner:
    buffer = torch.frombuffer(AlignedBuffer(CALLS * PIN_BYTES).view, dtype=torch.uint8)
    return Pinner(Arena(buffer, PIN_BYTES, n_ready=0), 0, ThreadJobs("pin", 1, 1))


def gaps(calls: list[tuple[float, int]]) -> list[float]:
    return [after - before for (before, _), (after, _) in zip(calls, calls[1:], strict=False)]


@pytest.mark.parametrize(("wait_s", "is_whole"), [(20.0, True), (2 * CALL_S, False)])
def test_the_start_waits_for_a_small_arena(
    pinned: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch, wait_s: float, is_whole: bool
) -> None:
    monkeypatch.setattr(arenas, "PIN_START_MAX_S", wait_s)
    pinner = make()
    pinner.start(lambda: False)
    assert (len(pinned) == CALLS) is is_whole
    pinner.close()


def test_at_full_speed_until_the_engine_is_at_work(
    pinned: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinner = make()
    slow = cuda.pin

    def pin(address: int, n_bytes: int, ordinal: int) -> None:
        slow(address, n_bytes, ordinal)
        if len(pinned) == CALLS // 2:
            pinner.make_way()

    monkeypatch.setattr(cuda, "pin", pin)
    monkeypatch.setattr(arenas, "PIN_START_MAX_S", 0.0)
    pinner.start(lambda: False)
    wait_until(lambda: len(pinned) >= CALLS)
    first, rest = gaps(pinned)[: CALLS // 2 - 1], gaps(pinned)[CALLS // 2 :]
    assert min(first) < 1.8 * CALL_S
    assert min(rest) >= 2 * CALL_S
    pinner.close()


def test_loads_go_first(pinned: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "PIN_START_MAX_S", 0.0)
    pinner, loads = make(), ["a load"]
    pinner.start(lambda: bool(loads))
    time.sleep(5 * CALL_S)
    assert not pinned
    loads.clear()
    wait_until(lambda: len(pinned) >= CALLS)
    pinner.close()
