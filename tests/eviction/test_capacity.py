"""Segment sets under one capacity: made ahead, evicted by least recent use, swept when their writer died."""

import math
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from kvtier.build import open_transfer
from kvtier.errors import ConfigError, IndexUnavailable, TierUnavailable
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.room import LATE_S, Room
from kvtier.eviction.set_removal import Remover
from kvtier.format.record import SegmentHeader
from kvtier.index.base import SetInfo, writer_lease
from kvtier.kernels.paged import PagedKV, PagedLayer
from kvtier.maintenance.scrub import stats, verify
from kvtier.maintenance.sweeper import SWEPT_NOTE, Sweeper
from kvtier.plan import SaveOutcome
from kvtier.scheduler.store import WantedChunk
from kvtier.storage import segments
from kvtier.storage.root import find_root
from kvtier.storage.segments import SegmentFiles
from tests.scheduler.test_slow_writers import by_hand
from tests.support.rig import BLOCKS, TARGET, Engine, geometry, namespace, settings, shares
from tests.waiting import wait_until

RECORD_BYTES = 4096 + 4 * 64 * 4 * 32 * 2 * 4  # header page, and 4 heads x 64 tokens x 4 layers x K and V of 32 floats


def tokens_of(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 64 * 5))


SEGMENT_BYTES = 4096 + 8 * RECORD_BYTES


def tiny(root: Path, sets: int = 3, **changes: object) -> Engine:
    """Sets of 8 chunks, and a capacity of `sets` of them."""
    return Engine(root, changes={"segment_bytes": SEGMENT_BYTES, "capacity_bytes": sets * SEGMENT_BYTES} | changes)


@pytest.mark.parametrize("touch_interval_s", [0.05, 1000.0])  # what is evicted never depends on it
def test_the_capacity_holds_and_the_oldest_goes_first(tmp_path: Path, touch_interval_s: float) -> None:
    engine = tiny(tmp_path, sets=5, touch_interval_s=touch_interval_s)
    for number in range(16):
        engine.save(tokens_of(number), BLOCKS)
        if engine.load(tokens_of(0), TARGET)[0] == 0 and number < 12:
            pytest.fail("what is used in every step was evicted")
        time.sleep(0.15)
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("v2/*/*.kvseg")) <= engine.settings.capacity_bytes
    assert engine.store._keeper._index.counts().n_bytes <= engine.settings.capacity_bytes
    hits = [engine.load(tokens_of(number), TARGET)[0] for number in range(16)]
    assert hits[15] == 5 and 0 in hits[1:9], hits
    assert not verify(find_root(tmp_path), engine.store._keeper._index).bad


def test_two_engines_never_evict_more_than_is_needed(tmp_path: Path) -> None:
    engines = [tiny(tmp_path, sets=6), tiny(tmp_path, sets=6)]
    for number in range(24):
        engines[number % 2].save(tokens_of(number), BLOCKS)
    on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("v2/*/*.kvseg"))
    assert on_disk <= engines[0].settings.capacity_bytes
    assert engines[0].store._keeper._index.counts().n_bytes >= 3 * engines[0].settings.segment_bytes
    for engine in engines:
        assert not verify(find_root(tmp_path), engine.store._keeper._index).bad
        engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"segment_bytes": 1 << 20, "capacity_bytes": 3 << 19}, "capacity_bytes.*one segment set takes"),
        ({"segment_bytes": 64 << 10}, "segment_bytes"),
        ({"host": {"arena_bytes": 256 << 10}}, r"host\.arena_bytes"),
        ({"hbm": {"arena_bytes": 1 << 30}}, r"hbm\.arena_bytes = 1073741824: there is no GPU here"),
    ],
)
def test_sizes_that_cannot_work_stop_start_up(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(tmp_path, tensor_size=2, changes=changes)


def test_kv_on_a_device_that_is_not_supported_stops_start_up(tmp_path: Path) -> None:
    """It would else run on without its cache: every save and load would fail and be counted."""
    plane = torch.zeros(4, 16, 4, 32, device="meta")
    pages = PagedKV((PagedLayer(plane, plane),), 16)
    shape = geometry(layers=1)
    with pytest.raises(ConfigError, match="device = 'meta'"):
        open_transfer(settings(tmp_path), namespace(shape), shares(shape)[0], pages)


def test_what_a_dead_writer_left_is_closed_and_trimmed(tmp_path: Path) -> None:
    dead = tiny(tmp_path, writer_lease_s=0.6)
    dead.save(tokens_of(1), BLOCKS)
    dead.store._keeper._ticker.close(1)  # type: ignore[union-attr]  # no further sign of life, as after SIGKILL
    index = dead.store._keeper._index
    before = stats(find_root(tmp_path), index).namespaces[0].n_bytes
    owner = next(info.owner for info in index.sets())
    wait_until(lambda: index.lease_owner(writer_lease(owner), time.time()) is None)
    alive = tiny(tmp_path)
    wait_until(lambda: not any(info.owner == owner and info.is_open for info in index.sets()))
    after = stats(find_root(tmp_path), index).namespaces[0].n_bytes
    assert after == before - 3 * RECORD_BYTES, "the slots that were not filled are given back"
    assert alive.load(tokens_of(1), TARGET)[0] == 5


def test_a_root_full_of_what_dead_writers_left_open_is_used_again_soon(tmp_path: Path) -> None:
    """Their sets can't be evicted before they are closed, and the next regular sweep is a minute away."""
    engine = tiny(tmp_path, sets=6)
    engine.save(tokens_of(1), BLOCKS)
    index = engine.store._keeper._index
    index.acquire_lease(writer_lease("gone"), "gone", time.time(), 1.0)
    for number in range(6):
        index.create_set(SetInfo(100 + number, engine.namespace.id, "gone", engine.settings.segment_bytes, 1.0, 1.0))
    base = time.monotonic()

    def saves() -> bool:
        number = 10 + int((time.monotonic() - base) * 50)
        done = engine.store.plan_save([WantedChunk(engine.keys(tokens_of(number))[0], bytes(16), (0, 1, 2, 3))])
        return done is not None and len(index.sets()) < 6

    for number in range(20, 24):
        engine.store.plan_save([WantedChunk(key, bytes(16), (0, 1, 2, 3)) for key in engine.keys(tokens_of(number))])
    wait_until(saves)


def test_empty_sets_of_dead_writers_and_old_orphans_go(tmp_path: Path) -> None:
    engine = tiny(tmp_path)
    engine.save(tokens_of(1), BLOCKS)
    engine.close()
    other = tiny(tmp_path)
    index = other.store._keeper._index
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    orphan = path.with_name(f"{77:016x}-0000-00.kvseg")
    orphan.write_bytes(path.read_bytes())  # says of itself that it is another
    lost = int(path.name[:16], 16)
    index.remove_set(lost)
    index.create_set(SetInfo(5, engine.namespace.id, "gone", 100, 1.0, 1.0))
    Sweeper(index, tmp_path / "v2", "sweeper").sweep()
    assert 5 not in {info.set_id for info in index.sets()}
    assert orphan.exists(), "its writer may be about to register it"
    Sweeper(index, tmp_path / "v2", "sweeper", clock=lambda: time.time() + 3600).sweep()
    assert not orphan.exists(), "what is no segment goes"
    assert lost in {info.set_id for info in index.sets()}, "a whole segment is taken in, not thrown away"
    assert other.load(tokens_of(1), TARGET)[0] == 5


def test_what_a_sweep_counts_beyond_the_capacity_is_evicted_in_the_same_tick(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=6)
    keeper, index, capacity_bytes = by_hand(engine), engine.store._keeper._index, engine.settings.capacity_bytes

    def save(numbers: range) -> None:
        for number in numbers:
            engine.save(tokens_of(number), BLOCKS)
            keeper.tick()

    save(range(7))
    for info in [info for info in index.sets() if not info.is_open][:2]:  # as if these files had been away
        index.remove_set(info.set_id)
        for path in tmp_path.glob(f"v2/*/{info.set_id:016x}-*"):
            os.utime(path, (1.0, 1.0))
    save(range(7, 14))
    index.drop_note(SWEPT_NOTE)
    keeper._due.limits_s = math.inf
    before_bytes = index.counts().n_bytes
    keeper._due.sweep.want()
    keeper.tick()
    assert index.notes(SWEPT_NOTE, time.time()) and before_bytes <= capacity_bytes
    assert index.counts().n_bytes <= capacity_bytes
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("v2/*/*.kvseg")) <= capacity_bytes


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """A file system of so many MiB; skips where none can be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip("mounting a small file system takes root")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_smaller_than_the_capacity_is_used_and_never_emptied() -> None:
    with small_disk(48) as root:
        engine = tiny(root, capacity_bytes=1 << 30, index={"path": f"{root}-index"})
        saved, fewest = 0, 10**6
        for number in range(80):
            done = engine.save(tokens_of(number), BLOCKS)
            saved += sum(answer.outcome is SaveOutcome.SAVED for answer in done)
            if number > 40:
                fewest = min(fewest, engine.store._keeper._index.counts().chunks)
        assert saved * RECORD_BYTES > 90 << 20, "saving stopped when the disk was full"
        assert fewest * RECORD_BYTES > 20 << 20, "room was made by throwing nearly everything away"
        assert engine.store.metrics.total()["evicted_bytes"] > 0
        assert not verify(find_root(root), engine.store._keeper._index).bad
        engine.close()
    shutil.rmtree(f"{root}-index")


def test_room_that_evicted_files_still_take_is_not_made_once_more() -> None:
    room = Room()
    assert room.bytes_for_sets(0.0, 90, 10) == 100
    assert room.bytes_for_sets(1.0, 80, 10) == room.bytes_for_sets(50.0, 80, 10) == 100  # not shown yet
    assert room.bytes_for_sets(50.0, 80, 0) == 90  # others took more than what was late
    assert room.bytes_for_sets(1.0 + LATE_S, 80, 0) == 80
    assert room.bytes_for_sets(70.0, 70, 0) == 80 and room.bytes_for_sets(71.0, 70, 10) == 80  # shown at last
    assert room.bytes_for_sets(73.0, 70, 0) == 70, "what others take after that is no room"


def test_a_full_quota_rests_saving_and_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space that statvfs does not know of: met when a segment is made, and answered by evicting one set a time."""
    engine = tiny(tmp_path, sets=40)
    for number in range(12):
        engine.save(tokens_of(number), BLOCKS)
    sets = engine.store._keeper._index.counts().sets
    create = SegmentFiles.create

    def limited(self: SegmentFiles, header: SegmentHeader) -> None:
        if len(self.ids()) >= 6:
            raise TierUnavailable("Disk quota exceeded", is_full=True)
        create(self, header)

    monkeypatch.setattr(SegmentFiles, "create", limited)

    def saves_again() -> bool:
        engine.wait_for_set()
        return any(a.outcome is SaveOutcome.SAVED for a in engine.save(tokens_of(random.randrange(99, 10**5)), BLOCKS))

    wait_until(lambda: not saves_again())
    assert engine.transfers[0].metrics.total()["skipped_chunks_no_space"] > 0
    wait_until(saves_again)
    assert engine.store._keeper._index.counts().sets > sets // 3


def test_storage_that_fails_for_other_reasons_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow write or refused file used to be taken for a full disk, and everything stored was evicted."""
    engine = tiny(tmp_path, sets=40)
    for number in range(8):
        engine.save(tokens_of(number), BLOCKS)
    chunks = engine.store._keeper._index.counts().chunks

    def refuse(self: SegmentFiles, header: object) -> None:
        raise TierUnavailable("Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, "create", refuse)
        outcomes = set()
        for number in range(10, 22):
            outcomes |= {answer.outcome for answer in engine.save(tokens_of(number), BLOCKS)}
            time.sleep(0.1)
        assert SaveOutcome.FAILED in outcomes and SaveOutcome.NO_SPACE not in outcomes
    assert engine.store._keeper._index.counts().chunks >= chunks
    assert engine.store.metrics.total().get("evicted_bytes", 0) == 0


def test_an_evicted_segment_gives_its_space_back_while_others_had_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "close_in_process", lambda folder, set_id: None)  # as if they were two processes
    writer, reader = tiny(tmp_path), tiny(tmp_path)
    writer.save(tokens_of(1), BLOCKS)
    reader.load(tokens_of(1), TARGET)
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    held = path.open("rb")
    (info,) = writer.store._keeper._index.some_sets([int(path.name[:16], 16)])
    Remover(writer.store._keeper._index, tmp_path / "v2").remove(info)
    inode = os.fstat(held.fileno()).st_ino
    held.close()

    def open_inodes() -> set[int]:
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.stat(f"/proc/self/fd/{descriptor}").st_ino)
        return found

    assert inode in open_inodes()
    for engine in (writer, reader):
        engine.transfers[0].tidy()
    assert inode not in open_inodes()


def test_slots_of_chunks_that_were_not_written_are_used_again(tmp_path: Path) -> None:
    first, second = tiny(tmp_path, sets=6), tiny(tmp_path, sets=6)
    first.save(tokens_of(1), BLOCKS)
    assert {answer.outcome for answer in second.save(tokens_of(1), BLOCKS)} == {SaveOutcome.PRESENT}
    done = second.save(tokens_of(2), BLOCKS)
    assert sorted(answer.slot for answer in done) == [0, 1, 2, 3, 4]
    assert not verify(find_root(tmp_path), second.store._keeper._index).bad


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_keeper_outlives_any_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error in one duty used to end the thread, and with it sets, signs of life and eviction for good."""
    engine = tiny(tmp_path, sets=12)
    keeper = engine.store._keeper
    faults = (OSError(5, "Input/output error"), ConfigError("root", "x", "y"), IndexUnavailable("gone"), KeyError(1))
    for fault in faults:

        def fail(*_: object, fault: Exception = fault) -> None:
            raise fault

        hook, threading.excepthook = threading.excepthook, lambda _: None
        with monkeypatch.context() as patched:
            patched.setattr(Evictor, "make_room", fail)
            patched.setattr(Sweeper, "close_set", fail)
            keeper._due.sweep.want()
            patched.setattr(Sweeper, "sweep", fail)
            for number in range(3):
                engine.prefill(tokens_of(number), BLOCKS)
            keeper._ticker.wake()  # type: ignore[union-attr]
            time.sleep(0.3)
        threading.excepthook = hook
    for number in range(20, 26):
        engine.save(tokens_of(number), BLOCKS)
    assert engine.load(tokens_of(25), TARGET)[0] == 5


def test_a_set_is_closed_although_the_index_failed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny(tmp_path, sets=12)
    closed, failures = Sweeper.close_set, iter([True, True])

    def fail_twice(self: Sweeper, set_id: int) -> None:
        if next(failures, False):
            raise IndexUnavailable("a moment")
        closed(self, set_id)

    monkeypatch.setattr(Sweeper, "close_set", fail_twice)
    for number in range(5):
        engine.save(tokens_of(number), BLOCKS)
    allocator = engine.store._keeper.allocators.common
    wait_until(lambda: sum(info.is_open for info in engine.store._keeper._index.sets()) <= 1 + allocator.n_unused)
