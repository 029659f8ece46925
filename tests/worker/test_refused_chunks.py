"""A prompt whose KV the codec cannot keep comes again: it is not encoded again each time, only to be refused."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.scheduler import store as store_module
from kvtier.scheduler.store import REFUSED_S
from tests.support.rig import Engine, geometry

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS = list(range(12))
SHAPE = geometry(k_head_size=64, v_head_size=64, dtype="bfloat16", element_bytes=2)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, SHAPE, request.param, changes={"codec": "int8"})
    engine.wait_for_set()
    engine.prefill(TOKENS, BLOCKS)
    yield engine


def save(engine: Engine) -> list[SaveOutcome]:
    """Of every chunk that is not stored yet; outcomes on the last rank, which has the head that is spoiled."""
    planned = engine.plan_if_new(TOKENS, BLOCKS)
    if planned is None:
        return []
    by_key = {answer.key: answer.outcome for answer in engine.run_save(planned)}
    return [by_key[chunk.key] for chunk in planned.chunks]


def spoil(engine: Engine, value: float) -> None:
    """One element of the second chunk and the last head."""
    engine.pages[-1].layers[2].planes[1][BLOCKS[5], 7, -1, 11] = value


SAVED, REFUSED = SaveOutcome.SAVED, SaveOutcome.REFUSED


def test_a_refused_chunk_is_left_alone_for_a_while(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(engine, float("nan"))
    assert save(engine) == [SAVED, REFUSED, SAVED]
    assert names.SKIPPED_REFUSED not in engine.store.metrics.total()
    for number in range(3):
        assert engine.plan_if_new(TOKENS, BLOCKS) is None
        assert engine.store.metrics.total()[names.SKIPPED_REFUSED] == number + 1, "skipped, and counted"
    clock, spoiled = engine.store._clock, engine.keys(TOKENS)[1]
    monkeypatch.setattr(engine.store, "_clock", lambda: clock() + REFUSED_S + 1)
    assert save(engine) == [REFUSED]
    assert engine.plan_if_new(TOKENS, BLOCKS) is None
    spoil(engine, 1.0)
    monkeypatch.setattr(engine.store, "_clock", lambda: clock() + 2 * REFUSED_S + 2)
    assert save(engine) == [SAVED]
    assert engine.store.is_known(spoiled)


def test_no_more_are_remembered_than_the_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "REFUSED_KEYS_MAX", 2)
    for block in (1, 5, 9):
        engine.pages[-1].layers[0].planes[0][BLOCKS[block], 0, -1, 0] = float("inf")
    assert save(engine) == [REFUSED] * 3
    assert save(engine) == [REFUSED], "the first was pushed out"


def test_that_chunks_are_refused_is_told(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    spoil(engine, float("nan"))
    with caplog.at_level(logging.WARNING, "kvtier"):
        save(engine)
    (line,) = [record.getMessage() for record in caplog.records if "cannot keep" in record.getMessage()]
    assert "codec int8 cannot keep the KV of 1 chunks so far" in line and "codec: raw" in line
