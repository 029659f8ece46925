"""Index recovery: publishes records from the header pages of segments in an index that does not list them.

If a chunk is stored twice, one record may have been found bad earlier, which its header does not show. So the record
that the index already has is read and verified before the other one is skipped.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, Corrupt, IndexUnavailable, KVTierError, TierUnavailable
from kvtier.format.record import RecordHeader, SegmentHeader, is_blank
from kvtier.index import entry
from kvtier.index.base import UNOWNED, Index, Location, NewRecord, SetInfo, slots_used
from kvtier.maintenance.record_check import RecordVerdict, judge
from kvtier.maintenance.sweep_lease import Clock, SweepLease
from kvtier.storage.root import read_namespace
from kvtier.storage.segments import SegmentFiles, segment_name

log = logging.getLogger("kvtier")

ADOPTED_MAX = 512  # records that become visible in one step with their set when it is read back
# Age from which on a file's header pages are final, seconds: a younger file may show another node pages from before a
# write.
SETTLED_S = 60.0
KEYS_AT_ONCE = 512  # keys looked up in one call, for which lookups of engines wait

Progress = Callable[[int], None]


class LeaseLapsed(TierUnavailable):
    """The lease lapsed: another process may have held it, and swept the segments that were read."""


@dataclass(slots=True)
class RemovedRecords:
    """Counts of removed index entries. gone: the record is not in its file any more, or another one is; bad: its bytes
    do not match the checksum, and it blocked another record of the chunk."""

    gone: int = 0
    bad: int = 0


class SetRecovery:
    """Recovery of sets by one process, which holds `lease`. taken_out: counts since `begin`. look_at_root: see Sweeper.
    disk_s: time by the clock that dates the files. may_be_away: files can be missing for a while, as on a brick that is
    down, or show old bytes."""

    def __init__(
        self,
        index: Index,
        lease: SweepLease,
        clock: Clock,
        disk_s: Clock,
        look_at_root: Callable[[], object],
        may_be_away: bool,
    ) -> None:
        self._index = index
        self._lease = lease
        self._clock = clock
        self._disk_s = disk_s
        self._look_at_root = look_at_root
        self._may_be_away = may_be_away
        self._good: set[tuple[bytes, Location]] = set()
        self.taken_out = RemovedRecords()

    def begin(self) -> None:
        """Begin a sweep or rebuild: records verified earlier may be bad by now."""
        self._good.clear()
        self.taken_out = RemovedRecords()

    def read_set(
        self,
        files: SegmentFiles,
        set_id: int,
        parts: Sequence[int],
        faults: dict[int, KVTierError],
        progress: Progress = lambda n_read: None,
        settled: Collection[int] = (),
    ) -> int:
        """Publish the records in the header pages of a set's segments. Return how many of them the index did not list.

        A set that the index does not list is added with all its segments. If one of them cannot be read for now, the
        set is left to a later sweep, because no sweep reads further segments of a listed set.

        faults: receives, by part, the reason why a segment could not be read. progress: called with the number of
        segments read, repeatedly while that takes long. settled: parts whose file was last written so long ago that no
        writer truncates it any more; if the set was taken over, all records of these parts are added, also those that
        the index had rejected.
        """
        try:
            while True:
                left = [part for part in parts if part not in faults]
                try:
                    return self._read_set(files, set_id, left, faults, progress, settled)
                except LeaseLapsed as fault:
                    if faults.keys().isdisjoint(left):
                        faults.update(dict.fromkeys(left, fault))
                        return 0
                    # A part may have failed late, and would do so each time, so read the others without it.
        finally:
            files.close()

    def _read_set(
        self,
        files: SegmentFiles,
        set_id: int,
        parts: Sequence[int],
        faults: dict[int, KVTierError],
        progress: Progress,
        settled: Collection[int],
    ) -> int:
        self._lease.renew()  # a lapse before this set says nothing about what is read of it
        lapses = self._lease.lapses
        # Asked before the pages are read: a living writer may publish records that were not on the pages read.
        members = self._index.members(set_id)
        has_list = bool(members) or not self._index.without_list([set_id])
        found: dict[int, list[NewRecord]] = {}
        header = None
        for n_read, part in enumerate(parts):
            progress(n_read)
            self._lease.renew()
            try:
                segment = self._read_segment(files, set_id, part)
            except (ConfigError, Corrupt, TierUnavailable) as fault:
                faults[part] = fault
                continue
            if segment is not None:
                header, found[part] = segment
        if header is None:
            return 0
        records = {(record.key, record.location): record for part in found for record in found[part]}
        gone = self._gone(files, {member for member in members if member[1].part in found and member not in records})
        self.taken_out.gone += sum(self._index.retract(key, place) for key, place in gone)
        known = set(members) - gone
        missing = [record for member, record in records.items() if member not in known]
        self._remove_blocking(files, missing, lambda: progress(len(parts)))
        self._check_held(lapses)  # else another process may have truncated the files
        is_whole = all(isinstance(fault, Corrupt) for fault in faults.values())
        taken = self._take_in(self._set_info(files, header, found), list(records.values())) if is_whole else None
        was_known = taken is None
        if taken is None:
            taken = self._add_missing(set_id, missing, known, lapses, settled if has_list else parts)
        is_missing = not all(files.exists(set_id, part) for part in found)
        if is_missing and not (self._may_be_away and was_known):  # a set that the index kept may only be away
            self._look_at_root()
            self._index.remove_set(set_id)  # the set was evicted while it was read
            return 0
        return taken

    def _gone(self, files: SegmentFiles, missed: set[tuple[bytes, Location]]) -> set[tuple[bytes, Location]]:
        """Return the records of the index that are not in their files. missed: those that the header pages did not
        show. If pages may be stale, a record counts as gone only if a descriptor that is opened now, long after the
        last write, does not show it either."""
        if not missed or not self._may_be_away:
            return missed
        now_s = self._disk_s()
        return {
            (key, at)
            for key, at in missed
            if files.age_s(at.set_id, at.part, now_s) >= SETTLED_S and judge(files, key, at) is RecordVerdict.OTHER
        }

    def _check_held(self, lapses: int) -> None:
        if not self._lease.is_held_since(lapses):
            raise LeaseLapsed("another process may have swept the root while the set was read")

    def _remove_blocking(self, files: SegmentFiles, missing: Sequence[NewRecord], progress: Callable[[], None]) -> None:
        """Remove bad records from the index that share layers and heads with `missing` ones, and so keep them out.

        This must precede publishing, because a late writer may truncate records that it does not see in the index.
        """
        read: dict[bytes, list[Location]] = {}
        for record in missing:
            read.setdefault(record.key, []).append(record.location)
        keys = sorted(read)
        for first in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[first : first + KEYS_AT_ONCE]
            for key, value in zip(some, self._index.find(some), strict=True):
                for location in entry.locations_of(value):
                    if location in read[key]:  # of a set whose list the index lost
                        continue
                    others = [other for other in read[key] if other.extent.intersect(location.extent) is not None]
                    if others and (key, location) not in self._good:
                        progress()
                        self._lease.renew()
                        self._remove_if_bad(files, key, location, others)

    def _remove_if_bad(self, files: SegmentFiles, key: bytes, location: Location, others: Sequence[Location]) -> None:
        verdict = judge(files, key, location)
        if verdict in (RecordVerdict.AS_SUMMED, RecordVerdict.UNKNOWN):
            self._good.add((key, location))
            return
        # A record whose file is missing is removed too. But if files may be missing for a while, it is kept; and if
        # reads may be stale, it is removed only if a good record with all of its layers and heads was read.
        if self._may_be_away and (verdict is RecordVerdict.GONE or not self._is_replaced(files, key, location, others)):
            return
        name = segment_name(location.set_id, location.part)
        log.info("slot %d of %s is bad, and another record of its chunk is read back", location.slot, name)
        self.taken_out.bad += self._index.retract(key, location)

    def _is_replaced(self, files: SegmentFiles, key: bytes, location: Location, others: Sequence[Location]) -> bool:
        whole = [other for other in others if other.extent.contains(location.extent)]
        return any(judge(files, key, other) is RecordVerdict.AS_SUMMED for other in whole)

    def _take_in(self, info: SetInfo, records: list[NewRecord]) -> int | None:
        """Add a set with all records that were read, also those that the index listed before and may have lost since.
        Return their number; None if the index lists the set. The last records of each part come first, so that no file
        is truncated before them."""
        records.sort(key=lambda record: -record.location.slot)
        if not self._index.create_set(info, records[:ADOPTED_MAX]):
            return None
        try:
            self._index.publish(records[ADOPTED_MAX:], from_files=True, into_unowned=True)
            return len(self._index.members(info.set_id))
        except IndexUnavailable:
            self._index.remove_set(info.set_id)  # a later sweep adds it with all its records
            raise

    def _add_missing(
        self,
        set_id: int,
        missing: list[NewRecord],
        known: Collection[tuple[bytes, Location]],
        lapses: int,
        settled: Collection[int],
    ) -> int:
        """Add records to a set that the index lists with the records `known`. Return how many were added.

        If the set was taken over, records behind the known ones are added only from files of `settled`, or if the index
        had accepted them before it lost their entries. The index rejected all others, and their writer truncates them
        without the lease (own_segments). If the set has a writer, and is taken over before the publish, the index
        rejects the records: then the files were truncated behind the known ones.
        """
        is_unowned = bool(missing) and any(info.owner == UNOWNED for info in self._index.some_sets([set_id]))
        if is_unowned:
            listed = self._index.listed(set_id)
            used = slots_used(location for _, location in known)
            missing = [
                record
                for record in missing
                if record.location.part in settled
                or record.location.slot < used.get(record.location.part, 0)
                or (record.location.rank, record.location.slot) in listed
            ]
        if not missing:
            return 0
        self._check_held(lapses)
        return self._index.publish(missing, from_files=True, into_unowned=is_unowned)

    def _read_segment(
        self, files: SegmentFiles, set_id: int, part: int
    ) -> tuple[SegmentHeader, list[NewRecord]] | None:
        """Return the segment's header and records; None when the file is gone. Raises ConfigError, Corrupt,
        TierUnavailable."""
        segment = files.lease(set_id, part)
        if segment is None:
            return None
        header = segment.header
        segment.release()
        whole = read_namespace(files.folder).geometry.whole
        records = []
        for slot, record in self._records(files, header):
            location = Location(set_id, header.rank, slot, record.slab_bytes, record.extent, record.checksums)
            records.append(NewRecord(record.key, location, whole))
        return header, records

    def _records(self, files: SegmentFiles, header: SegmentHeader) -> Iterator[tuple[int, RecordHeader]]:
        """Yield the valid record headers of a segment that are in their own slot."""
        name = f"{files.folder.name}/{segment_name(header.set_id, header.part)}"
        for slot, page in files.pages(header.set_id, header.part):
            self._lease.renew()
            if is_blank(page):
                continue
            try:
                record = RecordHeader.unpack(page)
            except Corrupt as fault:
                log.warning("%s slot %d: %s", name, slot, fault)
                continue
            if (record.set_id, record.slot, record.namespace) != (header.set_id, slot, header.namespace):
                log.warning("%s slot %d holds another slot's record", name, slot)
            elif (record.extent, record.slab_bytes) != (header.extent, header.slab_bytes):
                log.warning("%s slot %d holds a record of other layers, heads or sizes than its segment", name, slot)
            else:
                yield slot, record

    def _set_info(self, files: SegmentFiles, header: SegmentHeader, parts: Iterable[int]) -> SetInfo:
        # A set with a time in the future would not be evicted.
        now_s, disk_s = self._clock(), self._disk_s()
        created_s = min(self._index.local_s(header.created_ms / 1000), now_s)
        # The index had the time of the last use. The files have that of the last save, for a set may fill for days.
        age_s = min(files.age_s(header.set_id, part, disk_s) for part in parts)
        saved_s = min(now_s, max(created_s, now_s - age_s))
        n_bytes = files.set_bytes_of(header.set_id)
        return SetInfo(
            header.set_id, header.namespace, UNOWNED, n_bytes, created_s, saved_s, is_open=False, tenant=header.tenant
        )
