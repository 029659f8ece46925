"""Files in memory that are registered with CUDA, over a double of its driver: copies come right out of their pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import native
from kvtier.io.ring import AlignedBuffer, DeviceRing, ReadOp, Ring, WriteOp
from tests.waiting import wait_until

from cuda_double import CudaDouble
from records import PIECE_BYTES, TIMEOUT_S, Record, finished, written

DEVICE = DeviceRing(0, PIECE_BYTES, 2)
N_RECORDS = 6


@pytest.fixture
def memory_fd(tmpfs: Path | None) -> Iterator[int]:
    if tmpfs is None:
        pytest.skip("no tmpfs that may be written")
    fd = os.open(tmpfs / "pinned", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def records(memory_fd: int) -> list[Record]:
    """In the file, one after the other, of two pieces and a half each."""
    made = [Record(i, 5 * PAGE_BYTES, 8, i * (PAGE_BYTES + 40 * PAGE_BYTES)) for i in range(N_RECORDS)]
    with Ring(2, PIECE_BYTES) as ring:
        written(ring, memory_fd, made)
    return made


def read(ring: Ring, fd: int, records: list[Record]) -> tuple[list[int], list[AlignedBuffer], int]:
    """Errors, where the bytes landed, and how many reads of the file that took."""
    targets = [AlignedBuffer(record.n_bytes) for record in records]
    ops: list[ReadOp | WriteOp] = [
        record.read_op(fd, target, None)._replace(on_device=True)
        for record, target in zip(records, targets, strict=True)
    ]
    before = native.reads_issued()
    results = finished(ring.submit(ops))
    return [result.error for result in results], targets, native.reads_issued() - before


def hold(targets: list[AlignedBuffer], records: list[Record]) -> list[bool]:
    return [bytes(t.view[: len(r.slabs)]) == r.slabs for t, r in zip(targets, records, strict=True)]


def size(fd: int) -> int:
    return os.fstat(fd).st_size


def pages_of(n_bytes: float) -> int:
    return int(n_bytes) // PAGE_BYTES * PAGE_BYTES


@pytest.mark.parametrize("steps", [1, 7])
def test_what_is_pinned_is_not_read(cuda: CudaDouble, memory_fd: int, records: list[Record], steps: int) -> None:
    """Also where a piece lies in two registrations: no copy spans them, which the double counts as a fault."""
    cuda.delay(0.0002)
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        for step in range(1, steps + 1):
            ring.pin_file(memory_fd, pages_of(size(memory_fd) * step / steps))
        errors, targets, reads = read(ring, memory_fd, records)
        assert errors == [0] * N_RECORDS and all(hold(targets, records)) and reads == 0
        assert ring.close(TIMEOUT_S)


def test_what_is_not_pinned_is_read(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, records[3].offset + PAGE_BYTES)  # the fourth one's header page
        errors, targets, reads = read(ring, memory_fd, records)
        assert errors == [0] * N_RECORDS and all(hold(targets, records)) and reads > 0
        assert read(ring, memory_fd, records[:3])[2] == 0


def test_what_is_written_later_is_seen(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    """The pages are the file's own: a slot that was pinned before it was written holds what was written."""
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        new = Record(99, 5 * PAGE_BYTES, 8, records[2].offset)
        written(ring, memory_fd, [new])
        errors, targets, reads = read(ring, memory_fd, [new])
        assert errors == [0] and hold(targets, [new]) == [True] and reads == 0


def test_a_file_that_was_cut_is_short(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    """Although its pages are still pinned."""
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        os.ftruncate(memory_fd, records[4].offset + 2 * PAGE_BYTES)
        errors, targets, _ = read(ring, memory_fd, records)
        assert errors == [0] * 4 + [errno.ENODATA] * 2
        assert hold(targets, records)[:4] == [True] * 4


def test_another_file_behind_the_same_number_is_not_taken_for_it(
    cuda: CudaDouble, memory_fd: int, records: list[Record], tmpfs: Path
) -> None:
    """Somebody closed the descriptor without `forget`: a bug, but no reason for another file's bytes."""
    other = os.open(tmpfs / "other", os.O_RDWR | os.O_CREAT, 0o600)
    changed = [Record(50 + i, 5 * PAGE_BYTES, 8, record.offset) for i, record in enumerate(records)]
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        written(ring, other, changed)
        ring.pin_file(memory_fd, size(memory_fd))
        os.dup2(other, memory_fd)
        errors, targets, reads = read(ring, memory_fd, changed)
        assert errors == [0] * N_RECORDS and all(hold(targets, changed)) and reads > 0
        ring.pin_file(memory_fd, size(memory_fd))
        errors, targets, reads = read(ring, memory_fd, changed)
        assert errors == [0] * N_RECORDS and all(hold(targets, changed)) and reads == 0
    os.close(other)


def test_forgetting_unregisters_and_frees_the_memory(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        before = cuda.outstanding()
        for part in (0.4, 1):
            ring.pin_file(memory_fd, pages_of(size(memory_fd) * part))
        assert cuda.outstanding() > before and is_mapped()
        assert read(ring, memory_fd, records)[2] == 0
        ring.forget(memory_fd)
        errors, targets, reads = read(ring, memory_fd, records)
        assert errors == [0] * N_RECORDS and all(hold(targets, records)) and reads > 0
        wait_until(
            lambda: cuda.outstanding() == before and not is_mapped(), "another of the ring's threads unregistering"
        )


def test_closing_unregisters(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    ring = Ring(2, PIECE_BYTES, device=DEVICE)
    ring.pin_file(memory_fd, size(memory_fd))
    assert ring.close(TIMEOUT_S) and not is_mapped()
    with pytest.raises(TierUnavailable, match="closed"):
        ring.pin_file(memory_fd, size(memory_fd))


def test_what_cannot_be_pinned(cuda: CudaDouble, fd: int, memory_fd: int, records: list[Record], tmpfs: Path) -> None:
    """Reads go on as before."""
    os.ftruncate(fd, 1 << 20)
    with Ring(2, PIECE_BYTES) as of_host, pytest.raises(OSError, match="No such device"):
        of_host.pin_file(memory_fd, PAGE_BYTES)
    read_only = os.open(tmpfs / "pinned", os.O_RDONLY)
    with Ring(2, PIECE_BYTES, device=DEVICE) as ring:
        on_disk = [] if os.fstatvfs(fd).f_fsid == os.fstatvfs(memory_fd).f_fsid else [(fd, PAGE_BYTES)]
        for number, end in [
            *on_disk,
            (read_only, PAGE_BYTES),
            (memory_fd, size(memory_fd) + PAGE_BYTES),
            (memory_fd, 100),
            (memory_fd, 0),
            (memory_fd, -PAGE_BYTES),
            (-1, PAGE_BYTES),
        ]:
            with pytest.raises(OSError, match="Invalid argument|Bad file descriptor"):
                ring.pin_file(number, end)
        cuda.fail("cuMemHostRegister")
        with pytest.raises(TierUnavailable, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
            ring.pin_file(memory_fd, size(memory_fd))
        errors, targets, reads = read(ring, memory_fd, records)
        assert errors == [0] * N_RECORDS and all(hold(targets, records)) and reads > 0
    os.close(read_only)


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_call_that_fails_is_an_error_of_its_operation_alone(
    cuda: CudaDouble, memory_fd: int, records: list[Record], call: str
) -> None:
    cuda.delay(0.002)
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        cuda.fail(call, after=4)
        found = [read(ring, memory_fd, [record]) for record in records]  # together they would be one run
        assert [errors for errors, _, _ in found] == [[0]] * 4 + [[errno.EREMOTEIO]] + [[0]]
        assert all(
            hold(targets, [r]) == [True]
            for (errors, targets, _), r in zip(found, records, strict=True)
            if errors == [0]
        )


def test_a_file_that_a_broken_device_may_read_stays(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        cuda.close_gate()
        cuda.fail("cuEventRecord", "cuStreamSynchronize", times=2)
        errors, targets, _ = read(ring, memory_fd, records[:1])  # where the copy lands when the gate opens
        assert errors == [errno.EREMOTEIO] and targets
        ring.forget(memory_fd)
        (held,) = hold(targets, records[:1])
        assert not held and is_mapped()
        cuda.open_gate()
        cuda.wait_until_copying(0)
    assert is_mapped()
    cuda.left_behind = 3  # the ring's buffers, the file and its context


def test_few_copies_are_on_their_way_and_other_work_goes_on(cuda: CudaDouble, tmpfs: Path, memory_fd: int) -> None:
    """So that they end in their order; reads and writes that need no device do not wait for them."""
    slab_bytes = 20 << 20  # two copies each
    os.ftruncate(memory_fd, 4 * (PAGE_BYTES + slab_bytes))
    os.pwrite(memory_fd, b"\7" * os.fstat(memory_fd).st_size, 0)
    target, host = AlignedBuffer(4 * slab_bytes), AlignedBuffer(PAGE_BYTES)
    with Ring(8, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        cuda.close_gate()
        ops = [
            ReadOp(
                memory_fd,
                PAGE_BYTES + i * (PAGE_BYTES + slab_bytes),
                target.address + i * slab_bytes,
                slab_bytes,
                1,
                bytes(16),
                0,
                0,
                None,
                True,
            )
            for i in range(4)
        ]
        batch = ring.submit(ops)
        cuda.wait_until_copying(4)
        new = Record(5, PAGE_BYTES, 2)
        read_op = ReadOp(memory_fd, 0, host.address, PAGE_BYTES, 1, bytes(16), 0, 0, None)
        with open(tmpfs / "other", "wb+") as other:
            assert [r.error for r in finished(ring.submit([read_op, new.write_op(other.fileno())]))] == [0, 0]
        assert cuda.copying() == 4 and not batch.wait(0)
        cuda.open_gate()
        assert [result.error for result in finished(batch)] == [0] * 4
        assert bytes(target.view) == b"\7" * (4 * slab_bytes) and bytes(host.view) == b"\7" * PAGE_BYTES


def test_ordinary_reads_take_turns_with_them(cuda: CudaDouble, memory_fd: int, records: list[Record]) -> None:
    """Also where one thread does all, and there is always something pinned to copy."""
    target, host = AlignedBuffer(200 * records[0].n_bytes), AlignedBuffer(records[0].n_bytes)
    with Ring(1, PIECE_BYTES, device=DEVICE) as ring:
        ring.pin_file(memory_fd, size(memory_fd))
        cuda.delay(0.005)
        pinned = [
            ring.submit(
                [
                    records[0]
                    .read_op(memory_fd, target, None)
                    ._replace(on_device=True, address=target.address + i * records[0].n_bytes)
                ]
            )
            for i in range(200)
        ]
        read = ring.submit([records[1].read_op(memory_fd, host, None)])
        assert read.wait(TIMEOUT_S) and not pinned[-1].wait(0)
        assert all(batch.wait(TIMEOUT_S) for batch in pinned)


def is_mapped() -> bool:
    return "/pinned" in Path("/proc/self/maps").read_text()
