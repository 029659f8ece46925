"""Namespace folders: made once, and verified against their name ever after."""

import dataclasses
import stat
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.format.geometry import Geometry
from kvtier.format.namespace import CodecId, Namespace
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import (
    MODEL_FILE,
    NAMESPACE_FILE,
    Root,
    check_namespace,
    model_name,
    open_namespace,
    read_namespace,
)

NAMESPACE = Namespace(
    engine="vllm",
    weights="5f1e",
    geometry=Geometry(8, 4, 128, 128, "bfloat16", 2, "heads", 256),
    model_dtype="bfloat16",
    quantization="",
    positions="{}",
    hf_overrides="",
    codec=CodecId("raw", 1, 0),
    draft="",
    epoch="0",
)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "v2").mkdir()
    return Root(tmp_path, tmp_path / "v2", None)


def test_is_named_by_the_id_and_holds_the_json(root: Root) -> None:
    folder = open_namespace(root, NAMESPACE)
    assert folder == root.folder / NAMESPACE.id.hex()
    assert (folder / NAMESPACE_FILE).read_text() == NAMESPACE.canonical_json()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / NAMESPACE_FILE).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [NAMESPACE_FILE]
    assert open_namespace(root, NAMESPACE) == folder
    assert read_namespace(folder) == NAMESPACE


def test_keeps_the_name_of_the_model(root: Root) -> None:
    folder = open_namespace(root, NAMESPACE)
    assert model_name(folder) == ""
    for served in ("Qwen/Qwen3 \u00e9", "another name of it"):
        open_namespace(root, NAMESPACE, model=served)
        assert model_name(folder) == "Qwen/Qwen3 \u00e9"
    Sweeper(MemoryIndex(), root.folder, "me").erase_namespace(NAMESPACE.id)
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "{}", "no json", '"a\\u001b[31mb"', f'"{"m" * 201}"', "[" * 200_000, "\udcff"])
def test_shows_no_name_that_could_not_be_a_model_s(root: Root, content: str) -> None:
    folder = open_namespace(root, NAMESPACE)
    (folder / MODEL_FILE).write_bytes(content.encode(errors="surrogateescape"))
    assert model_name(folder) == ""


def test_is_made_where_the_name_of_the_model_cannot_be_kept(root: Root) -> None:
    (open_namespace(root, NAMESPACE) / MODEL_FILE).mkdir()
    assert model_name(open_namespace(root, NAMESPACE, model="m" * 300)) == ""


@pytest.mark.parametrize(
    "content",
    [
        dataclasses.replace(NAMESPACE, weights="other").canonical_json(),
        NAMESPACE.canonical_json().replace('"layers":8', '"layers":9'),
        NAMESPACE.canonical_json() + "\n",
        "{}",
        "not json",
        "\u00e9",
    ],
)
def test_that_contradicts_its_folder(root: Root, content: str) -> None:
    path = open_namespace(root, NAMESPACE) / NAMESPACE_FILE
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        open_namespace(root, NAMESPACE)
    assert caught.value.key == "root" and caught.value.value == str(path)
    assert "contradicts" in caught.value.fix and f"remove {path.parent}" in caught.value.fix
    assert path.read_text() == content  # it is for the operator to decide


def test_that_was_renamed(root: Root) -> None:
    folder = open_namespace(root, NAMESPACE)
    renamed = folder.rename(folder.with_name("0" * 32))
    with pytest.raises(ConfigError, match=f"describes namespace {NAMESPACE.id.hex()}"):
        read_namespace(renamed)


def test_that_cannot_be_made(root: Root) -> None:
    (root.folder / NAMESPACE.id.hex()).write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        open_namespace(root, NAMESPACE)


@pytest.mark.parametrize("part", ["engine", "weights", "draft", "settings", "model_dtype"])
def test_a_worker_of_other_files_or_settings_moves_nothing(root: Root, part: str) -> None:
    open_namespace(root, NAMESPACE)
    check_namespace(root, dataclasses.replace(NAMESPACE, epoch="1"), NAMESPACE.id)  # as after a reset
    check_namespace(root, dataclasses.replace(NAMESPACE, positions="more"), NAMESPACE.id)  # as models make it
    other = dataclasses.replace(NAMESPACE, **{part: "another"})  # type: ignore[arg-type]
    with pytest.raises(TierUnavailable, match=f"is of another {part}: .*, here another; give all processes"):
        check_namespace(root, other, NAMESPACE.id)
