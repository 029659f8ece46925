"""Fingerprints of model weights: the same for the same weights on every node and under every path.

blake3 over a sequence of (name, content) pairs, each length-prefixed:

    rule                    version of this definition, and whether tensors were hashed whole or sampled
    config.json             canonical JSON without the keys that say where it came from
    quantize_config.json, hf_quant_config.json      the same, where there
    each weight file, by its name in sorted order:
        *.safetensors       its header, then of every tensor, in order of its place in the file, its bytes
        other formats       its bytes (*.bin, *.pt, *.pth, *.gguf, except what a trainer leaves besides weights)

Weights of up to 8 GiB are hashed whole. Of larger ones every tensor (or other file) gives its first page, its last,
and up to 64 evenly spaced between (fewer where there are so many tensors that this would be over 1 GiB): who trains a
model changes nearly all of them. What is read depends on sizes and headers only, never on the machine.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvtier.errors import ConfigError
from kvtier.geometry import PAGE_BYTES
from kvtier.identity import canonical_text
from kvtier.once import replace_small

log = logging.getLogger("kvtier")

RULE_VERSION = 1
WHOLE_BYTES_MAX = 8 << 30
"""2 cores of an AMD EPYC hash 8 GiB/s from the page cache: reading whole costs a second, or what the disk takes."""
SAMPLED_PAGES_BETWEEN_MAX = 64
SAMPLED_PAGES_MAX = 1 << 18
"""In all, about: a mixture of experts may have 100,000 tensors."""

_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
_SIDE_FILES = ("quantize_config.json", "hf_quant_config.json")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_HEADER_BYTES_MAX = 100_000_000
_SET_MODEL_TAG = "set model_tag to a name that changes whenever the weights do"


@dataclass(frozen=True, slots=True)
class _File:
    """name: in the model's folder; path: resolved; the rest as stat tells, to notice a change."""

    name: str
    path: Path
    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def weights_fingerprint(model_dir: Path, cache_dir: Path | None) -> str:
    """64 hex digits for the weights in `model_dir`. Raises ConfigError("model_tag") where there are none to read.

    cache_dir: where answers are kept by path, size, times and inode of all files; None: nowhere.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError("model_tag", None, f"{model_dir} has no config.json to fingerprint; {_SET_MODEL_TAG}")
    texts = ["config.json", *(name for name in _SIDE_FILES if (model_dir / name).is_file())]
    weights = _weight_files(model_dir)
    if not weights:
        raise ConfigError("model_tag", None, f"{model_dir} has no weight files to fingerprint; {_SET_MODEL_TAG}")
    return _fingerprint(model_dir, texts, weights, cache_dir)


def adapter_fingerprint(adapter_dir: Path, cache_dir: Path | None = None) -> str:
    """64 hex digits for a LoRA adapter: its adapter_config.json and weights.

    Raises ConfigError("lora") when they are not there: its KV cannot be told from another's and must not be cached.
    """
    weights = [name for name in ("adapter_model.safetensors", "adapter_model.bin") if (adapter_dir / name).is_file()]
    if not weights or not (adapter_dir / "adapter_config.json").is_file():
        fix = "the folder lacks adapter_config.json or adapter_model.safetensors; requests with it are not cached"
        raise ConfigError("lora", str(adapter_dir), fix)
    return _fingerprint(adapter_dir, ["adapter_config.json"], weights, cache_dir)


def _weight_files(folder: Path) -> list[str]:
    """Names in `folder`, sorted; engines load weights from no deeper."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_file())
    return sorted(name for name in names if name.endswith(_SUFFIXES) and name not in _NO_WEIGHTS)


def _fingerprint(folder: Path, texts: list[str], weights: list[str], cache_dir: Path | None) -> str:
    try:
        files = [_stat(folder, name) for name in (*texts, *weights)]
        entry = None if cache_dir is None else cache_dir / f"{_cache_key(files)}.json"
        known = None if entry is None else _cached(entry)
        if known is not None:
            return known
        fingerprint = _compute(files, set(texts))
        if [_stat(folder, name) for name in (*texts, *weights)] != files:
            raise ConfigError("model_tag", None, f"the files in {folder} change while they are read; {_SET_MODEL_TAG}")
    except OSError as error:
        raise ConfigError("model_tag", None, f"cannot read {folder}: {error}; {_SET_MODEL_TAG}") from None
    if entry is not None:
        _remember(entry, fingerprint)
    return fingerprint


def _stat(folder: Path, name: str) -> _File:
    found = (folder / name).stat()
    return _File(name, (folder / name).resolve(), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _compute(files: list[_File], texts: set[str]) -> str:
    weights = [file for file in files if file.name not in texts]
    between = None
    if sum(file.n_bytes for file in weights) > WHOLE_BYTES_MAX:
        between = _pages_between(weights)
    digest = blake3(max_threads=blake3.AUTO)
    _add(digest, "rule", canonical_text([RULE_VERSION, "whole" if between is None else "sampled"]).encode())
    for file in files:
        if file.name in texts:
            _add(digest, file.name, _canonical_file(file.path))
            continue
        _add(digest, file.name, b"")
        if file.n_bytes:
            with _mapped(file) as data:
                _add_weights(digest, file, data, between)
    return digest.hexdigest()


def _pages_between(weights: list[_File]) -> int:
    """How many pages to sample between the first and the last of each tensor."""
    n_tensors = 0
    for file in weights:
        if file.name.endswith(".safetensors") and file.n_bytes:
            with _mapped(file) as data:
                n_tensors += len(_header(file, data)[1])
        else:
            n_tensors += 1
    return max(0, min(SAMPLED_PAGES_BETWEEN_MAX, SAMPLED_PAGES_MAX // max(1, n_tensors) - 2))


@contextmanager
def _mapped(file: _File) -> Iterator[mmap.mmap]:
    with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _add_weights(digest: blake3, file: _File, data: mmap.mmap, between: int | None) -> None:
    """Adds one file. `between`: pages to sample between the first and last of a tensor; None: all of them.

    Safetensors: header length u64, header JSON with name -> {"data_offsets": [begin, end], ...}, then the data.
    """
    begin, parts = 0, [range(len(data))]
    if file.name.endswith(".safetensors"):
        begin, tensors = _header(file, data)
        _add(digest, "header", data[:begin])
        parts = [range(begin + first, begin + end) for first, end in tensors]
    if between is None:
        data.madvise(mmap.MADV_SEQUENTIAL)
        pieces = [range(begin, len(data))]
    else:
        data.madvise(mmap.MADV_RANDOM)
        pieces = [piece for part in parts for piece in sampled_pages(part, between)]
        for piece in pieces:  # asked for all at once, so that the disk or server reads many at a time
            start = piece.start // mmap.PAGESIZE * mmap.PAGESIZE
            data.madvise(mmap.MADV_WILLNEED, start, piece.stop - start)
    with memoryview(data) as view:
        for piece in pieces:
            digest.update(struct.pack("<Q", len(piece)))
            with view[piece.start : piece.stop] as content:
                digest.update(content)


def sampled_pages(part: range, between: int) -> list[range]:
    """The first and last page of `part` and `between` evenly spaced ones; all of it where it is no longer than that."""
    pages = -(-len(part) // PAGE_BYTES)
    if pages <= between + 2:
        return [part] if len(part) else []
    steps = between + 1
    starts = [part.start + (pages - 1) * step // steps * PAGE_BYTES for step in range(steps)]
    starts.append(part.stop - PAGE_BYTES)
    return [range(start, start + PAGE_BYTES) for start in starts]


def _header(file: _File, data: mmap.mmap) -> tuple[int, list[tuple[int, int]]]:
    """Where the data begins, and the tensors' (begin, end) within it, ascending. Raises ConfigError when malformed."""
    try:
        (n_bytes,) = struct.unpack_from("<Q", data)
        if n_bytes > min(_HEADER_BYTES_MAX, len(data) - 8):
            raise ValueError(f"a header of {n_bytes} bytes")
        header = json.loads(data[8 : 8 + n_bytes])
        tensors = sorted((int(x["data_offsets"][0]), int(x["data_offsets"][1])) for x in _tensors(header))
        if any(not 0 <= first <= end <= len(data) - 8 - n_bytes for first, end in tensors):
            raise ValueError("a tensor lies outside of the file")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError("model_tag", None, f"{file.path} is not a whole safetensors file: {error}") from None
    return 8 + n_bytes, tensors


def _tensors(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (value for name, value in header.items() if name != "__metadata__")


def _add(digest: blake3, name: str, content: bytes) -> None:
    encoded = name.encode("utf-8", "surrogateescape")
    digest.update(struct.pack("<QQ", len(encoded), len(content)) + encoded)
    digest.update(content)


def _canonical_file(path: Path) -> bytes:
    try:
        values = json.loads(path.read_bytes())
        return canonical_text(_settled(values)).encode("ascii")
    except ValueError as error:
        raise ConfigError("model_tag", None, f"{path} is not JSON ({error}); {_SET_MODEL_TAG}") from None


def _settled(value: Any) -> Any:
    """`value` without the keys, at any depth, that tell where a configuration came from."""
    if isinstance(value, dict):
        return {name: _settled(below) for name, below in value.items() if name not in _VOLATILE_KEYS}
    return [_settled(below) for below in value] if isinstance(value, list) else value


def _cache_key(files: list[_File]) -> str:
    facts = [
        RULE_VERSION,
        WHOLE_BYTES_MAX,
        [[f.name, str(f.path), f.n_bytes, f.mtime_ns, f.ctime_ns, f.inode] for f in files],
    ]
    return blake3(canonical_text(facts).encode("ascii")).hexdigest()


def _cached(entry: Path) -> str | None:
    """An answer that this user kept; None when there is none, or when what is there is not exactly one."""
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        values = json.loads(entry.read_bytes())
        fingerprint = values["fingerprint"]
        is_whole = values["key"] == entry.stem and len(bytes.fromhex(fingerprint)) == 32
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return fingerprint if is_whole else None


def _remember(entry: Path, fingerprint: str) -> None:
    """Keeps an answer. That it cannot be kept costs time at the next start and nothing else."""
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_small(entry, canonical_text({"key": entry.stem, "fingerprint": fingerprint}).encode())
    except OSError as error:
        log.info("cannot keep the fingerprint in %s: %s", entry.parent, error)
