"""`kvtier weights verify` and `bench`."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvtier.weights.reader import WeightReader
from tests.cli.asking import Cli
from tests.damage import flip


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"t{number}": torch.arange(300_000 * number)}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def test_a_folder_is_as_its_manifest_says(folder: Path, cli: Cli) -> None:
    assert "--write` makes it" in cli.refused("weights", "verify", str(folder))
    assert "manifest written" in cli.printed("weights", "verify", str(folder), "--write")
    assert "0 bad" in cli.printed("weights", "verify", str(folder))
    found = cli.json("weights", "verify", str(folder))
    assert found["bad"] == [] and found["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_what_is_bad_is_named(folder: Path, cli: Cli) -> None:
    cli.printed("weights", "verify", str(folder), "--write")
    flip(folder / "model-2.safetensors", 3_000_000)
    os.truncate(folder / "model-1.safetensors", 2_400_000)
    save_file({"t3": torch.zeros(1)}, folder / "model-3.safetensors")
    bad = cli.json("weights", "verify", str(folder), status=1)["bad"]
    assert [(finding["file"][6], finding["offset"]) for finding in bad] == [
        ("1", 0),
        ("1", 2 << 20),
        ("2", 2 << 20),
        ("3", None),
    ]
    lines = cli.printed("weights", "verify", str(folder), status=1).splitlines()
    assert lines[0].startswith("BAD model-1.safetensors: ") and "is not a whole safetensors file" in lines[0]
    assert "bytes in tensor t2 differ" in lines[2] and "does not list" in lines[3] and lines[-1].endswith("4 bad")
    assert lines[0].count("model-1") == lines[2].count("model-2") == 1  # each file was named twice in its line
    assert lines[2].startswith("BAD model-2.safetensors at byte 2097152: ")
    (folder / "model-1.safetensors").unlink()
    assert "it cannot be opened: No such file" in cli.printed("weights", "verify", str(folder), status=1)


def test_a_missing_shard_of_the_index(folder: Path, cli: Cli) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t1": "model-1.safetensors", "t9": "model-9.safetensors"}}))
    said = cli.refused("weights", "verify", str(folder), "--write")
    assert "model-9.safetensors: model.safetensors.index.json names this file" in said
    index.write_text(json.dumps({"weight_map": {"t1": "../x"}}))
    assert "in another folder" in cli.refused("weights", "verify", str(folder), "--write")


def test_a_cache_that_lost_a_file(folder: Path, cli: Cli) -> None:
    """As where files of a Hugging Face cache are links, and one's content was removed; and a folder like a file."""
    link = folder / "model-3.safetensors"
    link.symlink_to("../blobs/gone")
    for options in ([], ["--write"]):
        said = cli.refused("weights", "verify", str(folder), *options)
        assert "model-3.safetensors: it is a link to nothing; get it again" in said
    link.unlink()
    link.mkdir()
    assert "model-3.safetensors: it is no file" in cli.refused("weights", "verify", str(folder))


def test_a_broken_file_gets_no_manifest(folder: Path, cli: Cli) -> None:
    os.truncate(folder / "model-1.safetensors", 1_000_000)
    assert "model-1.safetensors is not a whole" in cli.refused("weights", "verify", str(folder), "--write")
    assert not (folder / "kvtier-checksums.json").exists()


def test_a_folder_that_cannot_be_written_to(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so before it reads the files, also where access(2) allows it, as with some FUSE mounts."""
    plain_open = os.open

    def refused(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_TMPFILE) and Path(path).is_relative_to(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return plain_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(WeightReader, "sums", lambda *_: pytest.fail("the files were read"))
    said = cli.refused("weights", "verify", str(folder), "--write")
    assert (
        said.startswith(f"kvtier: {folder} cannot be written to (Read-only file system)")
        and "run this as a user" in said
    )


def test_files_in_the_format_of_mistral(folder: Path, cli: Cli) -> None:
    """vLLM loads such files, where there are any, instead of the files of the index."""
    save_file({"t": torch.zeros(9)}, folder / "consolidated.safetensors")
    cli.printed("weights", "verify", str(folder), "--write")
    flip(folder / "consolidated.safetensors", 90)
    bad = cli.json("weights", "verify", str(folder), status=1)["bad"]
    assert [finding["file"] for finding in bad] == ["consolidated.safetensors"]


@pytest.mark.parametrize("path", ["", "s3://bucket/x"])
def test_paths_that_are_no_folders(path: str, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to be the current folder, and a folder named `s3:` in it."""
    monkeypatch.chdir(folder)
    why = "it is a URL" if path else "it is empty"
    for command in ("verify", "bench", "plan", "shard"):
        assert why in cli.refused("weights", command, path, *(["--out", "x"] if command == "shard" else []))
    assert why in cli.refused("weights", "shard", str(folder), "--out", path)


def test_hidden_files_are_no_weights(folder: Path, cli: Cli) -> None:
    """vLLM does not read them: notes of macOS beside each file, and a shard that is being written."""
    (folder / "._model-1.safetensors").write_bytes(b"Mac OS X")
    cli.printed("weights", "verify", str(folder), "--write")
    (folder / ".writing-model-9.safetensors").touch()
    assert "; 0 bad" in cli.printed("weights", "verify", str(folder))


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_folder_that_is_not_there(command: str, tmp_path: Path, cli: Cli) -> None:
    """`verify` used to advise to make the manifest of a missing folder."""
    assert "there is no such folder" in cli.refused("weights", command, str(tmp_path / "absent"))


def test_an_empty_folder(tmp_path: Path, cli: Cli) -> None:
    assert "no safetensors file" in cli.refused("weights", "verify", str(tmp_path), "--write")


def test_bench(folder: Path, cli: Cli) -> None:
    values = cli.json("weights", "bench", str(folder))
    assert values["n_bytes"] == 900_000 * 8 and values["verified"] is values["pcie"] is None
    assert values["share"] == pytest.approx(values["loading"] / values["plain_read"])
    cli.printed("weights", "verify", str(folder), "--write")
    lines = cli.printed("weights", "bench", str(folder)).splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "loading",
        "loading, compared with the manifest",
        "ceiling: plain reads, 12 threads",
    ]
    assert "median of 3" in lines[-1]
    for device in ("meta", "mps"):
        said = cli.refused("weights", "bench", str(folder), "--device", device)
        assert f"device {device} cannot be used: weights load to the CPU or to CUDA" in said
    if not torch.cuda.is_available():
        assert "device cuda:0 cannot be used" in cli.refused("weights", "bench", str(folder), "--device", "cuda:0")
