"""Text that every machine has: Python's library, the packages beside it, licences and docs. Nothing is downloaded.

Bytes are the tokens; above them lie a few marks and the symbols of the synthetic tasks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BOS, COPY, PAIRS, NEEDLE, ASK = range(256, 261)
FIRST_SYMBOL = 264
SYMBOLS = 1016
VOCABULARY = FIRST_SYMBOL + SYMBOLS

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", "")
FILE_BYTES_MAX = 1 << 20  # larger ones are tables
FILE_BYTES_MIN = 512
HELD_OUT_EVERY = 12
"""Of so many files one is kept for evaluation."""
READ_S = 30.0


@dataclass(frozen=True)
class Corpus:
    """Bytes of files one after the other, each (n,) uint8; no file is in both."""

    training: Tensor
    held_out: Tensor
    files: int

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.training.to(device), self.held_out.to(device), self.files)


def folders() -> list[Path]:
    paths = sysconfig.get_paths()
    found = [Path(paths["stdlib"]), Path(paths["purelib"]), Path("/usr/share/common-licenses"), Path("/usr/share/doc")]
    return [path for path in found if path.is_dir()]


def candidates() -> list[Path]:
    """Text files, in an order that mixes the packages and is the same at each run on one machine."""
    found: set[Path] = set()
    for folder in folders():
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if name != "__pycache__"]
            found.update(Path(place, name) for name in names if Path(name).suffix in SUFFIXES)
    return sorted(found, key=lambda path: hashlib.blake2b(str(path).encode(), digest_size=8).digest())


def text_of(path: Path) -> bytes | None:
    """The file's bytes, or None where it is no text of a useful size."""
    try:
        if not FILE_BYTES_MIN <= path.stat().st_size <= FILE_BYTES_MAX:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in content else content


def read(limit_bytes: int) -> Corpus:
    """At most `limit_bytes` of distinct files. Raises SystemExit where the machine has too little text."""
    deadline = time.monotonic() + READ_S
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    n_bytes = 0
    for path in candidates():
        if n_bytes >= limit_bytes or time.monotonic() > deadline:
            break
        content = text_of(path)
        digest = hashlib.blake2b(content or b"", digest_size=16).digest()
        if content is None or digest in seen:  # a licence lies in many packages
            continue
        seen.add(digest)
        parts[len(seen) % HELD_OUT_EVERY == 0].append(content)
        n_bytes += len(content)
    training, held_out = (torch.frombuffer(bytearray(b"\n".join(part) or b"\n"), dtype=torch.uint8) for part in parts)
    if held_out.numel() < 1 << 15:
        raise SystemExit(f"only {n_bytes:,} bytes of text in {', '.join(map(str, folders()))}")
    return Corpus(training, held_out, len(seen))
