"""A rebuild reads back a set that somebody else reads back, cuts or loses meanwhile. Found by `tests.simulation`."""

from collections.abc import Collection
from pathlib import Path

import pytest

from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from tests.maintenance.test_index_lost_in_sweep import Forgetful
from tests.scheduler.test_slow_writers import BLOCKS, before, fall_silent, loads, once, sweeper, tokens_of, told
from tests.support.rig import TOKENS, Engine, saved_by_another
from tests.worker.test_trimming import engine_of


def test_a_set_whose_records_were_forgotten_while_it_was_read_comes_in_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index had known was left out: the set came in empty, and a sweep unlinked it (seeds 10404 of random and
    10861 of index_amnesia)."""
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    segments = sorted(tmp_path.glob("v2/*/*.kvseg"))
    index = Forgetful(LmdbIndex(str(tmp_path / "v2" / "index")))
    keeper = Sweeper(index, tmp_path / "v2", "me")  # type: ignore[arg-type]
    reading = keeper._recovery
    monkeypatch.setattr(reading, "_read_segment", before(reading._read_segment, once(index.forget)))
    rebuilt = keeper.rebuild()
    assert rebuilt is not None and rebuilt.records == 5
    index.rebuilt(index.loss())  # type: ignore[operator]
    keeper.sweep()
    assert index.counts().chunks == 5  # type: ignore[operator]
    assert sorted(tmp_path.glob("v2/*/*.kvseg")) == segments and segments


def test_what_a_writer_was_refused_is_not_read_back_while_it_cuts_that_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became visible, and its bytes were gone (seed 10786 of two_evictors)."""
    writer = engine_of(tmp_path, 6)
    fall_silent(writer)
    assert told(writer, tokens_of(1)) == {SaveOutcome.SAVED}
    sweeper(writer).sweep()
    index, segments = writer.store._keeper._index, writer.transfers[0]._saver.writer.segments
    leave, left = segments.leave, []

    def while_it_is_read_back(namespace: bytes, written: Collection[object]) -> set[int]:
        """The rebuild has read all pages when the writer cuts."""
        rebuilding = sweeper(writer, "rebuilding")
        cut = once(lambda: left.append(leave(namespace, written)))
        with monkeypatch.context() as patched:
            reading = rebuilding._recovery
            patched.setattr(reading, "_add_missing", before(reading._add_missing, cut))
            rebuilding.rebuild()
        return left[0]

    monkeypatch.setattr(segments, "leave", while_it_is_read_back)
    assert told(writer, tokens_of(2)) == {SaveOutcome.FAILED}
    assert left and index.counts().records == 2
    writer.close()
    assert loads(tmp_path, tokens_of(2)) == 0
    assert loads(tmp_path, tokens_of(1)) == 2


def test_what_lies_before_a_visible_record_is_added_to_a_set_that_was_taken_over(tmp_path: Path) -> None:
    """Nobody cuts there. What was last is left to be computed again: nobody can tell it from what was refused."""
    writer = Engine(tmp_path)
    writer.save(TOKENS, BLOCKS)
    index = writer.store._keeper._index
    (info,) = [info for info in index.sets() if index.members(info.set_id)]
    index.take_over(info.set_id)
    members = sorted(index.members(info.set_id), key=lambda member: member[1].slot)
    for slot in (1, 4):
        assert index.retract(*members[slot])
    rebuilt = sweeper(writer).rebuild()
    assert rebuilt is not None and rebuilt.records == 1
    assert {at.slot for _, at in index.members(info.set_id)} == {0, 1, 2, 3}
