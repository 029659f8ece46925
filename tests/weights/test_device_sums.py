"""Blocks that are summed on the device: which they are, and what damage to them does. Host memory is the device's."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import WeightsDamaged
from kvtier.io import ranges
from kvtier.io.ranges import RangeProgress, RangeReader
from kvtier.weights import device_sums
from kvtier.weights.copies import Copy, contiguous, pack
from kvtier.weights.device_sums import DeviceSums, whole_blocks
from kvtier.weights.reader import Sums, WeightReader
from tests.damage import flip
from tests.kernels.device_rig import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are compiled here: see tests/gpu")

BLOCK = 16 << 10


class DeviceTensor(torch.Tensor):
    is_cuda = True


class HostCopies(RangeReader):
    """Copies to the device as to the host."""

    def read(self, files: Any, copies: Any, targets: Any, **rest: Any) -> Any:
        targets = targets.copy()
        targets["on_device"] = 0
        return super().read(files, copies, targets, **rest)


class Reader(WeightReader):
    def _reader_for(self, targets: object) -> RangeReader:
        return HostCopies(threads=2, slots=1, piece_bytes=4 * BLOCK, block_bytes=BLOCK)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(device_sums, "FIRST_BYTES_MIN", 1)
    monkeypatch.setattr(device_sums, "_works", {})


HEADER = 1208  # bytes before the tensors
SIZES = {"first": 3 * BLOCK + 808, "second": BLOCK, "third": 2 * BLOCK + 24}
STARTS = {"first": HEADER, "second": HEADER + SIZES["first"], "third": HEADER + SIZES["first"] + SIZES["second"]}
SIZE = STARTS["third"] + SIZES["third"]
N_BLOCKS = -(-SIZE // BLOCK)


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    at, header = 0, {}
    for name, size in SIZES.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode().ljust(HEADER - 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + random.Random(1).randbytes(at))
    return path


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8).as_subclass(DeviceTensor) for size in SIZES.values()]


def whole_copies() -> list[Copy]:
    return [contiguous(0, STARTS[name], size, number) for number, (name, size) in enumerate(SIZES.items())]


@pytest.fixture(name="summed_by_cpu")
def _summed_by_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that the native code did not leave out, of each read with sums."""
    seen: list[int] = []
    run = WeightReader._run

    def watched(*rest: Any) -> Any:
        if len(rest) > 6:
            seen.extend(np.flatnonzero(~rest[6].blocks.by_file[0]).tolist())
        return run(*rest)

    monkeypatch.setattr(WeightReader, "_run", watched)
    return seen


def test_whole_blocks_are_summed_on_the_device(file: Path, summed_by_cpu: list[int]) -> None:
    targets = tensors()
    expected = {file: Reader().sums([file])[file]}
    Reader().read([file], whole_copies(), targets, expected)
    content = b"".join(bytes(target.numpy()) for target in targets)
    assert content == file.read_bytes()[HEADER:]
    assert summed_by_cpu == [0], "the header's block does not land"


@pytest.mark.parametrize(
    ("offset", "names"),
    [
        (20, None),
        (HEADER, {"first"}),
        (2 * BLOCK + 5, {"first"}),
        (STARTS["second"] - 1, {"first", "second"}),
        (STARTS["second"], {"first", "second"}),
        (SIZE - 1, {"third"}),
    ],
    ids=["header", "first block", "inner block", "shared block", "shared block, second tensor", "last block"],
)
def test_a_flipped_byte_is_named(file: Path, offset: int, names: set[str] | None) -> None:
    expected = Reader().sums([file])
    flip(file, offset)
    with pytest.raises(WeightsDamaged) as caught:
        Reader().read([file], whole_copies(), tensors(), expected)
    assert caught.value.offset == offset // BLOCK * BLOCK
    assert names is None or set(caught.value.tensors) == names


def test_blocks_are_summed_as_they_land(file: Path) -> None:
    """Files without checksums do not count."""
    sound = Reader().sums([file])[file]
    memory = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    places = np.array([(memory.data_ptr(), 1)], ranges.TARGET)
    blocks = whole_blocks(pack([contiguous(1, 0, SIZE, 0)]), places, np.array([0, SIZE]))
    sums = DeviceSums(blocks, DEVICE)
    sums._prepared.result()
    for file_number, offset in ((0, 9 * BLOCK), (1, 3 * BLOCK)):
        sums.sum_landed(RangeProgress(0, 0, file_number, offset))
    memory[::BLOCK] ^= 1
    found = sums.sums()
    assert found is not None and len(found[0]) == 0
    assert np.flatnonzero(found[1] == sound).tolist() == [0, 1, 2]


STRIP = Copy(0, STARTS["first"], 8, 3000, 6000, 0, 0, 3000)


def test_a_strip_is_summed_in_the_buffers(file: Path, summed_by_cpu: list[int]) -> None:
    expected = Reader().sums([file])
    copies = [STRIP, *whole_copies()[1:]]
    Reader().read([file], copies, tensors(), expected)
    assert summed_by_cpu == [0, 1, 2, 3], "the last of these holds the end of the strip's tensor"
    flip(file, BLOCK + 9)
    with pytest.raises(WeightsDamaged):
        Reader().read([file], copies, tensors(), expected)


def test_without_a_compiler_the_cpu_sums(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(device_sums.BlockSums, "__init__", broken)
    expected = Reader().sums([file])
    for _ in range(2):
        Reader().read([file], whole_copies(), tensors(), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "no C compiler" in caplog.text
    flip(file, BLOCK)
    with pytest.raises(WeightsDamaged):
        Reader().read([file], whole_copies(), tensors(), expected)


def test_few_bytes_do_not_load_the_kernel(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums, "FIRST_BYTES_MIN", SIZE)
    monkeypatch.setattr(device_sums, "begin", None)
    Reader().read([file], whole_copies(), tensors(), Reader().sums([file]))


def blocks_of(copies: list[Copy], *, address: int = 1 << 40, on_device: bool = True) -> list[int]:
    places = np.array([(address + (n << 30), on_device) for n in range(3)], ranges.TARGET)
    found = whole_blocks(pack(copies), places, np.array([SIZE, 0, BLOCK]))
    assert [len(each) for each in found.by_file] == [N_BLOCKS, 0, 1]
    covered = np.bincount(found.pieces[:, 3], 8 * found.pieces[:, 2], N_BLOCKS + 1)
    numbers = np.flatnonzero(covered).tolist()
    assert numbers == np.flatnonzero(np.concatenate(found.by_file)).tolist()
    return [int(number) for number in numbers]


ALL = list(range(N_BLOCKS))


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda copies: copies, ALL[1:]),
        (lambda copies: [contiguous(0, 0, SIZE, 0)], ALL),
        (lambda copies: [contiguous(0, 0, SIZE, 0), contiguous(0, 0, SIZE, 1)], ALL),
        (lambda copies: [contiguous(0, 0, SIZE - 8, 0)], ALL[:-1]),
        (lambda copies: [contiguous(0, 0, SIZE, 0, 4)], []),
        (
            lambda copies: [contiguous(0, 0, BLOCK + 4, 0), contiguous(0, BLOCK + 4, SIZE - BLOCK - 4, 1, 4)],
            [0, *ALL[2:]],
        ),
        (lambda copies: [contiguous(0, 0, 3 * BLOCK, 0), contiguous(0, 8, 3 * BLOCK, 0, BLOCK)], []),
        (lambda copies: [contiguous(0, 0, 3 * BLOCK, 0), Copy(0, 8, 2, 8, 99, 0, 2 * BLOCK, BLOCK)], []),
        (lambda copies: [Copy(0, BLOCK, 4, BLOCK, BLOCK, 0, 0, BLOCK)], [1, 2, 3, 4]),
        (lambda copies: [Copy(0, BLOCK, 4, BLOCK, BLOCK, 0, 0, BLOCK + 8)], []),
        (lambda copies: [contiguous(0, 0, SIZE + 8, 0)], []),
        (lambda copies: [contiguous(1, 0, SIZE, 0), contiguous(2, 0, BLOCK, 1)], [N_BLOCKS]),
        (lambda copies: [], []),
    ],
    ids=["tensors", "the file", "the file twice", "an end is missing", "odd place", "odd cut", "places overlap"]
    + ["a strip is laid over it", "rows without gaps", "rows with gaps", "beyond the end", "other files", "nothing"],
)
def test_blocks_that_land_whole(change: Callable[[list[Copy]], list[Copy]], left: list[int]) -> None:
    assert blocks_of(change(whole_copies())) == left
    assert blocks_of(change(whole_copies()), on_device=False) == []


def test_sums_are_compared_by_file(file: Path, tmp_path: Path) -> None:
    """Files without sums, and the same file twice, do not shift the others."""
    other = tmp_path / "other"
    other.write_bytes(random.Random(2).randbytes(3 * BLOCK))
    expected: dict[Path, Sums] = Reader().sums([other, file])
    del expected[file]
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8).as_subclass(DeviceTensor) for _ in range(3)]
    copies = [contiguous(n, 0, 3 * BLOCK, n) for n in range(3)]
    Reader().read([file, other, other], copies, targets, expected)
    flip(other, BLOCK)
    with pytest.raises(WeightsDamaged, match=f"other at byte {BLOCK}"):
        Reader().read([file, other, other], copies, targets, expected)
