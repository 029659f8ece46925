"""Segments whose set was removed are closed, on file systems that keep an open file under another name (NFS), that fail
close(2), and under a small RLIMIT_NOFILE."""

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import IndexUnavailable
from kvtier.eviction.set_removal import Remover
from kvtier.index.base import SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.plan import SaveOutcome
from kvtier.runtime import file_descriptors
from tests.engines.disk import Disk, disk
from tests.eviction.test_capacity import BLOCKS, SEGMENT_BYTES, TARGET, tokens_of
from tests.support.rig import Engine
from tests.waiting import wait_until

SAVED = {SaveOutcome.SAVED}


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 160 MiB behind faulty_fs.c."""
    with disk(tmp_path / "disk", 160 << 20, silly_renames=True) as made:
        if made.flags is None or made.n_bytes is None:
            pytest.skip("no FUSE here, or no tmpfs may be mounted")
        yield made


def engine_on(place: Disk, sets: int, **changes: object) -> Engine:
    base = {
        "segment_bytes": SEGMENT_BYTES,
        "capacity_bytes": sets * SEGMENT_BYTES,
        "index": {"path": str(place.below.parent.parent / "index")},
        "host": {"arena_bytes": 8 << 20, "admit": "never"},
    }
    engine = Engine(place.root, changes=base | changes)
    place.users.callback(engine.close)
    return engine


def bytes_on(place: Disk) -> int:
    """Sum what files take; those that an engine removes at this moment count nothing."""
    total = 0
    for path in place.below.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


def silly_files(place: Disk) -> list[Path]:
    return list(place.below.rglob(".fuse_hidden*"))


def test_an_evictor_closes_its_own_files_before_it_unlinks_them(faulty: Disk) -> None:
    """Scheduler and worker are one process here, as with one GPU: no file is kept under another name at any moment."""
    engine = engine_on(faulty, sets=6)
    for number in range(40):
        assert {answer.outcome for answer in engine.save(tokens_of(number), BLOCKS)} == SAVED
        assert not silly_files(faulty)
        assert bytes_on(faulty) <= 7 * SEGMENT_BYTES + (1 << 20)
    assert engine.store.metrics.total()["evicted_bytes"] > 0


def test_a_removed_set_that_is_read_stays_open_until_the_read_ends(
    faulty: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(faulty, sets=12)
    engine.save(tokens_of(1), BLOCKS)
    (path,) = faulty.below.glob("v2/*/*.kvseg")
    set_id = int(path.name[:16], 16)
    files = engine.transfers[0]._worker.files(engine.namespace.id)
    leased = files.lease(set_id, 0)
    assert leased is not None
    content = os.pread(leased.fd, 4096, 0)
    index = engine.store._keeper._index
    Remover(index, faulty.root / "v2").remove(index.some_sets([set_id])[0])
    engine.transfers[0].tidy()
    assert os.pread(leased.fd, 4096, 0) == content and silly_files(faulty)
    leased.release()
    wait_until(lambda: not silly_files(faulty))


def test_an_index_that_lost_its_content_closes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    engine.save(tokens_of(1), BLOCKS)
    worker = engine.transfers[0]._worker
    held = worker.files.open_sets()
    assert held
    empty = MemoryIndex()
    monkeypatch.setattr(MemoryIndex, "was_reset", property(lambda self: True))
    object.__setattr__(worker, "index", empty)
    worker.close_removed()
    assert worker.files.open_sets() == held
    monkeypatch.setattr(MemoryIndex, "was_reset", property(lambda self: False))
    worker.close_removed()
    assert not worker.files.open_sets()


@pytest.mark.parametrize("index_is_away", [False, True])
def test_a_writer_leaves_no_file_of_a_removed_set(
    tmp_path: Path, index_is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for dead, and its set evicted, records and all. The file that it then made for its next record was
    in no index and no budget (seed 9 of the simulation, 1,000 steps of random)."""
    engine = Engine(tmp_path)
    assert {answer.outcome for answer in engine.save(tokens_of(1), BLOCKS)} == SAVED
    (path,) = tmp_path.glob("v2/*/*.kvseg")
    plan = engine.plan(tokens_of(2), BLOCKS)
    assert {chunk.set_id for chunk in plan.chunks} == {int(path.name[:16], 16)}
    index, (transfer,) = engine.store._keeper._index, engine.transfers
    Remover(index, tmp_path / "v2").remove(index.some_sets([plan.chunks[0].set_id])[0])
    files, ask = transfer._worker.files(engine.namespace.id), transfer._worker.index.some_sets
    made: list[int] = []

    def answer_later(set_ids: Collection[int]) -> list[SetInfo]:
        made.append(files.file_bytes(plan.chunks[0].set_id, 0))
        if len(made) == 1 and index_is_away:
            raise IndexUnavailable("away")
        return ask(set_ids)

    monkeypatch.setattr(transfer._worker.index, "some_sets", answer_later)
    transfer.save(plan)
    assert transfer.drain(20)
    assert {answer.outcome for answer in transfer.poll().saves} == {SaveOutcome.FAILED}
    assert made[0] > 0 and not path.exists()


@pytest.mark.parametrize("number", [errno.EBADF, errno.EIO])
def test_a_close_that_fails_ends_no_thread_and_is_logged_once(
    number: int, faulty: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_descriptors, "_logged_s", float("-inf"))
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))
    engine = engine_on(faulty, sets=6)
    for chunks in range(8):
        engine.save(tokens_of(chunks), BLOCKS)
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        faulty.set("close fails with", number)
        hits, (answer,) = engine.load(tokens_of(7), TARGET)
        assert hits == 5 and not answer.failed_blocks
        index = engine.store._keeper._index
        for info in index.sets():
            if not info.is_open:
                Remover(index, faulty.root / "v2").remove(info)
        engine.transfers[0]._worker.files.close()
        engine.transfers[0].tidy()
        faulty.set("close fails with", 0)
    assert not ended
    assert sum("closing a file failed" in record.message for record in caplog.records) == 1
    assert {answer.outcome for answer in engine.save(tokens_of(99), BLOCKS)} == SAVED


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from pathlib import Path
from tests.support.rig import Engine
engine = Engine(Path(sys.argv[1]), changes={"segment_bytes": 1 << 20, "capacity_bytes": 256 << 20,
                                            "host": {"arena_bytes": 8 << 20, "admit": "never"}})
tokens = lambda number: list(range(1000 * number, 1000 * number + 256))
for number in range(100):
    done = engine.save(tokens(number), list(range(16)))
    assert len(done) == 4 and {answer.outcome.name for answer in done} == {"SAVED"}, (number, done)
hits, (answer,) = engine.load(tokens(0), list(range(16)))
assert hits == 4 and not answer.failed_blocks
engine.close()
"""


def test_a_small_limit_of_open_files_stops_no_save(tmp_path: Path) -> None:
    """Each prompt fills more than one segment; the process may open 128 files."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "root")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Too many open files" not in done.stderr


SMALL_FILES = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
from pathlib import Path
from tests.support.rig import Engine
engine = Engine(Path(sys.argv[1]), changes={"index": {"kind": sys.argv[3]}, "segment_bytes": 4 << 20})
if sys.argv[3] == "memory":
    engine.save(list(range(256)), list(range(16)))
engine.close()
"""


@pytest.mark.parametrize("index", ["embedded", "memory"])
def test_a_limit_of_the_size_of_files_is_named(index: str, tmp_path: Path) -> None:
    """Nothing was saved, and the log said "File too large" of a file that was not there."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, str(tmp_path / "root"), str(500_000), index],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    hint = "File too large: this process may write files of 500000 bytes; raise the limit with `ulimit -f`"
    assert hint in done.stderr, done.stderr[-3000:]


def test_files_are_opened_although_the_engine_took_all_descriptors(tmp_path: Path) -> None:
    engine = Engine(tmp_path, changes={"segment_bytes": SEGMENT_BYTES})
    for number in range(6):
        engine.save(tokens_of(number), BLOCKS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        engine.wait_for_set()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
        try:
            while True:
                taken.append(os.dup(0))
        except OSError as fault:
            assert fault.errno == errno.EMFILE
        files = engine.transfers[0]._worker.files(engine.namespace.id)
        held = files.open_sets()
        names = files.ids()  # opens the folder
        assert len(files.open_sets()) < len(held) and len(names) == len(held)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_error_without_a_descriptor_says_how_many_there_are() -> None:
    def open_it() -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/root/segment")

    with pytest.raises(
        OSError, match=r"may open \d+ files; raise the limit with `ulimit -n`: '/root/segment'"
    ) as fault:
        file_descriptors.with_descriptors(open_it)
    assert fault.value.errno == errno.EMFILE


def test_a_pool_keeps_a_share_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 256), (256, 64), (20, 8), (resource.RLIM_INFINITY, 256), (1 << 20, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda of, soft=soft: (soft, soft))
        assert file_descriptors.most_open(256) == most
