"""Fingerprints of model weights: equal for equal weights on every node and under every path.

blake3 over a sequence of (name, content) pairs, each length-prefixed:

    rule                    version of this definition, and whether tensors were hashed whole or sampled
    config.json             canonical JSON without the keys that name its origin; may be missing beside params.json
    _SIDE_FILES, *processor_config.json
                            the same, if present: they define how weights are read and images are prepared
    *.safetensors.index.json
                            the same, if it leaves out a *.safetensors file of the folder: that file is not loaded
    each weight file, by its name in sorted order:
        *.safetensors       its header, then the bytes of every tensor, in the order of the file
        other formats       its bytes (*.bin, *.pt, *.pth, *.gguf, except other files of a trainer)

Weights of up to 8 GiB are hashed whole. Of larger ones every tensor (or other file) gives its first page, its last, and
up to 64 evenly spaced between (fewer if the number of tensors would make that more than 1 GiB): training changes nearly
all of them. Embeddings in safetensors are hashed whole even then, the smallest first, up to 8 GiB of them: an added
token changes one row. The bytes read depend on sizes and headers only, never on the machine.
"""

import json
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvtier.errors import ConfigError, Corrupt
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.namespace import canonical_text
from kvtier.model.safetensors import header_size, parse_header
from kvtier.model.shard_manifest import read_shard_manifest
from kvtier.storage.cache_folder import CacheFolder

log = logging.getLogger("kvtier")

RULE_VERSION = 1
MAGIC = b"KVTFPRT1"  # of files with known answers, each of which is a cache key and the fingerprint
SAMPLED = "sampled, embeddings whole"
# Weights up to this size are hashed whole, bytes. 2 cores of an AMD EPYC hash 8 GiB/s from the page cache, so it
# takes a second, or the time of the disk.
WHOLE_BYTES_MAX = 8 << 30
EMBEDDING_BYTES_MAX = 8 << 30  # embeddings that are hashed whole in sampled weights, bytes
SAMPLED_PAGES_BETWEEN_MAX = 64  # pages sampled between the first and the last of a tensor
SAMPLED_PAGES_MAX = 1 << 18  # pages sampled in all, about: a mixture of experts may have 100,000 tensors

_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
_CONFIGS = ("config.json", "params.json")  # the second one is Mistral's, with or without the first
_SIDE_FILES = (
    "quantize_config.json",
    "hf_quant_config.json",
    "params.json",
    "audio_tokenizer_config.json",
    "quant_config.json",
    "quantization_config.json",
    "joint_head_config.json",
)
_PROCESSOR_SUFFIX = "processor_config.json"
INDEX_SUFFIX = ".safetensors.index.json"  # of the file that says in which file each tensor is
# Names of embedding tensors: embed_tokens, word_embeddings, tok_embeddings, wte.
_EMBEDDING = re.compile(r"embed|(^|\.)wte\.", re.IGNORECASE)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_SET_MODEL_TAG = "set model_tag to a name that changes whenever the weights do"


@dataclass(frozen=True, slots=True)
class _File:
    """A weight file. name: in the model's folder; path: resolved; the rest is from stat, to notice a change."""

    name: str
    path: Path
    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Sampling plan. between: pages to sample between the first and the last of a tensor. whole: tensors read
    whole, by file and first byte."""

    between: int
    whole: frozenset[tuple[str, int]]

    def pieces(self, name: str, tensors: list[tuple[str, range]]) -> list[range]:
        """Return the byte ranges to read of file `name`."""
        found = []
        for _, part in tensors:
            found += [part] if (name, part.start) in self.whole else sampled_pages(part, self.between)
        return found


def weights_fingerprint(model_dir: Path, cache_dir: Path | None) -> str:
    """Return 64 hex digits for the weights in `model_dir`. Raises ConfigError("model_tag") if none can be read.

    Shards made from a checkpoint have the checkpoint's, as long as no file of their folder was changed.
    cache_dir: folder of known answers by path, size, times and inode of all files; None: no cache.
    """
    own = _folder_fingerprint(model_dir, cache_dir)
    manifest = read_shard_manifest(model_dir)
    if manifest is None:
        return own
    if manifest.shards_fingerprint != own:
        log.warning("%s was changed since its shards were made: their KV is not that of the checkpoint", model_dir)
        return own
    return manifest.source_fingerprint


def shards_fingerprint(folder: Path) -> str:
    """Return 64 hex digits for the files of a folder of shards themselves. Raises as `weights_fingerprint`."""
    return _folder_fingerprint(folder, None)


def _folder_fingerprint(model_dir: Path, cache_dir: Path | None) -> str:
    configs = configs_in(model_dir)
    if not configs:
        missing = " and no ".join(_CONFIGS)
        raise ConfigError("model_tag", None, f"{model_dir} has no {missing} to fingerprint; {_SET_MODEL_TAG}")
    # Engines read no subfolders.
    weights = sorted(entry.name for entry in os.scandir(model_dir) if entry.is_file() and is_weight_file(entry.name))
    if not weights:
        raise ConfigError("model_tag", None, f"{model_dir} has no weight files to fingerprint; {_SET_MODEL_TAG}")
    texts = [*dict.fromkeys([configs[0], *_side_files(model_dir)]), *_choosing_indexes(model_dir, weights)]
    return _fingerprint(model_dir, texts, weights, cache_dir)


def adapter_fingerprint(adapter_dir: Path) -> str:
    """Return 64 hex digits for a LoRA adapter: its adapter_config.json and weights.

    Raises ConfigError("lora") if they are missing: its KV cannot be identified and must not be cached.
    """
    weights = [name for name in ("adapter_model.safetensors", "adapter_model.bin") if (adapter_dir / name).is_file()]
    if not weights or not (adapter_dir / "adapter_config.json").is_file():
        fix = "the folder lacks adapter_config.json or adapter_model.safetensors; requests with it are not cached"
        raise ConfigError("lora", str(adapter_dir), fix)
    return _fingerprint(adapter_dir, ["adapter_config.json"], weights, None)


def configs_in(model_dir: Path) -> list[str]:
    """Return the names of the model's configuration files; engines read the first one."""
    return [name for name in _CONFIGS if (model_dir / name).is_file()]


def config_fingerprint(model_dir: Path) -> str:
    """Return 64 hex digits for a model's configuration alone, if an engine reads that from another folder than the
    weights.

    Raises ConfigError("hf_config_path") if there is none to read.
    """
    names = configs_in(model_dir)
    if not names:
        raise ConfigError("hf_config_path", str(model_dir), "the folder has no config.json; name one that has it")
    digest = blake3()
    try:
        for name in names:
            _add(digest, name, _canonical_file(model_dir / name))
    except OSError as error:
        raise ConfigError("hf_config_path", str(model_dir), f"cannot be read: {error}; make it readable") from None
    return digest.hexdigest()


def file_fingerprint(path: Path, key: str) -> str:
    """Return 64 hex digits for the bytes of a small file that the setting `key` names. Raises ConfigError(key)."""
    try:
        return blake3(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(key, str(path), f"cannot be read: {error}; name a file that can") from None


def _side_files(folder: Path) -> list[str]:
    """Return the names of files read beside config.json, sorted, those of quantization first."""
    known = [name for name in _SIDE_FILES if (folder / name).is_file()]
    files = (entry.name for entry in os.scandir(folder) if entry.is_file())
    return known + sorted(name for name in files if name.endswith(_PROCESSOR_SUFFIX))


def is_weight_file(name: str) -> bool:
    """Return whether a file in a model's folder has weights, by its name."""
    return name.endswith(_SUFFIXES) and name not in _NO_WEIGHTS


def _choosing_indexes(folder: Path, weights: list[str]) -> list[str]:
    """Return the names of indexes in `folder` that leave out some of its safetensors files. Raises ConfigError.

    vLLM loads all tensors of the files that an index names, and no other files. An index that names all files selects
    nothing: its content is also in their headers.
    """
    found = []
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(INDEX_SUFFIX)):
        try:
            named = set(json.loads((folder / name).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            fix = f"{folder / name} is no index of weights ({error}); get it again, or {_SET_MODEL_TAG}"
            raise ConfigError("model_tag", None, fix) from None
        if not named.issuperset(weight for weight in weights if weight.endswith(".safetensors")):
            found.append(name)
    return found


def _fingerprint(folder: Path, texts: list[str], weights: list[str], cache_dir: Path | None) -> str:
    try:
        files = [_stat(folder, name) for name in (*texts, *weights)]
        cache, key = None if cache_dir is None else CacheFolder(cache_dir, "fingerprint", MAGIC), _cache_key(files)
        known = None if cache is None else _known(cache, key)
        if known is not None:
            return known
        fingerprint = _compute(files, set(texts))
        if [_stat(folder, name) for name in (*texts, *weights)] != files:
            raise ConfigError("model_tag", None, f"the files in {folder} change while they are read; {_SET_MODEL_TAG}")
    except OSError as error:
        raise ConfigError("model_tag", None, f"cannot read {folder}: {error}; {_SET_MODEL_TAG}") from None
    if cache is not None:
        cache.put(key, (key + fingerprint).encode())
    return fingerprint


def _stat(folder: Path, name: str) -> _File:
    found = (folder / name).stat()
    return _File(name, (folder / name).resolve(), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _compute(files: list[_File], texts: set[str]) -> str:
    weights = [file for file in files if file.name not in texts]
    sampling = None
    if sum(file.n_bytes for file in weights) > WHOLE_BYTES_MAX:
        sampling = _sampling(weights)
    digest = blake3(max_threads=blake3.AUTO)
    _add(digest, "rule", canonical_text([RULE_VERSION, "whole" if sampling is None else SAMPLED]).encode())
    for file in files:
        if file.name in texts:
            _add(digest, file.name, _canonical_file(file.path))
            continue
        _add(digest, file.name, b"")
        if file.n_bytes:
            with _mapped(file) as data:
                _add_weights(digest, file, data, sampling)
    return digest.hexdigest()


def _sampling(weights: list[_File]) -> _Sampling:
    n_tensors, embeddings = 0, []
    for file in weights:
        if file.name.endswith(".safetensors") and file.n_bytes:
            with _mapped(file) as data:
                tensors = _header(file, data)[1]
            n_tensors += len(tensors)
            embeddings += [(len(part), file.name, part.start) for name, part in tensors if _EMBEDDING.search(name)]
        else:
            n_tensors += 1
    whole, n_bytes = set(), 0
    for size, file_name, start in sorted(embeddings):
        n_bytes += size
        if n_bytes > EMBEDDING_BYTES_MAX:
            break
        whole.add((file_name, start))
    between = max(0, min(SAMPLED_PAGES_BETWEEN_MAX, SAMPLED_PAGES_MAX // max(1, n_tensors) - 2))
    return _Sampling(between, frozenset(whole))


@contextmanager
def _mapped(file: _File) -> Iterator[mmap.mmap]:
    with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _add_weights(digest: blake3, file: _File, data: mmap.mmap, sampling: _Sampling | None) -> None:
    """Hash one file; without sampling, all of it."""
    begin, tensors = 0, [("", range(len(data)))]
    if file.name.endswith(".safetensors"):
        begin, tensors = _header(file, data)
        _add(digest, "header", data[:begin])
    if sampling is None:
        data.madvise(mmap.MADV_SEQUENTIAL)
        pieces = [range(begin, len(data))]
    else:
        data.madvise(mmap.MADV_RANDOM)
        pieces = sampling.pieces(file.name, tensors)
        for piece in pieces:  # all at once, so that the disk or server reads many at a time
            start = piece.start // mmap.PAGESIZE * mmap.PAGESIZE
            is_long = len(piece) > (SAMPLED_PAGES_BETWEEN_MAX + 2) * PAGE_BYTES  # Linux reads only a part ahead
            data.madvise(mmap.MADV_SEQUENTIAL if is_long else mmap.MADV_WILLNEED, start, piece.stop - start)
    with memoryview(data) as view:
        for piece in pieces:
            digest.update(struct.pack("<Q", len(piece)))
            with view[piece.start : piece.stop] as content:
                digest.update(content)


def sampled_pages(part: range, between: int) -> list[range]:
    """Return the first and last page of `part` and `between` evenly spaced ones; all of it if it is no longer than
    that."""
    pages = -(-len(part) // PAGE_BYTES)
    if pages <= between + 2:
        return [part] if len(part) else []
    steps = between + 1
    starts = [part.start + (pages - 1) * step // steps * PAGE_BYTES for step in range(steps)]
    starts.append(part.stop - PAGE_BYTES)
    return [range(start, start + PAGE_BYTES) for start in starts]


def _header(file: _File, data: mmap.mmap) -> tuple[int, list[tuple[str, range]]]:
    """Return the offset of the data, and each tensor's name and bytes in the file, in order. Raises ConfigError for a
    malformed file."""
    try:
        begin = 8 + header_size(data[:8], len(data))
        found = parse_header(data[8:begin], len(data))
    except Corrupt as error:
        fix = f"{file.path} is not a whole safetensors file: {error}; get it again"
        raise ConfigError("model_tag", None, fix) from None
    return begin, [(name, range(entry.start, entry.stop)) for name, entry in found.tensors.items()]


def _add(digest: blake3, name: str, content: bytes) -> None:
    encoded = name.encode("utf-8", "surrogateescape")
    digest.update(struct.pack("<QQ", len(encoded), len(content)) + encoded)
    digest.update(content)


def _canonical_file(path: Path) -> bytes:
    try:
        values = json.loads(path.read_bytes())
        return canonical_text(_settled(values)).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ConfigError("model_tag", None, f"{path} is not JSON ({error}); {_SET_MODEL_TAG}") from None


def _settled(value: Any) -> Any:
    """Return `value` without the keys, at any depth, that name the origin of a configuration."""
    if isinstance(value, dict):
        return {name: _settled(below) for name, below in value.items() if name not in _VOLATILE_KEYS}
    return [_settled(below) for below in value] if isinstance(value, list) else value


def _cache_key(files: list[_File]) -> str:
    facts = [
        RULE_VERSION,
        SAMPLED,
        WHOLE_BYTES_MAX,
        EMBEDDING_BYTES_MAX,
        [[f.name, str(f.path), f.n_bytes, f.mtime_ns, f.ctime_ns, f.inode] for f in files],
    ]
    return blake3(canonical_text(facts).encode("ascii")).hexdigest()


def _known(cache: CacheFolder, key: str) -> str | None:
    """Return an answer that this user stored; None if there is none, or only one of another key."""
    found = re.fullmatch(key.encode() + rb"([0-9a-f]{64})", cache.get(key) or b"")
    return found[1].decode() if found else None
