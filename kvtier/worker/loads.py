"""The loads of a worker: each plan is walked on a background thread, and answered exactly once within its deadline,
whatever happens, even if its thread hangs in the kernel (I10). Bytes that fail their checksum never reach the engine
(I2); from the first bad chunk on, the blocks are reported as failed."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.plan import LoadDone, LoadPlan
from kvtier.runtime import metrics as names
from kvtier.runtime.repeated_log import RepeatedLog, cause_of
from kvtier.runtime.threads import Jobs
from kvtier.worker.context import WorkerContext
from kvtier.worker.fetch import Fetcher
from kvtier.worker.fetch_files import FetchFailed, SegmentGone
from kvtier.worker.load_walk import LoadWalk

AHEAD_BYTES = 512 << 20
CHUNKS_AHEAD_MIN, CHUNKS_AHEAD_MAX = 8, 64
ALONE_FACTOR, ALONE_SHARE = 2, 4
"""What one request has read ahead of the chunk being scattered; more only takes slots from other requests. A load that
is alone may have twice as much, but no more than a fourth of the arena: on an H200 host 512 MiB are read in 9 ms, and a
step of the engine, which holds the interpreter lock meanwhile, took up to 8."""
STILL_S = 1.0  # a load that got no chunk for so long may hang in the kernel, seconds; at most a quarter of its time
ANSWER_GRACE_S = 0.25
"""A load whose own thread has not answered so long after the deadline is answered for it."""


class Loader:
    """See the module."""

    def __init__(self, worker: WorkerContext, jobs: Jobs, fetcher: Fetcher) -> None:
        self._worker = worker
        self._jobs = jobs
        self._fetcher = fetcher
        ahead = AHEAD_BYTES // worker.arena.slot_bytes
        self._chunks_ahead = max(CHUNKS_AHEAD_MIN, min(CHUNKS_AHEAD_MAX, ahead))
        alone = min(ALONE_FACTOR * self._chunks_ahead, worker.arena.n_slots // ALONE_SHARE)
        self._chunks_ahead_alone = max(self._chunks_ahead, alone)
        self._lock = threading.Condition()
        self._loads: dict[LoadWalk, None] = {}  # in the order in which they were asked for
        self._waiting: deque[LoadWalk] = deque()  # beyond the bound of `jobs`; the scheduler bounds how many there are
        self._walking: dict[LoadWalk, None] = {}  # whose threads are in them, answered or not
        self._n_still = 0
        self._log = RepeatedLog(worker.clock)
        self._done: list[LoadDone] = []
        self._timings: list[tuple[int, float]] = []

    def load(self, plan: LoadPlan) -> None:
        """Queue a plan; called on the engine's thread. Its answer comes with `take_done`. One that finds no room among
        the jobs waits here until another ends: a full queue is no fault of the storage."""
        deadline_s = self._worker.clock() + self._worker.timeout_s
        load = LoadWalk(self._worker, self._fetcher, plan, deadline_s, self._window)
        with self._lock:
            self._loads[load] = None
            self._waiting.append(load)
        self._submit_waiting()

    def _submit_waiting(self) -> None:
        with self._lock:
            while self._waiting and self._jobs.submit(partial(self._run, self._waiting[0])):
                self._waiting.popleft()

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
            still_s = self._worker.clock() - min(STILL_S, self._worker.timeout_s / 4)
            n_still = sum(load.moved_s < still_s for load in self._walking)
        if n_still != self._n_still:
            self._n_still = n_still
            self._jobs.widen(2 * n_still)  # twice: the next ones may wait for what these read
        for load in overdue:
            self._answer(load, is_overdue=True)
        with self._lock:
            done, self._done = self._done, []
        return done

    def _window(self) -> int:
        """How many chunks one load may have coming."""
        return self._chunks_ahead_alone if len(self._loads) == 1 else self._chunks_ahead

    def _run(self, load: LoadWalk) -> None:
        started = time.perf_counter()
        failure: Exception | None = None
        with self._lock:
            self._walking[load] = None
        try:
            load.walk()
        except (FetchFailed, TierUnavailable) as fault:
            failure = fault
        finally:
            try:
                load.land()
            finally:
                self._answer(load)
                load.let_go()
                with self._lock:
                    del self._walking[load]
        if failure is not None:
            self._log.warning(
                cause_of(failure),
                "request %s: recomputed from chunk %d of its load on: %s",
                load.plan.request_id,
                load.n_chunks,
                failure,
            )
        if isinstance(failure, SegmentGone):
            with suppress(Corrupt, TierUnavailable, OSError):  # whoever is offered one of them finds out then
                self._fetcher.retract_gone(load.plan.namespace, load.plan.chunks[load.n_chunks :])
        self._worker.metrics.add(names.LOAD_REQUESTS)
        self._worker.metrics.add(names.LOAD_TOKENS, load.n_tokens)
        self._worker.metrics.add(names.LOAD_BYTES, load.n_bytes)
        self._worker.metrics.add(names.LOAD_SECONDS, time.perf_counter() - started)
        self._submit_waiting()

    def _answer(self, load: LoadWalk, *, is_overdue: bool = False) -> None:
        """Ends the load and tells so, if nobody has yet; one that is overdue, unless its chunks are still moving."""
        failed = load.end(is_overdue=is_overdue)
        if failed is None:
            return
        if failed:
            self._worker.metrics.add(names.LOAD_FAILURES)
        with self._lock:
            self._loads.pop(load, None)
            self._done.append(LoadDone(load.plan.request_id, failed))
            if not failed:
                asked_s = load.deadline_s - self._worker.timeout_s
                self._timings.append((load.n_tokens, self._worker.clock() - asked_s))
            self._lock.notify_all()
