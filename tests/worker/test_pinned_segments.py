"""Which segments are pinned, when, and when they are let go of."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent, RankShare
from kvtier.format.record import SegmentHeader, record_bytes
from kvtier.runtime.metrics import PINNED_FILE_BYTES, Metrics
from kvtier.storage.segments import SegmentFiles, segment_name
from kvtier.worker import pinned_segments
from kvtier.worker.arenas import PIN_BYTES
from kvtier.worker.context import WorkerContext
from kvtier.worker.pinned_segments import QUIET_S, PinnedSegments
from kvtier.worker.transfer import Upkeep
from tests.manual_jobs import ManualJobs
from tests.support.rig import Engine

NAMESPACE, OTHER_NAMESPACE = bytes(range(16)), bytes(range(16, 32))
OURS, OTHERS = Extent(0, 2, 0, 2), Extent(0, 2, 2, 2)
SLAB_BYTES = 2 << 20
SLOT_BYTES = record_bytes(OURS, SLAB_BYTES)
SLOTS = 20
SEGMENT_BYTES = PAGE_BYTES + SLOTS * SLOT_BYTES
BUDGET_BYTES = 1 << 40


@dataclass
class Rig:
    """A folder of segments in memory, and what was asked to be pinned: (device and inode, end), in order."""

    files: SegmentFiles
    now_s: float = 100.0
    closed: list[tuple[int, int]] = field(default_factory=list)
    asked: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    fault: TierUnavailable | OSError | None = None
    metrics: Metrics = field(default_factory=Metrics)
    is_gpu_busy: bool = False

    def pin(self, fd: int, end: int) -> None:
        if self.fault is not None:
            raise self.fault
        assert end % PAGE_BYTES == 0 and end <= os.fstat(fd).st_size
        assert not has_hole(fd, end), "memory for a hole"
        self.asked.append((file_of(fd), end))
        os.utime(fd)  # as the faults of a mapping that may be written do

    def segments(self, budget_bytes: int = BUDGET_BYTES) -> PinnedSegments:
        return PinnedSegments(self.worker(), lambda namespace: self.files, NAMESPACE, budget_bytes)

    def worker(self) -> WorkerContext:
        """What of it is looked at."""
        order = SimpleNamespace(mark=lambda: "launched", is_done=lambda mark: not self.is_gpu_busy)
        ring = SimpleNamespace(pin_file=lambda fd, end: self.pin(fd, end))
        worker = SimpleNamespace(
            io=SimpleNamespace(ring=ring),
            share=RankShare(0, OURS, OURS),
            order=order,
            metrics=self.metrics,
            clock=lambda: self.now_s,
        )
        return cast(WorkerContext, worker)

    def make(
        self, set_id: int, slots: int = SLOTS, extent: Extent = OURS, age_s: float = 0.0, namespace: bytes = NAMESPACE
    ) -> tuple[int, int]:
        """A segment of which so many slots are written."""
        rank = 0 if extent == OURS else 1
        header = SegmentHeader(namespace, set_id, rank, SLOTS, SLOT_BYTES, extent, SLAB_BYTES, 1)
        self.files.create(header)
        path = self.files.folder / segment_name(set_id, header.part)
        self.write(set_id, 0, slots, header.part)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
        status = path.stat()
        return status.st_dev, status.st_ino

    def write(self, set_id: int, first: int, end: int, part: int = 0) -> None:
        with open(self.files.folder / segment_name(set_id, part), "r+b") as file:
            for slot in range(first, end):
                file.seek(PAGE_BYTES + slot * SLOT_BYTES)
                file.write(b"\1" * SLOT_BYTES)

    def pinned(self) -> dict[tuple[int, int], int]:
        """How much, of which file."""
        return dict(self.asked)


def file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def has_hole(fd: int, end: int) -> bool:
    return os.lseek(fd, 0, os.SEEK_HOLE) < end


@pytest.fixture(name="rig")
def _rig(tmp_path: Path) -> Iterator[Rig]:
    shm = Path("/dev/shm")
    base = shm / f"kvtier-test-{os.getpid()}-{tmp_path.name}" if os.access(shm, os.W_OK) else tmp_path
    folder = base / NAMESPACE.hex()
    folder.mkdir(parents=True)
    rig = Rig(None)  # type: ignore[arg-type]
    rig.files = SegmentFiles(folder, False, lambda fd: rig.closed.append(file_of(fd)))
    yield rig
    rig.files.close()
    shutil.rmtree(base)


def test_whole_segments_are_pinned_in_steps_the_newest_first(rig: Rig) -> None:
    old, new = rig.make(1, age_s=60), rig.make(2, age_s=5)
    segments = rig.segments()
    segments.look()
    assert rig.pinned() == {new: SEGMENT_BYTES, old: SEGMENT_BYTES}
    assert [file for file, _ in rig.asked] == [new] * 3 + [old] * 3
    steps = [0, *(end for file, end in rig.asked if file == new)]
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) <= PIN_BYTES
    assert segments.n_bytes == rig.metrics.total()[PINNED_FILE_BYTES] == 2 * SEGMENT_BYTES
    segments.look()
    assert len(rig.asked) == 6
    segments.close()


def test_what_is_being_written_is_pinned_as_it_grows(rig: Rig) -> None:
    """In whole steps, so that it is not asked for with each record; and never a hole."""
    segment = rig.make(1, slots=12)
    segments = rig.segments()
    segments.look()
    assert rig.pinned() == {segment: PIN_BYTES}
    rig.write(1, 13, 17)  # behind a hole
    segments.look()
    assert rig.pinned() == {segment: PIN_BYTES}
    rig.write(1, 12, 13)
    segments.look()
    assert rig.pinned() == {segment: 2 * PIN_BYTES}
    rig.write(1, 17, SLOTS)
    segments.look()
    assert rig.pinned() == {segment: SEGMENT_BYTES}
    segments.close()


def test_the_time_of_the_last_write_stays(rig: Rig) -> None:
    """Upkeep goes by it."""
    rig.make(1, age_s=60)
    path = rig.files.folder / segment_name(1, 0)
    before = path.stat().st_mtime_ns
    segments = rig.segments()
    segments.look()
    assert rig.asked and path.stat().st_mtime_ns == before
    segments.close()


def test_one_that_cannot_be_mapped_is_left_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = rig.make(1, age_s=60), rig.make(2)
    pin, tried = rig.pin, []

    def refuse(fd: int, end: int) -> None:
        if file_of(fd) == new:
            tried.append(end)
            raise OSError(errno.EINVAL, "Invalid argument")
        pin(fd, end)

    monkeypatch.setattr(rig, "pin", refuse)
    segments = rig.segments()
    segments.look()
    segments.look()
    assert rig.pinned() == {old: SEGMENT_BYTES} and len(tried) == 1
    assert list(segments._held) == [(1, 0)]  # nor does it count among those that may be open
    segments.close()


def test_segments_of_other_ranks_are_left_alone(rig: Rig) -> None:
    ours = rig.make(1)
    rig.make(2, extent=OTHERS)
    segments = rig.segments()
    segments.look()
    segments.look()
    assert list(rig.pinned()) == [ours]
    segments.close()


def test_the_budget_is_kept(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """And what it has no room for is not even opened, at every look; which is said once."""
    rig.make(1, age_s=9)
    new = rig.make(2)
    segments = rig.segments(SEGMENT_BYTES + PAGE_BYTES)
    with caplog.at_level("INFO", "kvtier"):
        for _ in range(2):
            segments.look()
            assert rig.pinned() == {new: SEGMENT_BYTES} and list(segments._held) == [(2, 0)]
        assert caplog.text.count("all that io.pin_bytes") == 1
        rig.files.unlink(2, 0)  # the other one takes its room at once, and so on for as long as sets are evicted
        segments.look()
        assert caplog.text.count("all that io.pin_bytes") == 1 and list(segments._held) == [(1, 0)]
        rig.files.unlink(1, 0)
        segments.look()
        rig.make(3)
        segments.look()
    assert caplog.text.count("all that io.pin_bytes") == 2
    segments.close()


def test_not_while_the_engine_is_at_work_or_loads_run(rig: Rig) -> None:
    rig.make(1)
    segments, loads = rig.segments(), ManualJobs(4)
    segments._loads = loads
    segments.at_work()
    segments.look()
    assert not rig.asked
    rig.now_s += QUIET_S
    loads.submit(lambda: None)
    segments.look()
    assert not rig.asked
    loads.run()
    segments.look()
    assert len(rig.asked) == 3
    segments.close()


def test_not_during_one_long_step(rig: Rig) -> None:
    """What the engine launched with it is still on the GPU, long after it was heard of last."""
    rig.make(1)
    segments = rig.segments()
    segments.at_work()
    rig.is_gpu_busy = True
    rig.now_s += 10 * QUIET_S
    segments.look()
    rig.is_gpu_busy = False
    segments.look()
    assert not rig.asked  # it may go on with the next step
    rig.now_s += QUIET_S
    segments.look()
    assert len(rig.asked) == 3
    segments.close()


def test_many_small_segments_do_not_take_all_descriptors(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_segments, "FILES_MAX", 2)
    for number in range(3):
        rig.make(number, slots=1, age_s=number)
    segments = rig.segments()
    segments.look()
    assert len(segments._held) == 2
    rig.files.unlink(2, 0)
    segments.look()
    assert set(segments._held) == {(1, 0), (0, 0)}
    segments.close()


def test_work_that_comes_meanwhile_waits_for_one_step_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.make(1)
    segments = rig.segments()
    pin = rig.pin

    def pin_and_get_work(fd: int, end: int) -> None:
        pin(fd, end)
        segments.at_work()

    monkeypatch.setattr(rig, "pin", pin_and_get_work)
    segments.look()
    assert len(rig.asked) == 1
    segments.close()


def test_what_was_evicted_is_let_go_of_also_when_the_engine_is_busy(rig: Rig) -> None:
    gone, stays = rig.make(1), rig.make(2)
    segments = rig.segments()
    segments.look()
    assert set(rig.pinned()) == {gone, stays} and not rig.closed
    rig.files.unlink(1, 0)
    segments.at_work()
    segments.look()
    assert rig.closed == [gone] and segments.n_bytes == SEGMENT_BYTES
    segments.close()


def test_one_bad_segment_does_not_stand_in_the_others_way(rig: Rig) -> None:
    old = rig.make(1, age_s=60)
    (rig.files.folder / segment_name(2, 0)).write_bytes(b"\1" * PAGE_BYTES)
    with pytest.raises(Corrupt):
        rig.files.lease(2, 0)
    segments = rig.segments()
    segments.look()
    assert rig.pinned() == {old: SEGMENT_BYTES}
    segments.close()


def test_when_cuda_refuses_it_is_said_once_and_not_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.make(1)
    rig.make(2)
    rig.fault = TierUnavailable("a file cannot be pinned: CUDA_ERROR_OUT_OF_MEMORY")
    segments = rig.segments()
    for _ in range(3):
        segments.look()
    rig.fault = None
    segments.look()
    assert not rig.asked
    assert caplog.text.count("CUDA_ERROR_OUT_OF_MEMORY") == 1
    segments.close()


@pytest.mark.parametrize("fault", [OSError(errno.EINVAL, "Invalid argument"), TierUnavailable("CUDA_ERROR_UNKNOWN")])
def test_a_segment_that_is_cut_meanwhile_is_no_refusal(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Whether that is met before CUDA is asked, or by CUDA."""
    rig.make(1, age_s=60)
    rig.make(2)
    segments = rig.segments()

    def cut(fd: int, end: int) -> None:
        os.ftruncate(fd, PAGE_BYTES)
        monkeypatch.undo()
        raise fault

    monkeypatch.setattr(rig, "pin", cut)
    segments.look()
    assert set(rig.pinned().values()) == {SEGMENT_BYTES}
    segments.close()


def test_a_namespace_without_a_folder_is_looked_at_again(rig: Rig) -> None:
    segment = rig.make(1)
    answers: list[SegmentFiles | TierUnavailable] = [TierUnavailable("not yet"), rig.files]

    def files(namespace: bytes) -> SegmentFiles:
        answer = answers.pop(0)
        if isinstance(answer, TierUnavailable):
            raise answer
        return answer

    segments = PinnedSegments(rig.worker(), files, NAMESPACE, BUDGET_BYTES)
    segments.look()
    segments.look()
    assert list(rig.pinned()) == [segment]
    segments.close()


def test_an_engine_that_moves_to_another_namespace_is_followed(rig: Rig) -> None:
    """As it does when weights change in place: what it has left is let go of, though it was not evicted."""
    left, folder = rig.make(1), rig.files.folder.with_name(OTHER_NAMESPACE.hex())
    files = {NAMESPACE: rig.files, OTHER_NAMESPACE: SegmentFiles(folder, False)}
    segments = PinnedSegments(rig.worker(), files.__getitem__, NAMESPACE, BUDGET_BYTES)
    segments.look()
    assert list(rig.pinned()) == [left]
    folder.mkdir()
    rig.files = files[OTHER_NAMESPACE]
    new = rig.make(2, namespace=OTHER_NAMESPACE)
    segments.moves_in(OTHER_NAMESPACE)
    segments.look()
    assert rig.closed == [left] and set(rig.pinned()) == {left, new} and segments.n_bytes == SEGMENT_BYTES
    segments.close()


def test_whoever_pins_is_told_of_a_new_namespace(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    seen: list[bytes] = []
    tokens, blocks = range(1000, 1000 + 64), range(4)
    engine.transfers[0]._upkeep = Upkeep(moves_in=seen.append)
    engine.save(tokens, blocks)
    first = engine.store.namespace_id
    engine.store.reset()
    engine.save(tokens, blocks)
    assert engine.load(tokens, blocks)[0] == 1
    second = engine.store.namespace_id
    assert first != second and seen == [first, second, second]
    engine.close()


def test_closing_lets_go_of_all(rig: Rig) -> None:
    segment = rig.make(1)
    segments = rig.segments()
    segments.look()
    rig.files.close()
    assert not rig.closed
    segments.close()
    assert rig.closed == [segment]
