"""Weights on a real GPU: bytes of any place in a file land at any place in its memory, after what was there before."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvtier.errors import WeightsDamaged
from kvtier.kernels.block_sums import BlockSums
from kvtier.weights import device_sums, load_files, manifest
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.reader import WeightReader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SIZE = (48 << 20) + 12_345


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "x"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def expected(file: Path, copies: list[Copy], n_bytes: int) -> torch.Tensor:
    content, target = (
        torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8),
        torch.zeros(n_bytes, dtype=torch.uint8),
    )
    for copy in copies:
        shape = (copy.rows, copy.row_bytes)
        source = content.as_strided(shape, (copy.source_pitch, 1), copy.offset)
        target.as_strided(shape, (copy.target_pitch, 1), copy.target_offset).copy_(source)
    return target


COPIES = {
    "odd places": [contiguous(0, 4097 * k + k, 3_001, 0, 5_003 * k) for k in range(2_000)],
    "one range": [contiguous(0, 3, SIZE - 5, 0, 1)],
    "rows": [Copy(0, 11, 5_000, 1_001, 9_001, 0, 7, 1_003)],
    "large rows": [Copy(0, 1, 3, 9_000_001, 15_000_000, 0, 0, 9_000_001)],
}


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
def test_bytes_land_where_they_belong(file: Path, copies: list[Copy]) -> None:
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    with WeightReader() as reader:
        report = reader.read([file], copies, [target])
    assert torch.equal(target.cpu(), expected(file, copies, SIZE))
    assert report.bytes_landed == sum(copy.n_bytes for copy in copies)


def test_a_kernel_that_fills_the_target_comes_before(file: Path) -> None:
    target = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    other = torch.randn(8192, 8192, device="cuda")
    copies = [contiguous(0, 0, SIZE, 0)]
    with WeightReader() as reader:
        for _ in range(3):
            for _ in range(20):
                other = other @ other
            target.zero_()  # has not run yet
            reader.read([file], copies, [target])
            assert torch.equal(target.cpu(), expected(file, copies, SIZE))


def test_targets_on_host_and_device_at_once(file: Path) -> None:
    host, device = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    copies = [contiguous(0, 0, SIZE, 0), contiguous(0, 0, SIZE, 1)]
    with WeightReader() as reader:
        reader.read([file], copies, [host, device])
    assert torch.equal(host, device.cpu()) and host.count_nonzero()


def test_files_as_tensors_and_a_flipped_byte(tmp_path: Path) -> None:
    whole = {f"t{n}": torch.randn(n, 777, dtype=torch.float32).to(torch.bfloat16) for n in range(1, 200)}
    path = tmp_path / "x.safetensors"
    save_file(whole, path)
    with WeightReader() as reader:
        manifest.write(tmp_path, [path], reader)
    found = load_files([path], "cuda")
    assert all(torch.equal(value.cpu(), whole[name]) for name, value in found.items()) and found.keys() == whole.keys()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(WeightsDamaged):
        load_files([path], "cuda")


def test_sums_of_the_device_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of odd counts: files begin at any pair, and tensors after an odd one are summed by the CPU."""
    monkeypatch.setattr(device_sums, "FIRST_BYTES_MIN", 1)
    launched: list[int] = []
    sums = BlockSums.sums

    def counted(self: BlockSums) -> object:
        found = sums(self)
        launched.append(int((found != 0).sum()))
        return found

    monkeypatch.setattr(BlockSums, "sums", counted)
    paths = [tmp_path / f"{n}.safetensors" for n in range(4)]
    wholes = [
        {f"{n}.{m}": torch.randint(0, 256, (63_352 * m * m + 3 * (m == 15 + n),), dtype=torch.uint8) for m in range(20)}
        for n in range(4)
    ]
    for path, whole in zip(paths, wholes, strict=True):
        save_file(whole, path)
    with WeightReader() as reader:
        manifest.write(tmp_path, paths, reader)
    found = load_files(paths, "cuda")
    assert all(torch.equal(found[name].cpu(), value) for whole in wholes for name, value in whole.items())
    n_blocks = sum(-(-path.stat().st_size >> 20) for path in paths)
    assert len(launched) == 1 and n_blocks // 4 < launched[0] < n_blocks
    places = (5000, 12 << 20, (30 << 20) + 1, paths[3].stat().st_size - 1)
    for path, at in zip(paths, places, strict=True):
        content = bytearray(path.read_bytes())
        content[at] ^= 16
        path.write_bytes(content)
        with pytest.raises(WeightsDamaged) as caught:
            load_files([path], "cuda")
        assert (caught.value.path, caught.value.offset) == (path, at >> 20 << 20)
