"""Consistency check of a root: every record that the index names has its header in a file, and every file is of a set
that the index lists. Reads header pages and the whole index, no slabs.

A record in a file that no index entry names is no fault: its chunk is a miss, and a rebuild finds it. For example, two
engines store a chunk at the same time, the index names the first record only, and later the set of that one is evicted.

Engines may run during the check. So each set with a disagreement, or with such a record, is checked twice: a record
that was being written or evicted at first is in order at the second check."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.geometry import Extent, covers
from kvtier.format.record import RecordHeader, is_blank
from kvtier.index import entry
from kvtier.index.base import Index, Location, SetInfo
from kvtier.maintenance.scrub import Finding
from kvtier.storage.root import Root, namespace_folders
from kvtier.storage.segments import NeverBegun, SegmentFiles, segment_name

SETTLE_S = 2.0  # time between the two checks, seconds; a save takes less from its header to its index entry
LISTED_MAX = 1000  # disagreements that are listed; further ones are only counted

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class ConsistencyReport:
    """Counts of the check. records: readable headers in files. indexed: records that the index names. second: records
    of a chunk, or a part of one, for which the index names an earlier record. unpublished: records of sets that are
    still written. unnamed: records whose chunk is not in the index, though their set is; unnamed_places: of these, up
    to LISTED_MAX."""

    sets: int = 0
    segments: int = 0
    chunks: int = 0
    records: int = 0
    indexed: int = 0
    second: int = 0
    unpublished: int = 0
    unnamed: int = 0
    n_disagreements: int = 0
    disagreements: list[Finding] = field(default_factory=list)
    unnamed_places: list[Finding] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.n_disagreements


def check_consistency(
    root: Root, index: Index, progress: Progress = lambda done, total: None, wait: Callable[[float], None] = time.sleep
) -> ConsistencyReport:
    """Check a root. progress: called with (segment sets checked, segment sets in all)."""
    return _Check(root, index, wait).run(progress)


class _Check:
    def __init__(self, root: Root, index: Index, wait: Callable[[float], None]) -> None:
        self._root = root
        self._index = index
        self._wait = wait
        self._found = ConsistencyReport()
        self._parts: dict[bytes, list[Extent]] = {}

    def run(self, progress: Progress) -> ConsistencyReport:
        found = self._found
        located = self._located(found)
        known = {info.set_id: info for info in self._index.sets()}
        on_disk = self._on_disk()
        found.sets = len(known)
        found.segments = sum(len(parts) for _, parts in on_disk.values())
        doubtful = []
        every = sorted(known.keys() | on_disk.keys() | located.keys())
        for done, set_id in enumerate(every):
            progress(done, len(every))
            result = self._set(set_id, known.get(set_id), on_disk.get(set_id), located[set_id])
            if result.n_disagreements or result.unnamed:
                doubtful.append(set_id)
            else:
                self._add(result)
        progress(len(every), len(every))
        self._look_again(doubtful)
        return found

    def _look_again(self, doubtful: list[int]) -> None:
        if not doubtful:
            return
        self._wait(SETTLE_S)
        known = {info.set_id: info for info in self._index.some_sets(doubtful)}
        located = self._located(ConsistencyReport())  # bad entries were noted at the first check
        on_disk = self._on_disk()
        for set_id in doubtful:
            self._add(self._set(set_id, known.get(set_id), on_disk.get(set_id), located[set_id]))

    def _on_disk(self) -> dict[int, tuple[SegmentFiles, list[int]]]:
        """Return, for each set, its folder and the parts that have a segment."""
        return {
            set_id: (files, parts)
            for folder in namespace_folders(self._root.folder)
            for files in (SegmentFiles(folder, direct=False),)
            for set_id, parts in files.sets()
        }

    def _located(self, result: ConsistencyReport) -> Counter[int]:
        """Return the number of records that entries name in each set. Collects the parts of incomplete chunks."""
        self._parts.clear()
        named: Counter[int] = Counter()
        seen: set[bytes] = set()
        for key, value in self._index.entries():
            if key not in seen:
                seen.add(key)
                try:
                    locations = entry.unpack(value)
                    named.update(location.set_id for location in locations)
                    if not entry.is_complete(value):
                        self._parts[key] = [location.extent for location in locations]
                except Corrupt as fault:
                    self._note(result, Finding("", "", None, f"chunk {key.hex()}: {fault}"))
        self._found.chunks = len(seen)
        return named

    def _set(
        self, set_id: int, info: SetInfo | None, on_disk: tuple[SegmentFiles, list[int]] | None, n_located: int
    ) -> ConsistencyReport:
        """Check one set, of which index entries name `n_located` records."""
        result = ConsistencyReport()
        if info is None:
            namespace = on_disk[0].folder.name if on_disk else ""
            if n_located:
                what = f"{n_located} records of chunks are in it, but the index does not list it"
                self._note(result, Finding(namespace, f"{set_id:016x}", None, what))
            if on_disk is None:
                return result
        members = {} if info is None else {(at.part, at.slot): (key, at) for key, at in self._index.members(set_id)}
        if info is not None and len(members) != n_located:
            what = f"{n_located} of its records are in chunks' entries, but {len(members)} in its own list"
            self._note(result, Finding(info.namespace.hex(), f"{set_id:016x}", None, what))
        if on_disk is not None:
            files, parts = on_disk
            for part in parts:
                for slot, header in self._headers(files, (set_id, part), result):
                    place = files.folder.name, segment_name(set_id, part), slot
                    self._record(result, info, header, place, members.pop((part, slot), None))
            files.close()
        for part, slot in members:
            assert info is not None
            place = info.namespace.hex(), segment_name(set_id, part), slot
            self._note(result, Finding(*place, "the index names a record there, and there is none"))
        return result

    def _headers(
        self, files: SegmentFiles, name: tuple[int, int], result: ConsistencyReport
    ) -> Iterator[tuple[int, RecordHeader]]:
        """Yield the valid record headers that are in their own slot."""
        try:
            for slot, page in files.pages(*name):
                if is_blank(page):
                    continue
                try:
                    header = RecordHeader.unpack(page)
                except Corrupt:  # its writer died; reported if the index names it
                    continue
                if (header.set_id, header.slot) == (name[0], slot):
                    yield slot, header
        except NeverBegun:
            return
        except (Corrupt, TierUnavailable) as fault:
            self._note(result, Finding(files.folder.name, segment_name(*name), None, str(fault)))

    def _record(
        self,
        result: ConsistencyReport,
        info: SetInfo | None,
        header: RecordHeader,
        place: tuple[str, str, int],
        member: tuple[bytes, Location] | None,
    ) -> None:
        """Compare a header that was read with the record that the index names at its place."""
        result.records += 1
        if member is not None:
            if (header.key, header.extent, header.checksums) == (member[0], member[1].extent, member[1].checksums):
                result.indexed += 1
            else:
                self._note(result, Finding(*place, "is not the record that the index names there"))
        elif covers(self._parts.get(header.key, ()), header.extent) or self._index.resolve([header.key]):
            result.second += 1
        elif info is not None and info.is_open:
            result.unpublished += 1
        elif info is not None:
            result.unnamed += 1
            result.unnamed_places.append(Finding(*place, "not in the index"))
        else:
            self._note(result, Finding(*place, "no segment set of the index"))

    def _note(self, result: ConsistencyReport, what: Finding) -> None:
        result.n_disagreements += 1
        if len(result.disagreements) < LISTED_MAX:
            result.disagreements.append(what)

    def _add(self, result: ConsistencyReport) -> None:
        found = self._found
        found.records += result.records
        found.indexed += result.indexed
        found.second += result.second
        found.unpublished += result.unpublished
        found.unnamed += result.unnamed
        found.n_disagreements += result.n_disagreements
        found.disagreements += result.disagreements[: LISTED_MAX - len(found.disagreements)]
        found.unnamed_places += result.unnamed_places[: LISTED_MAX - len(found.unnamed_places)]


def drop_lost(index: Index) -> int:
    """Remove records from entries if the index does not list their set, as after the death of a publisher whose set was
    being evicted. Return their number. Count the index's entries again."""
    known = {info.set_id for info in index.sets()}
    lost = [
        (key, location)
        for key, value in index.recount()
        for location in entry.locations_of(value)
        if location.set_id not in known
    ]
    known |= {info.set_id for info in index.some_sets({location.set_id for _, location in lost})}
    return sum(index.retract(key, location) for key, location in lost if location.set_id not in known)
