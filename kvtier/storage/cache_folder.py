"""Cache files that processes of one user share, such as plans and compiled kernels. Any of them can be made again.

magic (8 bytes)   size of the body (u64, little endian)   body   blake3 of the body (32 bytes)
"""

import logging
import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from kvtier.errors import Corrupt
from kvtier.storage.atomic_files import replace_small
from kvtier.storage.root_owner import LOCAL_STATE

log = logging.getLogger("kvtier")

FOLDER = LOCAL_STATE / f"kvtier-{os.getuid()}"
FILE_BYTES_MAX = 1 << 30  # longest file that is read, bytes
LEFT_OVER_S = 3600.0  # age from which on a draft is one of a killed writer, seconds
FOLDER_BYTES_MAX = 1 << 30  # limit of one user's files of a kind in a folder; the least recently used are removed


class CacheFolder:
    """Folder of cache files, one for each key; a key is a hash in hexadecimal digits. A failure is a cache miss."""

    def __init__(self, folder: Path, kind: str, magic: bytes) -> None:
        """Set the folder; it is created with the first file.

        kind: of the content, for log lines and file names. magic: 8 bytes with a version, which changes when files of
        an earlier kvtier must not be used any more.
        """
        self._folder, self._kind, self._magic = folder, kind, magic
        # Names of these files, and of drafts that killed writers left. The folder may be the user's own, so no other
        # file is removed.
        self._removable = re.compile(rf"[0-9a-f]{{64}}\.{kind}|\.[0-9a-f]{{64}}\.{kind}\.[0-9a-f]{{32}}")

    def get(self, key: str) -> bytes | None:
        """Return the body of a file that this user stored; None if there is no file, or a damaged one: remove that."""
        path = self.path(key)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_size > FILE_BYTES_MAX:
                    raise Corrupt("it is of another user, or too long")
                with suppress(OSError):  # on a read-only file system
                    os.utime(file.fileno())  # the time of use, by which files are removed
                return self._body(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the stored %s %s cannot be read: %s", self._kind, self.path(key), error)
        except Corrupt as error:
            self.remove(key, error)
        return None

    def remove(self, key: str, reason: Exception) -> None:
        """Remove the file of a key that is of no use, and log the reason."""
        log.warning("the stored %s %s is not used, and made anew: %s", self._kind, self.path(key), reason)
        with suppress(OSError):
            self.path(key).unlink()

    def _body(self, content: bytes) -> bytes:
        (size,) = struct.unpack_from("<Q", content, len(self._magic)) if len(content) >= 48 else (0,)
        body = content[16:-32]
        if not content.startswith(self._magic) or size != len(body) or blake3(body).digest() != content[-32:]:
            raise Corrupt(f"it is not a whole {self._kind} file")
        return body

    def put(self, key: str, body: bytes) -> None:
        content = self._magic + struct.pack("<Q", len(body)) + body + blake3(body).digest()
        try:
            for folder in (self._folder.parent, self._folder):  # parents made by mkdir get the mode of the umask
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_small(self.path(key), content)
            self._remove_unused(self.path(key))
        except OSError as error:
            log.info("cannot keep the %s in %s: %s", self._kind, self._folder, error)

    def _remove_unused(self, new: Path) -> None:
        """Remove this user's files that were used longest ago, beyond FOLDER_BYTES_MAX, but not the new one. Other
        processes may do the same at the same time. Raises OSError."""
        found, left_over_s = [], time.time() - LEFT_OVER_S
        for entry in os.scandir(self._folder):
            if self._removable.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    is_written = entry.name.startswith(".") and status.st_mtime > left_over_s
                    if status.st_uid == os.getuid() and not is_written:
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        excess = sum(n_bytes for _, n_bytes, _ in found) - FOLDER_BYTES_MAX
        for _, n_bytes, path in sorted(found):
            if excess <= 0:
                break
            if path == os.fspath(new):  # it may seem the oldest, if the clock was set back
                continue
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= n_bytes

    def path(self, key: str) -> Path:
        return self._folder / f"{key}.{self._kind}"
