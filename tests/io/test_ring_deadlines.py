"""The ring while a read hangs in the kernel: timeouts, cancels, closing, bounds, and who goes first."""

import errno

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.ring import AlignedBuffer, Ring

from hang import HungRead, blocked
from records import PIECE_BYTES, TIMEOUT_S, Record, finished, written


def test_a_hung_read_times_out_and_ends_later(ring: Ring, fd: int, hung: HungRead) -> None:
    record, target = Record(1, 4 * PAGE_BYTES, 2), AlignedBuffer(9 * PAGE_BYTES)
    (result,) = written(ring, fd, [record])
    batch = ring.submit([hung.op])
    assert not batch.wait(0.05)
    hung.wait_until_hanging(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="not done"):
        batch.results()
    (read,) = finished(ring.submit([record.read_op(fd, target, result.checksums)]))  # the other threads go on
    assert read.ok
    batch.cancel()
    assert not batch.wait(0.05)  # it has started: it cannot be called back
    hung.release()
    assert finished(batch)[0].error == 0


def test_cancel_drops_what_has_not_started(fd: int, hung: HungRead) -> None:
    record, target = Record(1, 4 * PAGE_BYTES, 2), AlignedBuffer(9 * PAGE_BYTES)
    with Ring(1, PIECE_BYTES) as ring:
        (result,) = written(ring, fd, [record])
        blocker = blocked(ring, hung)
        read = record.read_op(fd, target, result.checksums)
        queued = ring.submit([read] * 3)
        behind = ring.submit([read, record.write_op(fd)])
        assert not queued.wait(0.05)
        queued.cancel()
        assert queued.wait(TIMEOUT_S)
        assert [r.error for r in queued.results()] == [errno.ECANCELED] * 3
        queued.cancel()  # harmless
        assert not behind.wait(0.0)
        hung.release()
        assert finished(blocker)[0].error == 0
        assert [r.error for r in finished(behind)] == [0, 0]


def test_cancel_in_the_middle_of_an_operation(hung: HungRead) -> None:
    """One piece hangs, the rest of its operation is dropped: it ends when the piece is back, as cancelled."""
    with Ring(1, PAGE_BYTES) as ring:
        batch = ring.submit([hung.long_op])
        hung.wait_until_hanging(TIMEOUT_S)
        batch.cancel()
        assert not batch.wait(0.1)
        hung.release()
        assert finished(batch)[0].error == errno.ECANCELED


def test_close_leaves_hung_threads_behind(fd: int, hung: HungRead) -> None:
    record = Record(1, 4 * PAGE_BYTES, 2)
    ring = Ring(1, PIECE_BYTES)
    blocker = blocked(ring, hung)
    queued = ring.submit([record.write_op(fd)])
    assert ring.close(0.1) is False
    assert finished(queued)[0].error == errno.ECANCELED
    with pytest.raises(TierUnavailable, match="closed"):
        ring.submit([record.write_op(fd)])
    assert not blocker.wait(0.0)
    hung.release()
    assert finished(blocker)[0].error == 0
    assert ring.close() is True


def test_the_queue_is_bounded(fd: int, hung: HungRead) -> None:
    record = Record(1, PAGE_BYTES, 1)
    with Ring(1, PIECE_BYTES, queued_ops_max=4) as ring:
        blocked(ring, hung)
        queued = ring.submit([record.write_op(fd)] * 3)
        with pytest.raises(TierUnavailable, match="queue"):
            ring.submit([record.write_op(fd)] * 2)
        last = ring.submit([record.write_op(fd)])
        with pytest.raises(TierUnavailable, match="queue"):
            ring.submit([record.write_op(fd)])
        hung.release()
        assert [r.error for r in finished(queued) + finished(last)] == [0] * 4
        assert [r.error for r in finished(ring.submit([record.write_op(fd)] * 4))] == [0] * 4


def test_reads_go_before_writes(fd: int, hung: HungRead, second_hung: HungRead) -> None:
    """Behind a hung read on one thread: reads are done before writes that were submitted earlier."""
    record, target = Record(1, PAGE_BYTES, 1), AlignedBuffer(PAGE_BYTES)
    with Ring(1, PIECE_BYTES) as ring:
        (result,) = written(ring, fd, [record])
        blocked(ring, hung)
        writes = ring.submit([record.write_op(fd)])
        read = record.read_op(fd, target, result.checksums)
        reads = [ring.submit([read]) for _ in range(3)]
        last_read = ring.submit([second_hung.op])
        hung.release()
        assert all(finished(batch)[0].ok for batch in reads)
        second_hung.wait_until_hanging(TIMEOUT_S)
        assert not last_read.wait(0.0) and not writes.wait(0.0)  # the thread hangs again, before the write
        second_hung.release()
        assert finished(last_read)[0].error == 0 and finished(writes)[0].error == 0


def test_writes_get_a_turn_among_reads(fd: int, hung: HungRead, second_hung: HungRead) -> None:
    """A stream of reads does not stop writes for good."""
    record, target = Record(1, PAGE_BYTES, 1), AlignedBuffer(PAGE_BYTES)
    with Ring(1, PIECE_BYTES) as ring:
        (result,) = written(ring, fd, [record])
        blocked(ring, hung)
        writes = ring.submit([record.write_op(fd)])
        read = record.read_op(fd, target, result.checksums)
        reads = ring.submit([read] * 20 + [second_hung.op])
        hung.release()
        assert finished(writes)[0].error == 0 and not reads.wait(0.0)
        second_hung.release()
        assert finished(reads)


def test_batches_take_turns(fd: int, hung: HungRead, second_hung: HungRead) -> None:
    """A short batch behind a long one ends long before it: their operations are interleaved."""
    record, target = Record(1, PAGE_BYTES, 1), AlignedBuffer(PAGE_BYTES)
    with Ring(1, PIECE_BYTES) as ring:
        (result,) = written(ring, fd, [record])
        read = record.read_op(fd, target, result.checksums)
        blocked(ring, hung)
        long = ring.submit([read] * 10 + [second_hung.op] + [read] * 10)
        short = ring.submit([read] * 5)
        hung.release()
        assert short.wait(TIMEOUT_S) and not long.wait(0.0)
        second_hung.release()
        assert [r.error for r in finished(long)] == [0] * 21
