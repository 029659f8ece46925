"""The ring: records through files, faults named by slab or by errno, many threads."""

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.errors import KVTierError
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import RecordHeader
from kvtier.io import native
from kvtier.io.ring import AlignedBuffer, FlushOp, OpResult, Ring
from tests.waiting import in_child

from records import FIRST_HEAD, PIECE_BYTES, Record, finished, open_file, written

# One slab smaller than a piece, slabs that pieces straddle, slabs of several pieces.
SHAPES = [(PAGE_BYTES, 1), (5 * PAGE_BYTES, 7), (12 * PAGE_BYTES, 8), (40 * PAGE_BYTES, 3)]


@pytest.mark.parametrize(("slab_bytes", "n_slabs"), SHAPES)
def test_round_trip(ring: Ring, fd: int, slab_bytes: int, n_slabs: int) -> None:
    record_bytes = PAGE_BYTES + slab_bytes * n_slabs
    records = [Record(i, slab_bytes, n_slabs, PAGE_BYTES + i * record_bytes) for i in range(5)]
    results = written(ring, fd, records)
    targets = [AlignedBuffer(record.n_bytes) for record in records]
    for record, result in zip(records, results, strict=True):
        assert result.checksums == record.reference_checksums()
        assert RecordHeader.unpack(_page(fd, record)) == replace(record.header, checksums=result.checksums)
    reads = [r.read_op(fd, t, result.checksums) for r, t, result in zip(records, targets, results, strict=True)]
    for record, target, result in zip(records, targets, finished(ring.submit(reads)), strict=True):
        assert result == OpResult(0, (), record.reference_checksums()) and result.ok
        assert target.view[: len(record.slabs)] == record.slabs


def _page(fd: int, record: Record) -> bytes:
    page = AlignedBuffer(PAGE_BYTES)
    assert os.preadv(fd, [page.view], record.offset) == PAGE_BYTES
    return bytes(page.view)


def test_a_run_of_heads_reads_alone(ring: Ring, fd: int) -> None:
    record = Record(1, 3 * PAGE_BYTES, 8)
    (result,) = written(ring, fd, [record])
    target = AlignedBuffer(record.n_bytes)
    run = range(2, 5)
    (read,) = finished(ring.submit([record.read_op(fd, target, result.checksums[2:5], run)]))
    assert read == OpResult(0, (), result.checksums[2:5])
    assert target.view[: 9 * PAGE_BYTES] == record.slabs[6 * PAGE_BYTES : 15 * PAGE_BYTES]


def _damage(path: Path, offset: int, new: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    assert os.pwrite(fd, new, offset) == len(new)
    os.close(fd)


def test_damage_is_named_by_slab(ring: Ring, fd: int, tmp_path: Path) -> None:
    record = Record(1, 20 * PAGE_BYTES, 6, PAGE_BYTES)
    (result,) = written(ring, fd, [record])
    first = record.offset + PAGE_BYTES
    path = tmp_path / "segment"
    flipped = record.slabs[record.slab_bytes + 77] ^ 0x10
    _damage(path, first + record.slab_bytes + 77, bytes([flipped]))
    _damage(path, first + 4 * record.slab_bytes + PAGE_BYTES, bytes(PAGE_BYTES))
    target = AlignedBuffer(record.n_bytes)
    (read,) = finished(ring.submit([record.read_op(fd, target, result.checksums)]))
    assert (read.error, read.bad_slabs) == (0, (1, 4)) and not read.ok
    (partial,) = finished(ring.submit([record.read_op(fd, target, result.checksums[3:], range(3, 6))]))
    assert partial.bad_slabs == (1,)
    (unverified,) = finished(ring.submit([record.read_op(fd, target, None)]))
    assert unverified.bad_slabs == () and unverified.checksums != result.checksums


def test_swapped_slabs_and_wrong_places_are_bad(ring: Ring, fd: int, tmp_path: Path) -> None:
    record = Record(1, 4 * PAGE_BYTES, 4)
    (result,) = written(ring, fd, [record])
    size = record.slab_bytes
    _damage(tmp_path / "segment", PAGE_BYTES, record.slabs[size : 2 * size] + record.slabs[:size])
    target = AlignedBuffer(record.n_bytes)
    op = record.read_op(fd, target, result.checksums)
    wrong_head = op._replace(first_head=FIRST_HEAD + 1)
    wrong_layer = op._replace(first_layer=0)
    wrong_key = op._replace(key=bytes(16))
    results = finished(ring.submit([op]))
    results += [finished(ring.submit([wrong]))[0] for wrong in (wrong_head, wrong_layer, wrong_key)]
    assert [r.bad_slabs for r in results] == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("cut", [1, PAGE_BYTES, 3 * PAGE_BYTES + 100, 4 * PAGE_BYTES])
def test_a_short_file_is_nodata_and_others_go_on(ring: Ring, fd: int, cut: int) -> None:
    records = [Record(i, 4 * PAGE_BYTES, 2, i * 9 * PAGE_BYTES) for i in range(3)]
    results = written(ring, fd, records)
    os.ftruncate(fd, 27 * PAGE_BYTES - cut)
    targets = [AlignedBuffer(record.n_bytes) for record in records]
    reads = [r.read_op(fd, t, result.checksums) for r, t, result in zip(records, targets, results, strict=True)]
    assert [result.error for result in finished(ring.submit(reads))] == [0, 0, errno.ENODATA]


def test_errors_are_one_operations_own(ring: Ring, fd: int, tmp_path: Path) -> None:
    good, bad = Record(1, PAGE_BYTES, 2), Record(2, 40 * PAGE_BYTES, 2)
    read_only = os.open(tmp_path / "segment", os.O_RDONLY)
    closed = os.dup(read_only)
    os.close(closed)
    results = finished(ring.submit([bad.write_op(closed), good.write_op(fd), bad.write_op(read_only)]))
    os.close(read_only)
    assert [result.error for result in results] == [errno.EBADF, 0, errno.EBADF]


def test_a_full_disk_is_enospc_and_leaves_no_header(ring: Ring) -> None:
    """/dev/full takes no byte; the header must not go out after a slab that did not."""
    full = os.open("/dev/full", os.O_RDWR)
    record = Record(1, PAGE_BYTES, 3)
    (result,) = finished(ring.submit([record.write_op(full)]))
    os.close(full)
    assert result.error == errno.ENOSPC


def test_no_header_after_a_slab_that_failed(ring: Ring, tmp_path: Path) -> None:
    """A file-size limit cuts the record short (the signal that comes with it must not end the process)."""
    import signal

    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = open_file(tmp_path / "segment", direct=False)
    record = Record(1, 40 * PAGE_BYTES, 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50 * PAGE_BYTES, old_limit[1]))
    try:
        (result,) = finished(ring.submit([record.write_op(fd)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert result.error == errno.EFBIG
    assert not any(os.pread(fd, PAGE_BYTES, 0))
    os.close(fd)


def test_many_threads_submit(ring: Ring, tmp_path: Path) -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        fd = open_file(tmp_path / f"segment{number}", direct=number % 2 == 0)
        records = [Record(100 * number + i, 5 * PAGE_BYTES, 4, i * 21 * PAGE_BYTES) for i in range(8)]
        target = AlignedBuffer(records[0].n_bytes)
        for _ in range(10):
            results = finished(ring.submit([record.write_op(fd) for record in records]))
            for record, result in zip(records, results, strict=True):
                (read,) = finished(ring.submit([record.read_op(fd, target, result.checksums)]))
                if not read.ok or target.view[: len(record.slabs)] != record.slabs:
                    faults.append(f"{number}: {read}")
        os.close(fd)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert faults == []


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 100},
        {"offset": -4096},
        {"address": 4097},
        {"address": 0},
        {"slab_bytes": 100},
        {"slab_bytes": 0},
        {"n_slabs": 0},
        {"n_slabs": 497},
        {"n_slabs": -1},
        {"key": b"short"},
        {"slab_bytes": 1 << 62},
    ],
)
def test_operations_that_are_not_whole_pages_are_refused(ring: Ring, fd: int, change: dict[str, object]) -> None:
    record = Record(1, PAGE_BYTES, 1)
    op = record.write_op(fd)
    with pytest.raises(ValueError, match="pages|key|range|slabs"):
        ring.submit([op._replace(**change)])  # type: ignore[arg-type]


def test_wrong_number_of_checksums_is_refused(ring: Ring, fd: int) -> None:
    record = Record(1, PAGE_BYTES, 2)
    with pytest.raises(ValueError, match="checksums"):
        ring.submit([record.read_op(fd, record.buffer, (1,))])


@pytest.mark.parametrize(("threads", "piece_bytes"), [(0, PIECE_BYTES), (4, 0), (4, 100), (100_000, PIECE_BYTES)])
def test_a_ring_of_nonsense_is_refused(threads: int, piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="ring"):
        Ring(threads, piece_bytes)


def test_an_empty_batch_is_done(ring: Ring) -> None:
    assert finished(ring.submit([])) == []


def test_a_child_makes_its_own_ring(ring: Ring, tmp_path: Path) -> None:
    """After a fork the parent's ring is refused, closing it is harmless, and a new one works."""
    fd = open_file(tmp_path / "segment", direct=False)
    record = Record(1, PAGE_BYTES, 1)
    written(ring, fd, [record])

    def work() -> None:
        with pytest.raises(RuntimeError):
            ring.submit([record.write_op(fd)])
        ring.close()
        with Ring(2, PIECE_BYTES) as own:
            assert finished(own.submit([record.write_op(fd)]))[0].error == 0

    assert in_child(work) == 0
    os.close(fd)


def test_a_buffer_is_aligned_and_writable() -> None:
    for n_bytes in (1, PAGE_BYTES, 5 << 20):
        buffer = AlignedBuffer(n_bytes)
        assert buffer.address % PAGE_BYTES == 0 and len(buffer.view) == n_bytes
        buffer.view[-1] = 7
        assert bytes(buffer.view[-1:]) == b"\x07"
    with pytest.raises(ValueError, match="buffer"):
        AlignedBuffer(0)


def test_what_changed_before_it_was_written_gets_no_header(ring: Ring, fd: int) -> None:
    record = Record(31, 8192, 3)
    sums = record.reference_checksums()
    good, bad = record.write_op(fd)._replace(checksums=sums), record.write_op(fd)
    wrong = (sums[0], sums[1] ^ 1, sums[2])
    (result,) = finished(ring.submit([bad._replace(checksums=wrong)]))
    assert (result.error, result.bad_slabs, result.ok) == (0, (1,), False)
    assert not any(Path(f"/proc/self/fd/{fd}").read_bytes()[:PAGE_BYTES]), "a header would make it a record"
    (result,) = finished(ring.submit([good]))
    assert result.ok and result.checksums == sums
    assert any(Path(f"/proc/self/fd/{fd}").read_bytes()[:PAGE_BYTES])


def test_a_flush_is_an_operation_of_its_own(ring: Ring, fd: int) -> None:
    record = Record(1, 3 * PAGE_BYTES, 2)
    written(ring, fd, [record])
    assert finished(ring.submit([FlushOp(fd), FlushOp(fd)])) == [OpResult(0, (), ())] * 2
    closed = os.open("/dev/null", os.O_RDONLY)
    os.close(closed)
    good, bad = finished(ring.submit([FlushOp(fd), FlushOp(closed)]))
    assert (good.error, bad.error) == (0, errno.EBADF)


def test_a_native_library_of_another_version_is_named() -> None:
    with pytest.raises(KVTierError, match="native library is of another version"):
        native._declare(SimpleNamespace())  # type: ignore[arg-type]
