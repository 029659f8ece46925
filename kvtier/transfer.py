"""Transfer moves: engine blocks -> arena -> file, and back. One a worker; decides nothing.

`save` gathers at once on the caller's thread; everything else runs in the background and is told by `poll`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from kvtier.admission import Admission
from kvtier.jobs import Jobs
from kvtier.loads import Loader
from kvtier.metrics import Metrics
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SavePlan
from kvtier.saves import Saver
from kvtier.worker import Worker

log = logging.getLogger("kvtier")


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
        self._worker.quarantine.sweep()
        return Progress(self._loader.take_done(timeout_s), self._saver.take_done())

    def drain(self, timeout_s: float) -> bool:
        """Waits for what is queued; False when `timeout_s` was not enough."""
        return self._load_jobs.drain(timeout_s) and self._save_jobs.drain(timeout_s)

    def close(self) -> None:
        """Ends the background work; what is still queued is dropped. Call `drain` first."""
        self._load_jobs.close()
        self._save_jobs.close()
        if self._save_jobs.pending() == 0:
            self._saver.trim()
        self._worker.ring.close()
        self._worker.index.close()
