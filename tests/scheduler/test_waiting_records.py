"""An index that is slow or gone for one half of an engine and not for the other: sets whose records wait to become
visible, and sets of which nobody knows whether they were registered."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.config.index import BreakerSettings
from kvtier.errors import IndexUnavailable
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.set_removal import Remover
from kvtier.index.base import Index, NewRecord, SetInfo
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import ORPHAN_GRACE_S, Sweeper
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.scheduler.background import Keeper, KeeperPlan
from tests.support.rig import Engine, geometry, namespace

SLOTS, CHUNK, PER = 6, 64, 4
BLOCKS, TARGET = list(range(24)), list(range(100, 124))


class Writer:
    """An engine whose worker does not reach the index while `is_down`; its scheduler's half does."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        record_bytes = 4 * (1 << 16) + 4096
        changes = {"index": {"kind": "memory"}, "segment_bytes": 4096 + SLOTS * record_bytes, "writer_lease_s": 1e6}
        self.engine = Engine(root, changes=changes)
        worker = self.engine.transfers[0]._worker
        self.index: Index = worker.index
        self.is_down = True
        breaker = Breaker(BreakerSettings(failures=10**6, pause_first_ms=100, pause_max_ms=100), random.Random(1))
        self.guard = GuardedIndex(self.index, breaker, QueueBounds(1000, 1 << 20), Metrics())
        object.__setattr__(worker, "index", self.guard)
        publish = self.index.publish

        def publish_if_up(records: Sequence[NewRecord], *options: bool) -> int:
            if self.is_down:
                raise IndexUnavailable("it does not answer")
            return publish(records, *options)

        monkeypatch.setattr(self.index, "publish", publish_if_up)

    def save(self, tokens: Sequence[int]) -> None:
        n_blocks = len(tokens) // CHUNK * PER
        assert {done.outcome.value for done in self.engine.save(tokens, BLOCKS[:n_blocks])} == {"saved"}

    def sweeper(self, later_s: float = 0.0) -> Sweeper:
        """Another engine's."""
        keeper = self.engine.store._keeper._sweeper
        return Sweeper(self.index, self.engine.root / "v2", "other", lambda: keeper.clock() + later_s)

    def set_id(self) -> int:
        """Of all that waits."""
        (set_id,) = {record.location.set_id for record in self.guard._waiting}
        return set_id

    def close_set(self) -> int:
        """As its keeper does some time after the last answer."""
        self.sweeper().close_set(self.set_id())
        return self.set_id()

    def come_back(self) -> float:
        """Records that were taken then."""
        self.is_down = False
        self.guard.tick()
        assert self.guard.n_waiting == 0
        return self.guard.metrics.total().get(names.PUBLISH_SENT_LATE, 0.0)


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    writer = Writer(tmp_path, monkeypatch)
    yield writer
    writer.engine.close()


def tokens_of(n_chunks: int) -> list[int]:
    return list(range(1000, 1000 + CHUNK * n_chunks))


def test_a_sweep_leaves_a_full_set_whose_records_wait(writer: Writer) -> None:
    """Its files were removed: what had waited for the index to come back was refused by it then."""
    writer.save(tokens_of(SLOTS))
    full = writer.close_set()
    assert [info.is_open for info in writer.index.some_sets([full])] == [False]
    writer.sweeper().sweep()
    assert writer.come_back() == SLOTS
    loaded, done = writer.engine.load(tokens_of(SLOTS), TARGET)
    assert loaded == SLOTS and not any(load.failed_blocks for load in done)


def test_a_closed_set_without_records_goes_after_a_while(writer: Writer) -> None:
    """Whoever wrote them may have lost them."""
    writer.save(tokens_of(SLOTS))
    full = writer.close_set()
    writer.sweeper(later_s=ORPHAN_GRACE_S).sweep()
    assert not writer.index.some_sets([full])
    assert writer.come_back() == 0


def test_what_waits_does_not_become_visible_in_a_set_that_was_cut(writer: Writer) -> None:
    """A set that an idle tenant leaves is cut behind the records that are visible (I1)."""
    writer.save(tokens_of(2))
    writer.sweeper().close_early(writer.set_id())
    assert writer.come_back() == 0
    assert writer.engine.load(tokens_of(2), TARGET)[0] == 0


class HalfDone(MemoryIndex):
    """Does what it is told, but its answer gets lost, of these methods."""

    lost: frozenset[str] = frozenset()

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        is_new = super().create_set(info, records)
        if "create_set" in self.lost:
            raise IndexUnavailable("the answer did not come in time")
        return is_new


@pytest.mark.parametrize("what", ["registering", "looking once more"])
def test_a_set_of_which_nobody_knows_whether_it_is_there_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each stayed as long as its engine lived, open and without a file, and took its bytes of the budget."""
    index, now = HalfDone(), [1e9]
    index.rebuilt(index.loss())
    plan = KeeperPlan("me", 4, 100, 100_000, 1e9, 5.0, lambda space: None)
    sweeper = Sweeper(index, tmp_path, "me", lambda: now[0])
    evictor = Evictor(index, tmp_path, "me", clock=lambda: now[0])
    keeper = Keeper(namespace(geometry()), plan, index, sweeper, evictor, random.Random(1))

    def lost(remover: Remover, now_s: float) -> int:
        if index.sets():
            raise IndexUnavailable("the answer did not come in time")
        return 0

    with monkeypatch.context() as patched:
        if what == "registering":
            patched.setattr(index, "lost", frozenset({"create_set"}))
        else:
            patched.setattr(Remover, "pending_bytes", lost)
        for _ in range(20):
            now[0] += 1.0
            keeper.tick()
        assert len(index.sets()) == 1, "that of the last try"
    keeper.tick()
    assert {info.set_id for info in index.sets()} == keeper.allocators.set_ids()
    keeper.close()
    assert not index.sets()
