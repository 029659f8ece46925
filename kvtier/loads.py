"""The load walk on a worker: from the nearest tier through an arena slot, verified, into the engine's blocks.

Runs on background threads. A plan is answered exactly once, within its deadline, whatever happens (I10); bytes that
fail their checksum never reach the engine (I2); from the first bad chunk on, the blocks are reported as failed.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier import metrics as names
from kvtier.admission import Admission
from kvtier.errors import Corrupt, IndexUnavailable, TierUnavailable
from kvtier.index import entry as entries
from kvtier.index.base import Location
from kvtier.io import native
from kvtier.io.ring import Batch, ReadOp
from kvtier.jobs import Jobs
from kvtier.plan import LoadChunk, LoadDone, LoadPlan
from kvtier.sources import Source, sources_of
from kvtier.worker import Worker

log = logging.getLogger("kvtier")

CHUNKS_AHEAD = 8
"""Chunks of one request read ahead of the one being scattered; more only takes slots from other requests."""


@dataclass(slots=True)
class _Fetch:
    """One chunk on its way into a slot of ours (`batch`), found in the arena, or `awaited` from another request."""

    chunk: LoadChunk
    slot: int = -1
    sources: tuple[Source, ...] = ()
    batch: Batch | None = None
    files: ExitStack | None = None
    awaited: threading.Event | None = None


@dataclass(slots=True)
class _Progress:
    n_chunks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0


class _Failed(Exception):
    """This chunk can't be had; the request is recomputed from here on. Never leaves this module."""


class Loader:
    """See the module."""

    def __init__(self, worker: Worker, jobs: Jobs, admission: Admission) -> None:
        self._worker = worker
        self._jobs = jobs
        self._admission = admission
        self._lock = threading.Condition()
        self._done: list[LoadDone] = []
        self._reading: dict[bytes, threading.Event] = {}
        self._wanted_twice: set[bytes] = set()
        self._stalled_until_s = 0.0

    def load(self, plan: LoadPlan) -> None:
        """Queues a plan. Its answer comes with `take_done`, also when the queue is full."""
        deadline_s = self._worker.clock() + self._worker.timeout_s
        if not self._jobs.submit(lambda: self._run(plan, deadline_s)):
            self._answer(plan, _Progress())

    def take_done(self, timeout_s: float) -> list[LoadDone]:
        """Answers since the last take; waits for one at most `timeout_s`."""
        with self._lock:
            if not self._done and timeout_s > 0:
                self._lock.wait(timeout_s)
            done, self._done = self._done, []
        return done

    def _run(self, plan: LoadPlan, deadline_s: float) -> None:
        started = time.perf_counter()
        self._worker.quarantine.sweep()
        progress = _Progress()
        try:
            if self._worker.clock() >= self._stalled_until_s:
                self._load_chunks(plan, deadline_s, progress)
        finally:
            self._answer(plan, progress)
        self._worker.metrics.add(names.LOAD_REQUESTS)
        self._worker.metrics.add(names.LOAD_TOKENS, progress.n_tokens)
        self._worker.metrics.add(names.LOAD_BYTES, progress.n_bytes)
        self._worker.metrics.add(names.LOAD_SECONDS, time.perf_counter() - started)

    def _answer(self, plan: LoadPlan, progress: _Progress) -> None:
        failed: set[int] = set()
        for chunk in plan.chunks[progress.n_chunks :]:
            failed.update(chunk.block_ids[self._first_block(chunk) :])
        if failed:
            self._worker.metrics.add(names.LOAD_FAILURES)
        with self._lock:
            self._done.append(LoadDone(plan.request_id, frozenset(failed)))
            self._lock.notify_all()

    def _load_chunks(self, plan: LoadPlan, deadline_s: float, progress: _Progress) -> None:
        """Keeps up to CHUNKS_AHEAD chunks coming while it scatters the oldest."""
        coming: deque[_Fetch] = deque()
        waiting = deque(plan.chunks)
        try:
            while waiting or coming:
                while waiting and len(coming) < CHUNKS_AHEAD:
                    # With nothing coming that would free a slot, one is waited for.
                    fetch = self._begin(plan, waiting[0], 0.0 if coming else self._left(deadline_s))
                    if fetch is None:
                        break
                    coming.append(fetch)
                    waiting.popleft()
                if not coming:
                    raise _Failed("no slot in the arena came free in time")
                self._finish(plan, coming[0], deadline_s)
                fetch = coming.popleft()
                progress.n_chunks += 1
                progress.n_tokens += self._worker.geometry.chunk_tokens - fetch.chunk.first_token
                progress.n_bytes += sum(source.n_bytes for source in fetch.sources)
        except (_Failed, TierUnavailable) as failure:
            log.warning("request %s: recomputed from chunk %d of its load on: %s",
                        plan.request_id, progress.n_chunks, failure)  # fmt: skip
        finally:
            for fetch in coming:
                self._abandon(fetch)

    def _begin(self, plan: LoadPlan, chunk: LoadChunk, slot_timeout_s: float) -> _Fetch | None:
        """Starts bringing a chunk; None when there is no slot for it."""
        cached = self._worker.arena.lease(chunk.key)
        if cached is not None:
            self._worker.metrics.add(names.HOST_HIT_CHUNKS)
            return _Fetch(chunk, *cached)
        with self._lock:
            reading = self._reading.get(chunk.key)
            if reading is not None:
                self._wanted_twice.add(chunk.key)
                return _Fetch(chunk, awaited=reading)
            self._reading[chunk.key] = threading.Event()
        slot = self._worker.arena.reserve(slot_timeout_s)
        if slot is None:
            self._reading_ended(chunk.key)
            return None
        fetch = _Fetch(chunk, slot)
        self._submit(plan, fetch)
        return fetch

    def _submit(self, plan: LoadPlan, fetch: _Fetch) -> None:
        """Sends the reads of a chunk whose slot is reserved; gives the slot back when there is nothing to read."""
        fetch.files = ExitStack()
        try:
            sources = sources_of(entries.unpack(fetch.chunk.entry), self._worker.share.reads,
                                 self._worker.arena.slot_bytes)  # fmt: skip
            if sources is None:
                raise _Failed("its records do not make up this rank's share")
            fetch.sources = sources
            fetch.batch = self._worker.ring.submit([self._read_op(plan, fetch, source) for source in sources])
        except Corrupt as fault:
            self._abandon(fetch)
            raise _Failed(str(fault)) from fault
        except BaseException:
            self._abandon(fetch)
            raise

    def _read_op(self, plan: LoadPlan, fetch: _Fetch, source: Source) -> ReadOp:
        files, location = self._worker.files(plan.namespace), source.location
        try:
            leased = files.lease(location.set_id, location.rank)
        except Corrupt:
            self._retract(fetch.chunk.key, location)
            raise
        if leased is None:
            self._retract(fetch.chunk.key, location)
            raise _Failed(f"segment {location.set_id:016x}-{location.rank:04d} is gone")
        assert fetch.files is not None
        fetch.files.callback(files.release, location.set_id, location.rank)
        return ReadOp(leased[0], source.file_offset, self._worker.arena.address(fetch.slot) + source.slot_offset,
                      source.slab_bytes, source.wanted.n_heads, fetch.chunk.key, source.wanted.first_head,
                      location.extent.first_layer, source.checksums)  # fmt: skip

    def _finish(self, plan: LoadPlan, fetch: _Fetch, deadline_s: float) -> None:
        """Waits for the chunk, verifies it and scatters it; its slot is then free, or cached."""
        if fetch.awaited is not None:
            self._take_over(plan, fetch, deadline_s)
        if fetch.batch is None and not self._cached_is_good(fetch):
            self._worker.arena.drop(fetch.chunk.key)
            self._worker.arena.release(fetch.slot, fetch.chunk.key)
            self._read_again(plan, fetch, deadline_s)
        if fetch.batch is not None:
            self._await_reads(fetch, deadline_s)
        self._scatter(fetch)
        if fetch.batch is None:
            self._worker.arena.release(fetch.slot, fetch.chunk.key)
            return
        self._close_files(fetch)
        if self._admission.keeps_loaded(fetch.chunk.key) or fetch.chunk.key in self._wanted_twice:
            self._worker.arena.commit(fetch.slot, fetch.chunk.key, fetch.sources)
        else:
            self._worker.arena.discard(fetch.slot)
        self._reading_ended(fetch.chunk.key)

    def _take_over(self, plan: LoadPlan, fetch: _Fetch, deadline_s: float) -> None:
        """Another request was reading this chunk: take it from the arena, or read it after all."""
        assert fetch.awaited is not None
        if not fetch.awaited.wait(self._left(deadline_s)):
            raise _Failed("another request's read of it takes too long")
        fetch.awaited = None
        cached = self._worker.arena.lease(fetch.chunk.key)
        if cached is not None:
            fetch.slot, fetch.sources = cached
        else:
            self._read_again(plan, fetch, deadline_s)

    def _read_again(self, plan: LoadPlan, fetch: _Fetch, deadline_s: float) -> None:
        fetch.slot = -1
        slot = self._worker.arena.reserve(self._left(deadline_s))
        if slot is None:
            raise _Failed("no slot in the arena came free in time")
        fetch.slot = slot
        self._submit(plan, fetch)

    def _cached_is_good(self, fetch: _Fetch) -> bool:
        if fetch.batch is not None:
            return True
        for source in fetch.sources:
            address = self._worker.arena.address(fetch.slot) + source.slot_offset
            found = native.slab_checksums(address, source.slab_bytes, source.wanted.n_heads, fetch.chunk.key,
                                          source.wanted.first_head, source.location.extent.first_layer)  # fmt: skip
            if found != source.checksums:
                self._worker.metrics.add(names.CHECKSUM_FAILURES)
                log.error("chunk %s went bad in host memory", fetch.chunk.key.hex())
                return False
        return True

    def _await_reads(self, fetch: _Fetch, deadline_s: float) -> None:
        assert fetch.batch is not None
        if not fetch.batch.wait(self._left(deadline_s)):
            self._stalled_until_s = self._worker.clock() + self._worker.timeout_s
            raise _Failed("the storage does not answer in time")
        for source, result in zip(fetch.sources, fetch.batch.results(), strict=True):
            if not result.error and not result.bad_slabs:
                continue
            location = source.location
            where = f"slot {location.slot} of segment {location.set_id:016x}-{location.rank:04d}"
            if result.error not in (0, errno.ENODATA):
                raise _Failed(f"{where}: {errno.errorcode.get(result.error, result.error)}")
            self._retract(fetch.chunk.key, location)
            self._worker.metrics.add(names.CHECKSUM_FAILURES)
            raise _Failed(f"{where}: " + ("it ends too soon" if result.error else "a checksum does not match"))

    def _scatter(self, fetch: _Fetch) -> None:
        worker, chunk = self._worker, fetch.chunk
        for source in fetch.sources:
            slabs = worker.arena.slabs(fetch.slot, source.slot_offset, source.wanted.n_heads, source.slab_bytes)
            worker.codec.decode(worker.pages, source.patch(worker.share.reads), chunk.block_ids,
                                self._first_block(chunk), slabs)  # fmt: skip

    def _abandon(self, fetch: _Fetch) -> None:
        """Lets go of a chunk that is not scattered. Reads that are under way keep their slot until they return."""
        if fetch.awaited is not None or fetch.slot < 0:
            return
        if fetch.batch is None and fetch.files is None:
            self._worker.arena.release(fetch.slot, fetch.chunk.key)
            fetch.slot = -1
            return
        self._reading_ended(fetch.chunk.key)
        slot, files = fetch.slot, fetch.files
        fetch.slot = -1

        def release() -> None:
            if files is not None:
                files.close()
            self._worker.arena.discard(slot)

        if fetch.batch is None or fetch.batch.wait(0):
            release()
        else:
            self._worker.quarantine.add(fetch.batch, release)

    def _reading_ended(self, key: bytes) -> None:
        with self._lock:
            self._wanted_twice.discard(key)
            event = self._reading.pop(key, None)
        if event is not None:
            event.set()

    def _close_files(self, fetch: _Fetch) -> None:
        if fetch.files is not None:
            fetch.files.close()

    def _retract(self, key: bytes, location: Location) -> None:
        """What is bad or gone is not offered again (compare-and-delete: never another writer's record)."""
        try:
            self._worker.index.retract(key, location)
        except IndexUnavailable:
            self._worker.metrics.add(names.INDEX_ERRORS)

    def _first_block(self, chunk: LoadChunk) -> int:
        blocks, rest = divmod(chunk.first_token, self._worker.pages.block_tokens)
        assert rest == 0, "local hits end at a block"
        return blocks

    def _left(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._worker.clock())
