"""Transfer moves: engine blocks -> arena -> file, and back. One a worker; decides nothing.

`save` gathers at once on the caller's thread; everything else runs in the background and is told by `poll`.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from kvtier.admission import Admission
from kvtier.jobs import Jobs, Ticker
from kvtier.loads import Loader
from kvtier.metrics import Metrics
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SavePlan
from kvtier.saves import Saver
from kvtier.worker import Worker

TIDY_INTERVAL_S = 5.0
CLOSE_TIMEOUT_S = 1.0


class Progress(NamedTuple):
    """What ended since the last poll."""

    loads: list[LoadDone]
    saves: list[SaveDone]


class Transfer:
    """Called from the worker's thread.

    Args:
        save_chunks_max: chunks that saves may hold in the arena at a time; at most half of it, so that loads go on.
    """

    def __init__(
        self, worker: Worker, save_jobs: Jobs, load_jobs: Jobs, admission: Admission, save_chunks_max: int
    ) -> None:
        self._worker = worker
        self._save_jobs = save_jobs
        self._load_jobs = load_jobs
        chunks_max = min(save_chunks_max, max(1, worker.arena.n_slots // 2))
        self._ticker: Ticker | None = None
        self._saver = Saver(worker, save_jobs, chunks_max, admission)
        self._loader = Loader(worker, load_jobs, admission)

    @property
    def metrics(self) -> Metrics:
        return self._worker.metrics

    def save(self, plan: SavePlan) -> None:
        """Gathers the plan's chunks before it returns. Each chunk is answered once, in some later `poll`."""
        self._saver.save(plan)

    def load(self, plan: LoadPlan) -> None:
        """Queues the plan, whose blocks stay this plan's until its one answer comes with some later `poll`."""
        self._loader.load(plan)

    def poll(self, timeout_s: float = 0.0) -> Progress:
        """What ended since the last poll; with `timeout_s`, waits so long at most for a load to end."""
        return Progress(self._loader.take_done(timeout_s), self._saver.take_done())

    def start(self) -> None:
        """Tidies in the background until `close`."""
        self._ticker = Ticker("tidy", TIDY_INTERVAL_S, self.tidy)

    def tidy(self) -> None:
        """Takes back slots of I/O that hung and has returned; lets go of segments that were evicted."""
        self._worker.quarantine.sweep()
        self._worker.files.close_unlinked()

    def drain(self, timeout_s: float) -> bool:
        """Waits for what is queued; False when `timeout_s` was not enough."""
        deadline_s = time.monotonic() + timeout_s
        loads_done = self._load_jobs.drain(timeout_s)
        return self._save_jobs.drain(max(0.0, deadline_s - time.monotonic())) and loads_done

    def close(self) -> None:
        """Ends the background work; what is still queued is dropped. Call `drain` first."""
        if self._ticker is not None:
            self._ticker.close(CLOSE_TIMEOUT_S)
        self._load_jobs.close()
        self._save_jobs.close()
        if self._save_jobs.pending() == 0:
            self._saver.trim()
        self._worker.quarantine.sweep()
        if not self._worker.ring.close() or len(self._worker.quarantine):
            _outlived.append(self._worker)  # its memory is still being written to by I/O that hangs
        self._worker.files.close()
        self._worker.index.close()


_outlived: list[Worker] = []
