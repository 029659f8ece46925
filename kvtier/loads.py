"""The load walk on a worker: from the nearest tier through an arena slot, verified, into the engine's blocks.

Runs on background threads. A plan is answered exactly once, within its deadline, whatever happens, even if a thread
hangs in the kernel (I10); bytes that fail their checksum never reach the engine (I2); from the first bad chunk on, the
blocks are reported as failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from kvtier import metrics as names
from kvtier.admission import Admission
from kvtier.errors import TierUnavailable
from kvtier.fetch import Fetch, Fetcher, FetchFailed
from kvtier.jobs import Jobs
from kvtier.plan import LoadChunk, LoadDone, LoadPlan
from kvtier.worker import Worker

log = logging.getLogger("kvtier")

CHUNKS_AHEAD = 8
"""Chunks of one request read ahead of the one being scattered; more only takes slots from other requests."""
ANSWER_GRACE_S = 0.25
"""A load whose own thread has not answered so long after the deadline is answered for it."""


@dataclass(eq=False)
class _Load:
    """One plan on its way. `lock` is held while a chunk is scattered and while the answer is given: afterwards the
    blocks are the engine's again, and no late thread writes into them."""

    plan: LoadPlan
    deadline_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_running: bool = False
    is_answered: bool = False
    n_chunks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    waiting: deque[LoadChunk] = field(default_factory=deque)
    coming: deque[Fetch] = field(default_factory=deque)


class Loader:
    """See the module."""

    def __init__(self, worker: Worker, jobs: Jobs, admission: Admission) -> None:
        self._worker = worker
        self._jobs = jobs
        self._fetcher = Fetcher(worker, admission)
        self._lock = threading.Condition()
        self._loads: set[_Load] = set()
        self._hangs_until_s = 0.0
        self._done: list[LoadDone] = []

    def load(self, plan: LoadPlan) -> None:
        """Queues a plan. Its answer comes with `take_done`, also when the queue is full."""
        load = _Load(plan, self._worker.clock() + self._worker.timeout_s, waiting=deque(plan.chunks))
        with self._lock:
            self._loads.add(load)
        if self._worker.clock() < self._hangs_until_s or not self._jobs.submit(partial(self._run, load)):
            self._answer(load)

    def take_done(self, timeout_s: float) -> list[LoadDone]:
        """Answers since the last take; waits for one at most `timeout_s`."""
        with self._lock:
            if not self._done and timeout_s > 0:
                self._lock.wait(timeout_s)
            late_s = self._worker.clock() - ANSWER_GRACE_S
            overdue = [load for load in self._loads if load.deadline_s < late_s]
        for load in overdue:
            self._answer(load, blocking=False)  # a scatter that is under way ends by itself, and answers
            if load.is_running:  # its thread hangs in the kernel: others would only follow it there
                self._hangs_until_s = self._worker.clock() + self._worker.timeout_s
        with self._lock:
            done, self._done = self._done, []
        return done

    def _answer(self, load: _Load, *, blocking: bool = True) -> None:
        """Gives the plan's one answer, unless it was given."""
        if not load.lock.acquire(blocking=blocking):
            return
        try:
            if load.is_answered:
                return
            load.is_answered = True
        finally:
            load.lock.release()
        failed: set[int] = set()
        for chunk in load.plan.chunks[load.n_chunks :]:
            failed.update(chunk.block_ids[self._first_block(chunk) :])
        if failed:
            self._worker.metrics.add(names.LOAD_FAILURES)
        with self._lock:
            self._loads.discard(load)
            self._done.append(LoadDone(load.plan.request_id, frozenset(failed)))
            self._lock.notify_all()

    def _run(self, load: _Load) -> None:
        started = time.perf_counter()
        load.is_running = True
        try:
            self._load_chunks(load)
        except (FetchFailed, TierUnavailable) as failure:
            log.warning("request %s: recomputed from chunk %d of its load on: %s",
                        load.plan.request_id, load.n_chunks, failure)  # fmt: skip
        finally:
            self._answer(load)
            self._let_go(load, 0)
        self._worker.metrics.add(names.LOAD_REQUESTS)
        self._worker.metrics.add(names.LOAD_TOKENS, load.n_tokens)
        self._worker.metrics.add(names.LOAD_BYTES, load.n_bytes)
        self._worker.metrics.add(names.LOAD_SECONDS, time.perf_counter() - started)

    def _load_chunks(self, load: _Load) -> None:
        """Keeps up to CHUNKS_AHEAD chunks coming while it scatters the oldest."""
        while load.waiting or load.coming:
            if self._worker.clock() >= load.deadline_s:
                raise FetchFailed("its time is over")
            self._read_ahead(load)
            fetch = load.coming[0]
            self._complete(load, fetch)
            self._scatter(load, fetch)
            load.coming.popleft()
            self._fetcher.keep_or_free(fetch)

    def _complete(self, load: _Load, fetch: Fetch) -> None:
        """Two loads never wait for each other: who waits for a slot holds none, and reads of others that are waited
        for have theirs. (A key has one place in all prompts that share it, so these waits have an order.)"""
        namespace, deadline_s = load.plan.namespace, load.deadline_s
        if self._fetcher.complete(namespace, fetch, deadline_s, slot_timeout_s=0.0):
            return
        self._let_go(load, 1)
        if not self._fetcher.complete(namespace, fetch, deadline_s, max(0.0, deadline_s - self._worker.clock())):
            raise FetchFailed("no slot in the arena came free in time")

    def _read_ahead(self, load: _Load) -> None:
        while load.waiting and len(load.coming) < CHUNKS_AHEAD:
            # With nothing coming that would free a slot, one is waited for.
            slot_timeout_s = 0.0 if load.coming else load.deadline_s - self._worker.clock()
            fetch = self._fetcher.begin(load.plan.namespace, load.waiting[0], slot_timeout_s)
            if fetch is None:
                break
            load.coming.append(fetch)
            load.waiting.popleft()
        if not load.coming:
            raise FetchFailed("no slot in the arena came free in time")

    def _scatter(self, load: _Load, fetch: Fetch) -> None:
        worker, chunk = self._worker, fetch.chunk
        with load.lock:
            if load.is_answered:
                raise FetchFailed("it was answered as late meanwhile")
            for source in fetch.sources:
                slabs = worker.arena.slabs(fetch.slot, source.slot_offset, source.wanted.n_heads, source.slab_bytes)
                worker.codec.decode(worker.pages, source.patch(worker.share.reads), chunk.block_ids,
                                    self._first_block(chunk), slabs)  # fmt: skip
            load.n_chunks += 1
        load.n_tokens += worker.geometry.chunk_tokens - chunk.first_token
        load.n_bytes += sum(source.n_bytes for source in fetch.sources)

    def _let_go(self, load: _Load, n_kept: int) -> None:
        """Abandons what is read ahead, but for the first `n_kept`; it is begun again when its turn comes."""
        while len(load.coming) > n_kept:
            fetch = load.coming.pop()
            load.waiting.appendleft(fetch.chunk)
            self._fetcher.abandon(fetch)

    def _first_block(self, chunk: LoadChunk) -> int:
        blocks, rest = divmod(chunk.first_token, self._worker.pages.block_tokens)
        assert rest == 0, "local hits end at a block"
        return blocks
