"""Sweeper: garbage collection of a root. It closes and removes the sets of dead writers, collects leftover files, and
runs rebuilds of the index (kvtier.maintenance.rebuild). Making room is the Evictor's task.

It works on all namespaces of a root, in any engine or on the command line. It holds a lease in the index, so only one
process removes anything, and in an order that survives a kill at any step (see kvtier.eviction.set_removal). A later
sweep collects a file that is in no index.

A writer that counts as dead may only be slow. So its sets are taken over in the index before their files are read,
truncated or removed: from then on the index rejects the writer's records, and all earlier records are visible.
"""

import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.errors import Corrupt, KVTierError, TierUnavailable
from kvtier.eviction import pins_backup
from kvtier.eviction.pins_backup import Restored
from kvtier.eviction.set_removal import Remover
from kvtier.index.base import Index, Location, SetInfo, slots_used, writer_lease
from kvtier.maintenance.rebuild import LeaseLapsed, SetRecovery
from kvtier.maintenance.sweep_lease import Clock, SweepLease
from kvtier.storage.filesystem import FreeSpace, Visibility, file_system_of
from kvtier.storage.root import MODEL_FILE, NAMESPACE_FILE, namespace_folders, remove_leftovers
from kvtier.storage.segments import SUFFIX, NeverBegun, SegmentFiles, segment_name

log = logging.getLogger("kvtier")

SWEPT_NOTE, REBUILT_NOTE = "swept", "rebuilt"
_TIME = struct.Struct("<d")
MISSING_NOTE = "missing"
_MISSING_LOOK, _MISSING = struct.Struct("<d"), struct.Struct("<Qd")  # time of the last look; set, missing since
MISSING_SETS_MAX = 1024  # sets without files that are remembered between two looks
MISSING_GRACE_S = 600.0  # time for which all checks must find no file of a set before it is removed, seconds
MISSING_GAP_MAX_S = 300.0  # longest time between two checks that counts in full, seconds: a clock may be set ahead
CLOCK_TOLERANCE_S = 5.0  # difference of two clocks that is not corrected, seconds
LOOKED_INTO_MAX = 1024  # closed sets whose records are counted in one sweep
ORPHAN_GRACE_S = 600.0  # age from which on a segment in no index is collected, seconds; a younger one may be registered


def is_to_be_rebuilt(index: Index, folder: Path) -> bool:
    """Return True if the index lost its content and `folder` (`<root>/v2`) has segments, or cannot be read. Raises
    IndexUnavailable."""
    if not index.was_reset:
        return False
    try:
        return any(file.name.endswith(SUFFIX) for space in namespace_folders(folder) for file in os.scandir(space))
    except OSError:
        return True


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Result of `Sweeper.rebuild`. gone_records, bad_records: removed from the index, see rebuild.RemovedRecords.
    restored: pins and quotas that the index had lost."""

    segments: int
    records: int
    unreadable: tuple[str, ...]
    removed_sets: int
    gone_records: int
    bad_records: int
    restored: Restored = Restored()


class Sweeper:
    """Thread-safe as far as its index is. `folder`: `<root>/v2`, with one folder a namespace.

    look_at_root: called before a decision is based on the content of the folder or on a missing file. It raises
    TierUnavailable if the folder is not the root's any more, as when another root or an empty mount point is there.
    """

    def __init__(self, index: Index, folder: Path, owner: str, clock: Clock = time.time) -> None:
        self._index = index
        self._folder = folder
        self._remover = Remover(index, folder, lambda: self.clock())
        self._overbooked_bytes = 0  # since the last `take_overbooked`
        self._looked_to = -1
        self._looked_at: set[tuple[int, int]] = set()  # set and part of files that were away and have been read since
        self.clock = clock
        self.look_at_root: Callable[[], object] = lambda: None
        self._lease = SweepLease(index, owner, lambda: self.clock())
        self._may_be_away = file_system_of(folder).visibility is not Visibility.LOCAL
        self._recovery = SetRecovery(
            index, self._lease, lambda: self.clock(), self._disk_s, lambda: self.look_at_root(), self._may_be_away
        )

    def sweep(self) -> None:
        """Close the sets of dead writers, remove empty ones, record the sizes of files, and collect or read back
        segments in no index."""
        self.look_at_root()
        if not self._lease.take():
            return
        self._recovery.begin()
        try:
            self._mend_sum()
            self._remover.finish(self.clock())
            known = {info.set_id: info for info in self._index.sets()}
            on_disk: dict[int, dict[int, int] | None] = {}
            for files in self._namespaces():
                on_disk.update(files.sizes())
                self._settle_orphans(files, known)
            self.look_at_root()  # it may have gone while its folders were listed
            if self._may_be_away and (known.keys() - on_disk.keys() or self._index.notes(MISSING_NOTE, self.clock())):
                self._remove_lost()
            looked_into = self._next_closed(known)
            for info in known.values():
                self._lease.renew()
                sizes = on_disk.get(info.set_id, {})
                if sizes is None:
                    continue  # a later sweep settles it, when the status of all its files can be read
                if info.is_open or info.set_id in looked_into or sum(sizes.values()) != info.n_bytes:
                    self._settle(info, sizes)
            remove_leftovers(self._folder, self._disk_s() - ORPHAN_GRACE_S)
            self._note_time(SWEPT_NOTE)
        finally:
            self._lease.release()

    def _mend_sum(self) -> None:
        lacking = self._index.mend_sum()
        if lacking:
            text = "the index had lost the sizes of some segment sets, or their sum: it is corrected by %+.1f MiB"
            log.warning(text, lacking / 2**20)

    def _disk_s(self) -> float:
        """Return the time by the clock that dates the root's files. On a network file system that is the server's
        clock, which may differ from this node's by more than a grace time."""
        now_s, ahead_s = self.clock(), 0.0
        if self._may_be_away:
            with suppress(OSError):
                os.utime(self._folder)
                ahead_s = os.stat(self._folder).st_mtime - time.time()
        return now_s + (ahead_s if abs(ahead_s) > CLOCK_TOLERANCE_S else 0.0)

    def swept_s(self) -> float:
        """Return the time at which the last sweep of any process ended, seconds since the epoch; 0: not known."""
        return self._noted_s(SWEPT_NOTE)

    def rebuilt_s(self) -> float:
        """Return the time at which the last rebuild ended, as `swept_s` does."""
        return self._noted_s(REBUILT_NOTE)

    def _note_time(self, name: str) -> None:
        self._index.put_note(name, _TIME.pack(self._index.shared_s(self.clock())), None)

    def _noted_s(self, name: str) -> float:
        value = self._index.notes(name, self.clock()).get(name, b"")
        return self._index.local_s(_TIME.unpack(value)[0]) if len(value) == _TIME.size else 0.0

    def _next_closed(self, known: dict[int, SetInfo]) -> set[int]:
        """Return the closed sets whose records this sweep counts: those that follow the ones of the last sweep. Each
        costs a round trip to a remote index."""
        closed = sorted(info.set_id for info in known.values() if not info.is_open)
        after = [set_id for set_id in closed if set_id > self._looked_to] or closed
        chosen = after[:LOOKED_INTO_MAX]
        self._looked_to = chosen[-1] if len(after) > len(chosen) else -1
        return set(chosen)

    def close_set(self, set_id: int) -> None:
        """Close a set whose writer adds no more: record its size on disk, and allow its eviction."""
        self.look_at_root()
        for info in self._index.some_sets([set_id]):
            n_bytes = self._measured(info, self._index.members(set_id))
            self._index.close_set(set_id, n_bytes)
            self._overbooked_bytes += info.n_bytes - n_bytes

    def take_overbooked(self) -> int:
        """Return the bytes that sets closed by `close_set` since the last call had reserved in the index but did not
        take on disk, for example because their files found no room."""
        taken, self._overbooked_bytes = self._overbooked_bytes, 0
        return taken

    def close_early(self, set_id: int) -> None:
        """Close a set that is not full, and truncate its files. All its records are visible in the index."""
        self.look_at_root()
        for info in self._index.some_sets([set_id]):
            self._index.take_over(set_id)  # first: else a record could be published after the truncation removed it
            members = self._index.members(set_id)
            self._overbooked_bytes += info.n_bytes - self._measured(info, members)
            if members:  # If there are none, the index may just have lost them. Its rebuild then reads these files.
                self._trim(info, [location for _, location in members])
            self._index.close_set(set_id, self._measured(info, members))

    def erase_namespace(self, namespace: bytes) -> None:
        """Remove a namespace that no request can name again, with its folder. Raises OSError when a late writer creates
        a segment there at the same time. Try again then: a folder without its description is not counted or removed."""
        for info in self._index.sets():
            if info.namespace == namespace:
                self._remover.remove(info)
        folder = self._folder / namespace.hex()
        if folder not in namespace_folders(self._folder):  # gone, or a link to a folder of others
            return
        for name in (NAMESPACE_FILE, MODEL_FILE):
            (folder / name).unlink(missing_ok=True)
        files = SegmentFiles(folder, direct=False)
        for set_id, part in files.ids():
            files.unlink(set_id, part)
        if folder.is_dir() and not any(path.suffix != SUFFIX for path in folder.iterdir()):
            folder.rmdir()

    def free_space(self) -> FreeSpace:
        """Return what the root's disk has left for this user. Raises TierUnavailable, OSError."""
        self.look_at_root()
        disk = os.statvfs(self._folder)
        if not disk.f_blocks:  # MooseFS answers zeros while its servers are away: no reason to evict anything
            raise TierUnavailable(f"{self._folder}: its storage says that it has no space at all; are its servers up?")
        return FreeSpace.of(disk)

    def rebuild(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Rebuilt | None:
        """Make the index agree with the files (maintenance.rebuild); entries without a file are removed. Return None,
        and do nothing, while another process sweeps or rebuilds, for a sweep cuts segments behind the records that the
        index knows. Return None as well when one may have done so in between: some segments are still to be read then.

        progress: called with (segments read, segments in all)."""
        self.look_at_root()
        if not self._lease.take():
            return None
        self._recovery.begin()
        try:
            return self._rebuild(progress)
        finally:
            self._lease.release()

    def _rebuild(self, progress: Callable[[int, int], None]) -> Rebuilt | None:
        self._mend_sum()
        # Before there are sets that another process could evict.
        restored = pins_backup.restore(self._index, self._folder, self.clock())
        # The newest sets come first: if a bad chunk was saved again, the newer record most often is the good one, and
        # then the bad record is not added.
        sets = [(files, *found) for files in self._namespaces() for found in reversed(files.sets())]
        total, now_s = sum(len(parts) for _, _, parts in sets), self._disk_s()
        unreadable: list[str] = []
        seen, records, has_lapsed = 0, 0, False
        for files, set_id, parts in sets:
            faults: dict[int, KVTierError] = {}
            tell = partial(lambda before, n_read: progress(before + n_read, total), seen)
            # A writer truncates its file after a rejected record, but it has done so before ORPHAN_GRACE_S is over.
            settled = [part for part in parts if files.age_s(set_id, part, now_s) >= ORPHAN_GRACE_S]
            records += self._recovery.read_set(files, set_id, parts, faults, tell, settled)
            seen += len(parts)
            for part, fault in faults.items():
                has_lapsed = has_lapsed or isinstance(fault, LeaseLapsed)
                if not isinstance(fault, NeverBegun):  # it is swept with its set
                    unreadable.append(f"{files.folder.name}/{segment_name(set_id, part)}: {fault}")
        if has_lapsed:
            return None
        progress(total, total)
        taken_out = self._recovery.taken_out
        removed_sets = self._remove_lost()
        self._note_time(REBUILT_NOTE)
        return Rebuilt(total, records, tuple(unreadable), removed_sets, taken_out.gone, taken_out.bad, restored)

    def _remove_lost(self) -> int:
        """Remove sets without files from the index. Return their number. If files may be missing for a while, remove a
        set only after all checks in MISSING_GRACE_S found none of its files."""
        unwritten = {info.set_id for info in self._index.sets() if not self._is_written(info)}
        missing = unwritten - self._on_disk()  # listed after the sets: a set is registered before it has files
        if self._may_be_away:
            missing = self._missing_for_long(missing)
        self.look_at_root()
        for set_id in missing:
            self._index.take_over(set_id)
        lost = missing - self._on_disk() if missing else missing
        self.look_at_root()  # after each listing: if the root itself is missing, its sets are not lost
        for set_id in lost:
            self._index.remove_set(set_id)
        return len(lost)

    def _missing_for_long(self, missing: set[int]) -> set[int]:
        """Note in the index since when each set has been missing. Return those missing for MISSING_GRACE_S."""
        note = self._index.notes(MISSING_NOTE, self.clock()).get(MISSING_NOTE, b"")
        now_s = self._index.shared_s(self.clock())  # another node may make the next check
        known: dict[int, float] = {}
        gap_s = 0.0
        if len(note) % _MISSING.size == _MISSING_LOOK.size:
            known = dict(_MISSING.iter_unpack(note[_MISSING_LOOK.size :]))
            gap_s = now_s - _MISSING_LOOK.unpack_from(note)[0]
        not_counted_s = max(0.0, gap_s - MISSING_GAP_MAX_S)
        since = {set_id: min(known.get(set_id, now_s) + not_counted_s, now_s) for set_id in missing}
        oldest = sorted(since.items(), key=lambda found: found[1])[:MISSING_SETS_MAX]
        if oldest:
            listed = b"".join(_MISSING.pack(*found) for found in oldest)
            self._index.put_note(MISSING_NOTE, _MISSING_LOOK.pack(now_s) + listed, None)
        elif note:
            self._index.drop_note(MISSING_NOTE)
        return {set_id for set_id, since_s in oldest if now_s - since_s >= MISSING_GRACE_S}

    def _on_disk(self) -> set[int]:
        return {set_id for files in self._namespaces() for set_id, _ in files.ids()}

    def _is_written(self, info: SetInfo) -> bool:
        """Return True if a living engine may still add records to the set."""
        return info.is_open and self._index.lease_owner(writer_lease(info.owner), self.clock()) is not None

    def _settle(self, info: SetInfo, sizes: dict[int, int]) -> None:
        """Close, remove or measure one set. sizes: bytes of its files by part, as the sweep listed them."""
        if self._is_written(info):
            return
        lapses = self._lease.lapses
        members = self._members_if_closed(info)
        if not members and self._index.without_list([info.set_id]):
            files = SegmentFiles(self._folder / info.namespace.hex(), direct=False)
            taken = self._recovery.read_set(files, info.set_id, sorted(sizes), {})
            log.info("segment set %016x had lost its list in the index: %d records were read back", info.set_id, taken)
            members = self._members_if_closed(info)
        if not members and not info.is_open and self._may_come(info):
            return
        if not members:
            was_lost = self._index.was_reset
            self._index.take_over(info.set_id)
            members = self._index.members(info.set_id)
            if not members and (was_lost or self._index.was_reset):
                return  # the index lost its content since this sweep began; the rebuild reads these files
        if not members:
            self._remover.remove(info)
            return
        if self._is_away(sizes, members):
            return  # a later sweep measures and closes it when its files are back
        if self._may_be_away and not info.is_open:
            self._read_returned(info, sizes, {place.part for _, place in members})
        n_bytes = sum(sizes.values())
        if info.is_open:
            if not self._lease.is_held_since(lapses):
                return  # the next sweep closes it
            log.info("closing segment set %016x of a writer that is gone", info.set_id)
            self._trim(info, [location for _, location in members])
            n_bytes = self._measured(info, members)
        if info.is_open or n_bytes != info.n_bytes:
            self._index.close_set(info.set_id, n_bytes)

    def _members_if_closed(self, info: SetInfo) -> list[tuple[bytes, Location]]:
        return [] if info.is_open else self._index.members(info.set_id)

    def _read_returned(self, info: SetInfo, sizes: dict[int, int], known: set[int]) -> None:
        """Read back a closed set that has a file without a record in the index, because the file was missing when the
        index was rebuilt. Each file is read once in this process, because it may have no records.

        known: parts with records in the index.
        """
        files, now_s = SegmentFiles(self._folder / info.namespace.hex(), direct=False), self._disk_s()
        new = {part for part in sizes.keys() - known if (info.set_id, part) not in self._looked_at}
        # A writer truncates its file after a rejected record, but it has done so before ORPHAN_GRACE_S is over.
        returned = {part for part in new if files.age_s(info.set_id, part, now_s) >= ORPHAN_GRACE_S}
        if not returned:
            return
        faults: dict[int, KVTierError] = {}
        taken = self._recovery.read_set(files, info.set_id, sorted(sizes), faults, settled=returned)
        if taken:
            log.info(
                "segment set %016x: %d records of a file that had been away were added to the index", info.set_id, taken
            )
        self._looked_at.update((info.set_id, part) for part in returned - faults.keys())

    def _measured(self, info: SetInfo, members: list[tuple[bytes, Location]]) -> int:
        """Return the bytes that the set's files take. While a file with records is missing, return the size in the
        index."""
        sizes = SegmentFiles(self._folder / info.namespace.hex(), direct=False).part_bytes(info.set_id)
        return info.n_bytes if self._is_away(sizes, members) else sum(sizes.values())

    def _is_away(self, sizes: dict[int, int], members: list[tuple[bytes, Location]]) -> bool:
        """Return True if a file with records of the set is missing, and may come back."""
        return self._may_be_away and not sizes.keys() >= {place.part for _, place in members}

    def _may_come(self, info: SetInfo) -> bool:
        """Return True if records of a closed set may still become visible: a living writer queues records that it wrote
        while the index did not answer (kvtier.index.guard)."""
        if self._index.lease_owner(writer_lease(info.owner), self.clock()) is None:
            return False
        files = SegmentFiles(self._folder / info.namespace.hex(), direct=False)
        ages_s = [files.age_s(*name, self._disk_s()) for name in files.ids() if name[0] == info.set_id]
        return any(age_s < ORPHAN_GRACE_S for age_s in ages_s)

    def _trim(self, info: SetInfo, locations: list[Location]) -> None:
        files = SegmentFiles(self._folder / info.namespace.hex(), direct=False)
        used = slots_used(locations)
        for part in files.part_bytes(info.set_id):
            try:
                files.trim(info.set_id, part, used.get(part, 0))
            except (Corrupt, TierUnavailable) as fault:
                log.warning("segment set %016x: a file is not trimmed: %s", info.set_id, fault)
        files.close()

    def _settle_orphans(self, files: SegmentFiles, known: dict[int, SetInfo]) -> None:
        """Read back segments that are in no index, because their evictor died or they were unreadable at the rebuild;
        they are evicted later like others. Remove files that are no segments."""
        now_s = self._disk_s()
        for set_id, parts in reversed(files.sets()):
            if set_id in known or min(files.age_s(set_id, part, now_s) for part in parts) < ORPHAN_GRACE_S:
                continue
            faults: dict[int, KVTierError] = {}
            taken = self._recovery.read_set(files, set_id, parts, faults)
            if taken:
                log.info("segment set %016x was in no index: %d records were added", set_id, taken)
            for part, fault in faults.items():
                if not isinstance(fault, Corrupt):
                    log.warning("a segment that is not in the index cannot be read, and is kept: %s", fault)
                    continue
                log.info("removing a file that is no segment: %s", fault)
                try:
                    files.unlink(set_id, part)
                except TierUnavailable as refusal:  # a folder with a segment's name must not end the sweep
                    log.warning("cannot remove a file that is no segment: %s", refusal)

    def _namespaces(self) -> list[SegmentFiles]:
        return [SegmentFiles(folder, direct=False) for folder in namespace_folders(self._folder)]
