"""Text that every machine has: Python's library, the packages beside it, licences and docs. Nothing is downloaded.

Bytes are the tokens; larger ids are a few marks and the symbols of the synthetic tasks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

BOS, COPY, PAIRS, ASK = range(256, 260)
FIRST_SYMBOL = 264
SYMBOLS = 1016
VOCABULARY = FIRST_SYMBOL + SYMBOLS

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", "")
FILE_BYTES = (512, 1 << 20)  # smaller files say little, larger ones are tables
HELD_OUT_EVERY = 12  # of so many files one is kept for evaluation
READ_S = 30.0


def folders() -> list[Path]:
    paths = sysconfig.get_paths()
    found = [Path(paths["stdlib"]), Path(paths["purelib"]), Path("/usr/share/common-licenses"), Path("/usr/share/doc")]
    return [path for path in found if path.is_dir()]


def candidates() -> list[Path]:
    """Return text files in an order that mixes the packages and is the same in each run on one machine."""
    found: set[Path] = set()
    for folder in folders():
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if name != "__pycache__"]
            found.update(Path(place, name) for name in names if Path(name).suffix in SUFFIXES)
    return sorted(found, key=lambda path: hashlib.blake2b(str(path).encode(), digest_size=8).digest())


def text_of(path: Path) -> bytes | None:
    """Return the file's bytes, or None if it is no text of a useful size."""
    try:
        if not FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in content else content


def read(limit_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of distinct files, for training and held out, each (n,) uint8; no file is in both.

    Raise SystemExit if the machine has too little text.
    """
    deadline = time.monotonic() + READ_S
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    n_bytes = 0
    for path in candidates():
        if n_bytes >= limit_bytes or time.monotonic() > deadline:
            break
        content = text_of(path)
        digest = hashlib.blake2b(content or b"", digest_size=16).digest()
        if content is None or digest in seen:  # many packages have the same licence
            continue
        seen.add(digest)
        parts[len(seen) % HELD_OUT_EVERY == 0].append(content)
        n_bytes += len(content)
    training, held_out = (torch.frombuffer(bytearray(b"\n".join(part) or b"\n"), dtype=torch.uint8) for part in parts)
    if held_out.numel() < 1 << 15:
        raise SystemExit(f"only {n_bytes:,} bytes of text in {', '.join(map(str, folders()))}")
    return training, held_out
