"""Reading segments back into an index that does not know what lies in them, from header pages.

Of a chunk that lies there twice, one may have been found bad once, which no header says. So the one that the index has
already is read and summed before the other is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, Corrupt, IndexUnavailable, KVTierError, TierUnavailable
from kvtier.format.record import RecordHeader, SegmentHeader, is_blank
from kvtier.index import entry
from kvtier.index.base import NOBODY, Index, Location, NewRecord, SetInfo, slots_used
from kvtier.maintenance.record_read import Verdict, judge
from kvtier.maintenance.sweep_lease import Clock, SweepLease
from kvtier.storage.root import read_namespace
from kvtier.storage.segments import SegmentFiles, segment_name

log = logging.getLogger("kvtier")

ADOPTED_MAX = 512
"""Records that become visible in one step with the set that they lie in, when that is read back."""
KEYS_AT_ONCE = 512
"""Looked up in one step: engines' lookups wait for it."""

Progress = Callable[[int], None]


class HeldUp(TierUnavailable):
    """Others may have had the lease meanwhile, and may have swept what was read."""


@dataclass(slots=True)
class TakenOut:
    """Entries of the index that went. gone: their record is not in its file any more, or is another one; bad: its
    bytes are not what was summed, and stood in the way of another record of the chunk."""

    gone: int = 0
    bad: int = 0


class ReadBack:
    """Of one process, which holds `lease`. taken_out: since `begin`. look_at_root: see Housekeeper. may_be_away: files
    can be missing for a while, as on a brick that is down, or show old bytes."""

    def __init__(
        self, index: Index, lease: SweepLease, clock: Clock, look_at_root: Callable[[], object], may_be_away: bool
    ) -> None:
        self._index = index
        self._lease = lease
        self._clock = clock
        self._look_at_root = look_at_root
        self._may_be_away = may_be_away
        self._good: set[tuple[bytes, Location]] = set()
        self.taken_out = TakenOut()

    def begin(self) -> None:
        """A sweep or rebuild begins: what was seen to be good before may be bad by now."""
        self._good.clear()
        self.taken_out = TakenOut()

    def read_set(
        self, files: SegmentFiles, set_id: int, ranks: Sequence[int], faults: dict[int, KVTierError],
        progress: Progress = lambda n_read: None, returned: Collection[int] = (),
    ) -> int:  # fmt: skip
        """Publishes what the header pages of a set's segments say; returns how many records the index did not know.

        A set that the index does not know comes into it with all its segments or, where one can't be read for now, not
        at all, to be taken in by a later sweep: of a set that it knows, nobody would look at that one again.

        faults: gets why a segment could not be read, by rank. progress: called with the segments read, again and again
            while that takes long.
        returned: ranks whose file was away when the index was rebuilt, and that no writer cuts any more.
        """
        try:
            return self._read_set(files, set_id, ranks, faults, progress, returned)
        except HeldUp as fault:
            faults.update({rank: fault for rank in ranks if rank not in faults})
            return 0
        finally:
            files.close()

    def _read_set(
        self, files: SegmentFiles, set_id: int, ranks: Sequence[int], faults: dict[int, KVTierError],
        progress: Progress, returned: Collection[int],
    ) -> int:  # fmt: skip
        lapses = self._lease.lapses
        # Before the pages are read: what is published meanwhile, by a writer that lives, is in no page that was read.
        members = self._index.members(set_id)
        found: dict[int, list[NewRecord]] = {}
        header = None
        for n_read, rank in enumerate(ranks):
            progress(n_read)
            self._lease.renew()
            try:
                segment = self._read_segment(files, set_id, rank)
            except (ConfigError, Corrupt, TierUnavailable) as fault:
                faults[rank] = fault
                continue
            if segment is not None:
                header, found[rank] = segment
        if header is None:
            return 0
        records = {(record.key, record.location): record for rank in found for record in found[rank]}
        gone = {member for member in members if member[1].rank in found and member not in records}
        self.taken_out.gone += sum(self._index.retract(key, place) for key, place in gone)
        known = set(members) - gone
        missing = [record for member, record in records.items() if member not in known]
        self._make_way(files, missing, lambda: progress(len(ranks)))
        self._check_held(lapses)  # somebody may have cut it since
        is_whole = all(isinstance(fault, Corrupt) for fault in faults.values())
        taken = self._take_in(self._set_info(files, header), list(records.values())) if is_whole else None
        was_known = taken is None
        if taken is None:
            taken = self._add_missing(set_id, missing, known, lapses, returned)
        is_missing = not all(files.exists(set_id, rank) for rank in found)
        if is_missing and not (self._may_be_away and was_known):  # a set that the index kept may only be away
            self._look_at_root()
            self._index.remove_set(set_id)  # it was evicted while it was read
            return 0
        return taken

    def _check_held(self, lapses: int) -> None:
        if not self._lease.is_held_since(lapses):
            raise HeldUp("others may have swept while it was read")

    def _make_way(self, files: SegmentFiles, missing: Sequence[NewRecord], progress: Callable[[], None]) -> None:
        """Takes what is bad of these chunks out of the index, where it stands in the way of records that were read: of
        the same layers and heads, all or some. Before those are published: of a set that is in the index, a late writer
        may cut what it does not see there."""
        read: dict[bytes, list[Location]] = {}
        for record in missing:
            read.setdefault(record.key, []).append(record.location)
        keys = sorted(read)
        for first in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[first : first + KEYS_AT_ONCE]
            for key, value in zip(some, self._index.find(some), strict=True):
                for location in entry.locations_of(value):
                    others = [other for other in read[key] if other.extent.intersect(location.extent) is not None]
                    if others and (key, location) not in self._good:
                        progress()
                        self._lease.renew()
                        self._look_at(files, key, location, others)

    def _look_at(self, files: SegmentFiles, key: bytes, location: Location, others: Sequence[Location]) -> None:
        verdict = judge(files, key, location)
        if verdict in (Verdict.AS_SUMMED, Verdict.UNKNOWN):
            self._good.add((key, location))
            return
        # A record whose file is missing makes way too: the chunk is read back from elsewhere. But one whose file may
        # only be away is kept, and one that may be stale makes way only for a good record of all that it holds.
        if self._may_be_away and (verdict is Verdict.GONE or not self._is_replaced(files, key, location, others)):
            return
        name = segment_name(location.set_id, location.rank)
        log.info("slot %d of %s is bad, and another record of its chunk is read back", location.slot, name)
        self.taken_out.bad += self._index.retract(key, location)

    def _is_replaced(self, files: SegmentFiles, key: bytes, location: Location, others: Sequence[Location]) -> bool:
        whole = [other for other in others if other.extent.contains(location.extent)]
        return any(judge(files, key, other) is Verdict.AS_SUMMED for other in whole)

    def _take_in(self, info: SetInfo, records: list[NewRecord]) -> int | None:
        """A set with all that was read of it, also what the index knew before: it may have been lost since. How many
        records were taken; None when it knows the set. Each rank's last ones come first, for nothing before them is
        cut."""
        records.sort(key=lambda record: -record.location.slot)
        if not self._index.create_set(info, records[:ADOPTED_MAX]):
            return None
        try:
            self._index.publish(records[ADOPTED_MAX:], from_files=True)
            return len(self._index.members(info.set_id))
        except IndexUnavailable:
            self._index.remove_set(info.set_id)  # it comes in again, with the records that are missing now
            raise

    def _add_missing(
        self, set_id: int, missing: list[NewRecord], known: Collection[tuple[bytes, Location]], lapses: int,
        returned: Collection[int],
    ) -> int:  # fmt: skip
        """To a set that the index knows, with `known` in it; how many records were taken. Of one that was taken over,
        none behind those, but in a file of `returned`: its writer was refused them, and cuts them off without the lease
        (own_segments)."""
        if missing and any(info.owner == NOBODY for info in self._index.some_sets([set_id])):
            used = slots_used(location for _, location in known)
            missing = [
                record
                for record in missing
                if record.location.rank in returned or record.location.slot < used.get(record.location.rank, 0)
            ]
        if not missing:
            return 0
        self._check_held(lapses)
        return self._index.publish(missing, from_files=True)

    def _read_segment(
        self, files: SegmentFiles, set_id: int, rank: int
    ) -> tuple[SegmentHeader, list[NewRecord]] | None:
        """Its header and records; None when it is gone. Raises ConfigError, Corrupt, TierUnavailable."""
        segment = files.lease(set_id, rank)
        if segment is None:
            return None
        header = segment.header
        segment.release()
        whole = read_namespace(files.folder).geometry.whole
        return header, [
            NewRecord(
                record.key, Location(set_id, rank, slot, record.slab_bytes, record.extent, record.checksums), whole
            )
            for slot, record in self._records(files, header)
        ]

    def _records(self, files: SegmentFiles, header: SegmentHeader) -> Iterator[tuple[int, RecordHeader]]:
        """The record headers of a segment that are whole and lie in their own place."""
        name = f"{files.folder.name}/{segment_name(header.set_id, header.rank)}"
        for slot, page in files.pages(header.set_id, header.rank):
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
                log.warning("%s slot %d holds a record of another cut than its segment", name, slot)
            else:
                yield slot, record

    def _set_info(self, files: SegmentFiles, header: SegmentHeader) -> SetInfo:
        # One from the future would never be evicted.
        created_s = min(self._index.local_s(header.created_ms / 1000), self._clock())
        n_bytes = files.set_bytes_of(header.set_id)
        return SetInfo(header.set_id, header.namespace, NOBODY, n_bytes, created_s, created_s, is_open=False,
                       tenant=header.tenant)  # fmt: skip
