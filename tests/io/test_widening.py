"""The ring while one file hangs: other threads stand in for those that it holds, and the file gets no more of them."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import ring as ring_module
from kvtier.io.ring import AlignedBuffer, Batch, Ring
from tests.support.rig import Engine
from tests.waiting import wait_until

from hang import HungRead
from records import PIECE_BYTES, TIMEOUT_S, Record, finished, open_file, written

THREADS = 4


def native_threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread may end before its name is read
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return names.count("kvtier-io\n")


def held(ring: Ring, hung: HungRead, what: str, fd: int) -> Batch:
    """Submit more reads or writes of one file than the ring has threads, all of which hang."""
    batch = ring.submit([hung.op if what == "reads" else hung.write_op(fd)] * (3 * THREADS))
    hung.wait_until_hanging(TIMEOUT_S)
    time.sleep(0.2)  # until all threads that may hang do
    return batch


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_a_file_that_hangs_holds_up_no_other(tmp_path: Path, hung: HungRead, what: str) -> None:
    other, fd = open_file(tmp_path / "other", direct=False), open_file(tmp_path / "hangs", direct=False)
    record, target = Record(1, 4 * PAGE_BYTES, 2), AlignedBuffer(9 * PAGE_BYTES)
    wait_until(lambda: native_threads() == 0, "the threads of earlier rings have ended")
    with Ring(THREADS, PIECE_BYTES) as ring:
        (result,) = written(ring, other, [record])
        read = record.read_op(other, target, result.checksums)
        blocker = held(ring, hung, what, fd)
        waiting = ring.submit([record.write_op(other) if what == "writes" else read])
        assert not waiting.wait(0.3)
        ring.widen(60.0)
        assert not waiting.wait(0.1) and native_threads() == THREADS
        ring.widen(0.2)
        assert finished(waiting)[0].error == 0
        for _ in range(3):
            assert finished(ring.submit([read]))[0].ok and finished(ring.submit([record.write_op(other)]))[0].ok
            ring.widen(0.2)
        assert THREADS < native_threads() <= 2 * THREADS, "the file took none of the new threads"
        assert not blocker.wait(0.0)
        hung.release()
        assert [answer.error for answer in finished(blocker)] == [0] * len(blocker.slabs_of_ops)
        ring.widen(60.0)
        wait_until(lambda: native_threads() == THREADS)
        assert finished(ring.submit([read]))[0].ok
    os.close(fd)
    os.close(other)


def test_operations_of_a_file_that_hangs_are_skipped_however_many_wait(tmp_path: Path, hung: HungRead) -> None:
    other, fd = open_file(tmp_path / "other", direct=False), open_file(tmp_path / "hangs", direct=False)
    record = Record(1, 4 * PAGE_BYTES, 2)
    with Ring(2, PIECE_BYTES) as ring:
        batches = ring.submit_each([[hung.write_op(fd)]] * 200)
        hung.wait_until_hanging(TIMEOUT_S)
        waiting = ring.submit([record.write_op(other)])
        assert not waiting.wait(0.2)
        ring.widen(0.1)
        assert finished(waiting)[0].error == 0
        for batch in batches:
            batch.cancel()
        hung.release()
        assert all(batch.wait(TIMEOUT_S) for batch in batches)
    os.close(fd)
    os.close(other)


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_the_last_free_thread_does_not_follow_into_a_file_that_hangs(tmp_path: Path, hung: HungRead, what: str) -> None:
    """Nothing else waits when it is added, and a file that hangs may have two threads."""
    other, fd = open_file(tmp_path / "other", direct=False), open_file(tmp_path / "hangs", direct=False)
    record = Record(1, 4 * PAGE_BYTES, 2)
    with Ring(1, PIECE_BYTES) as ring:
        blocker = held(ring, hung, what, fd)
        for _ in range(3):
            ring.widen(0.1)
            time.sleep(0.15)
        assert finished(ring.submit([record.write_op(other)]))[0].ok
        hung.release()
        assert [answer.error for answer in finished(blocker)] == [0] * len(blocker.slabs_of_ops)
    os.close(fd)
    os.close(other)


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_saves_and_loads_of_other_files_go_on(tmp_path: Path, hung: HungRead, what: str) -> None:
    """The worker's ring, in which one file takes all the threads that it can."""
    tokens, blocks = list(range(64 * 2)), list(range(8))
    changes = {"io": {"threads": THREADS, "timeout_s": 20.0}, "host": {"arena_bytes": 8 << 20, "admit": "never"}}
    fd = open_file(tmp_path / "hangs", direct=False)
    engine = Engine(tmp_path / "root", changes=changes)
    blocker = held(engine.transfers[0]._worker.io.ring, hung, what, fd)
    if what == "writes":
        assert {done.outcome.name for done in engine.save(tokens, blocks)} == {"SAVED"}
    else:
        other = Engine(tmp_path / "root", changes=changes)
        other.save(tokens, blocks)
        hits, (answer,) = engine.load(tokens, blocks)
        assert hits == 2 and not answer.failed_blocks
        other.close()
    blocker.cancel()
    hung.release()
    assert blocker.wait(TIMEOUT_S)
    engine.close()
    os.close(fd)


def test_nobody_who_submits_waits_for_new_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have memory to pin for a GPU, which takes long where it is busy."""
    fd, record = open_file(tmp_path / "file", direct=False), Record(1, PAGE_BYTES, 1)
    widening, may_go_on = threading.Event(), threading.Event()

    def wait(*args: object) -> int:
        widening.set()
        may_go_on.wait(TIMEOUT_S)
        return 0

    with Ring(THREADS, PIECE_BYTES) as ring:
        with monkeypatch.context() as during:
            during.setattr(ring_module, "library", SimpleNamespace(kvtier_ring_widen=wait))
            widen, submit = (
                threading.Thread(target=work) for work in (lambda: ring.widen(1.0), lambda: ring.submit([]))
            )
            widen.start()
            assert widening.wait(TIMEOUT_S)
            submit.start()
            submit.join(TIMEOUT_S / 4)
            has_submitted = not submit.is_alive()
            may_go_on.set()
            for thread in (widen, submit):
                thread.join()
        assert has_submitted
        assert finished(ring.submit([record.write_op(fd)]))[0].ok
