"""The load walk on a worker: from the nearest tier through an arena slot, verified, into the engine's blocks.

Runs on background threads. A plan is answered exactly once, within its deadline, whatever happens, even if a thread
hangs in the kernel (I10); bytes that fail their checksum never reach the engine (I2); from the first bad chunk on, the
blocks are reported as failed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtier import metrics as names
from kvtier.errors import TierUnavailable
from kvtier.fetch import Fetch, Fetcher, FetchFailed, Origin
from kvtier.jobs import Jobs
from kvtier.kernels.paged import Move
from kvtier.order import Mark
from kvtier.plan import LoadChunk, LoadDone, LoadPlan
from kvtier.sources import Source
from kvtier.worker import Worker

log = logging.getLogger("kvtier")

AHEAD_BYTES = 512 << 20
CHUNKS_AHEAD_MIN, CHUNKS_AHEAD_MAX = 8, 64
ALONE_FACTOR, ALONE_SHARE = 2, 4
TOGETHER = 4
"""What one request has read ahead of the chunk being scattered; more only takes slots from other requests. A load that
is alone may have twice as much, but no more than a fourth of the arena: on an H200 host 512 MiB are read in 9 ms, and a
step of the engine, which holds the interpreter lock meanwhile, took up to 8. A fourth of it is scattered together: a
launch a chunk takes longer than reading it, and after all of it storage would idle."""
TOGETHER_MAX = 64
"""In one launch with those from the arena, which free no slot that storage waits for."""
ANSWER_GRACE_S = 0.25
"""A load whose own thread has not answered so long after the deadline is answered for it."""


class _Moving(NamedTuple):
    """Chunks whose scatter was launched; they are in the engine's blocks when `mark` is done."""

    fetches: tuple[Fetch, ...]
    mark: Mark


@dataclass(eq=False)
class _Load:
    """One plan on its way. `lock` is held while a scatter is launched and while the answer is given, which is not
    before all of `moving` has ended: afterwards the blocks are the engine's again, and nothing late writes into them.
    `after`: the engine's work that a scatter must not overtake, such as zeroing these very blocks. `cut_short`: why a
    chunk ahead could not be begun; it and those behind it are not waiting any more, and those before it are loaded."""

    plan: LoadPlan
    deadline_s: float
    after: Mark = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_running: bool = False
    is_answered: bool = False
    n_chunks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    waiting: deque[LoadChunk] = field(default_factory=deque)
    coming: deque[Fetch] = field(default_factory=deque)
    moving: deque[_Moving] = field(default_factory=deque)
    cut_short: FetchFailed | TierUnavailable | None = None


class Loader:
    """See the module."""

    def __init__(self, worker: Worker, jobs: Jobs, fetcher: Fetcher) -> None:
        self._worker = worker
        self._jobs = jobs
        self._fetcher = fetcher
        ahead = AHEAD_BYTES // worker.arena.slot_bytes
        self._chunks_ahead = max(CHUNKS_AHEAD_MIN, min(CHUNKS_AHEAD_MAX, ahead))
        alone = min(ALONE_FACTOR * self._chunks_ahead, worker.arena.n_slots // ALONE_SHARE)
        self._chunks_ahead_alone = max(self._chunks_ahead, alone)
        self._lock = threading.Condition()
        self._loads: set[_Load] = set()
        self._hangs_until_s = 0.0
        self._done: list[LoadDone] = []
        self._timings: list[tuple[int, float]] = []

    def load(self, plan: LoadPlan) -> None:
        """Queues a plan; called on the engine's thread. Its answer comes with `take_done`, queued or not."""
        deadline_s = self._worker.clock() + self._worker.timeout_s
        load = _Load(plan, deadline_s, self._worker.order.mark(), waiting=deque(plan.chunks))
        with self._lock:
            self._loads.add(load)
        if self._worker.clock() < self._hangs_until_s or not self._jobs.submit(partial(self._run, load)):
            self._answer(load)

    def take_timings(self) -> list[tuple[int, float]]:
        """(tokens, seconds from asking to the end) of whole loads since the last take."""
        with self._lock:
            timings, self._timings = self._timings, []
        return timings

    def take_done(self, timeout_s: float) -> list[LoadDone]:
        """Answers since the last take; waits for one at most `timeout_s`."""
        with self._lock:
            if not self._done and timeout_s > 0:
                self._lock.wait(timeout_s)
            late_s = self._worker.clock() - ANSWER_GRACE_S
            overdue = [load for load in self._loads if load.deadline_s < late_s]
        for load in overdue:
            self._answer_late(load)
            if load.is_running:  # its thread hangs in the kernel: others would only follow it there
                self._hangs_until_s = self._worker.clock() + self._worker.timeout_s
        with self._lock:
            done, self._done = self._done, []
        return done

    def _answer_late(self, load: _Load) -> None:
        """Answers for a load's own thread; later, if it is just launching or its chunks are still moving."""
        if not load.lock.acquire(blocking=False):
            return
        try:
            if not all(self._worker.order.is_done(moving.mark) for moving in load.moving):
                return
            is_first, load.is_answered = not load.is_answered, True
        finally:
            load.lock.release()
        if is_first:
            self._tell(load)

    def _answer(self, load: _Load) -> None:
        """Gives the plan's one answer, unless it was given. Nothing of it is moving any more."""
        with load.lock:
            is_first, load.is_answered = not load.is_answered, True
        if is_first:
            self._tell(load)

    def _tell(self, load: _Load) -> None:
        failed: set[int] = set()
        for chunk in load.plan.chunks[load.n_chunks :]:
            failed.update(chunk.block_ids[self._first_block(chunk) :])
        if failed:
            self._worker.metrics.add(names.LOAD_FAILURES)
        with self._lock:
            self._loads.discard(load)
            self._done.append(LoadDone(load.plan.request_id, frozenset(failed)))
            if not failed:
                asked_s = load.deadline_s - self._worker.timeout_s
                self._timings.append((load.n_tokens, self._worker.clock() - asked_s))
            self._lock.notify_all()

    def _run(self, load: _Load) -> None:
        started = time.perf_counter()
        load.is_running = True
        try:
            self._load_chunks(load)
        except (FetchFailed, TierUnavailable) as failure:
            self._land(load)
            log.warning("request %s: recomputed from chunk %d of its load on: %s",
                        load.plan.request_id, load.n_chunks, failure)  # fmt: skip
        finally:
            try:
                self._land(load)
            finally:
                self._answer(load)
                self._let_go(load, 0)
        self._worker.metrics.add(names.LOAD_REQUESTS)
        self._worker.metrics.add(names.LOAD_TOKENS, load.n_tokens)
        self._worker.metrics.add(names.LOAD_BYTES, load.n_bytes)
        self._worker.metrics.add(names.LOAD_SECONDS, time.perf_counter() - started)

    def _load_chunks(self, load: _Load) -> None:
        """Keeps chunks coming while it scatters those that are here, in order. Raises FetchFailed, TierUnavailable."""
        while load.waiting or load.coming:
            if self._worker.clock() >= load.deadline_s:
                raise FetchFailed("its time is over")
            self._land(load, waits=not load.coming)
            self._read_ahead(load)
            self._complete(load, load.coming[0])
            here = self._here(load)
            n_good = self._fetcher.check(here)
            if n_good == 0:
                self._fetcher.reject(load.plan.namespace, here[0])
                continue
            self._scatter(load, here[:n_good])
        if load.cut_short is not None:
            raise load.cut_short

    def _window(self) -> int:
        """How many chunks one load may have coming."""
        return self._chunks_ahead_alone if len(self._loads) == 1 else self._chunks_ahead

    def _here(self, load: _Load) -> list[Fetch]:
        """The first chunk, which is complete, and on a device those behind it that are too: moved in one launch. (On
        the CPU one launch is no gain, and nobody could answer late while a slow codec decodes them all.)"""
        here = [load.coming[0]]
        n_brought, n_brought_max = int(here[0].origin is not Origin.ARENA), max(1, self._window() // TOGETHER)
        for fetch in itertools.islice(load.coming, 1, TOGETHER_MAX if self._worker.arena.is_device else 1):
            n_brought += fetch.origin is not Origin.ARENA
            if n_brought > n_brought_max or not self._fetcher.is_here(fetch):
                break
            self._fetcher.complete(load.plan.namespace, fetch, load.deadline_s, slot_timeout_s=0.0)
            here.append(fetch)
        return here

    def _complete(self, load: _Load, fetch: Fetch) -> None:
        """Two loads never wait for each other: who waits for a slot holds none, and reads of others that are waited
        for have theirs. (A key has one place in all prompts that share it, so these waits have an order, as long as
        who waits for another's read holds no chunk before it: those that are moving are landed.)"""
        namespace, deadline_s = load.plan.namespace, load.deadline_s
        if not self._fetcher.is_here(fetch):
            self._land(load)
        if self._fetcher.complete(namespace, fetch, deadline_s, slot_timeout_s=0.0):
            return
        self._land(load)
        self._let_go(load, 1)
        if not self._fetcher.complete(namespace, fetch, deadline_s, max(0.0, deadline_s - self._worker.clock())):
            raise FetchFailed("no slot in the arena came free in time")

    def _read_ahead(self, load: _Load) -> None:
        while load.waiting and len(load.coming) < self._window():
            # With nothing coming that would free a slot, one is waited for.
            slot_timeout_s = 0.0 if load.coming else load.deadline_s - self._worker.clock()
            try:
                fetch = self._fetcher.begin(load.plan.namespace, load.waiting[0], slot_timeout_s)
            except (FetchFailed, TierUnavailable) as failure:
                if not load.coming:
                    raise
                load.cut_short = failure
                load.waiting.clear()
                return
            if fetch is None:
                break
            load.coming.append(fetch)
            load.waiting.popleft()
        if not load.coming:
            raise FetchFailed("no slot in the arena came free in time")

    def _scatter(self, load: _Load, fetches: Sequence[Fetch]) -> None:
        """Launches the scatter of the first chunks that were coming, without waiting for it."""
        worker = self._worker
        moves = [self._move(fetch, source) for fetch in fetches for source in fetch.sources]
        with load.lock:
            if load.is_answered:
                raise FetchFailed("it was answered as late meanwhile")
            mark = worker.order.begin(partial(worker.codec.decode, worker.pages, moves), load.after)
            load.moving.append(_Moving(tuple(fetches), mark))
            for _ in fetches:
                load.coming.popleft()

    def _land(self, load: _Load, *, waits: bool = True) -> None:
        """Frees the slots of chunks that have arrived in the engine's blocks; with `waits`, of all that are moving."""
        order = self._worker.order
        while load.moving and (waits or order.is_done(load.moving[0].mark)):
            fetches, mark = load.moving[0]
            order.wait(mark)
            with load.lock:
                load.moving.popleft()
                load.n_chunks += len(fetches)
                load.n_tokens += sum(self._worker.geometry.chunk_tokens - f.chunk.first_token for f in fetches)
                load.n_bytes += sum(source.n_bytes for f in fetches for source in f.sources)
            for fetch in fetches:
                self._fetcher.keep_or_free(fetch)

    def _move(self, fetch: Fetch, source: Source) -> Move:
        patch = source.patch(self._worker.share.reads)
        slabs = self._fetcher.slab_run(fetch, source).slabs
        return Move(patch, fetch.chunk.block_ids, slabs, self._first_block(fetch.chunk))

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
