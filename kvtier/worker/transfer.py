"""Transfer: moves KV between the engine's blocks, the arenas and segment files, as plans say. One for each worker.

`save` gathers on the caller's thread before it returns. The worker's loop does the rest, and `poll` returns answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvtier.arena.admission import Admissions
from kvtier.codecs.base import slab_bytes
from kvtier.maintenance.record_check import RECHECK_INTERVAL_S
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SavePlan
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.threads import Job, ThreadJobs, Ticker, run_within
from kvtier.scheduler.engine_report import ArenaFill, RankFigures
from kvtier.scheduler.load_threshold import LoadCost
from kvtier.worker.arenas import Pinner
from kvtier.worker.context import WorkerContext
from kvtier.worker.loads import Loader
from kvtier.worker.loop import STUCK_S, TransferLoop
from kvtier.worker.saving import SaveBounds, Saver

TIDY_INTERVAL_S = 2.0  # interval at which segments of removed sets are closed, seconds
CLOSE_TIMEOUT_S = 1.0  # limit of each wait of `close`, seconds
HUNG_IO_S = 5.0  # time without an end of I/O after which a file counts as hung, seconds; at most timeout / 4

log = logging.getLogger("kvtier")


class Progress(NamedTuple):
    """Answers since the last poll. timings: (tokens, seconds) of whole loads."""

    loads: list[LoadDone]
    saves: list[SaveDone]
    timings: list[tuple[int, float]]


class TransferJobs(NamedTuple):
    """Threads of a worker. loop: the one thread of the transfer loop. load, save: for tasks of loads and saves that may
    wait for storage or index. tidy: the one thread of `Transfer.tidy`, which also closes unused segments."""

    loop: ThreadJobs
    load: ThreadJobs
    save: ThreadJobs
    tidy: ThreadJobs


class Transfer:
    """Mover of one worker's KV. Called from the worker's thread.

    Args:
        bounds: limits of the chunks that saves may hold in the arena at a time; the rest is for loads.
        cost: measured cost of a load on this machine; None: not known.
        pinner: pins the host arena in the background; None: nothing is pinned.
    """

    def __init__(
        self,
        worker: WorkerContext,
        jobs: TransferJobs,
        admit: Admissions,
        bounds: SaveBounds,
        cost: LoadCost | None = None,
        pinner: Pinner | None = None,
    ) -> None:
        self.cost = cost
        self._worker = worker
        self._jobs = jobs
        self._pinner = pinner
        worker.files.submit = self._submit_tidying
        self._tickers: list[Ticker] = []
        self._loop = TransferLoop(worker, jobs.loop)
        self._loader = Loader(worker, admit, self._loop, jobs.load)
        self._saver = Saver(worker, self._loop, jobs.save, bounds, admit)

    @property
    def metrics(self) -> Metrics:
        return self._worker.metrics

    @property
    def are_all_answered(self) -> bool:
        """Return True while no save or load is under way."""
        return not (self._saver.staged or self._loader.is_busy())

    def figures(self, counters: Mapping[str, float]) -> RankFigures:
        """Return the report of this rank, with `counters`."""
        worker = self._worker
        arenas = [("hbm" if worker.arena.is_device else "host", worker.arena)]
        arenas += [] if worker.host is None else [("host", worker.host)]
        fills = (
            ArenaFill(tier=tier, size_bytes=of.n_slots * of.slot_bytes, used_bytes=of.used_slots * of.slot_bytes)
            for tier, of in arenas
        )
        ceiling = None
        if self.cost is not None and self.cost.token_s > 0:
            chunk_bytes = worker.share.reads.n_heads * slab_bytes(worker.codec, worker.geometry, worker.share.reads)
            ceiling = chunk_bytes / worker.geometry.chunk_tokens / self.cost.token_s
        return RankFigures(dict(counters), tuple(fills), ceiling)

    def save(self, plan: SavePlan) -> None:
        """Gather the plan's chunks before it returns. Each chunk is answered once, in some later `poll`."""
        self._saver.save(plan)

    def load(self, plan: LoadPlan) -> None:
        """Queue a load. Its blocks belong to the plan until a later `poll` returns its one answer."""
        self._loader.load(plan)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these chunks from the arenas. A load under way may put one back, so no key may get other bytes later."""
        arenas = [arena for arena in (self._worker.arena, self._worker.host) if arena is not None]
        for key in keys:
            for arena in arenas:
                arena.drop(key)

    def step_begins(self, *, computes: bool, decodes: bool) -> None:
        """Note that the engine begins a step. computes: the engine launches a forward before the next `poll`; until
        then the loop leaves the interpreter lock to it while enough I/O is queued. decodes: requests decode in the
        step."""
        self._loop.step_begins(computes=computes, decodes=decodes)

    def poll(self, timeout_s: float = 0.0) -> Progress:
        """Return the answers since the last poll; wait at most `timeout_s` for a load to end."""
        self._loop.forward_is_launched()
        if self._pinner is not None:
            self._pinner.make_way()
        loads, timings = self._loader.take_done(timeout_s)
        return Progress(loads, self._saver.take_done(), timings)

    def start(self) -> None:
        """Tidy in the background until `close`."""
        if self._pinner is not None:
            self._pinner.start(self._loader.is_busy)
        self._tickers.append(Ticker("tidy", TIDY_INTERVAL_S, self._tick))
        if self._worker.files.sharing.may_be_away:
            self._tickers.append(Ticker("recheck", RECHECK_INTERVAL_S, self._loader.rechecks.run))

    def tidy(self) -> None:
        """Free the slots of late I/O that has returned; close segments whose sets were removed. Waits for storage and
        index."""
        self._worker.quarantine.sweep()
        self._worker.close_removed()
        self._worker.io.close_unused()

    def drain(self, timeout_s: float) -> bool:
        """Wait for queued work. Return False after `timeout_s`."""
        return self._loop.drain(timeout_s)

    def close(self) -> None:
        """Fail the loads under way, drop queued work and stop the threads. No byte reaches the pages after this
        returns, unless it logs that copies still run. Call `drain` first."""
        if not self._loader.stop(CLOSE_TIMEOUT_S):
            log.warning("copies into the KV cache still run after %g s: do not free its memory", CLOSE_TIMEOUT_S)
        for ticker in self._tickers:
            ticker.close(CLOSE_TIMEOUT_S)
        for jobs in self._jobs:
            jobs.close()
        self._jobs.tidy.drain(CLOSE_TIMEOUT_S)
        has_tidied = run_within("trim", CLOSE_TIMEOUT_S, self._trim_files)
        has_ended = self._worker.io.close() and not len(self._worker.quarantine)
        if has_ended and has_tidied and not any(jobs.pending() for jobs in self._jobs):
            if self._pinner is not None:
                self._pinner.close()
        else:
            _outlived.append(self._worker)  # its memory is still in use by work that hangs
        if has_tidied:
            has_tidied = run_within("close", CLOSE_TIMEOUT_S, self._worker.files.close)
        if not has_tidied:
            log.warning(
                "the storage does not answer: this rank's segments are left open and untrimmed for garbage collection"
            )
        self._worker.index.close()

    def _submit_tidying(self, job: Job) -> bool:
        """Queue the job if the thread is idle, because the one place in its queue is for `tidy`."""
        return not self._jobs.tidy.pending() and self._jobs.tidy.submit(job)

    def _tick(self) -> None:
        """Check deadlines, replace threads that hang and queue `tidy`. Makes no call that may hang."""
        quarter_s = self._worker.timeout_s / 4
        self._loop.check_deadlines()
        self._worker.io.widen(min(HUNG_IO_S, quarter_s))
        self._jobs.tidy.submit(self.tidy)
        # fstat or close of a file may hang in `tidy`; another thread then goes on with the other files.
        self._jobs.tidy.widen(min(STUCK_S, quarter_s))

    def _trim_files(self) -> None:
        """Truncate this rank's segments, and free the slots of late I/O that has returned. Waits for storage."""
        # The loop's `drain` returns before the thread of the last task is idle.
        if all(jobs.drain(CLOSE_TIMEOUT_S / 4) for jobs in (self._jobs.loop, self._jobs.load, self._jobs.save)):
            self._saver.writer.trim()
        self._worker.quarantine.sweep()


_outlived: list[WorkerContext] = []
