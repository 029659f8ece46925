"""Reading byte ranges of files into tensors."""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import TierUnavailable, WeightsUnreadable
from kvtier.io import ranges
from kvtier.io.ranges import RangeFailure, RangeReader, RangeResult
from kvtier.storage.segments import direct_io_works
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.reader import WeightReader

SIZE = (5 << 20) + 12345


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b")]
    for seed, path in enumerate(paths):
        path.write_bytes(random.Random(seed).randbytes(SIZE))
    return paths


def rows_of(data: bytes, copy: Copy) -> list[bytes]:
    starts = (copy.offset + row * copy.source_pitch for row in range(copy.rows))
    return [data[start : start + copy.row_bytes] for start in starts]


def expected(files: list[Path], copies: list[Copy], sizes: list[int]) -> list[bytes]:
    targets = [bytearray(size) for size in sizes]
    for copy in copies:
        for row, content in enumerate(rows_of(files[copy.file].read_bytes(), copy)):
            start = copy.target_offset + row * copy.target_pitch
            targets[copy.target][start : start + copy.row_bytes] = content
    return [bytes(target) for target in targets]


CASES = {
    "odd range": [contiguous(0, 4097, 3_000_001, 0, 13)],
    "whole file": [contiguous(1, 0, SIZE, 0)],
    "rows": [Copy(0, 8 + 3, 1000, 700, 2100, 0, 5, 900)],
    "rows larger than a piece": [Copy(0, 1, 2, 2_400_000, 2_500_000, 0, 0, 2_400_000)],
    "rows far apart": [Copy(0, 99, 5, 3000, 1_000_003, 0, 1, 3001), contiguous(0, 0, SIZE, 1)],
    "two files, two targets": [contiguous(0, 77, 1000, 1), contiguous(1, SIZE - 9, 9, 0, 1000)],
    "same range twice": [contiguous(0, 5, 5000, 0), contiguous(0, 5, 5000, 1)],
    "neighbours": [contiguous(0, 8 + 100 * k, 90, k % 2, 90 * k) for k in range(500)],
}


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("copies", CASES.values(), ids=CASES)
def test_bytes_land(files: list[Path], copies: list[Copy], readers: int) -> None:
    targets = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    report = WeightReader(readers=readers).read(files, copies, targets)
    assert [bytes(target.numpy()) for target in targets] == expected(files, copies, [SIZE, SIZE])
    assert report.bytes_landed == sum(copy.n_bytes for copy in copies)


def test_a_strided_target_is_addressed_from_its_first_element(files: list[Path]) -> None:
    whole = torch.zeros(64, 100, dtype=torch.int16)
    part = whole[:, 10:40]
    WeightReader().read(files, [Copy(0, 8, 64, 60, 120, 0, 0, 200)], [part])
    raw = files[0].read_bytes()[8 : 8 + 64 * 120]
    values = torch.frombuffer(bytearray(raw), dtype=torch.int16).view(64, 60)[:, :30]
    assert torch.equal(part, values)
    assert whole[:, :10].count_nonzero() == whole[:, 40:].count_nonzero() == 0


def test_nothing_to_read(files: list[Path]) -> None:
    assert WeightReader().read(files, [], []).bytes_landed == 0
    with WeightReader() as reader:
        assert reader.read([], [], []).bytes_read == 0
    assert reader.read([], [], []).bytes_read == 0  # buffers are made again


@pytest.mark.parametrize(
    "copy",
    [
        contiguous(0, 0, 101, 0),
        contiguous(0, 0, 51, 0, 50),
        contiguous(0, -1, 10, 0),
        contiguous(0, 0, 0, 0),
        Copy(0, 0, 2, 10, 9, 0, 0, 10),
        Copy(0, 0, 3, 10, 10, 0, 0, 46),
    ],
)
def test_copies_that_do_not_fit_are_refused(files: list[Path], copy: Copy) -> None:
    with pytest.raises(ValueError):
        WeightReader().read(files, [copy], [torch.zeros(100, dtype=torch.uint8)])


def test_a_file_that_ends_early_is_named_with_the_offset(files: list[Path]) -> None:
    os.truncate(files[1], 10_000)
    with pytest.raises(WeightsUnreadable) as caught:
        WeightReader().read(files, [contiguous(1, 9_000, 2_000, 0)], [torch.zeros(2_000, dtype=torch.uint8)])
    assert (caught.value.path, caught.value.offset) == (files[1], 10_000)


def test_a_missing_file_is_named(files: list[Path]) -> None:
    files[1].unlink()
    with pytest.raises(WeightsUnreadable, match="b: it cannot be opened: No such file"):
        WeightReader().read(files, [contiguous(0, 0, 10, 0)], [torch.zeros(10, dtype=torch.uint8)])


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(bytes(SIZE))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink])
def test_a_file_that_is_changed_while_it_is_read_is_refused(
    files: list[Path], change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RangeReader.read

    def changing(self: RangeReader, *rest: Any, **more: Any) -> object:
        result = read(self, *rest, **more)
        change(files[0])
        return result

    monkeypatch.setattr(RangeReader, "read", changing)
    with pytest.raises(WeightsUnreadable, match="a: (the file was changed while it was read|it cannot be opened)"):
        WeightReader().read(files, [contiguous(0, 0, 10, 0)], [torch.zeros(10, dtype=torch.uint8)])


def test_an_error_of_the_storage_is_named() -> None:
    """Address 0 of this process is not mapped, so reading it is an I/O error."""
    with pytest.raises(WeightsUnreadable, match="at byte 0: it cannot be read: Input/output error") as caught:
        WeightReader().read([Path("/proc/self/mem")], [contiguous(0, 0, 10, 0)], [torch.zeros(10, dtype=torch.uint8)])
    assert caught.value.offset == 0


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (errno.ETIMEDOUT, WeightsUnreadable, "no byte came for 120 s"),
        (errno.EREMOTEIO, TierUnavailable, "weights cannot be moved: CUDA said so"),
        (errno.ENOMEM, TierUnavailable, "weights cannot be moved: CUDA said so"),
    ],
)
def test_other_failures_are_named(
    files: list[Path], error: int, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = RangeResult(0, 0, RangeFailure(error, 0, 0, "CUDA said so"))
    monkeypatch.setattr(RangeReader, "read", lambda *_, **__: result)
    with pytest.raises(kind, match=said):
        WeightReader().read(files, [contiguous(0, 0, 10, 0)], [torch.zeros(10, dtype=torch.uint8)])


@pytest.mark.parametrize("refused", ["open", "preadv", "nothing"])
def test_a_file_system_without_direct_io(files: list[Path], refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse O_DIRECT when a file is opened, some when it is read. No descriptor is left open."""
    call = getattr(os, refused, None)

    def refuse(target: Any, value: Any, *rest: Any) -> Any:
        if refused == "preadv" or value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        assert call is not None
        return call(target, value, *rest)

    target = torch.zeros(5000, dtype=torch.uint8)
    monkeypatch.setattr(ranges, "resident_share", lambda *_: 0.0)
    if call is not None:
        monkeypatch.setattr(os, refused, refuse)
    report = WeightReader().read(files, [contiguous(1, 0, 5000, 0)], [target])
    assert bytes(target.numpy()) == files[1].read_bytes()[:5000]
    assert report.direct_files == (2 if call is None and direct_io_works(files[0].parent) else 0)
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.resolve() in files]


@pytest.mark.parametrize("flag", [0, os.O_DIRECT])
def test_a_file_that_cannot_be_opened_is_named(files: list[Path], flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = os.open

    def refuse(target: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT == flag:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return call(target, flags, *rest)

    monkeypatch.setattr(ranges, "resident_share", lambda *_: 0.0)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WeightsUnreadable, match="a: it cannot be opened: Too many open files"):
        WeightReader().read(files, [contiguous(0, 0, 10, 0)], [torch.zeros(10, dtype=torch.uint8)])


def test_files_in_the_page_cache_are_read_through_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 40_000)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if ranges.resident_share(file.fileno(), SIZE) is None:
            pytest.skip("the kernel does not say what is in the page cache")
        target = torch.zeros(path.stat().st_size, dtype=torch.uint8)
        copies = [contiguous(0, 0, len(target), 0)]
        assert WeightReader().read([path], copies, [target]).direct_files == 0
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if ranges.resident_share(file.fileno(), SIZE) or not direct_io_works(tmp_path):
            pytest.skip("the file system keeps the file in memory, or refuses O_DIRECT")
        target.zero_()
        assert WeightReader().read([path], copies, [target]).direct_files == 1
    assert bytes(target.numpy()) == path.read_bytes()


MEMORY = """
import sys
from pathlib import Path
from kvtier.weights.reader import WeightReader
reader = WeightReader()
reader.sums([Path(sys.argv[1])])
reader.close()
Path("/proc/self/clear_refs").write_text("5")
print(int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]))
WeightReader().sums([Path(sys.argv[2])])
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]))
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A load takes 96 MiB of buffers beside its targets, however large the files are."""
    for name, n_bytes in (("small", 4096), ("large", 1 << 30)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, n_bytes)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    before, peak = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout.split()
    assert int(peak) - int(before) < (128 + 32) << 10


def test_the_error_of_a_read_survives_the_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system that is gone, close fails too, and names no file."""
    path, close = tmp_path / "x", os.close
    path.write_bytes(bytes(100))

    def fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    target = torch.zeros(200, dtype=torch.uint8)
    with WeightReader() as reader, monkeypatch.context() as patch:
        patch.setattr("kvtier.weights.reader.os.close", fail)
        with pytest.raises(WeightsUnreadable, match="x at byte 100: it cannot be read"):
            reader.read([path], [contiguous(0, 0, 200, 0)], [target])
