"""Record reader: reads the records of chunks from segments into arena slots, checks them, and retracts records that are
bad or gone.

All methods may wait for storage or index, so they run on threads of the pool, except `begin_at_once`, `refuse_stuck`,
`note_slow` and `may_be_stale`.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

from kvtier.codecs.base import slab_bytes
from kvtier.errors import Corrupt, IndexUnavailable, KVTierError, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import part_of, tags_in
from kvtier.index import entry as entries
from kvtier.index.base import Location
from kvtier.io.base import Reader, Reads
from kvtier.io.ring import AlignedBuffer, ReadOp
from kvtier.maintenance.record_check import Rechecks
from kvtier.plan import LoadChunk
from kvtier.runtime import metrics as names
from kvtier.storage.open_segments import GONE, Name, OpenSegment
from kvtier.storage.segments import SegmentFiles, segment_name
from kvtier.storage.stuck_files import StuckFiles
from kvtier.worker.context import WorkerContext
from kvtier.worker.read_plan import Source, place_in_file, sources_of

BAD_CHECKSUM = "a checksum does not match"
UNSIGNED = "it was not signed with this engine's secret"


class FetchFailed(Exception):
    """A chunk cannot be loaded, so its request computes its tokens from there on. Not raised outside kvtier.worker."""


class SegmentGone(FetchFailed):
    """The segment file is missing, or ends before the record."""


class _Unusable(FetchFailed):
    """The index names records that this worker cannot load. records: those to retract."""

    def __init__(self, why: str, records: Sequence[Location]) -> None:
        super().__init__(why)
        self.records = records


class _NotOpen(Exception):
    """A segment is not open, and opening it may wait."""


class FileReads(NamedTuple):
    """The reads of one chunk into a slot, begun at `begun_s`: a run of slabs of each of its records and, in a signed
    namespace, then the header page of each. pages: memory of these header pages."""

    namespace: bytes
    key: bytes
    slot: int
    sources: tuple[Source, ...]
    batch: Reads
    begun_s: float
    pages: AlignedBuffer | None
    is_reread: bool  # the segments were opened for these reads


class HeldSegments:
    """Open segments of some chunks of a namespace, and the memory of their header pages, until all chunks have released
    them. is_anew: the segments are opened for these chunks alone. Thread-safe."""

    def __init__(self, namespace: bytes, n_chunks: int, *, is_anew: bool = False) -> None:
        self.namespace = namespace
        self.is_anew = is_anew
        self.segments: dict[tuple[int, int], OpenSegment] = {}
        self.pages: list[AlignedBuffer] = []
        self._n_chunks = n_chunks
        self._lock = threading.Lock()

    def release(self, n_chunks: int = 1) -> None:
        """Release the use by so many chunks."""
        with self._lock:
            self._n_chunks -= n_chunks
            if self._n_chunks:
                return
        for segment in self.segments.values():
            segment.release()


class _Prepared(NamedTuple):
    """A chunk whose reads can be submitted."""

    key: bytes
    slot: int
    sources: tuple[Source, ...]
    ops: list[ReadOp]
    pages: AlignedBuffer | None


class RecordReader:
    """Reads records for all loads of a worker. Thread-safe.

    engine: I/O engine of the reads. arena: target of the reads, in host memory if records are signed. signs: records
    are signed, so `judge` must check each chunk, even if its reads are CLEAN."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self._signer = worker.io.signer
        self.signs = self._signer is not None
        self.engine: Reader = worker.io.ring if self.signs else worker.io.reader
        self.arena = worker.host if self.signs and worker.host is not None else worker.arena
        self.rechecks = Rechecks(worker.files, worker.index, worker.metrics, worker.clock)
        self._sharing = worker.files.sharing
        self.stuck = StuckFiles(worker.timeout_s, worker.clock)
        self._slab_bytes: dict[Extent, int | None] = {}  # of records of this model

    def begin_at_once(self, chunks: Sequence[tuple[LoadChunk, int]], held: HeldSegments) -> list[FileReads] | None:
        """Submit the reads of chunks on the loop's thread, without a wait. Return None, with no read submitted, unless
        all segments are open and no fault is found; the caller then calls `begin` in the pool with the same `held`."""
        files = self._worker.files.if_known(held.namespace)
        if files is None or held.is_anew or not self.engine.never_waits or self.signs or self.stuck.has_any:
            return None

        def lease(key: bytes, location: Location, name: Name) -> OpenSegment:
            segment = files.lease_at_once(*name)
            if segment is None:
                raise _NotOpen
            held.segments[name] = segment
            return segment

        begun_s, batches = self._worker.clock(), list[Reads]()
        with suppress(Exception):  # also a bug, which must fail one load, as in the pool, and not all of the loop's
            prepared = [self._prepare(chunk, slot, held, lease) for chunk, slot in chunks]
            batches += self.engine.submit_each([each.ops for each in prepared])
        return _file_reads(prepared, batches, held, begun_s) if batches else None

    def begin(self, chunks: Sequence[tuple[LoadChunk, int]], held: HeldSegments) -> list[FileReads | Exception]:
        """Submit the reads of chunks into their slots, in order, up to the first chunk that fails. Return the reads of
        each chunk, then the fault of the one that failed; fewer if the queue is full. The segments stay open until
        `held` is released, after the end of the reads."""
        begun_s, failed, prepared = self._worker.clock(), list[FileReads | Exception](), list[_Prepared]()
        try:
            # Before all else, because it raises for another worker's namespace, whose records must not be judged here.
            files = self._worker.files(held.namespace)
            lease, may_be_stuck = partial(self._open, files, held), self.stuck.has_any
            for chunk, slot in chunks:
                if may_be_stuck:
                    self.refuse_stuck(chunk)
                prepared.append(self._prepare(chunk, slot, held, lease))
        except (FetchFailed, KVTierError, OSError) as failure:
            for location in failure.records if isinstance(failure, _Unusable) else ():
                self.retract(chunk.key, location)
            failed = [failure]
        if not prepared:
            return [*failed]
        try:
            batches = self.engine.submit_each([each.ops for each in prepared])
        except TierUnavailable as failure:
            return [failure]
        reads = _file_reads(prepared, batches, held, begun_s)
        return [*reads, *failed] if len(reads) == len(prepared) else [*reads]  # else the queue was full

    def _prepare(
        self, chunk: LoadChunk, slot: int, held: HeldSegments, lease: Callable[[bytes, Location, Name], OpenSegment]
    ) -> _Prepared:
        """Return a chunk's reads. Raises FetchFailed, and the exceptions of `lease`."""
        try:
            located, _ = entries.parse(chunk.entry)
        except Corrupt as fault:  # writers take the chunk for stored while its entry is there
            raise _Unusable(str(fault), [entries.NOWHERE]) from fault
        for location in located:
            if self._slab_bytes.get(location.extent) != location.slab_bytes:
                self._check_form(location)
        sources = sources_of(located, self._worker.share.reads, self.arena.slot_bytes)
        if sources is None:
            # For example, records of overlapping parts of the model do not fit the slot together. A complete entry is
            # retracted, because the chunk would not be saved again beside it.
            retracted = located if entries.is_complete(chunk.entry) else ()
            raise _Unusable("its records do not make up this rank's share", retracted)
        ops, opened = list[ReadOp](), list[tuple[OpenSegment, int]]()
        for source in sources:
            location = source.location
            name = location.set_id, part_of(location.set_id, location.rank, location.slot)
            segment = held.segments.get(name) or lease(chunk.key, location, name)
            offset = segment.header.offset_of(location.slot, location.extent, location.slab_bytes)
            if offset is None:
                raise _Unusable(f"{place_of(location)}: that segment has no such records", [location])
            opened.append((segment, offset))
            ops.append(self._op(chunk.key, slot, source, segment, offset))
        if self._signer is None:
            return _Prepared(chunk.key, slot, sources, ops, None)
        pages = AlignedBuffer(len(sources) * PAGE_BYTES)
        held.pages.append(pages)
        for number, (segment, offset) in enumerate(opened):
            address = pages.address + number * PAGE_BYTES
            ops.append(ReadOp(segment.fd, offset, address, PAGE_BYTES, 1, chunk.key, 0, 0, None))
        return _Prepared(chunk.key, slot, sources, ops, pages)

    def _check_form(self, location: Location) -> None:
        """Raise _Unusable if records of this extent and slab size are not of this model."""
        extent, geometry = location.extent, self._worker.geometry
        is_of_model = geometry.whole.contains(extent)
        self._slab_bytes[extent] = slab_bytes(self._worker.codec, geometry, extent) if is_of_model else None
        if self._slab_bytes[extent] != location.slab_bytes:
            what = f"slabs of {location.slab_bytes} bytes" if is_of_model else str(extent)
            why = f"{place_of(location)}: {what}: not of this {'codec' if is_of_model else 'model'}"
            raise _Unusable(why, [location])

    def refuse_stuck(self, chunk: LoadChunk) -> None:
        """Raise FetchFailed if a segment of the chunk does not answer."""
        why = self.stuck.why_not(_names(entries.locations_of(chunk.entry))) if self.stuck.has_any else ""
        if why:
            raise FetchFailed(why)

    def note_slow(self, reads: FileReads) -> None:
        """Note that reads have not ended by their load's deadline."""
        self.stuck.note_read(_names(source.location for source in reads.sources), reads.begun_s)

    def judge(self, reads: FileReads) -> bool:
        """Return True if ended reads are good; False if they may be stale and must be repeated with segments opened
        anew. Raises FetchFailed."""
        failed = self._first_bad(reads)
        if failed is None:
            return True
        location, error, what = failed
        if not reads.is_reread and error in (0, errno.ENODATA, *GONE) and self.may_be_stale(error):
            return False
        if error not in (0, errno.ENODATA):
            raise FetchFailed(f"{place_of(location)}: {errno.errorcode.get(error, error)}")
        self.reject(reads.namespace, reads.key, [location], what, error)

    def reject(
        self, namespace: bytes, key: bytes, bad: Sequence[Location], what: str = BAD_CHECKSUM, error: int = 0
    ) -> NoReturn:
        """Retract bad records. Queue them for a later check instead if they may be stale, even with segments opened
        anew. Raises FetchFailed."""
        where = place_of(bad[0])
        if self.may_be_stale(error) and what != UNSIGNED:
            for location in bad:
                self.rechecks.add(namespace, key, location)
            raise FetchFailed(f"{where}: {what}, also after a new open; it stays in the index for now")
        for location in bad:
            self.retract(key, location)
        # Wrong bytes are a fault of the storage; a truncated file is not.
        self._worker.metrics.add(names.GONE_CHUNKS if error else names.CHECKSUM_FAILURES)
        raise (SegmentGone if error else FetchFailed)(f"{where}: {what}")

    def may_be_stale(self, error: int = 0) -> bool:
        """Return True if a read that failed with `error` (0: wrong bytes) may succeed later on this file system."""
        return self._sharing.may_be_away if error else self._sharing.may_be_stale

    def retract_gone(self, namespace: bytes, chunks: Sequence[LoadChunk]) -> None:
        """Retract the chunks behind a SegmentGone whose segments are gone too, or end before the chunk's records.

        A load ends at the first such chunk. Without this, each later load of a long prompt would find only the next
        one. Retract nothing if the folder is missing too, as with a mount that is away. Raises TierUnavailable,
        Corrupt, OSError."""
        files = self._worker.files(namespace)
        if not files.is_there():
            return
        if self._sharing.may_be_away:
            chunks = self._of_removed_sets(chunks)
        there: dict[tuple[int, int], int] = {}
        for chunk in chunks:
            for location in entries.locations_of(chunk.entry):
                segment = (location.set_id, location.part)
                if segment not in there:
                    there[segment] = files.file_bytes(*segment)
                if there[segment] < place_in_file(location).stop:
                    self.retract(chunk.key, location)

    def _of_removed_sets(self, chunks: Sequence[LoadChunk]) -> list[LoadChunk]:
        """Return the chunks whose sets are all gone from the index."""
        sets_of = {chunk.key: {at.set_id for at in entries.locations_of(chunk.entry)} for chunk in chunks}
        known = self._known_sets(set().union(*sets_of.values()))
        return [chunk for chunk in chunks if not sets_of[chunk.key] & known]

    def _known_sets(self, set_ids: set[int]) -> set[int]:
        """Return the sets that the index lists; all of `set_ids` if it does not answer."""
        try:
            return {info.set_id for info in self._worker.index.some_sets(set_ids)}
        except IndexUnavailable:
            self._worker.metrics.add(names.INDEX_ERRORS)
            return set_ids

    def retract(self, key: bytes, location: Location) -> None:
        """Remove a bad or missing record from the index, by compare-and-delete: never another writer's record."""
        try:
            self._worker.index.retract(key, location)
        except IndexUnavailable:
            self._worker.metrics.add(names.INDEX_ERRORS)

    def _open(self, files: SegmentFiles, held: HeldSegments, key: bytes, location: Location, name: Name) -> OpenSegment:
        with self.stuck.opening(name):
            segment = self._lease(files, key, location, name, held)
        if segment is None:
            file = segment_name(*name)
            if self._sharing.may_be_away and self._known_sets({location.set_id}):
                self._worker.metrics.add(names.AWAY_CHUNKS)
                raise FetchFailed(f"{file}: it is missing, and the index has its set; is part of the storage down?")
            self.retract(key, location)
            self._worker.metrics.add(names.GONE_CHUNKS)
            raise SegmentGone(f"{file}: it is gone")
        held.segments[name] = segment
        if held.is_anew:
            self._worker.io.reopen(segment.fd)
        return segment

    def _lease(
        self, files: SegmentFiles, key: bytes, location: Location, name: Name, held: HeldSegments
    ) -> OpenSegment | None:
        """Raises Corrupt, TierUnavailable, FetchFailed."""
        stale = (Corrupt,) if self.may_be_stale() else ()
        try:
            if not held.is_anew:
                with suppress(*stale):
                    return files.lease(*name)
            return files.lease_anew(*name)
        except Corrupt as fault:
            if not stale:
                self.retract(key, location)
                raise
            self.rechecks.add(held.namespace, key, location)
            raise FetchFailed(f"{fault}; it stays in the index, for the read may have been too early") from fault

    def _op(self, key: bytes, slot: int, source: Source, segment: OpenSegment, offset: int) -> ReadOp:
        """offset: of the record in the segment."""
        arena, (_, first_slab, n_bytes_a_slab, _, slot_offset, patch) = self.arena, source.cut
        # A device verifies its bytes itself, so that checksums cover the transfer to it too.
        return ReadOp(
            segment.fd,
            offset + PAGE_BYTES + first_slab * n_bytes_a_slab,
            arena.address(slot) + slot_offset,
            n_bytes_a_slab,
            patch.n_heads,
            key,
            source.cut.wanted.first_head,
            source.location.extent.first_layer,
            None if arena.is_device else source.checksums,
            arena.is_device,
        )

    def _first_bad(self, reads: FileReads) -> tuple[Location, int, str] | None:
        """Return the record, the errno (0: wrong bytes) and the fault of the first bad read; None if all are good."""
        sources = reads.sources
        for number, result in enumerate(reads.batch.results()):
            if not result.ok:
                what = "it ends too soon" if result.error else BAD_CHECKSUM
                return sources[number % len(sources)].location, result.error, what
        for number, source in enumerate(sources if self._signer is not None else ()):
            if not self._is_ours(reads, number, source):
                return source.location, 0, UNSIGNED
        return None

    def _is_ours(self, reads: FileReads, number: int, source: Source) -> bool:
        """Return True if these slabs were signed with the secret for this place in model and prompt."""
        assert self._signer is not None and reads.pages is not None
        e, wanted, first_slab = source.location.extent, source.cut.wanted, source.cut.first_slab
        page = bytes(reads.pages.view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])
        tags = tags_in(page, e.n_heads)[first_slab : first_slab + wanted.n_heads]
        extent = Extent(e.first_layer, e.n_layers, wanted.first_head, wanted.n_heads)
        slabs = self.arena.slabs(reads.slot, source.cut.slot_offset, wanted.n_heads, source.cut.slab_bytes)
        return not self._signer.bad_slabs(reads.namespace, reads.key, extent, slabs.numpy(), tags)


def _file_reads(
    prepared: Sequence[_Prepared], batches: Sequence[Reads], held: HeldSegments, begun_s: float
) -> list[FileReads]:
    """Return the reads of the first chunks: as many as there are batches, for which the queue had room."""
    reads = []
    for (key, slot, sources, _, pages), batch in zip(prepared, batches, strict=False):
        reads.append(FileReads(held.namespace, key, slot, sources, batch, begun_s, pages, held.is_anew))
    return reads


def _names(locations: Iterable[Location]) -> set[tuple[int, int]]:
    return {(location.set_id, location.part) for location in locations}


def place_of(location: Location) -> str:
    """Name a record's place, for messages."""
    return f"slot {location.slot} of {segment_name(location.set_id, location.part)}"
