"""Bringing one chunk into an arena slot: found there, awaited from another request's read, or read from segments."""

from __future__ import annotations

import errno
import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier import metrics as names
from kvtier.admission import Admission
from kvtier.errors import Corrupt, IndexUnavailable
from kvtier.index import entry as entries
from kvtier.index.base import Location
from kvtier.io import native
from kvtier.io.ring import Batch, ReadOp
from kvtier.plan import LoadChunk
from kvtier.sources import Source, sources_of
from kvtier.worker import Worker

log = logging.getLogger("kvtier")


SWEEP_INTERVAL_S = 0.01
"""How often who waits for a slot looks whether abandoned reads have returned theirs."""


class FetchFailed(Exception):
    """This chunk can't be had; the request is recomputed from here on. Never leaves kvtier.loads."""


@dataclass(slots=True)
class Fetch:
    """One chunk on its way into a slot of ours (`batch`), found in the arena, or `awaited` from another request.

    slot: -1 while it has none. begun_s: when its reads were submitted.
    """

    chunk: LoadChunk
    slot: int = -1
    sources: tuple[Source, ...] = ()
    batch: Batch | None = None
    files: ExitStack | None = None
    awaited: threading.Event | None = None
    begun_s: float = 0.0


class Fetcher:
    """Shared by all loads of a worker; thread-safe."""

    def __init__(self, worker: Worker, admission: Admission) -> None:
        self._worker = worker
        self._admission = admission
        self._lock = threading.Lock()
        self._reading: dict[bytes, threading.Event] = {}
        self._wanted_twice: set[bytes] = set()
        self._stalled_until_s = 0.0

    def begin(self, namespace: bytes, chunk: LoadChunk, slot_timeout_s: float) -> Fetch | None:
        """Starts bringing a chunk; None when no slot came free for it in time. Raises FetchFailed."""
        found = self._found(chunk)
        if found is not None:
            return found
        slot = self._reserve(slot_timeout_s)
        if slot is None:
            return None
        found = self._found(chunk, claim=True)  # somebody may have begun while we waited for the slot
        if found is not None:
            self._worker.arena.discard(slot)
            return found
        fetch = Fetch(chunk, slot)
        self._submit(namespace, fetch)
        return fetch

    def complete(self, namespace: bytes, fetch: Fetch, deadline_s: float, slot_timeout_s: float) -> bool:
        """Waits until the chunk lies verified in its slot. Raises FetchFailed.

        False: it must be read after all, and no slot came free for that in `slot_timeout_s`. May be called again.
        """
        if fetch.awaited is not None:
            if not fetch.awaited.wait(self._left(deadline_s)):
                raise FetchFailed("another request's read of it takes too long")
            fetch.awaited = None
            cached = self._worker.arena.lease(fetch.chunk.key)
            if cached is not None:
                fetch.slot, fetch.sources = cached
        if fetch.slot >= 0 and fetch.files is None and not self._cached_is_good(fetch):
            self._worker.arena.drop(fetch.chunk.key)
            self._worker.arena.release(fetch.slot, fetch.chunk.key)
            fetch.slot = -1
        if fetch.slot < 0:
            slot = self._reserve(slot_timeout_s)
            if slot is None:
                return False
            fetch.slot = slot
            self._submit(namespace, fetch)
        if fetch.batch is not None:
            self._await_reads(fetch, deadline_s)
        return True

    def keep_or_free(self, fetch: Fetch) -> None:
        """After the chunk was used: its slot is free, or caches it for others."""
        key = fetch.chunk.key
        if fetch.files is None:
            self._worker.arena.release(fetch.slot, key)
        else:
            fetch.files.close()
            with self._lock:
                is_wanted = key in self._wanted_twice
            if self._admission.keeps_loaded(key) or is_wanted:
                self._worker.arena.commit(fetch.slot, key, fetch.sources)
            else:
                self._worker.arena.discard(fetch.slot)
            self._reading_ended(key)
        fetch.slot = -1

    def abandon(self, fetch: Fetch) -> None:
        """Lets go of a chunk that is not used. Reads that are under way keep their slot until they return."""
        slot, fetch.slot = fetch.slot, -1
        if slot < 0:
            return
        if fetch.files is None:
            self._worker.arena.release(slot, fetch.chunk.key)
            return
        self._reading_ended(fetch.chunk.key)
        release = ExitStack()
        release.callback(self._worker.arena.discard, slot)
        release.push(fetch.files)
        if fetch.batch is None or fetch.batch.wait(0):
            release.close()
        else:
            self._worker.quarantine.add(fetch.batch, release.close)

    def _found(self, chunk: LoadChunk, *, claim: bool = False) -> Fetch | None:
        """The chunk in the arena, or another's read of it; None when it is ours to read (`claim`ed as such)."""
        cached = self._worker.arena.lease(chunk.key)
        if cached is not None:
            self._worker.metrics.add(names.HOST_HIT_CHUNKS)
            return Fetch(chunk, *cached)
        with self._lock:
            reading = self._reading.get(chunk.key)
            if reading is not None:
                self._wanted_twice.add(chunk.key)
                return Fetch(chunk, awaited=reading)
            if claim:
                self._reading[chunk.key] = threading.Event()
        return None

    def _reserve(self, timeout_s: float) -> int | None:
        """A slot, also one whose abandoned reads have returned meanwhile."""
        deadline_s = self._worker.clock() + timeout_s
        while (slot := self._worker.arena.reserve(min(SWEEP_INTERVAL_S, self._left(deadline_s)))) is None:
            self._worker.quarantine.sweep()
            if self._worker.clock() >= deadline_s:
                return self._worker.arena.reserve()
        return slot

    def _submit(self, namespace: bytes, fetch: Fetch) -> None:
        """Sends the reads of a chunk whose slot is reserved; gives the slot back when that fails."""
        fetch.files = ExitStack()
        fetch.begun_s = self._worker.clock()
        try:
            if fetch.begun_s < self._stalled_until_s:
                raise FetchFailed("the storage did not answer lately")
            located = entries.unpack(fetch.chunk.entry)
            sources = sources_of(located, self._worker.share.reads, self._worker.arena.slot_bytes)
            if sources is None:
                raise FetchFailed("its records do not make up this rank's share")
            fetch.sources = sources
            ops = [self._read_op(namespace, fetch, fetch.files, source) for source in sources]
            fetch.batch = self._worker.ring.submit(ops)
        except Corrupt as fault:
            self.abandon(fetch)
            raise FetchFailed(str(fault)) from fault
        except BaseException:
            self.abandon(fetch)
            raise

    def _read_op(self, namespace: bytes, fetch: Fetch, files: ExitStack, source: Source) -> ReadOp:
        location = source.location
        try:
            segment = self._worker.files(namespace).lease(location.set_id, location.rank)
        except Corrupt:
            self._retract(fetch.chunk.key, location)
            raise
        if segment is None:
            self._retract(fetch.chunk.key, location)
            raise FetchFailed(f"segment {location.set_id:016x}-{location.rank:04d} is gone")
        files.callback(segment.release)
        return ReadOp(segment.fd, source.file_offset, self._worker.arena.address(fetch.slot) + source.slot_offset,
                      source.slab_bytes, source.wanted.n_heads, fetch.chunk.key, source.wanted.first_head,
                      location.extent.first_layer, source.checksums)  # fmt: skip

    def _cached_is_good(self, fetch: Fetch) -> bool:
        for source in fetch.sources:
            address = self._worker.arena.address(fetch.slot) + source.slot_offset
            found = native.slab_checksums(address, source.slab_bytes, source.wanted.n_heads, fetch.chunk.key,
                                          source.wanted.first_head, source.location.extent.first_layer)  # fmt: skip
            if found != source.checksums:
                self._worker.metrics.add(names.CHECKSUM_FAILURES)
                log.error("chunk %s went bad in host memory", fetch.chunk.key.hex())
                return False
        return True

    def _await_reads(self, fetch: Fetch, deadline_s: float) -> None:
        assert fetch.batch is not None
        if not fetch.batch.wait(self._left(deadline_s)):
            self._note_stall(fetch)
            raise FetchFailed("the storage does not answer in time")
        for source, result in zip(fetch.sources, fetch.batch.results(), strict=True):
            if result.ok:
                continue
            location = source.location
            where = f"slot {location.slot} of segment {location.set_id:016x}-{location.rank:04d}"
            if result.error not in (0, errno.ENODATA):
                raise FetchFailed(f"{where}: {errno.errorcode.get(result.error, result.error)}")
            self._retract(fetch.chunk.key, location)
            self._worker.metrics.add(names.CHECKSUM_FAILURES)
            raise FetchFailed(f"{where}: " + ("it ends too soon" if result.error else "a checksum does not match"))

    def _note_stall(self, fetch: Fetch) -> None:
        """Reads that had half of a load's whole time and did not end: nothing is read for a while. A load that was
        late for other reasons (a long queue) says nothing about the storage."""
        now = self._worker.clock()
        if now - fetch.begun_s >= self._worker.timeout_s / 2:
            self._stalled_until_s = now + self._worker.timeout_s

    def _reading_ended(self, key: bytes) -> None:
        with self._lock:
            self._wanted_twice.discard(key)
            event = self._reading.pop(key, None)
        if event is not None:
            event.set()

    def _retract(self, key: bytes, location: Location) -> None:
        """What is bad or gone is not offered again (compare-and-delete: never another writer's record)."""
        try:
            self._worker.index.retract(key, location)
        except IndexUnavailable:
            self._worker.metrics.add(names.INDEX_ERRORS)

    def _left(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._worker.clock())
