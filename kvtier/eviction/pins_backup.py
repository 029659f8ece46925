"""Backup of pins and run-time quotas in the root. If the index loses its content (a Redis that restarts empty, an
embedded index at each boot), its rebuild restores them.

    <root>/v2/notes/<first 32 hex digits of the name's BLAKE3>.json
    {"expires_s": number | null, "name": "pin/5f0c...", "value": "{...}"}      expires_s: by the index's clock
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvtier.errors import TierUnavailable
from kvtier.eviction import limits, pins
from kvtier.format.namespace import canonical_text
from kvtier.index.base import Index
from kvtier.storage.atomic_files import read_small, replace_small
from kvtier.storage.root import NOTES_FOLDER
from kvtier.storage.safe_open import folder_within, make_private

log = logging.getLogger("kvtier")

PREFIXES = (pins.PREFIX, limits.PREFIX)
FILES_MAX = 8192  # files that a restore reads: others can write to a share
NAME_BYTES_MAX = 200  # of a note's name, see Index.put_note
_SUFFIX = ".json"


class Restored(NamedTuple):
    pins: int = 0
    quotas: int = 0


class _Kept(NamedTuple):
    name: str
    value: bytes
    expires_s: float | None


def put(index: Index, folder: Path, name: str, value: bytes, expires_s: float | None) -> None:
    """Write a note into the root and the index: into both or none. folder: `<root>/v2`. Raises IndexUnavailable,
    TierUnavailable."""
    path = _path(folder, name)
    shared_s = None if expires_s is None else index.shared_s(expires_s)
    content = canonical_text({"name": name, "value": value.decode(), "expires_s": shared_s}).encode()
    try:
        before = read_small(path) if path.exists() else None
        make_private(str(path.parent))
        if path.parent.is_symlink():
            raise NotADirectoryError(f"{path.parent} is a link")
        replace_small(path, content)
    except OSError as error:
        raise TierUnavailable(f"{path} cannot be written: {error}; nothing was changed") from error
    try:
        index.put_note(name, value, expires_s)
    except BaseException:
        _undo(path, before)
        raise


def _undo(path: Path, before: bytes | None) -> None:
    try:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            replace_small(path, before)
    except OSError as error:
        log.warning("%s was changed, but the index was not, and the change cannot be undone: %s", path, error)


def drop(index: Index, folder: Path, name: str) -> bool:
    """Remove a note from the root and the index; False when the index had none. Raises as `put`."""
    path = _path(folder, name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise TierUnavailable(f"{path} cannot be removed: {error}; nothing was changed") from error
    return index.drop_note(name)


def restore(index: Index, folder: Path, now_s: float) -> Restored:
    """Put notes that the root has and the index lacks into the index, and remove the files of expired notes. Log files
    that cannot be read. Raises IndexUnavailable."""
    known = {name for prefix in PREFIXES for name in index.notes(prefix, now_s)}
    counts = dict.fromkeys(PREFIXES, 0)
    for path, kept in _read_all(folder):
        expires_s = None if kept.expires_s is None else index.local_s(kept.expires_s)
        if expires_s is not None and expires_s <= now_s:
            _remove(path)
        elif kept.name not in known:
            index.put_note(kept.name, kept.value, expires_s)
            counts[next(prefix for prefix in PREFIXES if kept.name.startswith(prefix))] += 1
    found = Restored(counts[pins.PREFIX], counts[limits.PREFIX])
    if any(found):
        log.info("the index had lost pins (%d) or quotas (%d): they are restored from the root", *found)
    return found


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s has expired and cannot be removed: %s", path, error)


def _read_all(folder: Path) -> Iterator[tuple[Path, _Kept]]:
    place = folder / NOTES_FOLDER
    try:
        with folder_within(place) as opened:
            names = sorted(name for name in os.listdir(opened) if name.endswith(_SUFFIX))
            for name in names[:FILES_MAX]:
                try:
                    kept = _parse(read_small(Path(name), opened))
                except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as fault:
                    log.warning("%s is no valid pin or quota and is ignored: %s", place / name, fault)
                    continue
                yield place / name, kept
    except FileNotFoundError:
        return
    except OSError as fault:
        log.warning("pins and quotas cannot be restored from %s: %s", place, fault)


def _parse(content: bytes) -> _Kept:
    """Raises ValueError, KeyError, TypeError, OverflowError, RecursionError."""
    values = json.loads(content)
    name, value, expires_s = values["name"], values["value"], values["expires_s"]
    if not isinstance(name, str) or not name.startswith(PREFIXES) or len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"its name is {name!r}")
    if not isinstance(value, str):
        raise ValueError(f"its value is {value!r}")
    if expires_s is not None and not math.isfinite(float(expires_s)):
        raise ValueError(f"it expires at {expires_s}")
    return _Kept(name, value.encode(), None if expires_s is None else float(expires_s))


def _path(folder: Path, name: str) -> Path:
    return folder / NOTES_FOLDER / (blake3(name.encode()).hexdigest()[:32] + _SUFFIX)
