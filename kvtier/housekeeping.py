"""Keeping a root in order: room for new segment sets, what dead writers left, and the index made anew from files.

Works on a whole root (all namespaces), from any engine or from the command line. Whatever removes something does so
under a lease in the index, so that many processes never do it twice, and in an order that is safe to be killed in:
first out of the index, then off the disk. A file in no index is swept later.

A writer that is taken for dead may be alive, only slow. So its sets are taken over in the index before anything of
theirs is looked at, cut or removed: what it publishes from then on is refused, and what was published before is seen.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, Corrupt, IndexUnavailable, KVTierError, TierUnavailable
from kvtier.eviction import least_recently_used
from kvtier.index.base import NOBODY, Index, Location, NewRecord, SetInfo
from kvtier.record import RecordHeader, SegmentHeader, is_blank
from kvtier.root import NAMESPACE_FILE, namespace_folders, read_namespace
from kvtier.tiers.segments import SUFFIX, NeverBegun, SegmentFiles, segment_name

log = logging.getLogger("kvtier")

EVICT_LEASE = "evict"
SWEEP_LEASE = "sweep"
LEASE_TTL_S = 5.0
"""Renewed with every set that is taken care of; so long, nobody evicts after a killed evictor. One that is merely slow
does no harm: a set leaves the index, and with it the sum that decides on eviction, before its files are touched."""
ORPHAN_GRACE_S = 600.0
"""A segment in no index is left alone for this long: its writer may be about to register it."""
ADOPTED_MAX = 512
"""Records that become visible in one step with the set that they lie in, when that is read back."""

Clock = Callable[[], float]


def writer_lease(owner: str) -> str:
    """Name of the lease that says this engine lives and may add records to its open sets."""
    return f"writer/{owner}"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What `Housekeeper.rebuild` did."""

    segments: int
    records: int
    unreadable: tuple[str, ...]
    removed_sets: int


class Housekeeper:
    """Thread-safe as far as its index is. `folder`: `<root>/v1`, with one folder a namespace."""

    def __init__(self, index: Index, folder: Path, owner: str, clock: Clock = time.time) -> None:
        self._index = index
        self._folder = folder
        self._owner = owner
        self.clock = clock

    def make_room(self, n_bytes: int, capacity_bytes: int) -> int | None:
        """Evicts until a set of `n_bytes` fits under `capacity_bytes`.

        Returns the bytes evicted; None when it does not fit: others evict right now, or nothing may go.
        """
        if self._excess(n_bytes, capacity_bytes) <= 0:
            return 0
        if self._index.acquire_lease(EVICT_LEASE, self._owner, self.clock(), LEASE_TTL_S) is None:
            return None
        try:
            evicted = 0
            excess = self._excess(n_bytes, capacity_bytes)
            for set_id in least_recently_used(self._index.sets(), excess):
                if self._index.acquire_lease(EVICT_LEASE, self._owner, self.clock(), LEASE_TTL_S) is None:
                    return None
                evicted += self._remove(set_id)
            return evicted if self._excess(n_bytes, capacity_bytes) <= 0 else None
        finally:
            self._index.release_lease(EVICT_LEASE, self._owner)

    def sweep(self) -> None:
        """Closes the sets of dead writers, drops the empty ones, books what files really take, and takes care of
        segments in no index."""
        if not self._hold_sweep_lease():
            return
        try:
            known = {info.set_id: info for info in self._index.sets()}
            on_disk: dict[int, int] = {}
            for files in self._namespaces():
                on_disk.update(files.set_bytes())
                self._settle_orphans(files, known)
            for info in known.values():
                self._hold_sweep_lease()
                self._settle(info, on_disk.get(info.set_id, 0))
        finally:
            self._index.release_lease(SWEEP_LEASE, self._owner)

    def close_set(self, set_id: int) -> None:
        """Its writer adds no more: books what its files take, and from now on it may be evicted."""
        files = self._files_of(set_id)
        if files is not None:
            self._index.close_set(set_id, files.set_bytes_of(set_id))

    def erase_namespace(self, namespace: bytes) -> None:
        """Removes a namespace that nobody can ask for again, with its folder. Raises OSError when a late writer makes a
        segment there right now: to be tried again, for without its description nobody would count or remove it."""
        for info in self._index.sets():
            if info.namespace == namespace:
                self._remove(info.set_id)
        folder = self._folder / namespace.hex()
        (folder / NAMESPACE_FILE).unlink(missing_ok=True)
        files = SegmentFiles(folder, direct=False)
        for set_id, rank in files.ids():
            files.unlink(set_id, rank)
        if folder.is_dir() and not any(path.suffix != SUFFIX for path in folder.iterdir()):
            folder.rmdir()

    def free_bytes(self) -> int:
        """Space that is left on the root's disk for this user."""
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def rebuild(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Rebuilt | None:
        """Makes the index agree with the files, from header pages alone; entries without a file go. None, and nothing
        is done, while others sweep or rebuild: a sweep cuts segments behind what the index knows of them.

        progress: called with (segments read, segments in all).
        """
        if not self._hold_sweep_lease():
            return None
        try:
            return self._rebuild(progress)
        finally:
            self._index.release_lease(SWEEP_LEASE, self._owner)

    def _rebuild(self, progress: Callable[[int, int], None]) -> Rebuilt:
        sets = [(files, *found) for files in self._namespaces() for found in files.sets()]
        total = sum(len(ranks) for _, _, ranks in sets)
        unreadable: list[str] = []
        done = records = 0
        for files, set_id, ranks in sets:
            faults: dict[int, KVTierError] = {}
            first = done

            def tell(n_read: int, first: int = first) -> None:
                progress(first + n_read, total)

            records += self._read_set(files, set_id, ranks, faults, tell)
            done += len(ranks)
            for rank, fault in faults.items():
                if not isinstance(fault, NeverBegun):  # it is swept with its set
                    unreadable.append(f"{files.folder.name}/{segment_name(set_id, rank)}: {fault}")
        progress(total, total)
        return Rebuilt(total, records, tuple(unreadable), self._remove_lost())

    def _hold_sweep_lease(self) -> bool:
        """Takes the lease, or renews it; False when others have it."""
        return self._index.acquire_lease(SWEEP_LEASE, self._owner, self.clock(), LEASE_TTL_S) is not None

    def _remove_lost(self) -> int:
        """Takes sets without files out of the index; how many."""
        unwritten = {info.set_id for info in self._index.sets() if not self._is_written(info)}
        missing = unwritten - self._on_disk()  # listed after the sets: a set is registered before it has files
        for set_id in missing:
            self._index.take_over(set_id)
        lost = missing - self._on_disk() if missing else missing
        for set_id in lost:
            self._index.remove_set(set_id)
        return len(lost)

    def _on_disk(self) -> set[int]:
        """The sets that have a segment."""
        return {set_id for files in self._namespaces() for set_id, _ in files.ids()}

    def _read_set(
        self, files: SegmentFiles, set_id: int, ranks: Sequence[int], faults: dict[int, KVTierError],
        progress: Callable[[int], None] = lambda n_read: None,
    ) -> int:  # fmt: skip
        """Publishes what the header pages of a set's segments say; returns how many records the index did not know.

        A set that the index does not know comes into it with all its segments or, where one can't be read for now, not
        at all, to be taken in by a later sweep: of a set that it knows, nobody would look at that one again.

        faults: gets why a segment could not be read, by rank. progress: called with the segments read.
        """
        # Before the pages are read: what is published meanwhile, by a writer that lives, is in no page that was read.
        members = self._index.members(set_id)
        found: dict[int, set[NewRecord]] = {}
        header = None
        for n_read, rank in enumerate(ranks):
            progress(n_read)
            self._hold_sweep_lease()
            try:
                segment = self._read_segment(files, set_id, rank)
            except (ConfigError, Corrupt, TierUnavailable) as fault:
                faults[rank] = fault
                continue
            if segment is not None:
                header, found[rank] = segment
        files.close()
        if header is None:
            return 0
        records = {(record.key, record.location): record for rank in found for record in found[rank]}
        for key, place in members:
            if place.rank in found and (key, place) not in records:
                self._index.retract(key, place)
        for known in members:
            records.pop(known, None)
        is_whole = all(isinstance(fault, Corrupt) for fault in faults.values())
        taken = self._publish(self._set_info(files, header) if is_whole else None, list(records.values()))
        if not all(files.exists(set_id, rank) for rank in found):
            self._index.remove_set(set_id)  # it was evicted while it was read
            return 0
        return taken

    def _publish(self, info: SetInfo | None, records: list[NewRecord]) -> int:
        """Publishes what was read of one set; how many were taken. `info`: of a set that may come into the index."""
        if info is None or not self._index.create_set(info, records[:ADOPTED_MAX]):
            return self._index.publish(records, from_files=True)
        try:
            self._index.publish(records[ADOPTED_MAX:], from_files=True)
            return len(self._index.members(info.set_id))
        except IndexUnavailable:
            self._index.remove_set(info.set_id)  # it comes in again, with the records that are missing now
            raise

    def _read_segment(self, files: SegmentFiles, set_id: int, rank: int) -> tuple[SegmentHeader, set[NewRecord]] | None:
        """Its header and records; None when it is gone. Raises ConfigError, Corrupt, TierUnavailable."""
        segment = files.lease(set_id, rank)
        if segment is None:
            return None
        header = segment.header
        segment.release()
        whole = read_namespace(files.folder).geometry.whole
        return header, {
            NewRecord(
                record.key, Location(set_id, rank, slot, record.slab_bytes, record.extent, record.checksums), whole
            )
            for slot, record in self._records(files, header)
        }

    def _records(self, files: SegmentFiles, header: SegmentHeader) -> Iterator[tuple[int, RecordHeader]]:
        """The record headers of a segment that are whole and lie in their own place."""
        name = f"{files.folder.name}/{segment_name(header.set_id, header.rank)}"
        for slot, page in files.pages(header.set_id, header.rank):
            if is_blank(page):
                continue
            try:
                record = RecordHeader.unpack(page)
            except Corrupt as fault:
                log.warning("%s slot %d: %s", name, slot, fault)
                continue
            if (record.set_id, record.slot, record.namespace) != (header.set_id, slot, header.namespace):
                log.warning("%s slot %d holds another slot's record", name, slot)
                continue
            yield slot, record

    def _is_written(self, info: SetInfo) -> bool:
        """Whether a living engine may still add records to the set."""
        return info.is_open and self._index.lease_owner(writer_lease(info.owner), self.clock()) is not None

    def _set_info(self, files: SegmentFiles, header: SegmentHeader) -> SetInfo:
        created_s = header.created_ms / 1000
        n_bytes = files.set_bytes_of(header.set_id)
        return SetInfo(header.set_id, header.namespace, NOBODY, n_bytes, created_s, created_s, is_open=False)

    def _settle(self, info: SetInfo, n_bytes: int) -> None:
        if self._is_written(info):
            return
        members = [] if info.is_open else self._index.members(info.set_id)
        if not members:
            self._index.take_over(info.set_id)
            members = self._index.members(info.set_id)
        if not members:
            self._remove(info.set_id)
            return
        if info.is_open:
            log.info("closing segment set %016x of a writer that is gone", info.set_id)
            n_bytes = self._trim(info, [location for _, location in members])
        if info.is_open or n_bytes != info.n_bytes:
            self._index.close_set(info.set_id, n_bytes)

    def _trim(self, info: SetInfo, locations: list[Location]) -> int:
        files = SegmentFiles(self._folder / info.namespace.hex(), direct=False)
        used: dict[int, int] = {}
        for location in locations:
            used[location.rank] = max(used.get(location.rank, 0), location.slot + 1)
        for set_id, rank in files.ids():
            if set_id == info.set_id:
                try:
                    files.trim(set_id, rank, used.get(rank, 0))
                except (Corrupt, TierUnavailable) as fault:
                    log.warning("cannot trim: %s", fault)
        files.close()
        return files.set_bytes_of(info.set_id)

    def _remove(self, set_id: int) -> int:
        """Out of the index first, then off the disk; bytes given back."""
        files = self._files_of(set_id)
        self._index.remove_set(set_id)
        freed = 0 if files is None else files.unlink_set(set_id)
        self._index.remove_set(set_id)  # who rebuilds the index may have read it back before its files were gone
        return freed

    def _files_of(self, set_id: int) -> SegmentFiles | None:
        """The folder of a set's namespace; None for a set that is not registered."""
        for info in self._index.sets():
            if info.set_id == set_id:
                return SegmentFiles(self._folder / info.namespace.hex(), direct=False)
        return None

    def _settle_orphans(self, files: SegmentFiles, known: dict[int, SetInfo]) -> None:
        """A segment in no index was being evicted when its evictor died, or was unreadable when the index was made
        anew. What can be read is taken in (and evicted in its turn); what is no segment at all goes."""
        for set_id, ranks in files.sets():
            if set_id in known or min(files.age_s(set_id, rank, self.clock()) for rank in ranks) < ORPHAN_GRACE_S:
                continue
            faults: dict[int, KVTierError] = {}
            taken = self._read_set(files, set_id, ranks, faults)
            if taken:
                log.info("segment set %016x was in no index: %d records are taken in", set_id, taken)
            for rank, fault in faults.items():
                if isinstance(fault, Corrupt):
                    log.info("removing what is no segment: %s", fault)
                    files.unlink(set_id, rank)
                else:
                    log.warning("a segment in no index stays, with its set: %s", fault)

    def _excess(self, n_bytes: int, capacity_bytes: int) -> int:
        return self._index.counts().n_bytes + n_bytes - capacity_bytes

    def _namespaces(self) -> list[SegmentFiles]:
        return [SegmentFiles(folder, direct=False) for folder in namespace_folders(self._folder)]
