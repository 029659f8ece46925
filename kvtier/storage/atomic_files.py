"""Atomic creation and replacement of small files, which many processes may attempt at the same time."""

import errno
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from kvtier.storage.safe_open import hand_over, open_plain

SMALL_FILE_BYTES_MAX = 1 << 20  # bytes read of a file
WAIT_FOR_WRITER_S = 2.0  # wait for the content of an empty file, seconds; needed on file systems without hard links

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def create_once(path: Path, content: bytes) -> bytes:
    """Create `path` (0600) with `content` unless it exists. Return its content then. Raises OSError.

    Readers see the complete file: it is written and synced under a temporary name, then linked. On a file system
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
            with suppress(FileExistsError):
                _fill(_create(path), content)
        finally:
            draft.unlink(missing_ok=True)
    return read_small(path)


def replace_small(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically. Raises OSError."""
    draft = _write_draft(path, content)
    try:
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_small(path: Path, folder: int | None = None) -> bytes:
    """Return the content of `path` (a name in the open `folder`, if given), after a short wait if it is empty.

    Raises OSError, also when it is no plain file.
    """
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


def _create(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    hand_over(path)
    return descriptor


def _fill(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # after power loss the name must not refer to an empty file
