"""Checksums of weight files: a flipped byte is named, and nothing is served."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvtier.errors import Corrupt, WeightsDamaged, WeightsUnreadable
from kvtier.weights import manifest
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.manifest import MANIFEST
from kvtier.weights.reader import WeightReader
from tests.damage import flip


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.arange(500_000), "second": torch.arange(100_000).to(torch.int16)}, path)
    with WeightReader() as reader:
        manifest.write(tmp_path, [path], reader)
    return path


def read(path: Path, copies: list[Copy]) -> torch.Tensor:
    target = torch.zeros(5_000_000, dtype=torch.uint8)
    with WeightReader() as reader:
        reader.read([path], copies, [target], manifest.of_files([path]))
    return target


def test_sound_files_are_read(file: Path) -> None:
    size = file.stat().st_size
    assert bytes(read(file, [contiguous(0, 0, size, 0)])[:size].numpy()) == file.read_bytes()
    assert bytes(read(file, [contiguous(0, 1_048_577, 3, 0)])[:3].numpy()) == file.read_bytes()[1_048_577:1_048_580]
    assert list(file.parent.glob("*")) in ([file, file.parent / MANIFEST], [file.parent / MANIFEST, file])


@pytest.mark.parametrize(
    ("offset", "block", "tensors"),
    [(2_500_000, 2 << 20, {"first"}), (4_000_000, 3 << 20, {"first", "second"}), (4_199_999, 4 << 20, {"second"})],
)
def test_a_flipped_byte_is_named(file: Path, offset: int, block: int, tensors: set[str]) -> None:
    size = file.stat().st_size
    flip(file, offset)
    with pytest.raises(WeightsDamaged, match=f"model.safetensors at byte {block}: bytes in tensor") as caught:
        read(file, [contiguous(0, 0, size, 0)])
    assert (caught.value.path, caught.value.offset) == (file, block)
    assert set(caught.value.tensors) == tensors


def test_who_may_read_the_files_may_read_the_manifest(file: Path) -> None:
    """An engine may run as another user than the one who made it."""
    file.chmod(0o644)
    with WeightReader() as reader:
        manifest.write(file.parent, [file], reader)
    assert (file.parent / MANIFEST).stat().st_mode & 0o777 == 0o644


def test_a_manifest_that_cannot_be_read_is_named(file: Path) -> None:
    (file.parent / MANIFEST).unlink()
    (file.parent / MANIFEST).mkdir()
    with pytest.raises(WeightsUnreadable, match=f"{MANIFEST}: it cannot be opened: Is a directory"):
        manifest.of_files([file])


@pytest.mark.parametrize("offset", [5, 20], ids=["length", "text"])
def test_a_flipped_byte_of_the_header_is_noticed(file: Path, offset: int) -> None:
    flip(file, offset)
    with pytest.raises(WeightsDamaged):
        read(file, [contiguous(0, 0, 100, 0)])


def test_headers_are_compared_whatever_is_read(tmp_path: Path) -> None:
    """This one fills more than a block, and is readable all the same."""
    path = tmp_path / "model.safetensors"
    metadata = {"note": "x" * (2 << 20)}
    save_file({"first": torch.arange(500_000), "second": torch.arange(100_000)}, path, metadata)
    size = path.stat().st_size
    with WeightReader() as reader:
        manifest.write(tmp_path, [path], reader)
        report = reader.read(
            [path], [contiguous(0, size - 9, 9, 0)], [torch.zeros(9, dtype=torch.uint8)], manifest.of_files([path])
        )
    assert report.bytes_landed == 9
    flip(path, path.read_bytes().index(b"xxx") + (3 << 19))
    with pytest.raises(WeightsDamaged, match="at byte 1048576"):
        read(path, [contiguous(0, size - 9, 9, 0)])


def test_only_blocks_that_are_read_count(file: Path) -> None:
    flip(file, 2_500_000)
    read(file, [contiguous(0, 100, 1000, 0), Copy(0, 3 << 20, 10, 100, 200, 0, 5000, 100)])


def test_a_file_of_another_size_is_refused(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(1 << 20))
    with pytest.raises(WeightsUnreadable, match="not the size in the manifest"):
        read(file, [contiguous(0, 0, 10, 0)])


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 2), ("block_bytes", 7), ("digest", ""), ("files", {}), ("files", None), ("files", {"x": 1})],
)
def test_a_manifest_that_is_damaged_is_refused(file: Path, key: str, value: object) -> None:
    path = file.parent / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(Corrupt, match="kvtier weights verify .* --write"):
        manifest.read(file.parent)


@pytest.mark.parametrize("files", [[], {"model.safetensors": {"bytes": 5 << 20, "sums": "00" * 8}}])
def test_a_digest_does_not_make_a_manifest_sound(file: Path, files: Any) -> None:
    path = file.parent / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files, "digest": manifest._digest(files)}))
    with pytest.raises(Corrupt, match="no attribute 'items'|1 checksums for 5242880 bytes"):
        manifest.read(file.parent)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"version": 1}', b"[" * 100_000])
def test_no_manifest_at_all(file: Path, content: bytes) -> None:
    (file.parent / MANIFEST).write_bytes(content)
    with pytest.raises(Corrupt):
        manifest.read(file.parent)
    (file.parent / MANIFEST).unlink()
    assert manifest.read(file.parent) is None and manifest.of_files([file]) == {}


def test_a_file_system_without_modes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (file.parent / MANIFEST).unlink()
    monkeypatch.setattr(os, "chmod", refused)
    with WeightReader() as reader:
        manifest.write(file.parent, [file], reader)
    assert list(manifest.read(file.parent) or {}) == [file]
