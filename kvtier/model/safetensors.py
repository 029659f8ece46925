"""Headers of safetensors files, read strictly.

A file begins with the length of its header (u64, little endian) and the header: JSON, name -> dtype, shape,
data_offsets (https://github.com/huggingface/safetensors#format). The tensors' bytes follow without holes.
"""

import json
import math
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvtier.errors import Corrupt
from kvtier.runtime.garbage import paused_collection

INDEX = "model.safetensors.index.json"  # says in which file of a checkpoint each tensor is
NAME_BYTES_MAX = 255
HEADER_BYTES_MAX = 100_000_000  # longest header that is read, bytes
SIZE_MAX = 1 << 63  # file sizes are smaller, bytes
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
# bits of an element, as safetensors 0.8 has them; elements of less than a byte are packed


class UnknownDtype(Corrupt):
    """A dtype that this kvtier does not know. The file may be whole."""


class TensorEntry(NamedTuple):
    """One tensor: name of its dtype in the header, shape in elements, and bytes from `start` to `stop` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start


class Header(NamedTuple):
    """Header of a file: the tensors by name, in the order of their bytes, and its texts."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def header_size(first_bytes: bytes, file_bytes: int) -> int:
    """Return the length of the header, bytes. first_bytes: the first 8 of a file of file_bytes. Raises Corrupt."""
    if len(first_bytes) < 8:
        raise Corrupt(f"a file of {len(first_bytes)} bytes")
    if first_bytes == b"version ":
        raise Corrupt("it is a pointer of Git LFS; run `git lfs pull`, which gets the file itself")
    (n_bytes,) = struct.unpack("<Q", first_bytes)
    if n_bytes > min(HEADER_BYTES_MAX, file_bytes - 8):
        raise Corrupt(f"a header of {n_bytes} bytes in a file of {file_bytes}; {HEADER_BYTES_MAX} may be read")
    return int(n_bytes)


def parse_header(header: bytes, file_bytes: int | None) -> Header:
    """Check a header without its length field. file_bytes: size of the file; None: not compared.

    Raises Corrupt with the tensor and the reason: the tensors' bytes must fill the file without overlaps and holes,
    each as many as dtype and shape say; names must be unique.
    """
    with paused_collection():
        return _parse(header, file_bytes)


def _parse(header: bytes, file_bytes: int | None) -> Header:
    try:
        text = header.decode()
        table = json.loads(text, parse_constant=_refuse_constant)
        if not _is_plain(text, table):
            table = json.loads(text, object_pairs_hook=_unique)
            "".join(table).encode()  # half of a surrogate pair is no name
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"the header is not valid JSON: {error}") from None
    except TypeError:
        raise Corrupt("the header is no JSON object") from None
    if not isinstance(table, dict) or not header.startswith(b"{"):
        raise Corrupt("the header is no JSON object")
    metadata = table.pop("__metadata__", None)
    if metadata is None:  # also null, as safetensors reads it
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Corrupt("__metadata__ is no object of strings")
    begin = 8 + len(header)
    entries = [(name, _entry(name, value, begin)) for name, value in table.items()]
    entries.sort(key=lambda item: item[1][2:])
    end = begin
    for name, entry in entries:
        if entry.start != end:
            raise Corrupt(f"tensor {name} begins at byte {entry.start} of the file, the one before ends at {end}")
        end = entry.stop
    if file_bytes is not None and end != file_bytes:
        raise Corrupt(f"the tensors end at byte {end}, the file has {file_bytes} bytes")
    return Header(dict(entries), metadata)


def read_header(path: Path, *, is_whole: bool = True) -> Header:
    """Read and check the header of a file; is_whole: also that the file holds all bytes. Raises Corrupt, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return parse_header(file.read(header_size(file.read(8), size)), size if is_whole else None)
        except UnknownDtype as error:
            raise Corrupt(f"{path} cannot be read: {error}") from None
        except Corrupt as error:
            raise Corrupt(f"{path} is not a whole safetensors file: {error}; get it again") from None


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a checkpoint, {} if it has none. Raises Corrupt for a malformed one."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found.get("metadata", {}), dict) or not isinstance(found["weight_map"], dict):
            raise ValueError("weight_map or metadata is no object")
        if any(len(str(name).encode("utf-8", "replace")) > NAME_BYTES_MAX for name in found["weight_map"].values()):
            raise ValueError("weight_map names a file that no system has")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"it is not an index of safetensors files ({error})") from None
    return dict(found)


def checkpoint_files(folder: Path, index: dict[str, Any]) -> list[Path]:
    """Return the safetensors files of a checkpoint: those of its index, if it has one, else all but `consolidated*`,
    which hold the same weights once more. index: see `read_index`."""
    if index:
        return sorted({folder / str(name) for name in index["weight_map"].values()})
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    return [path for path in found if not path.name.startswith("consolidated")] or found


def _is_plain(text: str, table: object) -> bool:
    """Return True if certainly no key is repeated. This count of quotes saves a hook on each object, which would take
    longer than all else.

    If no key is repeated, a header without escapes has the quotes of five strings a tensor and of its metadata.
    """
    if not isinstance(table, dict) or "\\" in text:
        return False
    metadata = table.get("__metadata__")
    strings = 5 * len(table)
    if metadata is not None:
        strings += 2 * len(metadata) - 4 if isinstance(metadata, dict) else 0
    return text.count('"') == 2 * strings


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, _), *_ = (Counter(name for name, _ in pairs) - Counter(table.keys())).items()
        raise ValueError(f"the key {name} stands twice")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _entry(name: str, value: object, begin: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]  # type: ignore[index]
    except (TypeError, KeyError, ValueError, IndexError):
        raise Corrupt(f"tensor {name}: no dtype, shape and data_offsets") from None
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        raise UnknownDtype(f"tensor {name} is of dtype {dtype}, which this kvtier does not know")
    bits = DTYPE_BITS[dtype]
    sizes = (*shape, start, stop) if type(shape) is list else ("",)
    if set(map(type, sizes)) != {int} or min(sizes) < 0 or max(sizes) >= SIZE_MAX:
        raise Corrupt(f"tensor {name}: shape or data_offsets are not sizes")
    n_bits = math.prod(shape) * bits
    if n_bits == 0 and math.prod(size or 1 for size in shape) >= SIZE_MAX:  # torch multiplies in 64 bits
        raise Corrupt(f"tensor {name}: no tensor has the shape {shape}")
    if stop >= SIZE_MAX - begin or n_bits % 8 or stop - start != n_bits // 8:
        raise Corrupt(f"tensor {name}: {stop - start} bytes for {dtype} {shape}")
    return TensorEntry(dtype, tuple(shape), begin + start, begin + stop)
