"""Keeping loaded chunks in the host arena: copied down from the staging slot in the background, off the load's path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtier.arena.admission import Admission
from kvtier.format.geometry import PAGE_BYTES
from kvtier.runtime.threads import Jobs
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.read_plan import Source, end_of


class HostKeeper:
    """For workers with a staging arena above the host arena. A full queue keeps nothing: it is a cache."""

    def __init__(self, worker: WorkerContext, host: ChunkArena, jobs: Jobs, admission: Admission) -> None:
        self._worker = worker
        self._host = host
        self._jobs = jobs
        self._admission = admission

    def wants(self, key: bytes) -> bool:
        """Whether this chunk, which was just read from files, is to be kept."""
        return self._admission.keeps_loaded(key)

    def keep(self, slot: int, key: bytes, sources: tuple[Source, ...], let_go: Callable[[], None]) -> None:
        """Copies a verified chunk out of a slot that nobody else gets before `let_go`, which is called in any case."""
        if not self._jobs.submit(partial(self._copy_down, slot, key, sources, let_go)):
            let_go()

    def _copy_down(self, slot: int, key: bytes, sources: tuple[Source, ...], let_go: Callable[[], None]) -> None:
        host_slot = self._host.reserve()
        try:
            if host_slot is None:
                return
            n_bytes = end_of(sources) - PAGE_BYTES
            with self._worker.order.moving():
                self._worker.order.copy(self._host.record(host_slot, n_bytes), self._worker.arena.record(slot, n_bytes))
            self._host.commit(host_slot, key, sources)
            host_slot = None
        finally:
            let_go()
            if host_slot is not None:
                self._host.discard(host_slot)
