"""Taking a segment set away: out of the index first, then off the disk, in steps that anybody can be killed between.

Before the first step a note `evicting/<set id>` (the namespace, and bytes u64 little-endian) says what is going on, and
after the last one it goes. Until then the bytes count. What somebody left half done is finished by whoever evicts or
sweeps next.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

from kvtier.errors import StaleLease, TierUnavailable
from kvtier.index.base import Index, SetInfo
from kvtier.tiers.segments import SegmentFiles

log = logging.getLogger("kvtier")

PREFIX = "evicting/"
_NOTE = struct.Struct("<16sQ")


class Remover:
    """Thread-safe as far as its index is. `folder`: `<root>/v1`."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._index = index
        self._folder = folder

    def remove(self, info: SetInfo, token: int | None = None) -> int:
        """Bytes given back. `token`: see Index.remove_set. Raises StaleLease, IndexUnavailable, TierUnavailable."""
        note = f"{PREFIX}{info.set_id:016x}"
        self._index.put_note(note, _NOTE.pack(info.namespace, info.n_bytes), None)
        try:
            self._index.remove_set(info.set_id, token)
        except StaleLease:
            self._index.drop_note(note)
            raise
        freed_bytes = self._unlink(info.set_id, info.namespace)
        self._index.drop_note(note)
        return freed_bytes

    def finish(self, now_s: float) -> None:
        """Ends the removals that others began. Called under the lease of who evicts, or of who sweeps."""
        for note, value in self._index.notes(PREFIX, now_s).items():
            try:
                set_id, (namespace, _) = int(note.removeprefix(PREFIX), 16), _NOTE.unpack(value)
                self._index.remove_set(set_id)
                self._unlink(set_id, namespace)
            except (ValueError, struct.error, TierUnavailable) as fault:
                log.warning("a set whose removal was begun stays for now: %s", fault)
                continue
            self._index.drop_note(note)

    def pending_bytes(self, now_s: float) -> int:
        """Of sets that left the index, but maybe not the disk yet."""
        notes = self._index.notes(PREFIX, now_s)
        if not notes:
            return 0
        left = {f"{PREFIX}{info.set_id:016x}" for info in self._index.some_sets([_id_of(note) for note in notes])}
        return sum(
            _NOTE.unpack(value)[1] for note, value in notes.items() if note not in left and len(value) == _NOTE.size
        )

    def _unlink(self, set_id: int, namespace: bytes) -> int:
        freed_bytes = SegmentFiles(self._folder / namespace.hex(), direct=False).unlink_set(set_id)
        self._index.remove_set(set_id)  # who rebuilds the index may have read it back before its files were gone
        return freed_bytes


def _id_of(note: str) -> int:
    """0, which is no set's, for a note that is none of ours."""
    try:
        return int(note.removeprefix(PREFIX), 16)
    except ValueError:
        return 0
