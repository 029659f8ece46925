"""Records of one chunk that engines of unlike cuts wrote may overlap so that together they do not fit a slot."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.index import entry as entries
from kvtier.plan import SaveOutcome
from tests.support.rig import Engine

TOKENS = list(range(64))
BLOCKS = list(range(4))
TARGET = list(range(100, 104))


def save_alone(root: Path, stages: Sequence[range], rank: int) -> None:
    """Of this engine only one stage lives long enough to save."""
    engine = Engine(root, stages=stages)
    engine.transfers, others = [engine.transfers[rank]], engine.transfers
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    engine.transfers = others
    engine.close()


def test_records_that_do_not_fit_a_slot_together_are_a_miss_once(tmp_path: Path) -> None:
    """Three layers of four from one engine and two from another: five do not fit. The chunk was complete, so nobody
    saved it again, and every load of it failed anew."""
    save_alone(tmp_path, [range(3), range(3, 4)], 0)
    save_alone(tmp_path, [range(2), range(2, 4)], 1)
    reader = Engine(tmp_path)
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 1 and answer.failed_blocks == frozenset(TARGET)
    assert reader.load(TOKENS, TARGET) == (0, []), "not offered again (I11)"
    assert {done.outcome for done in reader.save(TOKENS, TARGET)} == {SaveOutcome.SAVED}
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 1 and not answer.failed_blocks
    (entry,) = reader.store.lookup(reader.keys(TOKENS))
    assert len(entries.unpack(entry)) == 1


def test_what_fits_is_loaded_from_both(tmp_path: Path) -> None:
    save_alone(tmp_path, [range(2), range(2, 4)], 0)
    save_alone(tmp_path, [range(2), range(2, 4)], 1)
    reader = Engine(tmp_path)
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 1 and not answer.failed_blocks
