"""Reads of neighbours in a file are one read: the same bytes, sums and errors as one by one, in fewer calls."""

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.native import reads_issued
from kvtier.io.ring import AlignedBuffer, DeviceRing, ReadOp, Ring

from cuda_double import CudaDouble
from hang import HungRead, blocked
from records import TIMEOUT_S, finished, open_file

FILE_PAGES = 320
CONTENT = random.Random(1).randbytes(FILE_PAGES * PAGE_BYTES)
LARGE_PIECE_BYTES = 4 << 20
GAP_PAGES_MAX = 16
KEY, HEAD, LAYER = bytes(range(16)), 3, 5


@pytest.fixture(name="full")
def _full(fd: int, tmp_path: Path) -> int:
    """The descriptor, of a file with CONTENT."""
    (tmp_path / "segment").write_bytes(CONTENT)
    return fd


class Reads:
    """Reads of whole pages, each into pages of its own in one buffer, which holds nothing before."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.target: AlignedBuffer = AlignedBuffer(4 * FILE_PAGES * PAGE_BYTES)
        self.used_pages = 0

    def op(self, page: int, slab_pages: int = 1, n_slabs: int = 1, *, on_device: bool = False) -> ReadOp:
        address = self.target.address + self.used_pages * PAGE_BYTES
        self.used_pages += slab_pages * n_slabs
        sums = None if on_device else sums_of(page, slab_pages, n_slabs)
        return ReadOp(
            self.fd, page * PAGE_BYTES, address, slab_pages * PAGE_BYTES, n_slabs, KEY, HEAD, LAYER, sums, on_device
        )

    def got(self, op: ReadOp) -> bytes:
        start = op.address - self.target.address
        return bytes(self.target.view[start : start + op.slab_bytes * op.n_slabs])

    def landed(self, op: ReadOp) -> bool:
        return self.got(op) == CONTENT[op.offset : op.offset + op.slab_bytes * op.n_slabs]


def sums_of(page: int, slab_pages: int, n_slabs: int) -> tuple[int, ...]:
    slabs = np.frombuffer(CONTENT, np.uint8)[page * PAGE_BYTES :].reshape(-1, PAGE_BYTES)[: slab_pages * n_slabs]
    return tuple(
        slab_checksum(slab.reshape(-1), slab_seed(KEY, HEAD + i, LAYER))
        for i, slab in enumerate(slabs.reshape(n_slabs, slab_pages, PAGE_BYTES))
    )


# (pages to the next read, pages of a slab, slabs): runs, gaps of all lengths, steps back, the same pages again.
DISTANCES = [0, 0, 1, 1, 2, GAP_PAGES_MAX, GAP_PAGES_MAX + 1, -3]
STEPS = st.lists(st.tuples(st.sampled_from(DISTANCES), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=40)


@given(
    steps=STEPS,
    order=st.sampled_from(["file", "reversed", "shuffled"]),
    batches=st.integers(1, 4),
    threads=st.integers(1, 3),
    piece_pages=st.sampled_from([1, 2, 5, 16, 1024]),
    end=st.one_of(st.just(FILE_PAGES * PAGE_BYTES), st.integers(0, FILE_PAGES * PAGE_BYTES)),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_asked_for_is_as_if_read_one_by_one(
    full: int,
    steps: list[tuple[int, int, int]],
    order: str,
    batches: int,
    threads: int,
    piece_pages: int,
    end: int,
    seed: int,
) -> None:
    """The model: all bytes and sums of a read that the file holds whole, ENODATA for any other."""
    with open(f"/proc/self/fd/{full}", "wb") as file:
        file.write(CONTENT[:end])
    reads, page, ops = Reads(full), 0, []
    for distance, slab_pages, n_slabs in steps:
        page = max(0, page + distance)
        if page + slab_pages * n_slabs > FILE_PAGES:
            break
        ops.append(reads.op(page, slab_pages, n_slabs))
        page += slab_pages * n_slabs
    if order == "reversed":
        ops.reverse()
    if order == "shuffled":
        random.Random(seed).shuffle(ops)
    with Ring(threads, piece_pages * PAGE_BYTES) as ring:
        submitted = [(ops[i::batches], ring.submit(ops[i::batches])) for i in range(batches)]
        for of_batch, batch in submitted:
            for op, result in zip(of_batch, finished(batch), strict=True):
                is_whole = op.offset + op.slab_bytes * op.n_slabs <= end
                assert result.error == (0 if is_whole else errno.ENODATA)
                assert not is_whole or (reads.landed(op) and result.ok and result.checksums == op.checksums)


@pytest.mark.parametrize(("piece_bytes", "n_reads"), [(LARGE_PIECE_BYTES, 1), (64 * PAGE_BYTES, 2), (PAGE_BYTES, 64)])
def test_records_of_a_segment_are_few_reads(full: int, piece_bytes: int, n_reads: int) -> None:
    """64 records of a page, a header page before each: 32 of them make the 63 pages of a read of at most 64."""
    reads = Reads(full)
    ops = [reads.op(2 * i + 1) for i in range(64)]
    with Ring(1, piece_bytes) as ring:
        before = reads_issued()
        assert all(result.ok for result in finished(ring.submit(ops)))
        assert reads_issued() - before == n_reads
    assert all(map(reads.landed, ops))


def test_loads_that_wait_are_few_reads(full: int, hung: HungRead, tmp_path: Path) -> None:
    """As loads submit them: a batch a chunk, two loads of two segments in turns."""
    other_fd = open_file(tmp_path / "segment", direct=False)
    reads, other_reads = Reads(full), Reads(other_fd)
    ops = [one for i in range(24) for one in (reads.op(2 * i), other_reads.op(3 * i))]
    with Ring(1, LARGE_PIECE_BYTES) as ring:
        blocked(ring, hung)
        batches = [ring.submit([op]) for op in ops]
        before = reads_issued()
        hung.release()
        assert all(finished(batch)[0].ok for batch in batches)
        assert reads_issued() - before == 2
    os.close(other_fd)
    assert all(map(reads.landed, ops[::2])) and all(map(other_reads.landed, ops[1::2]))


@pytest.mark.parametrize(
    ("pages", "n_reads"),
    [([0, 1, 2], 1), ([0, GAP_PAGES_MAX + 1], 1), ([0, GAP_PAGES_MAX + 2], 2), ([4, 2, 0], 3), ([7, 7], 2)],
)
def test_which_are_neighbours(full: int, pages: list[int], n_reads: int) -> None:
    reads = Reads(full)
    with Ring(1, LARGE_PIECE_BYTES) as ring:
        before = reads_issued()
        assert all(result.ok for result in finished(ring.submit([reads.op(page) for page in pages])))
        assert reads_issued() - before == n_reads


def test_pages_of_another_file_are_no_neighbours(full: int, tmp_path: Path) -> None:
    """They would be, if it were the same one; the other one is empty."""
    empty = open_file(tmp_path / "empty", direct=False)
    reads = Reads(full)
    ops = [reads.op(i)._replace(fd=(full, empty)[i % 2]) for i in range(8)]
    with Ring(1, LARGE_PIECE_BYTES) as ring:
        assert [result.error for result in finished(ring.submit(ops))] == [0, errno.ENODATA] * 4
        assert [result.error for result in finished(ring.submit(ops[1:]))] == [errno.ENODATA, *[0, errno.ENODATA] * 3]
    os.close(empty)


def test_an_error_is_that_operations_own(full: int) -> None:
    """One of the targets is memory that nobody may write to; those before it and after it are read."""
    reads = Reads(full)
    ops = [reads.op(2 * i, 2) for i in range(8)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(ops[3].address, 2 * PAGE_BYTES, mmap.PROT_READ) == 0
    try:
        with Ring(1, LARGE_PIECE_BYTES) as ring:
            results = finished(ring.submit(ops))
    finally:
        libc.mprotect(ops[3].address, 2 * PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
    assert [result.error for result in results] == [0, 0, 0, errno.EFAULT, 0, 0, 0, 0]
    assert all(reads.landed(op) and result.ok for op, result in zip(ops, results, strict=True) if not result.error)


def test_damage_is_named_by_slab(full: int, tmp_path: Path) -> None:
    reads = Reads(full)
    ops = [reads.op(7 * i + 1, 2, 3) for i in range(8)]
    with open(tmp_path / "segment", "r+b") as file:
        file.seek(ops[5].offset + 3 * PAGE_BYTES)  # in its second slab
        file.write(bytes(8))
    with Ring(1, LARGE_PIECE_BYTES) as ring:
        before = reads_issued()
        results = finished(ring.submit(ops))
        assert reads_issued() - before == 1
    assert [result.bad_slabs for result in results] == [(1,) if i == 5 else () for i in range(8)]


def test_a_run_that_hangs_ends_later_and_a_cancel_drops_the_rest(full: int, hung: HungRead) -> None:
    reads = Reads(full)
    ops = [reads.op(0), hung.op._replace(fd=full, offset=PAGE_BYTES), reads.op(2), reads.op(200)]
    with Ring(1, LARGE_PIECE_BYTES) as ring:
        batch = ring.submit(ops)
        hung.wait_until_hanging(TIMEOUT_S)
        batch.cancel()
        assert not batch.wait(0.1)  # what is read with it cannot be called back either
        hung.release()
        results = finished(batch)
    assert [result.error for result in results] == [0, 0, 0, errno.ECANCELED]
    assert reads.landed(ops[0]) and reads.landed(ops[2])


# --- for a device ---


def test_a_run_for_a_device_is_one_read_and_a_copy_each(cuda: CudaDouble, full: int) -> None:
    reads = Reads(full)
    ops = [reads.op(4 * i + 1, 3, on_device=True) for i in range(64)]
    cuda.delay(0.001)
    with Ring(1, PAGE_BYTES, device=DeviceRing(0, LARGE_PIECE_BYTES, 2)) as ring:
        before, copies_before = reads_issued(), cuda.copies()
        assert all(result.ok for result in finished(ring.submit(ops)))
        assert (reads_issued() - before, cuda.copies() - copies_before) == (1, 64)
    assert all(map(reads.landed, ops))


def test_reads_for_the_host_and_for_a_device_are_apart(cuda: CudaDouble, full: int) -> None:
    reads = Reads(full)
    ops = [reads.op(i, on_device=i >= 4) for i in range(8)]
    with Ring(1, LARGE_PIECE_BYTES, device=DeviceRing(0, LARGE_PIECE_BYTES, 2)) as ring:
        before = reads_issued()
        assert all(result.ok for result in finished(ring.submit(ops)))
        assert reads_issued() - before == 2
    assert all(map(reads.landed, ops))


def test_what_cannot_be_read_is_not_copied(cuda: CudaDouble, full: int) -> None:
    """The slot holds bytes of an earlier run where the file ends: they must not reach the device as this read's."""
    reads = Reads(full)
    with Ring(1, PAGE_BYTES, device=DeviceRing(0, LARGE_PIECE_BYTES, 1)) as ring:
        earlier = [reads.op(i, on_device=True) for i in range(8)]
        assert all(result.ok for result in finished(ring.submit(earlier)))
        os.ftruncate(full, 5 * PAGE_BYTES + 100)
        ops, copies_before = [reads.op(i, on_device=True) for i in range(8)], cuda.copies()
        errors = [result.error for result in finished(ring.submit(ops))]
        assert errors == [0] * 5 + [errno.ENODATA] * 3
        assert cuda.copies() - copies_before == 5
    assert all(map(reads.landed, ops[:5]))
    assert not any(any(reads.got(op)) for op in ops[5:])


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_call_that_fails_fails_its_run_alone(cuda: CudaDouble, full: int, call: str) -> None:
    """Which of its copies ended is not known; nothing is on its way when it is answered."""
    reads = Reads(full)
    ops = [reads.op(100 * (i // 4) + i, on_device=True) for i in range(8)]
    cuda.delay(0.002)
    with Ring(1, PAGE_BYTES, device=DeviceRing(0, LARGE_PIECE_BYTES, 2)) as ring:
        cuda.fail(call, after=1 if call == "cuMemcpyHtoDAsync" else 0)
        results = finished(ring.submit(ops))
        assert [result.error for result in results] == [errno.EREMOTEIO] * 4 + [0] * 4
        assert cuda.copying() == 0 and all(map(reads.landed, ops[4:]))
        assert all(result.ok for result in finished(ring.submit(ops)))
    assert all(map(reads.landed, ops))


def test_a_run_of_which_a_part_was_sent_ends_when_that_has_landed(cuda: CudaDouble, full: int) -> None:
    """It must not land in memory that its owner uses for something else."""
    reads = Reads(full)
    ops = [reads.op(i, on_device=True) for i in range(4)]
    with Ring(1, PAGE_BYTES, device=DeviceRing(0, LARGE_PIECE_BYTES, 2)) as ring:
        cuda.close_gate()
        cuda.fail("cuMemcpyHtoDAsync", after=2)
        batch = ring.submit(ops)
        cuda.wait_until_copying(2)
        assert not batch.wait(0.1)
        cuda.open_gate()
        assert [result.error for result in finished(batch)] == [errno.EREMOTEIO] * 4
