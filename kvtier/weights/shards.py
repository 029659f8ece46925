"""Shards: the parameters of each rank in safetensors files of their own, written so that a kill at any point is
repaired.

A folder is being written as long as it has `.kvtier-weights.partial`: the manifest of what it is to become. Each file
is written under a name with a dot, synced, and renamed; so a file under its own name is whole. Its checksums are
recorded next, and a run that goes on compares the file with them. The manifest comes last.
"""

import ctypes
import fcntl
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.errors import ConfigError, Corrupt, TierUnavailable
from kvtier.model.safetensors import read_header
from kvtier.model.shard_manifest import NAME, ShardManifest, manifest_text, read_shard_manifest
from kvtier.model.weights_fingerprint import INDEX_SUFFIX, is_weight_file, shards_fingerprint
from kvtier.runtime.units import size
from kvtier.storage.filesystem import FULL, FreeSpace
from kvtier.weights import manifest as checksums
from kvtier.weights.copies import TARGET, pack
from kvtier.weights.dtypes import TORCH_DTYPES
from kvtier.weights.plan import Conversion, Elements, Parameter, WeightPlan, byte_strides, convert, dtype_name
from kvtier.weights.reader import Sums, WeightReader
from kvtier.weights.strided import copies_between

PARTIAL = f".{NAME.removesuffix('.json')}.partial"
DRAFT = ".writing-"  # begin of the name of a file that is being written
PART_BYTES = 16 << 30  # most bytes of tensors in a file, unless one tensor has more
BATCH_BYTES = 1 << 30  # tensors that are read together before they are written, bytes
DATA_ALIGNMENT = 4096  # the first tensor begins at a multiple of this, bytes
ROOM_TO_SPARE = 64 << 20  # for headers, manifest and the model's other files, bytes
OTHER_WEIGHTS = (
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".onnx_data",
    ".tflite",
)  # endings of other frameworks' weight files, which are not copied
GPTQ_LAYERS = "modules_in_block_to_quantize"  # in quantization_config, and in vLLM's object of it
Content = bytes | memoryview
_OTHER_SETTINGS = (
    "make the shards again with this engine's dtype and quantization, or, for expert parallelism, load the "
    "checkpoint's own folder"
)
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class RankState:
    """Source of one rank's shards: its tensors by name, and the plan that fills some of them.

    plan's targets are `targets`; a tensor of `state` shares its memory with at most one of them. expected: checksums of
    the plan's files that a manifest lists.
    """

    rank: int
    state: dict[str, torch.Tensor]
    plan: WeightPlan
    targets: Sequence[torch.Tensor]
    expected: Mapping[Path, Sums]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make the folder and lock it, so that no other process writes the same files. Raises ConfigError, OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError("--out", str(folder), "it is a file, or in a file; name a folder") from None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "--out", str(folder), "another process writes shards there; wait until it has ended"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


class ShardFolder:
    """Folder of shards that is being written."""

    def __init__(self, folder: Path, manifest: ShardManifest, progress: Callable[[int, int], object]) -> None:
        """Begin, or go on where an earlier attempt at the same shards ended. Raises ConfigError.

        folder: locked by the caller with `locked_folder`.
        progress: is called after each tensor with (bytes written so far, bytes of all shards).
        """
        self._folder, self._manifest, self._progress = folder, manifest, progress
        self._done_bytes, self._total_bytes = 0, 0
        self._files: dict[str, int] = {}
        earlier = read_shard_manifest(folder, PARTIAL)
        if all(entry.name.startswith(".") for entry in folder.iterdir()):
            if earlier != manifest:  # a model that was refused, or nothing
                _write(folder / PARTIAL, [manifest_text(manifest)])
        elif earlier is None:
            is_finished = read_shard_manifest(folder) is not None
            what = "it has finished shards; use them, empty it, or" if is_finished else "the folder is not empty;"
            raise ConfigError("--out", str(folder), f"{what} name a new one")
        elif earlier != manifest:
            fix = "it has the beginning of other shards (another checkpoint, size or release)"
            raise ConfigError("--out", str(folder), f"{fix}; empty it, or name a new one")
        for draft in folder.glob(f"{DRAFT}*"):
            draft.unlink()
        self._sums: dict[Path, Sums] = {}
        with suppress(Corrupt):  # without them, files are written again
            self._sums = {path: sums for path, sums in (checksums.read(folder) or {}).items() if path.is_file()}

    def check_room(self, n_bytes: int) -> None:
        """Refuse to begin what will not fit. n_bytes: of all shards. Raises TierUnavailable."""
        self._total_bytes = n_bytes
        written = sum(path.stat().st_size for path in self._folder.glob("model-rank-*"))
        found = os.statvfs(self._folder)
        free = FreeSpace.of(found).n_bytes
        missing = n_bytes + ROOM_TO_SPARE - written - free
        if missing > 0 and found.f_blocks:  # some FUSE file systems have sizes of 0
            text = (
                f"shards of {size(n_bytes)}, with {size(ROOM_TO_SPARE)} for other files, do not fit into {self._folder}"
            )
            fix = f"{size(free)} are free there, {size(missing)} too little; free them or name another folder"
            raise TierUnavailable(f"{text}: {fix}", is_full=True)

    def write_rank(self, state: RankState, reader: WeightReader) -> None:
        """Write the shards of a rank, and free its tensors. Raises WeightsUnreadable, TierUnavailable, OSError."""
        for part, names in enumerate(_parts(state.state)):
            name = f"model-rank-{state.rank}-part-{part}.safetensors"
            path, header = self._folder / name, _header({key: state.state[key] for key in names})
            data_bytes = sum(state.state[key].nbytes for key in names)
            self._files[name] = len(header) + data_bytes
            if self._is_written(path, reader):
                self._report(data_bytes)
                continue
            path.unlink(missing_ok=True)  # there may be no room for both
            with _needing_room(path):
                _write(path, self._contents(header, _filled(state, names, reader)))
                self._sums |= reader.sums([path])
                _write(self._folder / checksums.MANIFEST, [checksums.content_of(self._sums)])

    def _is_written(self, path: Path, reader: WeightReader) -> bool:
        """Return whether an earlier attempt wrote the file, and its bytes are still those. Raises WeightsUnreadable."""
        recorded = self._sums.pop(path, None)
        if recorded is None or path.stat().st_size != self._files[path.name]:
            return False
        self._sums |= (found := reader.sums([path]))
        return np.array_equal(found[path], recorded)

    def _contents(self, header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Content]:
        yield header
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            # Not by numpy: a tensor that has been an array can't be freed while others refer to it.
            yield memoryview((ctypes.c_uint8 * dense.nbytes).from_address(dense.data_ptr()))
            self._report(tensor.nbytes)

    def _report(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        self._progress(self._done_bytes, self._total_bytes)

    def finish(self, source: Path, *, is_untied: bool = False, gptq_layers: Sequence[str] = ()) -> ShardManifest:
        """Copy the model's other files, and write the manifests.

        is_untied: the checkpoint has an output head of its own, whatever its config.json says. gptq_layers: names, in
        the checkpoint, of the layers that are quantized with GPTQ. Raises TierUnavailable without room, OSError.
        """
        with _needing_room(self._folder):
            return self._finish(source, is_untied, gptq_layers)

    def _finish(self, source: Path, is_untied: bool, gptq_layers: Sequence[str]) -> ShardManifest:
        for entry in sorted(source.iterdir()):
            if entry.is_file() and _is_beside_weights(entry.name):
                shutil.copyfile(entry, self._folder / entry.name)
        for name in module_folders(source):
            _copy_folder(source / name, self._folder / name)
        if is_untied or gptq_layers:
            _adapt_config(self._folder / "config.json", is_untied, gptq_layers)
        sums = {path: self._sums[path] for path in (self._folder / name for name in self._files)}
        _write(self._folder / checksums.MANIFEST, [checksums.content_of(sums)])
        own = shards_fingerprint(self._folder)
        done = self._manifest.model_copy(update={"files": self._files, "shards_fingerprint": own})
        _write(self._folder / NAME, [manifest_text(done)])
        (self._folder / PARTIAL).unlink()
        return done


@contextmanager
def _needing_room(path: Path) -> Iterator[None]:
    """Raise TierUnavailable, which says how to go on, where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        text = f"no room for {path}: {error.strerror}; free some and run the command again, which goes on here"
        raise TierUnavailable(text, is_full=True) from None


def shard_plan(folder: Path, manifest: ShardManifest, rank: int, state: dict[str, torch.Tensor]) -> WeightPlan:
    """Return the plan that loads a rank's shards into its state. Raises ConfigError where they do not fit, Corrupt."""
    files = tuple(folder / name for name in manifest.of_rank(rank))
    copies, conversions, left = [], [], dict(state)
    names = sorted(state)
    numbers = {name: number for number, name in enumerate(names)}
    for file, path in enumerate(files):
        if not path.is_file() or path.stat().st_size != manifest.files[path.name]:
            fix = "this shard is missing or has another size than when it was made; make the shards again"
            raise ConfigError("model", str(path), fix)
        for name, entry in read_header(path).tensors.items():
            tensor = left.pop(name, None)
            here = TORCH_DTYPES.get(entry.dtype)
            if tensor is None or here != tensor.dtype or entry.shape != tuple(tensor.shape):
                wanted = "no such tensor" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                fix = f"it has {name} as {entry.dtype} {list(entry.shape)}, this engine wants {wanted}"
                raise ConfigError("model", str(path), f"{fix}; {_OTHER_SETTINGS}")
            dense = torch.empty(entry.shape, dtype=tensor.dtype, device="meta")
            one, other = (file, entry.start, byte_strides(dense)), (numbers[name], 0, byte_strides(tensor))
            moved = copies_between(entry.shape, one, other, tensor.element_size())
            if moved is None:
                source = Elements.of(file, entry.start, dense)
                conversions.append(Conversion(source, Elements.of(numbers[name], 0, tensor)))
            copies += moved or []
    if left:
        fix = f"no shard of rank {rank} has {min(left)}, which this engine wants; {_OTHER_SETTINGS}"
        raise ConfigError("model", str(folder), fix)
    targets = tuple(Parameter.of(name, state[name]) for name in names)
    return WeightPlan(files, targets, pack(copies), tuple(conversions))


def _parts(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each file's tensors. Large ones come first: their sizes keep the next ones aligned."""
    parts: list[list[str]] = [[]]
    n_bytes = 0
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        n_bytes += state[name].nbytes
        if parts[-1] and n_bytes > PART_BYTES:
            parts.append([])
            n_bytes = state[name].nbytes
        parts[-1].append(name)
    return parts


def _header(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return length and header of a file, padded with spaces."""
    table, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _filled(state: RankState, names: list[str], reader: WeightReader) -> Iterable[torch.Tensor]:
    """Yield a part's tensors with their content, and free each once the next is asked for."""
    numbers = {target.untyped_storage()._cdata: number for number, target in enumerate(state.targets)}
    owners = [numbers.get(state.state[name].untyped_storage()._cdata) for name in names]
    sharers = Counter(tensor.untyped_storage()._cdata for tensor in state.state.values())
    waiting = 0
    for place, name in enumerate(names):
        if waiting == 0:
            n_bytes = 0
            while place + waiting < len(names) and (waiting == 0 or n_bytes < BATCH_BYTES):
                n_bytes += state.state[names[place + waiting]].nbytes
                waiting += 1
            _fill(state, {owner for owner in owners[place : place + waiting] if owner is not None}, reader)
        waiting -= 1
        yield state.state[name]
        storage = state.state[name].untyped_storage()
        if sharers[storage._cdata] == 1:
            storage.resize_(0)


def _fill(state: RankState, owners: set[int], reader: WeightReader) -> None:
    rows = state.plan.copies[np.isin(state.plan.copies[:, TARGET], list(owners))]
    if len(rows):
        reader.read(state.plan.files, rows, state.targets, state.expected)
    conversions = (each for each in state.plan.conversions if each.target.number in owners)
    convert(reader, state.plan.files, conversions, state.targets, state.expected)


def _is_beside_weights(name: str) -> bool:
    """Return whether a file of a model's folder belongs beside shards too: configuration, tokenizer, code."""
    is_weights = is_weight_file(name) or name.endswith(OTHER_WEIGHTS)
    return not (is_weights or name.endswith(INDEX_SUFFIX) or name.startswith((".", "kvtier-")))


def module_folders(folder: Path) -> list[str]:
    """Return the subfolders that modules.json of a sentence-transformers model names: pooling and layers after it."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        names = {Path(str(module["path"])) for module in modules}
    except (OSError, ValueError, TypeError, KeyError):
        return []
    inside = {name.name for name in names if str(name) == name.name != ".."}  # "/" has no name
    return sorted(name for name in inside if (folder / name).is_dir())


def _copy_folder(source: Path, target: Path) -> None:
    """Copy files without their modes: read-only copies could not be written again, and some file systems have none."""
    target.mkdir(exist_ok=True)
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            _copy_folder(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name)


def _adapt_config(path: Path, is_untied: bool, gptq_layers: Sequence[str]) -> None:
    """Write into a config.json that the model's head is not its embeddings, and which layers are quantized with GPTQ,
    unless it says so."""
    config = json.loads(path.read_text())
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        if is_untied and (part is config or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        found = part.get("quantization_config")
        if gptq_layers and isinstance(found, dict):
            found[GPTQ_LAYERS] = found.get(GPTQ_LAYERS) or list(gptq_layers)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write(path: Path, contents: Iterable[Content]) -> None:
    """Write a file under another name, sync it, and rename it. Raises OSError."""
    draft = path.with_name(f"{DRAFT}{path.name}")
    try:
        with draft.open("wb", buffering=0) as file:
            for content in contents:
                left = memoryview(content).cast("B")
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
