"""Small files that many processes may create at once and that never change: one content wins, whole, for all."""

from __future__ import annotations

import errno
import os
import time
import uuid
from pathlib import Path

from kvtier.storage.safe_open import hand_over, open_plain

SMALL_FILE_BYTES_MAX = 1 << 20
WAIT_FOR_WRITER_S = 2.0
"""Only where a file system has no hard links: how long an empty file may be one that is being written."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def create_once(path: Path, content: bytes) -> bytes:
    """Creates `path` (0600) with `content` unless it exists; returns what it holds then. Raises OSError.

    No reader sees a part of it: it is written and synced under another name, then linked to its own. On a file system
    without hard links it is created exclusively instead, and readers wait while it is empty.
    """
    assert content
    if not path.exists():
        draft = _write_draft(path, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _create_exclusively(path, content)
        finally:
            draft.unlink(missing_ok=True)
    return read_small(path)


def replace_small(path: Path, content: bytes) -> None:
    """Puts `content` in place of what `path` holds: a reader sees the one or the other, whole. Raises OSError."""
    draft = _write_draft(path, content)
    try:
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_small(path: Path, folder: int | None = None) -> bytes:
    """What `path` holds (a name in the open `folder`, if one is given), waiting a moment while that is nothing. Raises
    OSError, also when it is a link, a pipe or the like."""
    deadline = time.monotonic() + WAIT_FOR_WRITER_S
    while True:
        with open(open_plain(path, folder), "rb") as file:
            content = file.read(SMALL_FILE_BYTES_MAX)
        if content or time.monotonic() > deadline:
            return content
        time.sleep(0.01)


def _write_draft(path: Path, content: bytes) -> Path:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = _create(draft)
    try:
        _fill(descriptor, content)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _create_exclusively(path: Path, content: bytes) -> None:
    try:
        descriptor = _create(path)
    except FileExistsError:
        return
    _fill(descriptor, content)


def _create(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    hand_over(path)
    return descriptor


def _fill(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # after power loss the name must not stand over an empty file
