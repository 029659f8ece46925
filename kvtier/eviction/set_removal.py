"""Crash-safe removal of a segment set, first from the index, then from the disk.

A note `evicting/<set id>` (the namespace, bytes u64 little-endian, the tenant's label) is written before the first step
and dropped after the last one; until then the set's bytes count as used. The next eviction or sweep completes the
removal of a process that was killed.

On storage of which a part may be down, files of the set may be missing at its removal, and come back. A note
`away/<set id>` then counts what was not freed, for AWAY_S at most; the next eviction or sweep unlinks what is back.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import StaleLease, TierUnavailable
from kvtier.eviction.room import LATE_S
from kvtier.index.base import Index, SetInfo
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.storage.filesystem import Visibility, file_system_of
from kvtier.storage.segments import SegmentFiles

PREFIX = "evicting/"
AWAY_PREFIX = "away/"  # notes of removed sets some of whose files were missing, as on a brick that is down
AWAY_S = 600.0  # time in which files that were missing are expected back, and their bytes count, seconds
_NOTE = struct.Struct("<16sQ")
_MALFORMED = ValueError, struct.error  # faults of a note that `Removal.read` cannot parse


class Removal(NamedTuple):
    """Removal of a set that was begun. n_bytes: size of its files by the index."""

    set_id: int
    namespace: bytes
    n_bytes: int
    tenant: str

    def pack(self) -> bytes:
        return _NOTE.pack(self.namespace, self.n_bytes) + self.tenant.encode()

    @classmethod
    def read(cls, name: str, value: bytes) -> Removal:
        """Parse a note. Raises _MALFORMED."""
        namespace, n_bytes = _NOTE.unpack_from(value)
        id_text = name.rpartition("/")[2]
        set_id = int(id_text, 16)
        if not 0 <= set_id < 1 << 64:
            raise ValueError(f"no set has the id {id_text}")
        return cls(set_id, namespace, n_bytes, value[_NOTE.size :].decode())


class Remover:
    """Thread-safe as far as its index is. `folder`: `<root>/v2`."""

    def __init__(self, index: Index, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._index = index
        self._folder = folder
        self._log = RepeatedLog()
        self._clock = clock
        self._watched_s: dict[bytes, float] = {}  # namespace -> time of the last removal here
        self._may_be_away = file_system_of(folder).visibility is not Visibility.LOCAL

    def held_bytes(self) -> int:
        """Return the bytes of removed files that a process has open, which network file systems keep under another name
        (`.nfsXXXX`).

        Only namespaces are examined from which this process has removed a set in the last LATE_S: a process that hangs
        must not keep others from saving for longer.
        """
        total, now_s = 0, self._clock()
        for namespace, removed_s in list(self._watched_s.items()):
            n_bytes = SegmentFiles(self._folder / namespace.hex(), direct=False).held_bytes()
            if n_bytes and 0.0 <= now_s - removed_s < LATE_S:
                total += n_bytes
                continue
            self._watched_s.pop(namespace, None)
            if n_bytes:
                text = (
                    "%d MiB of evicted sets still take space after %.0f s, because a process on some node holds their "
                    "files open (`.nfs*` in %s): they no longer count against capacity_bytes; a sweep removes those "
                    "that a crashed node left"
                )
                self._log.warning("held", text, n_bytes >> 20, LATE_S, namespace.hex())
        return total

    def remove(self, info: SetInfo, token: int | None = None) -> int:
        """Remove a set. Return the freed bytes. `token`: see Index.remove_set. Raises StaleLease, IndexUnavailable,
        TierUnavailable."""
        note = f"{PREFIX}{info.set_id:016x}"
        removal = Removal(info.set_id, info.namespace, info.n_bytes, info.tenant)
        # Measured before the note is written: from then on a sweep or the next evictor may unlink the files, and then
        # they are not missing for a while but gone.
        missing_bytes = self._missing_bytes(removal)
        self._index.put_note(note, removal.pack(), None)
        try:
            self._index.remove_set(info.set_id, token)
        except StaleLease:
            self._index.drop_note(note)
            raise
        self._expect_back(removal, missing_bytes)
        freed_bytes = self._unlink(info.set_id, info.namespace)
        self._index.drop_note(note)
        return freed_bytes

    def _missing_bytes(self, removal: Removal) -> int:
        """Return the bytes of the set's files that are missing now, as on a brick that is down. Files without a record
        do not count, because they may never have been created."""
        if not self._may_be_away:
            return 0
        sizes = SegmentFiles(self._folder / removal.namespace.hex(), direct=False).part_bytes(removal.set_id)
        missing_bytes = removal.n_bytes - sum(sizes.values())
        if missing_bytes <= 0 or sizes.keys() >= {place.part for _, place in self._index.members(removal.set_id)}:
            return 0
        return missing_bytes

    def _expect_back(self, removal: Removal, missing_bytes: int) -> None:
        """Write the note `away/`: the missing files come back and take their space again."""
        if missing_bytes > 0:
            note = removal._replace(n_bytes=missing_bytes).pack()
            self._index.put_note(f"{AWAY_PREFIX}{removal.set_id:016x}", note, self._clock() + AWAY_S)

    def finish(self, now_s: float) -> None:
        """Complete removals that other evictors began, and unlink files of removed sets that were missing and are back.
        The caller holds the lease of eviction or of the sweep."""
        for prefix, finish in ((PREFIX, self._finish_begun), (AWAY_PREFIX, self._finish_away)):
            for note, value in self._index.notes(prefix, now_s).items():
                try:
                    is_over = finish(Removal.read(note, value))
                except (*_MALFORMED, TierUnavailable) as fault:
                    self._log.warning(
                        "stays",
                        "the removal of a segment set is not complete; the next eviction goes on with it: %s",
                        fault,
                    )
                    continue
                if is_over:
                    self._index.drop_note(note)

    def _finish_begun(self, removal: Removal) -> bool:
        self._index.remove_set(removal.set_id)
        self._unlink(removal.set_id, removal.namespace)
        return True

    def _finish_away(self, removal: Removal) -> bool:
        # A sweep may have added the set to the index again: then the set is counted and evicted like others.
        if self._index.some_sets([removal.set_id]):
            return True
        freed_bytes = self._unlink(removal.set_id, removal.namespace)
        if 0 < freed_bytes < removal.n_bytes:
            self._expect_back(removal, removal.n_bytes - freed_bytes)
        return freed_bytes >= removal.n_bytes

    def pending_bytes(self, now_s: float) -> int:
        """Return the size of sets that left the index, but perhaps not the disk yet. Call it after summing the sets of
        the index, so that a set removed in between is in at least one of the two."""
        begun = self.pending((), now_s)
        known = {info.set_id for info in self._index.some_sets([removal.set_id for removal in begun])} if begun else ()
        return sum(removal.n_bytes for removal in begun if removal.set_id not in known)

    def pending(self, sets: Iterable[SetInfo], now_s: float) -> list[Removal]:
        """Return the removals that may be incomplete or whose files may come back, except those of `sets`, which the
        index listed before this call."""
        known, found = {info.set_id for info in sets}, list[Removal]()
        for note, value in (self._index.notes(PREFIX, now_s) | self._index.notes(AWAY_PREFIX, now_s)).items():
            with suppress(*_MALFORMED):
                removal = Removal.read(note, value)
                if removal.set_id not in known:
                    found.append(removal)
        return found

    def _unlink(self, set_id: int, namespace: bytes) -> int:
        freed_bytes = SegmentFiles(self._folder / namespace.hex(), direct=False).unlink_set(set_id)
        self._watched_s[namespace] = self._clock()
        self._index.remove_set(set_id)  # a rebuild may have added the set again before its files were gone
        return freed_bytes
