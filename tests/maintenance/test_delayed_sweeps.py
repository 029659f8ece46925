"""A sweep that is held up for longer than its lease lasts: another sweep may have been there since, so it neither cuts
nor publishes what it knew before (seed 10016 of the simulation's two_evictors)."""

import time
from pathlib import Path

import pytest

from kvtier.maintenance.sweep_lease import LEASE_TTL_S
from kvtier.maintenance.sweeper import Sweeper
from tests.scheduler.test_slow_writers import BLOCKS, after, fall_silent, loads, segments, tokens_of
from tests.support.clock import Clock
from tests.worker.test_trimming import RECORD_BYTES, engine_of


class StallingClock(Clock):
    def stall(self) -> None:
        self.now_s += LEASE_TTL_S + 1


def test_it_cuts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = engine_of(tmp_path, 6)
    fall_silent(writer)
    writer.save(tokens_of(1), BLOCKS)
    index, clock = writer.store._keeper._index, StallingClock(time.time())
    sweeper = Sweeper(index, writer.root / "v2", "slow", clock)
    whole = sum(path.stat().st_size for path in segments(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(index, "members", after(index.members, clock.stall))
        sweeper.sweep()
    assert sum(path.stat().st_size for path in segments(tmp_path)) == whole
    sweeper.sweep()
    assert sum(path.stat().st_size for path in segments(tmp_path)) == 4096 + 2 * RECORD_BYTES < whole
    writer.close()
    assert loads(tmp_path, tokens_of(1)) == 2


def test_it_reads_nothing_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = engine_of(tmp_path, 6)
    writer.save(tokens_of(1), BLOCKS)
    index, clock = writer.store._keeper._index, StallingClock(time.time())
    for info in index.sets():
        index.remove_set(info.set_id)
    sweeper = Sweeper(index, writer.root / "v2", "slow", clock)
    with monkeypatch.context() as patched:
        reading = sweeper._recovery
        patched.setattr(reading, "_read_segment", after(reading._read_segment, clock.stall))
        rebuilt = sweeper.rebuild()
    assert rebuilt is None and index.counts().records == 0
    again = sweeper.rebuild()
    assert again is not None and again.records == 2 and not again.unreadable
    writer.close()
    assert loads(tmp_path, tokens_of(1)) == 2
