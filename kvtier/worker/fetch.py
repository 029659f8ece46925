"""Bringing one chunk into an arena slot: found there, awaited from another request's read, copied up from the host
arena, or read from segments."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial

from kvtier.arena.admission import Admission
from kvtier.errors import Corrupt
from kvtier.format.geometry import PAGE_BYTES
from kvtier.kernels.paged import SlabRun
from kvtier.maintenance.record_check import Rechecks
from kvtier.plan import LoadChunk
from kvtier.runtime import metrics as names
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.fetch_files import FetchFailed, FileReader, FileReads, place_of
from kvtier.worker.keep import HostKeeper
from kvtier.worker.read_plan import Source, end_of

SWEEP_INTERVAL_S = 0.01
"""How often who waits for a slot looks whether abandoned reads have returned theirs."""


class Origin(Enum):
    """Where a fetch's bytes come from, which decides what its slot and its other holdings mean."""

    NONE = 0  # no slot yet
    ARENA = 1  # the slot is leased: others may use it too
    HOST = 2  # the slot is ours; copied from a leased slot of the host arena
    FILES = 3  # the slot is ours; read from open segments (what is signed, into `landing`, and then as from the host)


@dataclass(slots=True)
class Fetch:
    """One chunk on its way into a slot, or `awaited` from another request.

    claim: set when nobody need wait for this fetch any more; who fills a slot has one, and ends its own alone.
    held: what must stay until the bytes have arrived: open segments, or the lease of a host slot.
    landing: slot of the host arena that signed bytes are read into and looked at, before they go up; -1: none.
    copied: when a copy from the host arena is done. is_verified: the checksums were seen to match; bad: where not.
    was_reread: read again already, because what came first may have been stale.
    """

    chunk: LoadChunk
    slot: int = -1
    landing: int = -1
    sources: tuple[Source, ...] = ()
    origin: Origin = Origin.NONE
    claim: threading.Event | None = None
    reads: FileReads | None = None
    held: ExitStack | None = None
    copied: Mark = None
    awaited: threading.Event | None = None
    is_verified: bool = False
    was_reread: bool = False
    bad: tuple[Source, ...] = ()


class Fetcher:
    """Shared by all loads of a worker; thread-safe."""

    def __init__(self, worker: WorkerContext, admission: Admission, keeper: HostKeeper | None) -> None:
        self._worker = worker
        self._admission = admission
        self._keeper = keeper
        self._log = RepeatedLog(worker.clock)
        self._files = FileReader(worker)
        self._landing = None if self._files.arena is worker.arena else self._files.arena
        self._lock = threading.Lock()
        self._reading: dict[bytes, threading.Event] = {}
        self._wanted_twice: set[bytes] = set()

    def begin(self, namespace: bytes, chunk: LoadChunk, slot_timeout_s: float) -> Fetch | None:
        """Starts bringing a chunk; None when no slot came free for it in time. Raises FetchFailed, TierUnavailable."""
        fetch = Fetch(chunk)
        return fetch if self._begin(namespace, fetch, slot_timeout_s) else None

    def complete(self, namespace: bytes, fetch: Fetch, deadline_s: float, slot_timeout_s: float) -> bool:
        """Waits until the chunk's bytes are in its slot, or on their way there behind `copied`.

        False: it must be read after all, and no slot came free for that in `slot_timeout_s`. May be called again.
        Raises FetchFailed, TierUnavailable.
        """
        while fetch.slot < 0:
            if fetch.awaited is not None and not fetch.awaited.wait(self._left(deadline_s)):
                raise FetchFailed("another request's read of it takes too long")
            fetch.awaited = None
            if not self._begin(namespace, fetch, slot_timeout_s):
                return False
        if fetch.reads is not None:
            while not self._files.wait(fetch.reads, deadline_s):
                self._read_anew(namespace, fetch)
            self._end_reads(fetch)
        return True

    def is_here(self, fetch: Fetch) -> bool:
        """Whether the bytes have arrived, all of them: else `complete` waits for them, or says what failed. Ends its
        reads when they have: counts them, and begins the copy up of a signed chunk."""
        if fetch.slot < 0 or (fetch.copied is not None and not self._worker.order.is_done(fetch.copied)):
            return False
        if fetch.reads is not None and self._files.have_arrived(fetch.reads):
            self._end_reads(fetch)
        return fetch.reads is None and (fetch.copied is None or self._worker.order.is_done(fetch.copied))

    def check(self, fetches: Sequence[Fetch]) -> int:
        """How many of these complete fetches, from the first on, hold what was saved (I2)."""
        unverified = [fetch for fetch in fetches if not fetch.is_verified and not fetch.bad]
        runs = [self.slab_run(fetch, source) for fetch in unverified for source in fetch.sources]
        if runs:
            with self._worker.order.moving(*(fetch.copied for fetch in unverified if fetch.copied is not None)):
                found = iter(self._worker.sums(runs))
            for fetch in unverified:
                fetch.bad = tuple(source for source in fetch.sources if next(found) != source.checksums)
                fetch.is_verified = not fetch.bad
        return next((n for n, fetch in enumerate(fetches) if not fetch.is_verified), len(fetches))

    def slab_run(self, fetch: Fetch, source: Source) -> SlabRun:
        """Where this part of a chunk lies in the fetch's slot."""
        slabs = self._worker.arena.slabs(fetch.slot, source.slot_offset, source.wanted.n_heads, source.slab_bytes)
        return SlabRun(slabs, fetch.chunk.key, source.wanted.first_head, source.location.extent.first_layer)

    def reject(self, namespace: bytes, fetch: Fetch) -> None:
        """The bytes are bad. A copy is forgotten, to be read again; raises FetchFailed where they came from files."""
        bad, fetch.bad = fetch.bad, ()
        if fetch.origin is Origin.FILES and self._files.may_be_stale():
            if not fetch.was_reread:
                self._read_anew(namespace, fetch)
                return
            for source in bad:
                self._files.rechecks.add(namespace, fetch.chunk.key, source.location)
            raise FetchFailed(f"{place_of(bad[0].location)}: a checksum does not match, also when it is opened again")
        self._worker.metrics.add(names.CHECKSUM_FAILURES)
        if fetch.origin is Origin.FILES:
            for source in bad:
                self._files.retract(fetch.chunk.key, source.location)
            raise FetchFailed(f"{place_of(bad[0].location)}: a checksum does not match")
        self._log.line(logging.ERROR, "bad", "chunk %s went bad in memory; it is read again", fetch.chunk.key.hex())
        if fetch.origin is Origin.ARENA:
            self._worker.arena.drop(fetch.chunk.key)
            self._worker.arena.release(fetch.slot, fetch.chunk.key)
            fetch.slot, fetch.origin = -1, Origin.NONE
            return
        assert self._worker.host is not None and fetch.held is not None
        self._worker.host.drop(fetch.chunk.key)
        fetch.held.close()
        fetch.copied = None
        self._fill(namespace, fetch)

    def keep_or_free(self, fetch: Fetch) -> None:
        """After the chunk was used: its slot is free, or caches it for others."""
        key, slot, fetch.slot = fetch.chunk.key, fetch.slot, -1
        if fetch.origin is Origin.ARENA:
            self._worker.arena.release(slot, key)
            return
        with self._lock:
            is_wanted = key in self._wanted_twice
        stays = self._admission.keeps_loaded(key) or is_wanted
        if stays:
            self._worker.arena.commit(slot, key, fetch.sources)
        if self._keeper is not None and fetch.origin is Origin.FILES and self._keeper.wants(key):
            self._keep_below(self._keeper, slot, key, fetch.sources, stays)
        elif not stays:
            self._worker.arena.discard(slot)
        self._end_claim(fetch)
        assert fetch.held is not None
        fetch.held.close()

    def _keep_below(
        self, keeper: HostKeeper, slot: int, key: bytes, sources: tuple[Source, ...], is_cached: bool
    ) -> None:
        """Has the chunk copied down too, out of its slot or, if it is cached by now, out of the one that holds it."""
        arena = self._worker.arena
        if not is_cached:
            keeper.keep(slot, key, sources, partial(arena.discard, slot))
            return
        cached = arena.lease(key)
        if cached is not None:  # else it was pushed out already
            keeper.keep(cached[0], key, cached[1], partial(arena.release, cached[0], key))

    @property
    def rechecks(self) -> Rechecks:
        return self._files.rechecks

    def retract_gone(self, namespace: bytes, chunks: Sequence[LoadChunk]) -> None:
        """See FileReader."""
        self._files.retract_gone(namespace, chunks)

    def abandon(self, fetch: Fetch) -> None:
        """Lets go of a chunk that is not used. Reads that are under way keep their slot until they return."""
        slot, fetch.slot = fetch.slot, -1
        if slot < 0:
            return
        if fetch.origin is Origin.ARENA:
            self._worker.arena.release(slot, fetch.chunk.key)
            return
        self._end_claim(fetch)
        release = ExitStack()
        release.callback(self._worker.arena.discard, slot)
        landing, fetch.landing = fetch.landing, -1
        if self._landing is not None and landing >= 0:
            release.callback(self._landing.discard, landing)
        if fetch.held is not None:
            release.push(fetch.held)
        if fetch.copied is not None:
            self._worker.order.wait(fetch.copied)
        if fetch.reads is None or fetch.reads.batch.wait(0):
            release.close()
        else:
            self._worker.quarantine.add(fetch.reads.batch, release.close)

    def _begin(self, namespace: bytes, fetch: Fetch, slot_timeout_s: float) -> bool:
        """Takes the chunk from the arena, joins another's read of it, or starts one; False: no slot for that."""
        if self._join(fetch):
            return True
        slots = self._reserve(slot_timeout_s)
        if slots is None:
            return False
        if self._join(fetch, slots):  # somebody may have begun while we waited for the slot
            self._worker.arena.discard(slots[0])
            if self._landing is not None:
                self._landing.discard(slots[1])
            return True
        self._fill(namespace, fetch)
        return True

    def _join(self, fetch: Fetch, slots: tuple[int, int] | None = None) -> bool:
        """Whether the chunk is in the arena, or on its way there by another; else it is claimed for `slots`."""
        key = fetch.chunk.key
        cached = self._worker.arena.lease(key)
        if cached is not None:
            self._worker.metrics.add(names.ARENA_HIT_CHUNKS)
            (fetch.slot, fetch.sources), fetch.origin = cached, Origin.ARENA
            return True
        if slots is None and key in self._reading:
            self._files.refuse_stuck(fetch.chunk)  # another's read of it would be waited for in vain
        with self._lock:
            fetch.awaited = self._reading.get(key)
            if fetch.awaited is not None:
                self._wanted_twice.add(key)
                return True
            if slots is not None:
                fetch.slot, fetch.landing = slots
                fetch.claim = self._reading[key] = threading.Event()
        return False

    def _reserve(self, timeout_s: float) -> tuple[int, int] | None:
        """A slot, also one whose abandoned reads have returned meanwhile, and one to land in below it (-1 where none is
        needed)."""
        deadline_s = self._worker.clock() + timeout_s
        while (slots := self._try_to_reserve(min(SWEEP_INTERVAL_S, self._left(deadline_s)))) is None:
            self._worker.quarantine.sweep()
            if self._worker.clock() >= deadline_s:
                return self._try_to_reserve(0.0)
        return slots

    def _try_to_reserve(self, timeout_s: float) -> tuple[int, int] | None:
        """Both or none: who waits for long holds nothing."""
        slot = self._worker.arena.reserve(timeout_s)
        if slot is None or self._landing is None:
            return None if slot is None else (slot, -1)
        landing = self._landing.reserve(timeout_s)
        if landing is None:
            self._worker.arena.discard(slot)
            return None
        return slot, landing

    def _fill(self, namespace: bytes, fetch: Fetch) -> None:
        """Starts to fill the slot that was reserved; gives it back when that fails."""
        try:
            if self._copy_up(fetch):
                self._worker.metrics.add(names.HOST_HIT_CHUNKS)
                self._leave_landing(fetch)
            else:
                self._read(namespace, fetch)
        except Corrupt as fault:
            self.abandon(fetch)
            raise FetchFailed(str(fault)) from fault
        except BaseException:
            self.abandon(fetch)
            raise

    def _copy_up(self, fetch: Fetch) -> bool:
        """From the host arena, if the chunk is there."""
        host = self._worker.host
        cached = None if host is None else host.lease(fetch.chunk.key)
        if host is None or cached is None:
            return False
        self._copy_from(host, fetch, *cached)
        return True

    def _copy_from(self, host: ChunkArena, fetch: Fetch, host_slot: int, sources: tuple[Source, ...]) -> None:
        """Out of a slot that is leased; the lease ends with what the fetch holds."""
        fetch.sources, fetch.origin, fetch.held = sources, Origin.HOST, ExitStack()
        fetch.held.callback(host.release, host_slot, fetch.chunk.key)
        n_bytes = end_of(fetch.sources) - PAGE_BYTES
        fetch.copied = self._worker.order.begin_copy(
            self._worker.arena.record(fetch.slot, n_bytes), host.record(host_slot, n_bytes)
        )

    def _read(self, namespace: bytes, fetch: Fetch) -> None:
        fetch.origin, fetch.held = Origin.FILES, ExitStack()
        slot = fetch.slot
        if self._landing is not None:
            if fetch.landing < 0:  # it is read again
                fetch.landing = -1 if (found := self._landing.reserve()) is None else found
            if fetch.landing < 0:
                raise FetchFailed("no slot in the host arena is free")
            slot = fetch.landing
        fetch.reads = self._files.begin(namespace, fetch.chunk, slot, fetch.held)
        fetch.sources = fetch.reads.sources

    def _read_anew(self, namespace: bytes, fetch: Fetch) -> None:
        """Read the chunk once more into its slot, through new descriptors: what came may be stale."""
        assert fetch.held is not None
        self._worker.metrics.add(names.REREAD_CHUNKS)
        fetch.was_reread = True
        slot = fetch.landing if self._landing is not None and fetch.landing >= 0 else fetch.slot
        try:
            fetch.reads = self._files.begin(namespace, fetch.chunk, slot, fetch.held, anew=True)
        except Corrupt as fault:
            raise FetchFailed(str(fault)) from fault

    def _end_reads(self, fetch: Fetch) -> None:
        """All of the chunk has arrived."""
        fetch.reads, fetch.is_verified = None, not self._worker.arena.is_device
        n_bytes = sum(source.n_bytes for source in fetch.sources)
        self._worker.metrics.add(names.FILE_READ_BYTES, n_bytes)
        if self._landing is None and self._worker.io.reader is not self._worker.io.ring:
            self._worker.metrics.add(names.KVIKIO_READ_BYTES, n_bytes)
        if self._landing is not None:
            self._rise(self._landing, fetch)

    def _rise(self, landing: ChunkArena, fetch: Fetch) -> None:
        """From the slot that it was read into and found good in, as what the host arena had already; it stays there
        only if it is wanted."""
        key, slot, fetch.landing = fetch.chunk.key, fetch.landing, -1
        assert fetch.held is not None
        fetch.held.close()
        is_new, leased, sources = landing.commit_leased(slot, key, fetch.sources)
        self._copy_from(landing, fetch, leased, sources)
        if is_new and (self._keeper is None or not self._keeper.wants(key)):
            landing.drop(key)

    def _leave_landing(self, fetch: Fetch) -> None:
        if self._landing is not None and fetch.landing >= 0:
            self._landing.discard(fetch.landing)
            fetch.landing = -1

    def _end_claim(self, fetch: Fetch) -> None:
        """Who waited for this fetch finds the chunk in the arena now, or claims it."""
        claim, fetch.claim = fetch.claim, None
        if claim is None:
            return
        with self._lock:
            self._wanted_twice.discard(fetch.chunk.key)
            del self._reading[fetch.chunk.key]
        claim.set()

    def _left(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._worker.clock())
