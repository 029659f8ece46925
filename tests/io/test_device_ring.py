"""Reads for a device, over a double of CUDA's driver: whole bytes, late copies, failing calls, cancels, closing."""

import errno
import os
import threading
import time

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.ring import AlignedBuffer, DeviceRing, OpResult, ReadOp, Ring, WriteOp
from tests.waiting import wait_until

from cuda_double import CudaDouble
from hang import HungRead
from records import PIECE_BYTES, TIMEOUT_S, Record, finished, written

DEVICE = DeviceRing(0, PIECE_BYTES, 2)


def stored(
    fd: int, n: int, slab_bytes: int = 4 * PAGE_BYTES, n_slabs: int = 8
) -> tuple[list[Record], list[AlignedBuffer]]:
    """Write records into the file, one after the other. Return them, and memory to read them into."""
    records = [Record(i, slab_bytes, n_slabs, i * (PAGE_BYTES + slab_bytes * n_slabs)) for i in range(n)]
    with Ring(2, PIECE_BYTES) as ring:
        written(ring, fd, records)
    return records, targets_of(records)


def targets_of(records: list[Record]) -> list[AlignedBuffer]:
    return [AlignedBuffer(record.n_bytes) for record in records]


def device_op(record: Record, fd: int, target: AlignedBuffer) -> ReadOp:
    return record.read_op(fd, target, None)._replace(on_device=True)


def device_ops(records: list[Record], fd: int, targets: list[AlignedBuffer]) -> list[ReadOp | WriteOp]:
    return [device_op(record, fd, target) for record, target in zip(records, targets, strict=True)]


def holds(target: AlignedBuffer, record: Record) -> bool:
    return bytes(target.view[: len(record.slabs)]) == record.slabs


@pytest.mark.parametrize(
    ("slab_bytes", "n_slabs", "threads", "slots", "piece_pages"),
    [
        (PAGE_BYTES, 1, 1, 1, 1),
        (5 * PAGE_BYTES, 7, 1, 2, 4),
        (5 * PAGE_BYTES, 7, 4, 3, 1024),
        (40 * PAGE_BYTES, 3, 1, 1, 1),
        (40 * PAGE_BYTES, 3, 3, 2, 16),
    ],
)
def test_all_bytes_land(
    cuda: CudaDouble, fd: int, slab_bytes: int, n_slabs: int, threads: int, slots: int, piece_pages: int
) -> None:
    records, targets = stored(fd, 6, slab_bytes, n_slabs)
    cuda.delay(0.0002)
    with Ring(threads, PIECE_BYTES, device=DeviceRing(0, piece_pages * PAGE_BYTES, slots)) as ring:
        results = finished(ring.submit(device_ops(records, fd, targets)))
        assert results == [OpResult(0, (), (0,) * n_slabs)] * 6
        assert all(map(holds, targets, records))
        assert ring.close(TIMEOUT_S)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_slot_is_not_used_again_before_its_copy_has_ended(cuda: CudaDouble, fd: int, slots: int) -> None:
    """Copies read their slot long after the thread could have read the next pieces into it."""
    records, targets = stored(fd, 12)
    cuda.delay(0.003)
    with Ring(1, PIECE_BYTES, device=DeviceRing(0, PIECE_BYTES, slots)) as ring:
        assert all(result.ok for result in finished(ring.submit(device_ops(records, fd, targets))))
        assert all(map(holds, targets, records))


@pytest.mark.parametrize("n_records", [1, 2])
def test_done_means_that_the_copies_have_ended(cuda: CudaDouble, fd: int, n_records: int) -> None:
    records, targets = stored(fd, n_records)
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        cuda.close_gate()
        batch = ring.submit(device_ops(records, fd, targets))
        cuda.wait_until_copying(2 * n_records)
        assert not batch.wait(0.1)
        assert not any(map(holds, targets, records))
        cuda.open_gate()
        assert all(result.ok for result in finished(batch))
        assert all(map(holds, targets, records))


def test_a_landed_read_is_not_kept_back_by_the_next(cuda: CudaDouble, fd: int) -> None:
    """One thread, and reads that hang: the device's read is reported between two of them."""
    (record,), (target,) = stored(fd, 1, PAGE_BYTES, 4)
    first, second, third = hung = [HungRead() for _ in range(3)]
    before = cuda.events_reached()
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        ring.submit([first.op])
        first.wait_until_hanging(TIMEOUT_S)
        batch = ring.submit([device_op(record, fd, target)])
        others = [ring.submit([read.op]) for read in hung[1:]]
        first.release()
        second.wait_until_hanging(TIMEOUT_S)
        wait_until(lambda: cuda.events_reached() > before, "the copy's event")
        second.release()
        third.wait_until_hanging(TIMEOUT_S)
        assert batch.wait(0.0) and holds(target, record)
        third.release()
        assert all(finished(other) for other in others)


def test_one_read_is_cut_over_the_threads(cuda: CudaDouble, fd: int) -> None:
    """In pieces of the device's own size: 32 pages here, while the ring's are 16."""
    (record,), (target,) = stored(fd, 1, 32 * PAGE_BYTES, 8)
    before = cuda.copies()
    with Ring(4, PIECE_BYTES, device=DeviceRing(0, 2 * PIECE_BYTES, 2)) as ring:
        cuda.close_gate()
        batch = ring.submit([device_op(record, fd, target)])
        cuda.wait_until_copying(8)  # two slots a thread: all four threads are at it
        cuda.open_gate()
        assert finished(batch)[0].ok and holds(target, record)
        assert cuda.copies() - before == 8


def test_a_device_that_is_late_is_not_taken_for_a_file_that_hangs(cuda: CudaDouble, fd: int) -> None:
    """Threads that wait for a free slot have read their file: none stands in for them, with slots of its own."""
    piece_bytes = 6 << 20
    (record,), (target,) = stored(fd, 1, 24 * piece_bytes, 1)
    with Ring(4, PIECE_BYTES, device=DeviceRing(0, piece_bytes, 3)) as ring:
        opened = cuda.outstanding()
        cuda.close_gate()
        batch = ring.submit([device_op(record, fd, target)])
        cuda.wait_until_copying(4 * 3)
        time.sleep(0.2)  # until all threads wait for the device
        ring.widen(0.1)
        assert cuda.outstanding() == opened
        cuda.open_gate()
        assert finished(batch)[0].ok and holds(target, record)


def test_reads_for_host_and_device_and_writes_in_one_batch(cuda: CudaDouble, fd: int) -> None:
    records, targets = stored(fd, 8)
    new = Record(99, 4 * PAGE_BYTES, 8, 8 * records[0].n_bytes)
    ops: list[ReadOp | WriteOp] = [new.write_op(fd)]
    for i, (record, target) in enumerate(zip(records, targets, strict=True)):
        sums = record.reference_checksums()
        wrong = (*sums[:5], sums[5] ^ 1, *sums[6:])
        ops.append(device_op(record, fd, target) if i % 2 else record.read_op(fd, target, sums if i else wrong))
    cuda.delay(0.001)
    with Ring(3, PIECE_BYTES, device=DEVICE) as ring:
        first, *reads = finished(ring.submit(ops))
        assert first.checksums == new.reference_checksums()
        assert all(map(holds, targets, records))
        assert [result.bad_slabs for result in reads] == [(5,), *[()] * 7]
        assert [result.checksums for result in reads[1::2]] == [(0,) * 8] * 4


def test_short_files_and_read_errors_are_one_operations_own(cuda: CudaDouble, fd: int) -> None:
    records, targets = stored(fd, 4)
    os.ftruncate(fd, 4 * records[0].n_bytes - PAGE_BYTES - 100)
    ops = device_ops(records, fd, targets)
    ops[1] = device_op(records[1], -1, targets[1])
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        for _ in range(3):  # the slots are as good as before
            errors = [result.error for result in finished(ring.submit(ops))]
            assert errors == [0, errno.EBADF, 0, errno.ENODATA]
        assert holds(targets[0], records[0]) and holds(targets[2], records[2])


def test_a_reads_answer_does_not_wait_for_a_write(cuda: CudaDouble, fd: int) -> None:
    """One thread whose copy is late, and a write that hangs: the read is reported before the write is taken."""
    (record,), (target,) = stored(fd, 1, PAGE_BYTES, 4)
    blocker, hung = HungRead(), HungRead()
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring, open(os.devnull, "wb") as sink:
        ring.submit([blocker.op])
        blocker.wait_until_hanging(TIMEOUT_S)
        cuda.close_gate()
        batch = ring.submit([device_op(record, fd, target)])
        write = ring.submit([hung.write_op(sink.fileno())])
        blocker.release()
        cuda.wait_until_copying(1)
        time.sleep(0.05)  # it could take the write now
        cuda.open_gate()
        assert batch.wait(TIMEOUT_S / 4) and holds(target, record)
        hung.wait_until_hanging(TIMEOUT_S)
        hung.release()
        assert finished(write)[0].error == 0


def test_reads_do_not_spoil_a_capture(cuda: CudaDouble, fd: int) -> None:
    """The engine records CUDA graphs while a ring opens, reads and closes (the double counts faults)."""
    records, targets = stored(fd, 6)
    cuda.capture(True)
    cuda.delay(0.001)
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        assert all(result.ok for result in finished(ring.submit(device_ops(records, fd, targets))))
        assert ring.close(TIMEOUT_S)
    assert cuda.capture_mode_of_thread() == 0


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_call_that_fails_is_an_error_of_its_operation_alone(cuda: CudaDouble, fd: int, call: str) -> None:
    records, targets = stored(fd, 6)
    cuda.delay(0.002)
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        cuda.fail(call, after=4)
        results = finished(ring.submit(device_ops(records, fd, targets)))
        assert sorted(result.error for result in results) == [0] * 5 + [errno.EREMOTEIO]
        assert all(holds(t, r) for t, r, result in zip(targets, records, results, strict=True) if result.ok)
        again = targets_of(records)
        assert all(result.ok for result in finished(ring.submit(device_ops(records, fd, again))))
        assert all(map(holds, again, records))


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize"])
def test_a_failed_operation_ends_only_when_nothing_is_on_its_way(cuda: CudaDouble, fd: int, call: str) -> None:
    """The copy had been sent: it must not land in memory that its owner uses for something else."""
    (record,), (target,) = stored(fd, 1, PAGE_BYTES, 4)
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        cuda.close_gate()
        cuda.fail(call)
        batch = ring.submit([device_op(record, fd, target)])
        cuda.wait_until_copying(1)
        assert not batch.wait(0.1)
        cuda.open_gate()
        assert finished(batch)[0].error == errno.EREMOTEIO


def test_a_device_that_does_not_answer_is_given_up(cuda: CudaDouble, fd: int) -> None:
    """Nothing more is sent, reads for the host go on, and memory that may still be read is never given back."""
    (record,), (target,) = stored(fd, 1, PAGE_BYTES, 4)
    (host_target,) = targets_of([record])
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        cuda.close_gate()
        cuda.fail("cuEventRecord", "cuStreamSynchronize", times=2)
        for _ in range(3):
            assert finished(ring.submit([device_op(record, fd, target)]))[0].error == errno.EREMOTEIO
        assert cuda.copying() == 1
        assert finished(ring.submit([record.read_op(fd, host_target, record.reference_checksums())]))[0].ok
        cuda.open_gate()
        cuda.wait_until_copying(0)
    cuda.left_behind = 1


@pytest.mark.parametrize(("call", "after"), [("cuCtxSetCurrent", 0), ("cuThreadExchangeStreamCaptureMode", 4)])
def test_a_thread_without_the_device_says_so(cuda: CudaDouble, fd: int, call: str, after: int) -> None:
    """`after`: calls that succeed, those of the thread that opens the ring."""
    (record,), (target,) = stored(fd, 1)
    cuda.fail(call, after=after)
    cuda.left_behind = 1  # the buffers, see above
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        assert finished(ring.submit([device_op(record, fd, target)]))[0].error == errno.EREMOTEIO


def test_cancel_drops_what_has_not_been_read(cuda: CudaDouble, fd: int) -> None:
    records, targets = stored(fd, 3)
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        cuda.close_gate()
        batch = ring.submit(device_ops(records[:2], fd, targets[:2]))
        queued = ring.submit(device_ops(records[2:], fd, targets[2:]))
        cuda.wait_until_copying(2)  # the two pieces of the first, in both slots
        batch.cancel()
        queued.cancel()
        assert finished(queued)[0].error == errno.ECANCELED
        assert not batch.wait(0.05)  # its copies cannot be called back
        cuda.open_gate()
        assert [result.error for result in finished(batch)] == [0, errno.ECANCELED]
        assert holds(targets[0], records[0])


def test_close_leaves_copies_behind_that_do_not_end(cuda: CudaDouble, fd: int) -> None:
    """Their buffers stay until they have; then all goes."""
    records, targets = stored(fd, 4)
    before = cuda.outstanding()
    ring = Ring(2, PIECE_BYTES, device=DEVICE)
    cuda.close_gate()
    batch = ring.submit(device_ops(records, fd, targets))
    cuda.wait_until_copying(4)
    assert ring.close(0.1) is False
    assert not batch.wait(0.0) and cuda.outstanding() > before
    cuda.open_gate()
    for target, record, result in zip(targets, records, finished(batch), strict=True):
        assert result.error == errno.ECANCELED or (result.ok and holds(target, record))


def test_close_waits_for_copies(cuda: CudaDouble, fd: int) -> None:
    records, targets = stored(fd, 6)
    before = cuda.outstanding()
    ring = Ring(2, PIECE_BYTES, device=DEVICE)
    cuda.close_gate()  # a busy machine may look at copies that take a while only when they have ended
    batch = ring.submit(device_ops(records, fd, targets))
    cuda.wait_until_copying(4)
    cuda.delay(0.005)
    threading.Timer(0.05, cuda.open_gate).start()
    assert ring.close(TIMEOUT_S) is True
    assert cuda.outstanding() == before and cuda.copying() == 0
    assert batch.wait(0.0)
    for target, record, result in zip(targets, records, batch.results(), strict=True):
        assert result.error == errno.ECANCELED or (result.ok and holds(target, record))


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemHostRegister", "cuStreamCreate", "cuEventCreate"]
)
def test_a_ring_does_not_open_without_its_device(cuda: CudaDouble, call: str, after: int) -> None:
    """And leaves nothing behind, wherever it fails (the double counts)."""
    once = call not in ("cuStreamCreate", "cuEventCreate")
    cuda.fail(call, after=0 if once else after)
    with pytest.raises(TierUnavailable, match=rf"CUDA device 1 .*{call}: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        Ring(3, PIECE_BYTES, device=DeviceRing(1, PIECE_BYTES, 2))


def test_a_device_that_is_not_there_is_named(cuda: CudaDouble) -> None:
    with pytest.raises(TierUnavailable, match="CUDA device 7 .*cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        Ring(1, PIECE_BYTES, device=DeviceRing(7))


@pytest.mark.parametrize(
    "device",
    [DeviceRing(-1), DeviceRing(0, 100), DeviceRing(0, 0), DeviceRing(0, PIECE_BYTES, 0), DeviceRing(0, 1 << 40)],
)
def test_a_device_ring_of_nonsense_is_refused(cuda: CudaDouble, device: DeviceRing) -> None:
    with pytest.raises(ValueError, match="DeviceRing"):
        Ring(1, PIECE_BYTES, device=device)


def test_device_reads_that_make_no_sense_are_refused(cuda: CudaDouble, ring: Ring, fd: int) -> None:
    record = Record(1, PAGE_BYTES, 2)
    op = device_op(record, fd, record.buffer)
    with pytest.raises(ValueError, match="without one"):
        ring.submit([op])
    with Ring(1, PIECE_BYTES, device=DEVICE) as with_device, pytest.raises(ValueError, match="checksums"):
        with_device.submit([op._replace(checksums=(1, 2))])


def test_threads_that_stand_in_for_those_that_hang_read_for_the_device(
    cuda: CudaDouble, fd: int, hung: HungRead
) -> None:
    (record,), (target,) = stored(fd, 1)
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        blocker = ring.submit([hung.op] * 4)
        hung.wait_until_hanging(TIMEOUT_S)
        time.sleep(0.2)  # until both threads hang
        waiting = ring.submit([device_op(record, fd, target)])
        cuda.fail("cuMemHostRegister")
        with pytest.raises(TierUnavailable, match="those that hang: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
            ring.widen(0.1)
        assert not waiting.wait(0.1)
        ring.widen(0.1)
        assert finished(waiting)[0].ok and holds(target, record)
        hung.release()
        assert [result.error for result in finished(blocker)] == [0] * 4
        ring.widen(60.0)
