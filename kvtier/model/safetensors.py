"""Headers of safetensors files.

A file begins with the length of its header (u64, little endian) and the header: JSON, name -> dtype, shape,
data_offsets (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.model.config_json import KEY

HEADER_BYTES_MAX = 100_000_000  # longest header that is read, bytes
SIZE_MAX = 1 << 62  # offsets in a file, bytes
# Exceptions of the two functions below for a malformed header.
MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


def header_size(first_bytes: bytes) -> int:
    """Return the length of the header, bytes. first_bytes: the first 8 of the file."""
    (n_bytes,) = struct.unpack("<Q", first_bytes)
    if n_bytes > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {n_bytes} bytes")
    return int(n_bytes)


def tensor_ranges(header: bytes) -> list[tuple[str, range]]:
    """Return the name of each tensor and its bytes, counted from the end of the header."""
    return [
        (name, range(*map(int, tensor["data_offsets"])))
        for name, tensor in json.loads(header).items()
        if name != "__metadata__"
    ]


def read_tensor_ranges(path: Path) -> list[tuple[str, range]]:
    """Read the name and the bytes of each tensor in a safetensors file from its header. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            size = header_size(file.read(8))
            found = tensor_ranges(file.read(size))
        for name, part in found:
            if not 0 <= part.start <= part.stop < SIZE_MAX:
                raise ValueError(f"tensor {name} is stored at {part.start} to {part.stop}")
    except (*MALFORMED, OSError) as error:
        raise ConfigError(KEY, str(path), f"it is no safetensors file ({error}); get it again") from None
    return [(name, range(8 + size + part.start, 8 + size + part.stop)) for name, part in found]
