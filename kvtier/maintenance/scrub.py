"""Scrub: reports the content of a root by namespace (`stats`), and verifies every byte of it (`verify`)."""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError, Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.namespace import Namespace
from kvtier.format.record import RecordHeader, SegmentHeader, is_blank, tags_in
from kvtier.format.signing import Signer
from kvtier.index.base import Index, Location
from kvtier.io.ring import AlignedBuffer, Batch, ReadOp, Ring
from kvtier.maintenance.record_check import RECORD_BYTES_MAX
from kvtier.runtime.units import counted
from kvtier.storage.open_segments import OpenSegment
from kvtier.storage.root import NAMESPACE_FILE, Root, model_name, namespace_folders, read_namespace
from kvtier.storage.segments import NeverBegun, SegmentFiles, segment_name

IO_THREADS = 8  # threads of the ring that reads
IN_FLIGHT_BYTES = 64 << 20  # records read ahead, bytes
CUT_OFF = "the file ends before its last slab"

Progress = Callable[[int, int], None]
Place = tuple[str, str]  # folder of a namespace, and name of a file in it


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace of a root. `model`: "" where its name is not known. `n_bytes`: what its segments take on disk."""

    namespace: Namespace
    model: str
    sets: int
    open_sets: int
    segments: int
    records: int
    chunks: int
    n_bytes: int
    last_used_s: float

    @property
    def tokens(self) -> int:
        return self.chunks * self.namespace.geometry.chunk_tokens


@dataclass(frozen=True, slots=True)
class RootStats:
    """Contents of a root. unreadable: a sentence for each thing that could not be read. n_bytes: bytes on disk of the
    files whose status was read."""

    namespaces: tuple[NamespaceStats, ...]
    unreadable: tuple[str, ...]
    n_bytes: int


class Finding(NamedTuple):
    """A fault that was found. namespace: its folder; "" if the fault has none. segment: file name in the folder, or
    set; "" if the fault has none. slot: None if the fault is of the whole file."""

    namespace: str
    segment: str
    slot: int | None
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`. unfinished: slots, and whole segments, whose writer died before they were complete; nothing
    refers to them. unproved: signed records whose signatures were not checked, because the secret is missing."""

    segments: int
    records: int
    n_bytes: int
    unfinished: int
    bad: tuple[Finding, ...]
    unproved: int = 0


class _RecordRead(NamedTuple):
    """A record that is being read into a buffer, which is held until the batch is done. page: its header page."""

    slot: int
    header: RecordHeader
    page: bytes
    batch: Batch
    buffer: AlignedBuffer


def stats(root: Root, index: Index) -> RootStats:
    """Return the content of a root by namespace. Reads file sizes and the index, no segment."""
    found, unreadable = [], []
    sets = index.sets()
    n_bytes = 0
    for folder in namespace_folders(root.folder):
        files = SegmentFiles(folder, direct=False)
        found_sizes = list(files.sizes().values())
        folder_bytes = sum(sum(sizes.values()) for sizes in found_sizes if sizes is not None)
        n_bytes += folder_bytes
        if n_unread := found_sizes.count(None):
            what = f"the sizes of the files of {counted(n_unread, 'segment set')} cannot be read, and are not counted"
            unreadable.append(f"{folder}: {what}; is part of the storage down?")
        try:
            namespace = read_namespace(folder)
        except ConfigError as fault:
            unreadable.append(f"{fault} ({folder_bytes} bytes of segments are there)")
            continue
        mine = [info for info in sets if info.namespace == namespace.id]
        members = [key for info in mine for key, _ in index.members(info.set_id)]
        chunks = sum(1 for key in set(members) if index.resolve([key]))
        found.append(
            NamespaceStats(
                namespace,
                model_name(folder),
                len(mine),
                sum(info.is_open for info in mine),
                len(files.ids()),
                len(members),
                chunks,
                folder_bytes,
                max((info.used_s for info in mine), default=0.0),
            )
        )
    return RootStats(tuple(found), tuple(unreadable), n_bytes)


def verify(
    root: Root, index: Index, progress: Progress = lambda done, total: None, signer: Signer | None = None
) -> VerifyReport:
    """Read every record and verify every checksum, and the signatures made with the signer's secret. progress: called
    with (segments read, segments in all)."""
    return _Verifier(root, index, signer).run(progress)


class _Verifier:
    def __init__(self, root: Root, index: Index, signer: Signer | None) -> None:
        self._root = root
        self._index = index
        self._signer = signer
        self._signed: dict[str, str] = {}  # fingerprint of the secret, by folder of a namespace
        self._bad: list[Finding] = []
        self._namespaces: dict[int, str] = {}  # of the sets that the index knows
        self._records = self._n_bytes = self._unfinished = self._unproved = 0

    def run(self, progress: Progress) -> VerifyReport:
        folders = namespace_folders(self._root.folder)
        tiers = [SegmentFiles(folder, direct=False) for folder in folders]
        segments = [(files, *name) for files in tiers for name in files.ids()]
        expected = self._expected()
        contradicting = [finding for folder in folders for finding in self._namespace(folder)]
        with Ring(IO_THREADS) as ring:
            for done, (files, set_id, part) in enumerate(segments):
                progress(done, len(segments))
                self._segment(ring, files, set_id, part, expected.pop((set_id, part), {}))
        progress(len(segments), len(segments))
        # The folders are listed again, because running engines may have created segments since.
        later = namespace_folders(self._root.folder) if expected else []
        created = {name for folder in later for name in SegmentFiles(folder, direct=False).ids()}
        for (set_id, part), slots in expected.items():
            place = (self._namespaces[set_id], segment_name(set_id, part))
            if (set_id, part) not in created:
                self._bad += [Finding(*place, slot, "its segment is missing") for slot in slots]
        for files in tiers:
            files.close()
        bad = (*self._bad, *contradicting)
        return VerifyReport(len(segments), self._records, self._n_bytes, self._unfinished, bad, self._unproved)

    def _expected(self) -> dict[tuple[int, int], dict[int, tuple[bytes, Location]]]:
        """Return (set, part) -> slot -> the record that the index names there."""
        expected: dict[tuple[int, int], dict[int, tuple[bytes, Location]]] = {}
        for info in self._index.sets():
            self._namespaces[info.set_id] = info.namespace.hex()
            for key, location in self._index.members(info.set_id):
                expected.setdefault((info.set_id, location.part), {})[location.slot] = (key, location)
        return expected

    def _namespace(self, folder: Path) -> Iterator[Finding]:
        try:
            self._signed[folder.name] = read_namespace(folder).signing
        except ConfigError as fault:
            yield Finding(folder.name, NAMESPACE_FILE, None, fault.fix)

    def _segment(
        self, ring: Ring, files: SegmentFiles, set_id: int, part: int, expected: dict[int, tuple[bytes, Location]]
    ) -> None:
        place = (files.folder.name, segment_name(set_id, part))
        try:
            segment = files.lease(set_id, part)
            if segment is None:  # evicted since the folder was listed
                return
            try:
                self._records_of(ring, segment, place, self._headers(files, segment.header, expected))
            finally:
                segment.release()
                files.close()
        except NeverBegun as fault:
            if expected:
                self._bad.append(Finding(*place, None, str(fault)))
            else:
                self._unfinished += 1
            return
        except (Corrupt, TierUnavailable) as fault:
            if files.exists(set_id, part):  # else its namespace was erased since
                self._bad.append(Finding(*place, None, str(fault)))
            return
        self._bad += [Finding(*place, slot, "the file has nothing there") for slot in sorted(expected)]

    def _headers(
        self, files: SegmentFiles, segment: SegmentHeader, expected: dict[int, tuple[bytes, Location]]
    ) -> Iterator[tuple[int, RecordHeader, bytes]]:
        """Yield the slots with a record, its header and header page, checked against their place and the index."""
        place = (files.folder.name, segment_name(segment.set_id, segment.part))
        for slot, page in files.pages(segment.set_id, segment.part):
            wanted = expected.pop(slot, None)
            if wanted is None and is_blank(page):
                continue
            try:
                header = RecordHeader.unpack(page)
            except Corrupt as fault:
                if wanted is None:
                    self._unfinished += 1
                else:
                    self._bad.append(Finding(*place, slot, str(fault)))
                continue
            if (header.set_id, header.slot, header.namespace) != (segment.set_id, slot, segment.namespace):
                self._bad.append(Finding(*place, slot, "holds the record of another place"))
                continue
            if (header.extent, header.slab_bytes) != (segment.extent, segment.slab_bytes):
                self._bad.append(Finding(*place, slot, "has other layers, heads or sizes than its segment"))
                continue
            said = (header.key, header.extent, header.checksums)
            if wanted is not None and said != (wanted[0], wanted[1].extent, wanted[1].checksums):
                self._bad.append(Finding(*place, slot, "is not the record that the index refers to"))
                continue
            yield slot, header, page

    def _records_of(
        self, ring: Ring, segment: OpenSegment, place: Place, headers: Iterator[tuple[int, RecordHeader, bytes]]
    ) -> None:
        """Read and check the slabs of the records, several at a time."""
        reading: deque[_RecordRead] = deque()
        file_bytes = os.fstat(segment.fd).st_size
        for slot, header, page in headers:
            e = header.extent
            n_bytes = e.n_heads * header.slab_bytes
            offset = segment.header.slot_offset(slot) + PAGE_BYTES
            if offset + n_bytes > file_bytes:
                self._bad.append(Finding(*place, slot, CUT_OFF))
                continue
            if n_bytes > RECORD_BYTES_MAX:
                self._bad.append(Finding(*place, slot, f"says that it has {n_bytes} bytes, and is not read"))
                continue
            while reading and (len(reading) + 1) * n_bytes > IN_FLIGHT_BYTES:
                self._check(place, reading.popleft())
            buffer = AlignedBuffer(n_bytes)
            what = header.slab_bytes, e.n_heads, header.key, e.first_head, e.first_layer, header.checksums
            op = ReadOp(segment.fd, offset, buffer.address, *what)
            reading.append(_RecordRead(slot, header, page, ring.submit([op]), buffer))
        while reading:
            self._check(place, reading.popleft())

    def _check(self, place: Place, reading: _RecordRead) -> None:
        slot, header = reading.slot, reading.header
        while not reading.batch.wait(60.0):
            pass  # offline tool: a slow disk is waited for
        result = reading.batch.results()[0]
        self._records += 1
        self._n_bytes += header.extent.n_heads * header.slab_bytes
        if result.error:
            what = CUT_OFF if result.error == errno.ENODATA else os.strerror(result.error)
            self._bad.append(Finding(*place, slot, what))
        elif result.bad_slabs:
            heads = ", ".join(str(header.extent.first_head + slab) for slab in result.bad_slabs)
            self._bad.append(Finding(*place, slot, f"checksum of head {heads} does not match"))
        elif self._signed.get(place[0]):
            self._check_signature(place, reading)

    def _check_signature(self, place: Place, reading: _RecordRead) -> None:
        signer, header = self._signer, reading.header
        if signer is None or signer.fingerprint != self._signed[place[0]]:
            self._unproved += 1
            return
        size, n_heads = header.slab_bytes, header.extent.n_heads
        slabs = [reading.buffer.view[at : at + size] for at in range(0, n_heads * size, size)]
        bad = signer.bad_slabs(header.namespace, header.key, header.extent, slabs, tags_in(reading.page, n_heads))
        if bad:
            heads = ", ".join(str(header.extent.first_head + slab) for slab in bad)
            self._bad.append(Finding(*place, reading.slot, f"head {heads} was not signed with the secret"))
