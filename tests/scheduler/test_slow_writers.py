"""A writer that others take for dead, or that knows of no one else's doing, is only slow: what it answers "saved" is
there all the same, and what is no longer wanted of it is answered as failed (I1)."""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.eviction.set_removal import Remover
from kvtier.index.base import writer_lease
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance.rebuild import SetRecovery
from kvtier.maintenance.sweep_lease import SWEEP_LEASE
from kvtier.maintenance.sweeper import CLOCK_TOLERANCE_S, ORPHAN_GRACE_S, Sweeper
from kvtier.plan import SaveOutcome
from kvtier.scheduler.background import Keeper
from kvtier.storage.segments import SegmentFiles, Sharing
from tests.support.rig import BLOCKS, TARGET, Engine
from tests.waiting import wait_until
from tests.worker.test_trimming import RECORD_BYTES, engine_of


def tokens_of(number: int, n_chunks: int = 2) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 64 * n_chunks))


@pytest.fixture
def writer(tmp_path: Path) -> Engine:
    return engine_of(tmp_path, 6)


def by_hand(engine: Engine) -> Keeper:
    """Its keeper, which ticks only when it is told to."""
    keeper = engine.store._keeper
    keeper._ticker.close(5.0)  # type: ignore[union-attr]
    keeper.tick()
    return keeper


def fall_silent(engine: Engine) -> Keeper:
    """Its keeper hangs: for others its time has run out."""
    keeper = by_hand(engine)
    engine.store._keeper._index.release_lease(writer_lease(keeper._plan.owner), keeper._plan.owner)
    return keeper


def once(act: Callable[[], object]) -> Callable[[], None]:
    """`act` at the first call, which its own doing may call again."""
    left = [act]

    def run() -> None:
        if left:
            left.pop()()

    return run


def after(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        answer = method(*args, **options)
        act()
        return answer

    return run


def before(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        act()
        return method(*args, **options)

    return run


def sweeper(engine: Engine, name: str = "other") -> Sweeper:
    return Sweeper(engine.store._keeper._index, engine.root / "v2", name)


def loads(root: Path, tokens: Sequence[int]) -> int:
    """Chunks that a new engine loads, all whole."""
    reader = engine_of(root, 6)
    found, done = reader.load(tokens, TARGET)
    assert not any(load.failed_blocks for load in done)
    reader.close()
    return found


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("v2/*/*.kvseg"))


def told(engine: Engine, tokens: Sequence[int]) -> set[SaveOutcome]:
    return {done.outcome for done in engine.save(tokens, BLOCKS)}


@pytest.mark.parametrize("has_records", [True, False], ids=["set with records", "set without"])
def test_what_a_sweeper_cut_off_before_it_was_published_is_not_saved(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_records: bool
) -> None:
    keeper = fall_silent(writer)
    if has_records:
        writer.save(tokens_of(1), BLOCKS)
    index = writer.transfers[0]._worker.index
    monkeypatch.setattr(index, "publish", before(index.publish, once(sweeper(writer).sweep)))
    ring = writer.transfers[0]._worker.io.ring
    if has_records:  # cut before the bytes come: they make the file long again
        monkeypatch.setattr(ring, "submit", before(ring.submit, once(sweeper(writer).sweep)))
    assert told(writer, tokens_of(2)) == {SaveOutcome.FAILED}
    assert sum(path.stat().st_size for path in segments(tmp_path)) == (4096 + 2 * RECORD_BYTES) * has_records
    keeper._due.renew_s = 0.0
    keeper.tick()
    assert told(writer, tokens_of(2)) == {SaveOutcome.SAVED}, "it goes on in a set of its own"
    writer.close()
    assert loads(tmp_path, tokens_of(2)) == 2
    assert loads(tmp_path, tokens_of(1)) == 2 * has_records


@pytest.mark.parametrize("known", ["not at all", "as taken over", "not, for it was lost"])
def test_a_segment_that_is_made_late_is_not_left_in_no_index(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """It stayed, counted by nobody, until a sweep after its grace time: with writers enough, beyond the budget."""
    keeper = fall_silent(writer)
    index = keeper._index
    meanwhile: dict[str, Callable[[], object]] = {
        "not at all": sweeper(writer).sweep,
        "as taken over": lambda: [index.take_over(info.set_id) for info in index.sets()],
        "not, for it was lost": lambda: shutil.rmtree(tmp_path / "v2" / "index"),
    }
    monkeypatch.setattr(SegmentFiles, "create", before(SegmentFiles.create, once(meanwhile[known])))
    assert told(writer, tokens_of(1)) == {SaveOutcome.FAILED}
    left = {int(path.name[:16], 16) for path in segments(tmp_path)}
    if known == "not at all":
        assert not left
    elif known == "as taken over":
        assert len(left) == 1 and left <= {info.set_id for info in index.sets()}, "others count it, and remove it"
    else:
        assert len(left) == 1 and index.was_reset, "whoever reads the segments again may be at it"
    keeper._due.renew_s = 0.0
    keeper.tick()
    assert told(writer, tokens_of(2)) == {SaveOutcome.SAVED}, "it goes on in a set of its own"
    sweeper(writer).sweep()
    left = {int(path.name[:16], 16) for path in segments(tmp_path)}
    assert left == {info.set_id for info in index.sets() if index.members(info.set_id)}
    writer.close()
    assert loads(tmp_path, tokens_of(2)) == 2


def test_another_record_of_the_same_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engine_of(tmp_path, 6), engine_of(tmp_path, 6)
    second.wait_for_set()
    index = first.transfers[0]._worker.index
    save = once(lambda: second.save(tokens_of(1), BLOCKS))
    monkeypatch.setattr(index, "publish", before(index.publish, save))
    assert told(first, tokens_of(1)) == {SaveOutcome.SAVED}
    assert first.load(tokens_of(1), TARGET)[0] == 2


def test_a_load_of_chunks_that_are_being_saved_loses_none_of_the_answers(tmp_path: Path) -> None:
    """Another engine has stored the chunks. Their slots are blank, and no later save would get them."""
    writer, other = engine_of(tmp_path, 6), engine_of(tmp_path, 6)
    writer.wait_for_set()
    plan = writer.plan(tokens_of(1), BLOCKS)
    assert told(other, tokens_of(1)) == {SaveOutcome.SAVED}
    assert writer.load(tokens_of(1), TARGET)[0] == 2
    assert {done.outcome for done in writer.run_save(plan)} == {SaveOutcome.PRESENT}
    again = writer.plan(tokens_of(2), BLOCKS)
    assert {(chunk.set_id, chunk.slot) for chunk in again.chunks} == {(at.set_id, at.slot) for at in plan.chunks}


def test_an_engine_whose_index_is_lost_goes_on_in_sets_that_the_new_one_knows(tmp_path: Path) -> None:
    """It used to write on into sets of which the index knew nothing, up to nine of them."""
    writer, other = engine_of(tmp_path, 6), engine_of(tmp_path, 6)
    keepers = [by_hand(writer), by_hand(other)]
    writer.save(tokens_of(1), BLOCKS)
    shutil.rmtree(tmp_path / "v2" / "index")
    engine_of(tmp_path, 6).close()  # makes it anew
    assert not writer.store._keeper._index.was_reset
    assert told(writer, tokens_of(2)) == {SaveOutcome.FAILED}
    for keeper in keepers:
        keeper._due.renew_s = 0.0
        keeper.tick()
    for number, engine in ((3, writer), (4, other)):
        assert told(engine, tokens_of(number)) == {SaveOutcome.SAVED}
    writer.close()
    other.close()
    assert [loads(tmp_path, tokens_of(number)) for number in (1, 3, 4)] == [2, 2, 2]


def test_an_engine_that_rebuilds_the_index_itself_does_the_same(writer: Engine, tmp_path: Path) -> None:
    keeper = by_hand(writer)
    writer.save(tokens_of(1), BLOCKS)
    shutil.rmtree(tmp_path / "v2" / "index")
    assert writer.store._keeper._index.was_reset
    keeper.tick()
    assert told(writer, tokens_of(2)) == {SaveOutcome.SAVED}
    writer.close()
    assert loads(tmp_path, tokens_of(1)) == loads(tmp_path, tokens_of(2)) == 2


def test_an_engine_that_needs_no_set_asks_once_in_a_tick_whether_the_index_is_lost(
    writer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time is a round trip to Redis. The duty that rebuilds the index asks anyway."""
    keeper, asked = by_hand(writer), list[bool]()
    keeper._due.sweep.due_s = keeper._due.limits_s = math.inf
    was_reset = LmdbIndex.was_reset

    def ask(index: LmdbIndex) -> bool:
        asked.append(was_reset.fget(index))  # type: ignore[attr-defined]
        return asked[-1]

    monkeypatch.setattr(LmdbIndex, "was_reset", property(ask))
    keeper.tick()
    assert asked == [False]
    writer.save(tokens_of(1, 5), BLOCKS)
    assert keeper.allocators.n_unused == 0
    asked.clear()
    keeper.tick()
    assert keeper.allocators.n_unused == 1 and len(asked) > 1 and not any(asked)


def test_an_engine_gives_signs_of_life_while_it_rebuilds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        writer = engine_of(tmp_path, 6)
        writer.save(tokens_of(number), BLOCKS)
        writer.close()
    engine = engine_of(tmp_path, 6, writer_lease_s=1.0)
    keeper, index = by_hand(engine), engine.store._keeper._index
    now_s = [keeper._sweeper.clock()]
    silent: list[float] = []

    def read_slowly() -> None:
        now_s[0] += 0.8 * keeper._plan.writer_lease_s
        if index.lease_owner(writer_lease(keeper._plan.owner), now_s[0]) is None:
            silent.append(now_s[0])

    monkeypatch.setattr(keeper._sweeper, "clock", lambda: now_s[0])
    monkeypatch.setattr(SetRecovery, "_read_segment", before(SetRecovery._read_segment, read_slowly))
    shutil.rmtree(tmp_path / "v2" / "index")
    keeper.tick()
    assert not silent and not index.was_reset


def test_what_is_published_while_an_index_is_rebuilt_stays(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in no page that was read, and taken for an entry without a record."""
    writer.save(tokens_of(1), BLOCKS)
    read = SetRecovery._records

    def fill_and_close() -> None:
        assert told(writer, tokens_of(2, 4)) == {SaveOutcome.SAVED}
        keeper = writer.store._keeper
        common = keeper.allocators.common
        wait_until(lambda: not any(map(common._is_full, common._sets.values())) and not keeper._pending.to_close)

    then = once(fill_and_close)
    monkeypatch.setattr(SetRecovery, "_records", lambda *args: (list(read(*args)), then())[0])
    sweeper(writer).rebuild()
    writer.close()
    assert loads(tmp_path, tokens_of(2, 4)) == 4


def test_an_engine_that_comes_and_goes_during_a_rebuild_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sets had no file when the folders were listed, and were taken out of the index."""
    first = engine_of(tmp_path, 6)
    first.save(tokens_of(1), BLOCKS)

    def come_and_go() -> None:
        other = engine_of(tmp_path, 6)
        other.save(tokens_of(2), BLOCKS)
        other.close()

    monkeypatch.setattr(SegmentFiles, "ids", after(SegmentFiles.ids, once(come_and_go)))
    sweeper(first).rebuild()
    first.close()
    assert loads(tmp_path, tokens_of(2)) == 2


@pytest.mark.parametrize("when", ["before its files go", "after they were read"])
def test_what_is_evicted_while_an_index_is_rebuilt_is_offered_by_neither(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It was read back: lookups found it, and who came to save it was told that it is present."""
    writer.save(tokens_of(1), BLOCKS)
    writer.close()
    other = engine_of(tmp_path, 6)
    index = other.store._keeper._index
    (lost,) = [info for info in index.sets() if index.members(info.set_id)]
    evicting, rebuilding = Remover(index, tmp_path / "v2"), sweeper(other, "rebuilding")
    if when == "before its files go":
        rebuild = once(rebuilding.rebuild)
        monkeypatch.setattr(SegmentFiles, "unlink_set", before(SegmentFiles.unlink_set, rebuild))
        evicting.remove(lost)
    else:
        read, evict = SetRecovery._records, once(lambda: evicting.remove(lost))
        monkeypatch.setattr(SetRecovery, "_records", lambda *args: (list(read(*args)), evict())[0])
        rebuilding.rebuild()
    assert lost.set_id not in {info.set_id for info in index.sets()}
    assert told(other, tokens_of(1)) == {SaveOutcome.SAVED}


def test_a_set_that_is_read_back_is_never_without_records(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper that saw it between its registration and its records removed it as empty, and unlinked its files."""
    writer.save(tokens_of(1), BLOCKS)
    writer.close()
    other = engine_of(tmp_path, 6)
    index = other.store._keeper._index
    for info in index.sets():
        if not info.is_open:
            index.remove_set(info.set_id)

    def sweep() -> None:
        index.release_lease(SWEEP_LEASE, "other")  # as if it had run out
        sweeper(other, "sweeper").sweep()

    with monkeypatch.context() as patched:
        patched.setattr(index, "create_set", after(index.create_set, once(sweep)))
        assert sweeper(other).rebuild().records == 2
    other.close()
    assert loads(tmp_path, tokens_of(1)) == 2


def test_what_a_late_writer_made_of_an_epoch_that_was_left_goes_with_it(tmp_path: Path) -> None:
    """Without the namespace's description nobody could tell what it was: it stayed on the disk, uncounted, for good."""
    engine = engine_of(tmp_path, 6)
    keeper = by_hand(engine)
    engine.store.reset()
    keeper.tick()
    engine.save(tokens_of(1), BLOCKS)
    folder = tmp_path / "v2" / engine.store.namespace_id.hex()
    (path,) = folder.glob("*.kvseg")
    shutil.copyfile(path, folder / f"{77:016x}-0001-00.kvseg")
    engine.store.reset()
    keeper.tick()
    assert not folder.exists()
    assert folder.name not in {info.namespace.hex() for info in keeper._index.sets()}


def test_no_set_is_left_open_by_an_epoch_that_ends_while_its_keeper_ticks(tmp_path: Path) -> None:
    """It made another one for the namespace that was just left, which nobody would fill or close."""
    engine = engine_of(tmp_path, 6)
    keeper = by_hand(engine)
    left = engine.namespace.id

    class Watched(deque):  # type: ignore[type-arg]
        def append(self, epoch: object) -> None:
            super().append(epoch)
            keeper.tick()

    keeper._pending.epochs = Watched()
    engine.store.reset()
    keeper.tick()
    assert [info for info in engine.store._keeper._index.sets() if info.namespace == left] == []


def test_a_writer_that_is_refused_does_not_cut_a_file_that_was_away_when_the_index_was_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index knows no record of that file, but its records are not lost: a sweep reads them back."""
    writer = Engine(tmp_path, tensor_size=2)
    by_hand(writer)
    writer.save(tokens_of(1), BLOCKS)
    paths = segments(tmp_path)
    assert len(paths) == 2
    index, now_s = writer.store._keeper._index, [time.time()]
    shutil.rmtree(tmp_path / "v2" / "index")
    rebuilding = Sweeper(index, tmp_path / "v2", "other", clock=lambda: now_s[0])
    monkeypatch.setattr(rebuilding, "_may_be_away", True)
    monkeypatch.setattr(rebuilding._recovery, "_may_be_away", True)
    for transfer in writer.transfers:
        monkeypatch.setattr(transfer._worker.files, "sharing", Sharing(may_be_away=True))
    away = paths[1].rename(tmp_path / "away")
    assert index.was_reset and rebuilding.rebuild() is not None
    index.rebuilt(index.loss())
    away.rename(paths[1])
    assert told(writer, tokens_of(2)) == {SaveOutcome.FAILED}
    now_s[0] += ORPHAN_GRACE_S + CLOCK_TOLERANCE_S
    rebuilding.sweep()
    assert len(index.resolve(writer.keys(tokens_of(1)))) == 2
    assert index.resolve(writer.keys(tokens_of(2))) == [], "what was answered as failed does not come back"
