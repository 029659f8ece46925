"""Repeated log lines: the first at once, later ones as counts at growing intervals."""

import logging
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.runtime.repeated_log import INTERVAL_FIRST_S, INTERVAL_MAX_S, KINDS_MAX, RepeatedLog
from kvtier.worker.record_reader import RecordReader
from tests.support.clock import Clock
from tests.support.rig import Engine, reader_of_saved

TOKENS = list(range(64 * 2))
BLOCKS = list(range(8))


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def test_the_first_line_comes_at_once_and_later_ones_as_a_count(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    lines = RepeatedLog(clock)
    for _ in range(215):
        lines.warning("a", "storage %s", "away")
    clock.now_s += INTERVAL_FIRST_S
    lines.warning("a", "storage %s", "away")
    assert caplog.messages == ["kvtier: storage away", "kvtier: storage away (214 more in the last 10 s)"]


def test_a_run_of_an_hour_writes_few_lines(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    lines = RepeatedLog(clock)
    for _ in range(36_000):
        lines.warning("a", "away")
        clock.now_s += 0.1
    assert 5 < len(caplog.messages) < 15


def test_kinds_are_apart_and_one_that_was_quiet_is_new(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    lines = RepeatedLog(clock)
    assert lines.warning("a", "one") and lines.warning("b", "two") and not lines.warning("a", "one")
    clock.now_s += INTERVAL_MAX_S
    assert lines.warning("a", "one")
    assert caplog.messages == ["kvtier: one", "kvtier: two", "kvtier: one (1 more in the last 600 s)"]
    clock.now_s += INTERVAL_FIRST_S
    assert lines.warning("a", "one"), "the interval is the first one again"


def test_a_clock_that_was_set_back_hides_nothing(clock: Clock) -> None:
    lines = RepeatedLog(clock)
    lines.warning("a", "one")
    clock.now_s -= 86_400
    assert lines.warning("a", "one")


def test_no_more_kinds_are_remembered_than_the_bound(clock: Clock) -> None:
    lines = RepeatedLog(clock)
    for number in range(2 * KINDS_MAX):
        lines.warning(str(number), "one")
    assert len(lines._kinds) == KINDS_MAX


def test_loads_that_fail_alike_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of_saved(tmp_path, TOKENS, BLOCKS)

    def away(*args: object) -> None:
        raise TierUnavailable(f"{tmp_path}/x{len(caplog.records)}.kvseg: Input/output error")

    monkeypatch.setattr(RecordReader, "_open", away)
    for _ in range(50):
        planned, answers = reader.load(TOKENS, BLOCKS)
        assert planned == 2 and answers[0].failed_blocks
    reader.close()
    assert sum("recomputed" in line for line in caplog.messages) == 1


def test_saves_that_fail_alike_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    writer = engine.transfers[0]._saver.writer
    with caplog.at_level(logging.WARNING, "kvtier"):
        for _ in range(100):
            writer._back_off("no space left on device")
    engine.close()
    assert sum("saving pauses" in line for line in caplog.messages) == 1
