"""Keeping loaded chunks in the host arena: copied down from the staging slot in the background, off the load's path."""

from __future__ import annotations

from functools import partial

from kvtier.geometry import PAGE_BYTES
from kvtier.jobs import Jobs
from kvtier.sources import Source, end_of
from kvtier.worker import ChunkArena, Worker


class HostKeeper:
    """For workers with a staging arena above the host arena. A full queue keeps nothing: it is a cache."""

    def __init__(self, worker: Worker, host: ChunkArena, jobs: Jobs) -> None:
        self._worker = worker
        self._host = host
        self._jobs = jobs

    def keep(self, slot: int, key: bytes, sources: tuple[Source, ...]) -> None:
        """Takes over a reserved staging slot that holds a verified chunk, and frees it in the end."""
        if not self._jobs.submit(partial(self._copy_down, slot, key, sources)):
            self._worker.arena.discard(slot)

    def _copy_down(self, slot: int, key: bytes, sources: tuple[Source, ...]) -> None:
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
            self._worker.arena.discard(slot)
            if host_slot is not None:
                self._host.discard(host_slot)
