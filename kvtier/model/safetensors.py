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


def read_tensor_ranges(path: Path) -> list[tuple[str, range]]:
    """Read the name and the place of each tensor in a safetensors file from its header. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > HEADER_BYTES_MAX:
                raise ValueError(f"a header of {header_bytes} bytes")
            header = json.loads(file.read(header_bytes))
        found = []
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                if not 0 <= begin <= end < SIZE_MAX:
                    raise ValueError(f"tensor {name} is stored at {begin} to {end}")
                found.append((name, range(8 + header_bytes + begin, 8 + header_bytes + end)))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        OSError,
        struct.error,
    ) as error:
        raise ConfigError(KEY, str(path), f"it is no safetensors file ({error}); get it again") from None
    return found
