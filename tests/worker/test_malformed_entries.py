"""Index entries as others may have written them: whatever they say, a load is answered, nothing outside of the
segment's records is read, and what cannot be right is taken out."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.format.geometry import Extent
from kvtier.index import entry as entries
from kvtier.index.base import Location
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.worker.record_reader import RecordReader
from tests.damage import damage_entry
from tests.scheduler.test_slow_writers import before
from tests.support.rig import Engine

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
FAR = 2**32 - 1


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, changes={"host": {"arena_bytes": 8 << 20, "admit": "never"}})


def other(location: Location, **changes: object) -> Location:
    return location._replace(**changes)  # type: ignore[arg-type]


def many_heads(location: Location) -> Location:
    """Of so many heads that the record's place in the file is beyond what a file can have."""
    e = location.extent
    return other(location, extent=Extent(e.first_layer, e.n_layers, 0, 65535), checksums=(1,) * 65535, slot=FAR)


def many_layers(location: Location) -> Location:
    e = location.extent
    return other(location, extent=Extent(0, 65535, e.first_head, e.n_heads), slab_bytes=location.slab_bytes * 16384)


STRANGE: dict[str, Callable[[Location], Location]] = {
    "a slot behind the segment": lambda at: other(at, slot=FAR),
    "the first slot behind its last": lambda at: other(at, slot=at.slot + 4096),
    "heads that the model has not": many_heads,
    "layers that the model has not": many_layers,
    "slabs of another size": lambda at: other(at, slab_bytes=at.slab_bytes * 2),
    "a set that is not there": lambda at: other(at, set_id=at.set_id + 1),
    "a rank that is not there": lambda at: other(at, rank=65535),
}


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_entry_is_a_miss(engine: Engine, what: str, is_open: bool) -> None:
    """Also where the segments are open, so that reads begin without waiting."""
    engine.save(TOKENS, BLOCKS)
    if is_open:
        engine.load(TOKENS, list(range(200, 212)))
    keys = engine.keys(TOKENS)
    found = engine.store.lookup(keys)
    assert found is not None and len(found) == 3
    (location,) = entries.unpack(found[1])
    strange = STRANGE[what](location)
    told = [found[0], entries.pack([strange], strange.extent), found[2]]
    before = engine.blocks(TARGET[4:])
    (done,) = engine.run_load(engine.store.plan_load("one", keys, told, TARGET, 0))
    assert done.failed_blocks == frozenset(TARGET[4:]), "from the strange one on"
    assert all((a == b).all() for a, b in zip(engine.blocks(TARGET[4:]), before, strict=True))
    assert engine.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset(), "the true entry is another, and stayed"


def test_a_record_of_another_cut_than_its_segment(tmp_path: Path) -> None:
    """A segment's header says which heads its records have. An entry that says others would be read at the wrong
    place: only the checksum would notice."""
    two = Engine(tmp_path, tensor_size=2, changes={"host": {"arena_bytes": 8 << 20, "admit": "never"}})
    two.save(TOKENS, BLOCKS)
    keys = two.keys(TOKENS)
    found = two.store.lookup(keys)
    assert found is not None and len(found) == 3
    first, second = sorted(entries.unpack(found[0]), key=lambda at: at.rank)
    crossed = entries.pack([other(first, rank=second.rank), other(second, rank=first.rank)], two.shape.whole)
    plan = two.store.plan_load("one", keys[:1], [crossed], TARGET[:4], 0)
    for transfer, done in zip(two.transfers, two.run_load(plan), strict=True):
        assert done.failed_blocks == frozenset(TARGET[:4])
        assert names.CHECKSUM_FAILURES not in transfer.metrics.total(), "it was not even read"


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_damaged_entry_is_taken_out_and_its_chunk_saved_again(
    engine: Engine, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    retracting = []
    monkeypatch.setattr(
        RecordReader, "retract", before(RecordReader.retract, lambda: retracting.append(threading.current_thread()))
    )
    engine.save(TOKENS, BLOCKS)
    if is_open:
        engine.load(TOKENS, list(range(200, 212)))
    key = engine.keys(TOKENS)[1]
    damage_entry(engine.store.index, key)
    assert engine.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset(TARGET[4:])
    assert engine.load(TOKENS, TARGET)[0] == 1
    (thread,) = retracting
    assert "loop" not in thread.name, "the loop waited for the index"
    assert {done.key: done.outcome for done in engine.save(TOKENS, BLOCKS)}[key] is SaveOutcome.SAVED
    assert engine.load(TOKENS, TARGET)[0] == 3 and engine.holds(TOKENS, TARGET)
