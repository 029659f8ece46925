"""Manifest: checksums of a folder's weight files, one a block of 1 MiB, in a JSON file beside them."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvtier.errors import Corrupt, WeightsUnreadable
from kvtier.io.ranges import BLOCK_BYTES
from kvtier.storage.atomic_files import replace_small
from kvtier.weights.reader import Sums, WeightReader, n_blocks

MANIFEST = "kvtier-checksums.json"
VERSION = 1
MANIFEST_BYTES_MAX = 1 << 30  # of a file that is read


def write(folder: Path, files: Sequence[Path], reader: WeightReader) -> None:
    """Read the files whole and replace the folder's manifest by their checksums, after all were read.

    Who may read the first of the files may read the manifest.
    """
    replace_small(folder / MANIFEST, content_of(reader.sums(files)))
    with suppress(OSError):  # some FUSE file systems have no modes of files
        shutil.copymode(files[0], folder / MANIFEST)  # engines of other users load the files too


def content_of(sums: Mapping[Path, Sums]) -> bytes:
    """Return the content of a manifest of these files, whose checksums `WeightReader.sums` gave. Raises OSError."""
    table = {
        path.name: {"bytes": path.stat().st_size, "sums": found.astype("<u8").tobytes().hex()}
        for path, found in sums.items()
    }
    content = {"version": VERSION, "block_bytes": BLOCK_BYTES, "files": table, "digest": _digest(table)}
    return json.dumps(content, indent=1).encode() + b"\n"


def read(folder: Path) -> dict[Path, Sums] | None:
    """Return the checksums of each file of a folder, or None without a manifest.

    Raises Corrupt for a manifest that is damaged or of another version, WeightsUnreadable.
    """
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
    try:
        content = json.loads(text)
        if (content["version"], content["block_bytes"]) != (VERSION, BLOCK_BYTES):
            raise ValueError(f"version {content['version']!r}, blocks of {content['block_bytes']!r} bytes")
        if content["digest"] != _digest(content["files"]):
            raise ValueError("its digest differs")
        found = {}
        for name, entry in content["files"].items():
            found[folder / name] = np.frombuffer(bytes.fromhex(entry["sums"]), "<u8").astype(np.uint64)
            if len(found[folder / name]) != n_blocks(entry["bytes"]):
                raise ValueError(f"{name}: {len(found[folder / name])} checksums for {entry['bytes']} bytes")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(
            f"{path} is no manifest of this kvtier ({error}); remove it, or write it anew with "
            f"`kvtier weights verify {folder} --write`"
        ) from None


def of_files(files: Sequence[Path]) -> dict[Path, Sums]:
    """Return the checksums of the files that a manifest in their folder lists. Raises as `read`."""
    found: dict[Path, Sums] = {}
    for folder in dict.fromkeys(path.parent for path in files):
        found |= read(folder) or {}
    return {path: found[path] for path in files if path in found}


def _digest(table: Mapping[str, Mapping[str, object]]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
