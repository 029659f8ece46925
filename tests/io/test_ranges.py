"""Range reads: bytes of files at any offset, to host memory and to the double of a device."""

import errno
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import TierUnavailable
from kvtier.format.checksum import slab_seed
from kvtier.io import ranges
from kvtier.io.native import checksum
from kvtier.io.ranges import FILE, TARGET, RangeProgress, RangeReader, RangeResult, resident_share, shared_sizes
from tests.waiting import wait_until

from cuda_double import CudaDouble

PAGE = 4096
SIZE = 40 * PAGE + 1234
SMALL = {"threads": 3, "slots": 2, "piece_bytes": 4 * PAGE, "block_bytes": PAGE}


@pytest.fixture(name="folder", scope="module")
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            Path(folder, str(number)).write_bytes(random.Random(number).randbytes(SIZE))
        yield Path(folder)


class Target:
    """Host memory, which the double also takes for a device's."""

    def __init__(self, n_bytes: int, on_device: bool = False) -> None:
        self.bytes = np.zeros(n_bytes, np.uint8)
        self.row = (self.bytes.ctypes.data, on_device)


def read(
    reader: RangeReader,
    folder: Path,
    copies: list[tuple[int, ...]],
    targets: list[Target],
    *,
    direct: bool = False,
    cached: bool = False,
    sums: npt.NDArray[np.uint64] | None = None,
    not_summed: npt.NDArray[np.uint8] | None = None,
    stall_s: float = 20.0,
) -> RangeResult:
    """A copy: file, offset, rows, row bytes, source pitch, target, target offset, target pitch."""
    fds = [os.open(folder / str(number), os.O_RDONLY | (os.O_DIRECT if direct else 0)) for number in range(2)]
    address = 0 if sums is None else sums.ctypes.data
    skipped = 0 if not_summed is None else not_summed.ctypes.data
    rows = [(fd, os.fstat(fd).st_size, address * (n == 0), skipped * (n == 0), cached) for n, fd in enumerate(fds)]
    files = np.array(rows, FILE)
    table = np.array(copies, np.int64).reshape(-1, 8)
    try:
        return reader.read(files, table, np.array([target.row for target in targets], TARGET), stall_s=stall_s)
    finally:
        for fd in fds:
            os.close(fd)


def expected(folder: Path, copies: list[tuple[int, ...]], sizes: list[int]) -> list[bytes]:
    targets = [bytearray(size) for size in sizes]
    data = [(folder / str(number)).read_bytes() for number in range(2)]
    for file, offset, rows, row_bytes, source_pitch, target, target_offset, target_pitch in copies:
        for row in range(rows):
            start, to = offset + row * source_pitch, target_offset + row * target_pitch
            targets[target][to : to + row_bytes] = data[file][start : start + row_bytes]
    return [bytes(target) for target in targets]


@st.composite
def disjoint_copies(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    """Copies whose places in three targets do not overlap, and the sizes of the targets."""
    sizes = [0, 0, 0]
    copies = []
    for _ in range(draw(st.integers(1, 8))):
        rows = draw(st.sampled_from([1, 1, 2, 3, 17]))
        row_bytes = draw(st.integers(1, draw(st.sampled_from([9, 5000, SIZE // rows]))))
        gap = (SIZE - row_bytes * rows) // max(1, rows - 1)
        source_pitch = row_bytes + draw(st.integers(0, gap) | st.just(0))
        offset = draw(st.integers(0, SIZE - (rows - 1) * source_pitch - row_bytes))
        target, target_pitch = draw(st.integers(0, 2)), row_bytes + draw(st.integers(0, 50) | st.just(0))
        target_offset = sizes[target] + draw(st.integers(0, 20))
        sizes[target] = target_offset + (rows - 1) * target_pitch + row_bytes
        copies.append(
            (draw(st.integers(0, 1)), offset, rows, row_bytes, source_pitch, target, target_offset, target_pitch)
        )
    return copies, sizes


@given(disjoint_copies(), st.booleans(), st.sampled_from(["", "direct", "cached"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_copies(
    fake_driver: Path,
    folder: Path,
    drawn: tuple[list[tuple[int, ...]], list[int]],
    on_device: bool,
    way: str,
    summed: bool,
) -> None:
    copies, sizes = drawn
    targets = [Target(size, on_device and number != 1) for number, size in enumerate(sizes)]
    sums = np.zeros(SIZE // PAGE + 1, np.uint64) if summed else None
    with CudaDouble(fake_driver), RangeReader(0 if on_device else None, **SMALL) as reader:
        result = read(reader, folder, copies, targets, direct=way == "direct", cached=way == "cached", sums=sums)
    assert result.failure is None
    assert [bytes(target.bytes) for target in targets] == expected(folder, copies, sizes)
    assert result.bytes_landed == sum(copy[2] * copy[3] for copy in copies)
    assert result.bytes_read <= 2 * SIZE
    if sums is not None:
        touched = {
            block
            for file, offset, rows, row_bytes, pitch, *_ in copies
            if file == 0
            for row in range(rows)
            for block in range((offset + row * pitch) // PAGE, (offset + row * pitch + row_bytes - 1) // PAGE + 1)
        }
        assert all(sums[block] == block_sum(folder, block) for block in touched)


def test_gaps_of_a_cached_file_are_not_read(folder: Path) -> None:
    copies = [(0, 100, 3, 1000, 40_000, 0, 0, 1000), (0, 900, 2, 300, 900, 1, 0, 300), (1, 0, 1, 10, 10, 1, 600, 10)]
    sums = np.zeros(SIZE // PAGE + 1, np.uint64)
    targets = [Target(3000), Target(610)]
    with RangeReader(**SMALL) as reader:
        # The second copy's rows are 600 bytes apart, which are read. The last copy is in another file.
        assert read(reader, folder, copies, targets, cached=True).bytes_read == 2000 + 2000 + 10
        assert [bytes(target.bytes) for target in targets] == expected(folder, copies, [3000, 610])
        assert read(reader, folder, copies, targets).bytes_read > 80_000
        assert read(reader, folder, copies, targets, cached=True, sums=sums).bytes_read > 80_000  # whole blocks


@pytest.mark.parametrize(("cores", "readers", "threads"), [(32, 2, 16), (128, 2, 16), (64, 8, 8), (2, 2, 4)])
def test_threads_of_several_readers(monkeypatch: pytest.MonkeyPatch, cores: int, readers: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert shared_sizes(readers) == {"threads": threads, "piece_bytes": 2 << 20}


def block_sum(folder: Path, block: int) -> int:
    content = (folder / "0").read_bytes()[block * PAGE : (block + 1) * PAGE]
    data = np.frombuffer(content + bytes(-len(content) % 8), np.uint8)
    return checksum(data.ctypes.data, len(data), SEED)


SEED = slab_seed(b"kvtier weights\0\0", 0, 0)


def whole(target: int = 0) -> tuple[int, ...]:
    return (0, 0, 1, SIZE, SIZE, target, 0, SIZE)


def test_blocks_that_are_summed_elsewhere(folder: Path) -> None:
    sums, not_summed = np.zeros(SIZE // PAGE + 1, np.uint64), np.ones(SIZE // PAGE + 1, np.uint8)
    not_summed[[0, 7, 40]] = 0
    with RangeReader(**SMALL) as reader:
        assert read(reader, folder, [whole()], [Target(SIZE)], sums=sums, not_summed=not_summed).failure is None
    assert [sums[block] for block in (0, 7, 40)] == [block_sum(folder, block) for block in (0, 7, 40)]
    assert np.count_nonzero(sums) == 3


def test_copies_that_end_late_land_whole(cuda: CudaDouble, folder: Path) -> None:
    """A slot is not read into before the device has taken its bytes, and the answer waits for the last copy."""
    cuda.delay(0.002)
    target = Target(SIZE, on_device=True)
    with RangeReader(0, **SMALL) as reader:
        for _ in range(2):
            target.bytes[:] = 0
            assert read(reader, folder, [whole()], [target]).failure is None
            assert [bytes(target.bytes)] == expected(folder, [whole()], [SIZE])


@pytest.mark.parametrize("prepared", [False, True])
def test_slots_are_pinned_once_and_freed(cuda: CudaDouble, folder: Path, prepared: bool) -> None:
    objects = cuda.outstanding()
    target = Target(SIZE, on_device=True)
    with RangeReader(0, **SMALL) as reader:
        if prepared:
            reader.prepare()
        for _ in range(3):
            target.bytes[:] = 0
            assert read(reader, folder, [whole()], [target]).failure is None
            assert [bytes(target.bytes)] == expected(folder, [whole()], [SIZE])
        wait_until(lambda: 1 <= cuda.outstanding() - objects - 1 <= 6)  # beside the context
        if prepared:
            wait_until(lambda: cuda.outstanding() - objects - 1 == 6)
    wait_until(lambda: cuda.outstanding() == objects)  # a thread that ends may hold them a little longer


def test_slots_that_cannot_be_prepared_are_tried_again(cuda: CudaDouble, folder: Path) -> None:
    cuda.fail("cuMemHostRegister", times=3)
    target = Target(SIZE, on_device=True)
    with RangeReader(0, **SMALL) as reader:
        reader.prepare()
        wait_until(lambda: cuda.failures_left() == 0)
        assert read(reader, folder, [whole()], [target]).failure is None
    assert [bytes(target.bytes)] == expected(folder, [whole()], [SIZE])


@pytest.mark.parametrize(
    "call",
    ["cuStreamCreate", "cuEventCreate", "cuMemHostRegister", "cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuEventRecord"],
)
def test_a_call_that_fails_is_named(cuda: CudaDouble, folder: Path, call: str) -> None:
    cuda.delay(0.001)
    copies = [(0, 0, 100, 1000, 1600, 0, 0, 1000)]
    with RangeReader(0, **SMALL) as reader:
        cuda.fail(call, after=1, times=100)
        failure = read(reader, folder, copies, [Target(100_000, on_device=True)]).failure
        assert failure is not None and failure.error == errno.EREMOTEIO
        assert failure.message == f"{call}: CUDA_ERROR_OUT_OF_MEMORY (2)"
        cuda.fail(times=0)
        target = Target(100_000, on_device=True)
        assert read(reader, folder, copies, [target]).failure is None
        assert [bytes(target.bytes)] == expected(folder, copies, [100_000])


def test_a_device_that_is_not_there(cuda: CudaDouble) -> None:
    with pytest.raises(TierUnavailable, match="CUDA device 7 cannot be used"):
        RangeReader(7)


@pytest.mark.parametrize("direct", [False, True])
def test_the_end_of_a_file_is_named(folder: Path, direct: bool) -> None:
    with RangeReader(**SMALL) as reader:
        failure = read(reader, folder, [(1, SIZE - 10, 1, 11, 0, 0, 0, 0)], [Target(11)], direct=direct).failure
    assert failure is not None
    assert (failure.error, failure.file, failure.offset) == (errno.ENODATA, 1, SIZE)


def test_after_a_stall_nothing_lands(cuda: CudaDouble, folder: Path) -> None:
    """Copies under way are waited for: their target may be freed afterwards."""
    cuda.close_gate()
    target = Target(SIZE, on_device=True)
    threading.Timer(0.5, cuda.open_gate).start()
    with RangeReader(0, **SMALL) as reader:
        failure = read(reader, folder, [whole()], [target], stall_s=0.1).failure
        assert failure is not None and failure.error == errno.ETIMEDOUT
        landed = bytes(target.bytes)
        assert cuda.copying() == 0
    assert bytes(target.bytes) == landed


def test_bytes_before_the_place_of_progress_have_landed(cuda: CudaDouble, folder: Path) -> None:
    cuda.delay(0.05)
    target, seen = Target(SIZE, on_device=True), []
    content = (folder / "0").read_bytes()

    def look(done: RangeProgress) -> None:
        landed = done.offset if done.file == 0 else SIZE
        assert bytes(target.bytes[:landed]) == content[:landed]
        seen.append(landed)

    with RangeReader(0, **SMALL) as reader, (folder / "0").open("rb") as file:
        files, places = np.array([(file.fileno(), SIZE, 0, 0, 0)], FILE), np.array([target.row], TARGET)
        reader.read(files, np.array([whole()], np.int64), places, progress=look)
    assert seen == sorted(seen) and seen[-1] == SIZE and any(0 < place < SIZE for place in seen)


def test_progress_may_stop_a_read(cuda: CudaDouble, folder: Path) -> None:
    cuda.delay(0.1)

    def stop(done: RangeProgress) -> None:
        assert 0 <= done.bytes_landed <= SIZE
        raise KeyboardInterrupt

    target = Target(SIZE, on_device=True)
    fd = os.open(folder / "0", os.O_RDONLY)
    with RangeReader(0, **SMALL) as reader, pytest.raises(KeyboardInterrupt):
        files, places = np.array([(fd, SIZE, 0, 0, 0)], FILE), np.array([target.row], TARGET)
        reader.read(files, np.array([whole()], np.int64), places, progress=stop)
    assert cuda.copying() == 0
    os.close(fd)


@pytest.mark.parametrize(
    "copy",
    [
        (2, 0, 1, 1, 0, 0, 0, 0),
        (0, 0, 1, 1, 0, 1, 0, 0),
        (0, -1, 1, 1, 0, 0, 0, 0),
        (0, 0, 0, 1, 0, 0, 0, 0),
        (0, 0, 1, 0, 0, 0, 0, 0),
        (0, 0, 2, 8, 7, 0, 0, 8),
        (0, 0, 1 << 40, 1, 1 << 30, 0, 0, 1),
        (0, 0, 1 << 40, 1 << 30, 1 << 30, 0, 0, 1 << 30),
    ],
)
def test_copies_out_of_range_are_refused(folder: Path, copy: tuple[int, ...]) -> None:
    with RangeReader(**SMALL) as reader, pytest.raises(ValueError):
        read(reader, folder, [copy], [Target(1)])


@pytest.mark.parametrize("options", [{"threads": 0}, {"slots": 0}, {"piece_bytes": 5000}, {"block_bytes": 3 << 20}])
def test_sizes_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        RangeReader(**options)


def test_share_of_a_file_in_the_page_cache(folder: Path) -> None:
    content = (folder / "0").read_bytes()
    with (folder / "0").open("rb") as file:
        assert resident_share(file.fileno(), len(content)) in (1.0, None)


@pytest.mark.parametrize("said", [0, -1])
def test_share_where_cachestat_is_blind(said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says 0 of files in the overlayfs of a container, and nothing in kernels before 6.5."""
    path = tmp_path / "long"
    path.write_bytes(bytes(8 << 20))
    monkeypatch.setattr(ranges, "quick", SimpleNamespace(kvtier_resident_bytes=lambda fd, offset, length: said))
    with path.open("rb") as file:
        assert resident_share(file.fileno(), 8 << 20) == 1.0
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 4 << 20, os.POSIX_FADV_DONTNEED)  # whole folios of 2 MiB
        assert resident_share(file.fileno(), 8 << 20) in (0.5, 1.0)  # tmpfs keeps all
        # mincore says that all pages of a file are cached if the caller neither owns nor may write it.
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert resident_share(file.fileno(), 8 << 20) == (None if said < 0 else 0.0)


def test_share_of_a_long_file_is_estimated(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    with path.open("rb") as file:
        if resident_share(file.fileno(), 200 << 20) != 0.0:
            pytest.skip("the kernel does not say what is in the page cache, or keeps files in memory")
        file.read(100 << 20)
        assert resident_share(file.fileno(), 200 << 20) == pytest.approx(0.5, abs=0.1)


def test_bytes_of_a_read_that_hung_are_dropped(folder: Path) -> None:
    """A read of the kernel's log blocks until something is logged. Until then, the next read takes other slots."""
    try:
        log = os.open("/dev/kmsg", os.O_RDWR)
        os.lseek(log, 0, os.SEEK_END)
    except OSError as error:
        pytest.skip(f"a hung read needs the kernel's log: {error}")
    hung, target = Target(10), Target(SIZE)
    with RangeReader(**SMALL) as reader:
        files, copies = np.array([(log, PAGE, 0, 0, 0)], FILE), np.array([(0, 0, 1, 10, 0, 0, 0, 0)], np.int64)
        failure = reader.read(files, copies, np.array([hung.row], TARGET), stall_s=0.2).failure
        assert failure is not None and failure.error == errno.ETIMEDOUT
        assert read(reader, folder, [whole()], [target]).failure is None
        assert [bytes(target.bytes)] == expected(folder, [whole()], [SIZE])
        deadline_s = time.monotonic() + 20
        while has_io_threads():
            assert time.monotonic() < deadline_s
            os.write(log, b"kvtier: a test ends a read of this log")  # one alone may wake the reader late
            time.sleep(0.5)
    os.close(log)
    assert not hung.bytes.any()


def has_io_threads() -> bool:
    names = (Path("/proc/self/task", task, "comm") for task in os.listdir("/proc/self/task"))
    return any(name.exists() and name.read_text() == "kvtier-io\n" for name in names)


def test_a_read_that_cannot_begin_leaves_no_descriptor_open(folder: Path) -> None:
    """Each file is opened once more for the read's threads; the last one here cannot be."""
    fd = os.open(folder / "0", os.O_RDONLY)
    files = np.array([*[(fd, SIZE, 0, 0, 0)] * 5, (-1, SIZE, 0, 0, 0)], FILE)
    target, copies = Target(PAGE), np.array([(0, 0, 1, PAGE, PAGE, 0, 0, PAGE)], np.int64)
    with RangeReader(**SMALL) as reader:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierUnavailable, match="Bad file descriptor"):
            reader.read(files, copies, np.array([target.row], TARGET))
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
