"""Own segments: the segments that a rank fills. It creates each for the first record, and unlinks or truncates those in
sets that its engine has lost. All calls may wait for storage or index, so they run on threads of the pool.

A slow writer may outlive its lease. Others then take over its sets and remove those without records. A segment that the
writer creates after that is in no index, and counts against no capacity. So the writer asks the index for the set after
it has created the segment, not before: if the set is removed later than that, the remover finds the segment.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial

from kvtier.codecs.base import slab_bytes
from kvtier.errors import Corrupt, IndexUnavailable, TierUnavailable
from kvtier.format.geometry import Extent
from kvtier.format.record import STRIPES_MAX, SegmentHeader, created_ms_of, part_of, parts_of, record_bytes
from kvtier.index.base import UNOWNED, Location, slots_used
from kvtier.maintenance.sweep_lease import SweepLease
from kvtier.plan import SaveChunk, SavePlan
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.storage.open_segments import Name, OpenSegment
from kvtier.storage.segments import SegmentFiles, segment_name
from kvtier.worker.context import WorkerContext

ACCEPTED_MAX = 64 * STRIPES_MAX  # limit of the files that are remembered to have visible records
UNPUBLISHED_MAX = 4096  # limit of the records of failed saves that are remembered until they are erased


class OwnSegments:
    """Thread-safe, but for `lease`: one thread at a time may lease a segment.

    Args:
        writes: content of a record of this rank.

    whole: content of the records of all ranks. accepted: files with records that the index has accepted. unpublished:
    (namespace, set, slot) of records that must be erased, because their saves failed.
    """

    def __init__(self, worker: WorkerContext, writes: Extent) -> None:
        self._worker = worker
        self.writes = writes
        self.whole = worker.geometry.whole
        self.slab_bytes = slab_bytes(worker.codec, worker.geometry, writes)
        layers = range(writes.first_layer, writes.end_layer)
        self.filled_bytes = worker.codec.layers_bytes(worker.geometry, layers)  # of a slab, without its padding
        self.record_bytes = record_bytes(writes, self.slab_bytes)
        self.accepted: deque[Name] = deque(maxlen=ACCEPTED_MAX)
        self.unpublished: deque[tuple[bytes, int, int]] = deque(maxlen=UNPUBLISHED_MAX)
        self._blanked: set[tuple[bytes, int, int]] = set()  # of `unpublished`, those that may be erased already
        self._erasing = threading.Lock()
        self._log = RepeatedLog(worker.clock)

    def lease(self, plan: SavePlan, chunk: SaveChunk, part: int) -> OpenSegment | None:
        """Return the chunk's segment, open until its release; None if its set is no longer in the index.

        part: number of the set's file that has the chunk's slot. Raises TierUnavailable, Corrupt.
        """
        files = self._worker.files(plan.namespace)
        header = self._header(plan, chunk, part)
        try:
            leased = files.lease(chunk.set_id, part, for_writing=True)
            if leased is None:
                name, is_new = (chunk.set_id, part), files.create(header)
                while is_new and name in self.accepted:  # an earlier file of this name; two threads may have noted it
                    self.accepted.remove(name)
                with suppress(IndexUnavailable):  # if the index stays away, the record is not published either
                    self._leave_unknown(files, {chunk.set_id}, {name} if is_new else ())
                leased = files.lease(chunk.set_id, part, for_writing=True)
        except TierUnavailable:
            # A reset removes the set and its namespace's folder; then the missing folder is no fault of the storage.
            if self._was_removed(chunk.set_id):
                return None
            raise
        if leased is not None and leased.header != header:
            leased.release()
            raise Corrupt(f"{segment_name(chunk.set_id, part)} is not the segment that this engine created")
        return leased

    def _was_removed(self, set_id: int) -> bool:
        """Return True if the index does not have the set; False if it has the set, or cannot tell."""
        index = self._worker.index
        with suppress(IndexUnavailable):
            return not index.was_reset and not index.some_sets([set_id]) and not index.was_reset
        return False

    def _header(self, plan: SavePlan, chunk: SaveChunk, part: int) -> SegmentHeader:
        """Return the header of the segment that this rank creates for the chunk. A segment with another header must not
        be written, because a segment's header determines the offsets of its records."""
        return SegmentHeader(
            plan.namespace,
            chunk.set_id,
            self._worker.share.rank,
            plan.slots,
            self.record_bytes,
            self.writes,
            self.slab_bytes,
            created_ms_of(chunk.set_id),
            chunk.tenant,
            part % STRIPES_MAX,
        )

    def leave(self, namespace: bytes, written: Collection[Location]) -> set[int]:
        """Handle a publish that the index rejected in part. Return the ids of the sets that this engine still owns.

        Unlink this rank's segments of sets that the index does not list. Truncate those of sets that were taken over
        behind their last visible record, as the sweeper did: if it did so while the record was being written, the file
        has the record's header page, which is written last, without its slabs. Raises IndexUnavailable,
        TierUnavailable.
        """
        files = self._worker.files(namespace)
        ours, taken_over = self._leave_unknown(files, {location.set_id for location in written})
        for set_id in taken_over:
            self._cut(files, set_id, [location for location in written if location.set_id == set_id])
        return ours

    def _leave_unknown(
        self, files: SegmentFiles, set_ids: Collection[int], new: Collection[Name] = ()
    ) -> tuple[set[int], set[int]]:
        """Unlink this rank's files of sets that the index does not list. Return (ids of the sets that this engine owns,
        ids of those that were taken over). new: files that were just created, without records.

        Files of a set that was taken over are kept: they are counted, and its new owner removes them. After a loss of
        the index nothing is unlinked, because its rebuild may be reading the files.
        """
        index = self._worker.index
        was_lost = index.was_reset
        known = index.some_sets(set_ids)
        unknown = set(set_ids) - {info.set_id for info in known}
        ours = {info.set_id for info in known if info.owner != UNOWNED}
        if was_lost or index.was_reset:  # the index may be lost between the two calls
            return ours, set()
        # Keep files with records that the index had accepted: either their set was removed, and its remover unlinks
        # them, or the index went back to an earlier state, and its rebuild reads them.
        accepted = set(self.accepted).difference(new)
        for set_id in sorted(unknown):
            parts = [part for part in parts_of(set_id, self._worker.share.rank) if (set_id, part) not in accepted]
            if parts:
                self._unlink(files, set_id, parts)
        return ours, {info.set_id for info in known} - ours

    def note_unpublished(self, namespace: bytes, chunks: Iterable[SaveChunk]) -> None:
        """Remember records whose saves failed, to erase them: their headers may be in the files, and then a rebuild of
        the index would publish them. No write of them may be under way any more."""
        self.unpublished.extend((namespace, chunk.set_id, chunk.slot) for chunk in chunks)

    def erase_unpublished(self) -> None:
        """Blank the headers of `unpublished` records. Records in files that the storage refuses stay for the next call.
        So do all of them while another process sweeps or rebuilds, because it may be about to publish them, and while
        another thread erases."""
        first = next(iter(self.unpublished), None)
        # One thread at a time: all of them are one owner of the lease, and the first to end would release it.
        if first is None or not self._erasing.acquire(blocking=False):
            return
        owner = f"writer of {first[1]:016x}, rank {self._worker.share.rank}"
        lease = SweepLease(self._worker.index, owner, time.time)
        try:
            with suppress(IndexUnavailable):  # the records stay for the next call
                if lease.take():
                    try:
                        self._erase_all(partial(lease.is_held_since, lease.lapses))
                    finally:
                        lease.release()
        finally:
            self._erasing.release()

    def _erase_all(self, is_held: Callable[[], bool]) -> None:
        records = []
        while self.unpublished:
            records.append(self.unpublished.popleft())
        by_file: dict[tuple[bytes, int, int], list[int]] = {}
        for namespace, set_id, slot in records:
            file = namespace, set_id, part_of(set_id, self._worker.share.rank, slot)
            by_file.setdefault(file, []).append(slot)
        is_refused = False
        for (namespace, set_id, part), slots in by_file.items():
            is_erased = False
            with suppress(Corrupt):  # a rebuild reads no record of such a file
                try:
                    is_erased = not is_refused and self._erase((namespace, set_id, part), slots, is_held)
                except (IndexUnavailable, TierUnavailable):
                    is_refused = True
                if not is_erased:
                    self.unpublished.extend((namespace, set_id, slot) for slot in slots)
        self._blanked.intersection_update(list(self.unpublished))  # other threads may add to it

    def _erase(self, file: tuple[bytes, int, int], slots: Collection[int], is_held: Callable[[], bool]) -> bool:
        """Erase records of one file: (namespace, set, part). Return False to try again later: the file is missing now
        and may come back, or the lease has lapsed, and a rebuild may be about to publish the records.

        A record that a rebuild of the index has published is complete, and stays (I1).
        """
        (namespace, set_id, part), index = file, self._worker.index
        complete = {place.slot for _, place in index.members(set_id) if place.part == part}
        erased = {slot for slot in slots if slot not in complete or (namespace, set_id, slot) in self._blanked}
        if not is_held():
            return False
        names = {(namespace, set_id, slot) for slot in erased}
        self._blanked |= names
        is_there = self._worker.files(namespace).erase(set_id, part, erased)
        for key, place in index.members(set_id):
            if place.part == part and place.slot in erased:
                index.retract(key, place)
        if not is_held():
            # The storage took longer than the lease lasts: a rebuild that read the records before may publish them now.
            # The next call retracts those.
            return False
        self._blanked -= names
        return is_there or not self._worker.files.sharing.may_be_away or not index.some_sets([set_id])

    def _cut(self, files: SegmentFiles, set_id: int, written: Collection[Location]) -> None:
        used = slots_used(place for _, place in self._worker.index.members(set_id))
        try:
            for part in parts_of(set_id, self._worker.share.rank):
                if part in used or not self._worker.files.sharing.may_be_away:
                    files.trim(set_id, part, used.get(part, 0))
                else:
                    # The file may have been missing when the index was rebuilt; a sweep then reads its records later.
                    files.erase(set_id, part, [place.slot for place in written if place.part == part])
        except (Corrupt, TierUnavailable) as fault:
            self._log.warning("trim", "segment set %016x is not trimmed: %s", set_id, fault)

    def _unlink(self, files: SegmentFiles, set_id: int, parts: Collection[int]) -> None:
        # Repeated for each chunk that is saved until the engine renews its lease. Not a warning, because a reset
        # removes sets on purpose; the scheduler's half logs losses.
        text = "segment set %016x was removed before it was full, as after a reset; late records are dropped"
        self._log.line(logging.INFO, f"removed {set_id}", text, set_id)
        try:
            for part in parts:
                files.unlink(set_id, part)
        except TierUnavailable as fault:
            self._log.warning(
                "stays", "a removed segment could not be unlinked; garbage collection removes it later: %s", fault
            )
            return
        if len(parts) == len(parts_of(set_id, self._worker.share.rank)):
            self._worker.index.remove_set(set_id)  # a sweep may have added it again just before the unlink
