"""Fingerprints of weights: what must change them, what must not, and that a cached answer is never a stale one."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.model import weights_fingerprint as fingerprint
from kvtier.model.weights_fingerprint import adapter_fingerprint, sampled_pages, weights_fingerprint
from kvtier.storage.cache_folder import CacheFolder
from kvtier.weights.manifest import MANIFEST
from tests.damage import flip

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_theta": 10000.0}
PAGE = 4096


def write_safetensors(path: Path, sizes: dict[str, int], data: bytes | None = None) -> int:
    """A safetensors file with one u8 tensor a name; returns where its data begins. No data: sparse."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, n_bytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        if data is None:
            file.truncate(begin + offset)
        else:
            file.write(data)
    return begin


def make_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a": 1 << 20, "b": 5000}, os.urandom(1) * 1053576)
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"c": 3000}, bytes(range(250)) * 12)
    return folder


def copy(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to, symlinks=True))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def print_of(model: Path) -> str:
    return weights_fingerprint(model, None)


# --- what must not change it ---


def test_same_weights_under_another_path(model: Path, tmp_path: Path) -> None:
    assert len(bytes.fromhex(print_of(model))) == 32
    assert print_of(copy(model, tmp_path / "else" / "where")) == print_of(model)


def test_same_weights_behind_symbolic_links(model: Path, tmp_path: Path) -> None:
    """A hub cache is a folder of links to blobs that are named by their hash."""
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(model.iterdir()):
        os.symlink(path.rename(tmp_path / f"blob{number}"), tmp_path / "snapshot" / path.name)
    links = print_of(tmp_path / "snapshot")
    for path in (tmp_path / "snapshot").iterdir():
        shutil.copy(path, model / path.name)
    assert print_of(model) == links


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ORIGIN = {"_name_or_path": "/home/me", "transformers_version": "9.9"}


def write_index(model: Path, *files: str, name: str = "model") -> Path:
    path = model / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {f"t{n}": file for n, file in enumerate(files)}}))
    return path


def swap_shards(model: Path) -> None:
    first, second = (model / name for name in SHARDS)
    first.rename(model / "x")
    second.rename(first)
    (model / "x").rename(second)


def write_config(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


UNNOTICED: dict[str, Callable[[Path], object]] = {
    "where the config came from": lambda model: (model / "config.json").write_text(
        json.dumps(dict(reversed(list({**CONFIG, **ORIGIN}.items()))), indent=4)
    ),
    "files that are no weights": lambda model: [
        (model / name).write_text("x")
        for name in ("README.md", "tokenizer.json", "training_args.bin", "optimizer.pt", MANIFEST)
    ],
    # so the fingerprints of models without other files are those of releases that did not look at the index
    "an index that names all files": lambda model: write_index(model, *SHARDS),
}
NOTICED: dict[str, Callable[[Path], object]] = {
    "a value in another shard": lambda model: flip(model / SHARDS[1], (model / SHARDS[1]).stat().st_size - 1),
    "swapped shards": swap_shards,
    "rope_theta": lambda model: write_config(model, rope_theta=10001.0),
    "rope_scaling": lambda model: write_config(model, rope_scaling={"factor": 2}),
    "quantization": lambda model: write_config(model, quantization="x"),
}


@pytest.mark.parametrize("what", [*UNNOTICED, *NOTICED])
def test_changes_that_count(model: Path, what: str) -> None:
    before = print_of(model)
    (UNNOTICED | NOTICED)[what](model)
    assert (print_of(model) != before) is (what in NOTICED)


# --- what must change it ---


@pytest.mark.parametrize("where", ["first byte", "middle of the big tensor", "last byte of it", "second tensor"])
def test_another_value_in_one_tensor(model: Path, where: str) -> None:
    before = print_of(model)
    path = model / "model-00001-of-00002.safetensors"
    begin = path.stat().st_size - (1 << 20) - 5000
    offset = {"first byte": 0, "middle of the big tensor": 600_001, "last byte of it": (1 << 20) - 1}.get(
        where, 1 << 20
    )
    flip(path, begin + offset)
    changed = print_of(model)
    assert changed != before
    flip(path, begin + offset)
    assert print_of(model) == before


def test_renamed_tensors(model: Path) -> None:
    data = bytes(8192)
    seen = set()
    for sizes in ({"a": 4096, "b": 4096}, {"b": 4096, "a": 4096}, {"a": 4096, "c": 4096}, {"a": 2048, "b": 6144}):
        write_safetensors(model / "model-00001-of-00002.safetensors", sizes, data)
        seen.add(print_of(model))
    assert len(seen) == 4


@pytest.mark.parametrize(
    "name",
    [
        "quantize_config.json",
        "hf_quant_config.json",
        "params.json",
        "audio_tokenizer_config.json",
        "quant_config.json",
        "quantization_config.json",
        "joint_head_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ],
)
def test_configurations_beside_the_weights(model: Path, name: str) -> None:
    seen = {print_of(model)}
    for bits in (4, 8):
        (model / name).write_text(json.dumps({"bits": bits}))
        seen.add(print_of(model))
    assert len(seen) == 3


def test_weights_in_the_format_of_mistral(model: Path) -> None:
    """Some of Mistral's models come with params.json alone."""
    (model / "config.json").rename(model / "params.json")
    seen = {print_of(model)}
    (model / "params.json").write_text(json.dumps({"n_layers": 9}))
    assert len(seen | {print_of(model)}) == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_weights_in_other_formats(tmp_path: Path, name: str) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    (tmp_path / name).write_bytes(bytes(100_000))
    before = print_of(tmp_path)
    flip(tmp_path / name, 50_000)
    assert print_of(tmp_path) != before


# --- large models are sampled ---


def test_sampled_pages_are_the_ends_and_an_even_choice_between() -> None:
    part = range(1000, 1000 + 1000 * PAGE + 7)
    pages = sampled_pages(part, 64)
    assert len(pages) == 66 and all(len(page) == PAGE for page in pages)
    assert pages[0].start == part.start and pages[-1].stop == part.stop
    gaps = [(right.start - left.start) / PAGE for left, right in zip(pages, pages[1:], strict=False)]
    assert all(14 <= gap <= 17 for gap in gaps)
    assert sampled_pages(range(5, 5 + 66 * PAGE), 64) == [range(5, 5 + 66 * PAGE)]
    assert sampled_pages(range(5, 5), 64) == []
    assert len(sampled_pages(part, 0)) == 2


def make_sparse(folder: Path) -> tuple[Path, int]:
    """9 GiB in two tensors that take no disk. Returns the file and where its data begins."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "model.safetensors"
    return path, write_safetensors(path, {"big": 9 << 30, "small": 5000})


def test_more_than_8_gib_is_sampled(tmp_path: Path) -> None:
    path, begin = make_sparse(tmp_path / "model")
    original = print_of(path.parent)
    seen = {original}
    for offset in (0, (9 << 30) - 1, (9 << 30) + 2500, sampled_pages(range(9 << 30), 64)[33].start + 77):
        flip(path, begin + offset)
        seen.add(print_of(path.parent))
    assert len(seen) == 5
    other, other_begin = make_sparse(tmp_path / "other")
    flip(other, other_begin + sampled_pages(range(9 << 30), 64)[33].start + 5 * PAGE)  # between two sampled pages
    assert print_of(other.parent) == original


def test_plain_fingerprints_are_pinned(tmp_path: Path) -> None:
    """Another answer for the same files would orphan what is stored: it needs another RULE_VERSION or SAMPLED."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": 64, "b": 200}, bytes(range(256)) + bytes(8)
    )
    assert print_of(tmp_path) == "490fa4d762c62bfd8a71d76ad9b85bcc56083b23e541cc241d8e83f3c43b94d6"


EMBEDDINGS = ["model.embed_tokens.weight", "tok_embeddings.weight", "transformer.wte.weight", "wte.weight"]


@pytest.mark.parametrize("name", [*EMBEDDINGS, "model.layers.0.mlp.down_proj.weight"])
def test_one_row_of_an_embedding_in_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES_MAX", 5 << 20)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    begin = write_safetensors(tmp_path / "model.safetensors", {"a": 3 << 20, name: 4 << 20, "z": 1 << 20})
    before, unnoticed = print_of(tmp_path), 0
    for row in range(5, 1024, 200):
        flip(tmp_path / "model.safetensors", begin + (3 << 20) + row * 4096)
        unnoticed += print_of(tmp_path) == before
        flip(tmp_path / "model.safetensors", begin + (3 << 20) + row * 4096)
    assert (unnoticed == 0) == (name in EMBEDDINGS)  # of other tensors pages are left out


def test_embeddings_are_hashed_whole_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest first: a table of 100 GiB beside the embedding of tokens neither takes minutes nor its place."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(fingerprint, "EMBEDDING_BYTES_MAX", 5 << 20)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    begin = write_safetensors(tmp_path / "model.safetensors", {"table.embed": 6 << 20, "embed_tokens": 4 << 20})
    before = print_of(tmp_path)
    flip(tmp_path / "model.safetensors", begin + 5 * PAGE)
    assert print_of(tmp_path) == before
    flip(tmp_path / "model.safetensors", begin + (6 << 20) + 5 * PAGE)
    assert print_of(tmp_path) != before


def test_whole_and_sampled_differ(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = print_of(model)
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES_MAX", 1000)
    assert print_of(model) != before


def test_many_tensors_are_sampled_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, begin = make_sparse(tmp_path / "model")
    monkeypatch.setattr(fingerprint, "SAMPLED_PAGES_MAX", 2 * 10)  # two tensors: 8 between
    before = print_of(path.parent)
    flip(path, begin + sampled_pages(range(9 << 30), 64)[33].start)
    assert print_of(path.parent) == before
    flip(path, begin + sampled_pages(range(9 << 30), 8)[4].start)
    assert print_of(path.parent) != before


# --- the cache ---


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever weights are really hashed."""
    calls: list[int] = []
    compute = fingerprint._compute

    def counted(*arguments: Any) -> str:
        calls.append(1)
        return compute(*arguments)

    monkeypatch.setattr(fingerprint, "_compute", counted)
    return calls


def test_second_answer_comes_from_the_cache(model: Path, tmp_path: Path, hashed: list[int]) -> None:
    cache = tmp_path / "cache" / "deep"
    first = weights_fingerprint(model, cache)
    assert weights_fingerprint(model, cache) == first == print_of(model)
    assert len(hashed) == 2  # one for the cache, one without it
    assert len(list(cache.iterdir())) == 1


def test_change_of_a_file_is_noticed(model: Path, tmp_path: Path) -> None:
    path = model / "model-00002-of-00002.safetensors"
    before, times = weights_fingerprint(model, tmp_path / "cache"), path.stat()
    flip(path, times.st_size - 1)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same mtime, same inode
    assert weights_fingerprint(model, tmp_path / "cache") == print_of(model) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": "x"}', b"\xff", b'{"fingerprint": "00", "key": "x"}'])
def test_malformed_entry_is_not_believed(model: Path, tmp_path: Path, content: bytes) -> None:
    right = weights_fingerprint(model, tmp_path / "cache")
    entry = next((tmp_path / "cache").iterdir())
    entry.write_bytes(content)
    assert weights_fingerprint(model, tmp_path / "cache") == right
    stored = CacheFolder(entry.parent, "fingerprint", fingerprint.MAGIC).get(entry.stem)
    assert stored == (entry.stem + right).encode()  # and is put right


def test_entry_of_another_model_is_not_believed(model: Path, tmp_path: Path) -> None:
    right = weights_fingerprint(model, tmp_path / "cache")
    weights_fingerprint(make_model(tmp_path / "other", CONFIG | {"x": 1}), tmp_path / "cache2")
    entry, foreign = next((tmp_path / "cache").iterdir()), next((tmp_path / "cache2").iterdir())
    shutil.copy(foreign, entry)
    assert weights_fingerprint(model, tmp_path / "cache") == right


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_entry_of_another_user_is_not_believed(model: Path, tmp_path: Path, hashed: list[int]) -> None:
    right = weights_fingerprint(model, tmp_path / "cache")
    entry = next((tmp_path / "cache").iterdir())
    CacheFolder(entry.parent, "fingerprint", fingerprint.MAGIC).put(entry.stem, (entry.stem + "0" * 64).encode())
    assert weights_fingerprint(model, tmp_path / "cache") == "0" * 64  # what one's own file says is believed
    os.chown(entry, 65534, 65534)
    assert weights_fingerprint(model, tmp_path / "cache") == right and len(hashed) == 2


def test_cache_that_cannot_be_written_is_no_fault(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert weights_fingerprint(model, tmp_path / "file" / "cache") == print_of(model)


# --- nothing to fingerprint ---


def refusal(model: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        weights_fingerprint(model, None)
    assert caught.value.key == "model_tag" and "set model_tag" in caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.safetensors": "x"}, "no config.json"),
        ({"config.json": "{}"}, "no weight files"),
        ({"config.json": "{", "model.safetensors": "x"}, "not JSON"),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert said in refusal(tmp_path).fix


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" * 4,
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"{{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 32) + b'{"a":{"data_offsets":[0, 9999]}}'.ljust(32),
    ],
)
def test_torn_safetensors(model: Path, content: bytes) -> None:
    (model / "model-00002-of-00002.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is not a whole safetensors file"):
        print_of(model)


# --- adapters ---


def test_adapters(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(ConfigError, match="lora = .*not cached"):
        adapter_fingerprint(adapter)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    path = adapter / "adapter_model.safetensors"
    begin = write_safetensors(path, {"lora_A": 100}, bytes(100))
    seen = {adapter_fingerprint(adapter), adapter_fingerprint(copy(adapter, tmp_path / "copy"))}
    assert len(seen) == 1
    flip(path, begin + 50)
    seen.add(adapter_fingerprint(adapter))
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    seen.add(adapter_fingerprint(adapter))
    assert len(seen) == 3


# --- an index that chooses among the files ---


@pytest.mark.parametrize("name", ["model", "consolidated"])
def test_an_index_that_leaves_files_out_is_part_of_it(model: Path, name: str) -> None:
    """vLLM loads the files that it names and no others."""
    prints = {print_of(model)}
    for files in (SHARDS[:1], SHARDS[1:]):
        write_index(model, *files, name=name)
        prints.add(print_of(model))
    assert len(prints) == 3


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 1}', '{"weight_map": {"a": []}}', "{}"])
def test_an_index_that_cannot_be_read_is_refused(model: Path, text: str) -> None:
    write_index(model).write_text(text)
    with pytest.raises(ConfigError, match="model.safetensors.index.json is no index of weights"):
        print_of(model)


def test_an_index_that_changes_is_seen_past_the_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = []
    for files in (SHARDS, SHARDS[:1], SHARDS[1:], SHARDS):
        write_index(model, *files)
        found.append(weights_fingerprint(model, cache))
    assert found[0] == found[3] and len(set(found)) == 3
