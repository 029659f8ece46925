"""From staging slots down to slots of the host arena, summed before they leave the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.codecs.base import slab_bytes
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.kernels.paged import SlabRun
from kvtier.plan import SaveChunk
from kvtier.worker.context import ChunkArena, WorkerContext


@dataclass(slots=True, eq=False)
class Staged:
    """A gathered chunk and the slot, reserved for it, that it lies in by now.

    place: among the chunks that were gathered with it.
    above: the staging slot that it was copied down from, while that is still reserved for it; None: it has none.
    checksums: of its slabs as they were gathered; None: not known, the I/O engine's own are taken.
    """

    chunk: SaveChunk
    arena: ChunkArena
    slot: int
    place: int
    checksums: tuple[int, ...] | None = None
    above: int | None = None


class Lowering:
    """Thread-safe."""

    def __init__(self, worker: WorkerContext, host: ChunkArena, writes: Extent) -> None:
        self._worker = worker
        self._host = host
        self._writes = writes
        self._slab_bytes = slab_bytes(worker.codec, worker.geometry, writes)

    def move(self, staged: Sequence[Staged]) -> int:
        """Moves the first of the gathered chunks, as many as the host arena has slots for; how many. Their staging
        slots are theirs still, as `above`. 0: not even one slot came free in time.

        The checksums are taken where the bytes were gathered, if the codec did not: what the way down changes is found
        before anything is published.
        """
        worker, n_bytes = self._worker, self._writes.n_heads * self._slab_bytes
        host_slots = self._reserve(len(staged))
        moved = staged[: len(host_slots)]
        if not moved:
            return 0
        try:
            with worker.order.moving():
                for item, host_slot in zip(moved, host_slots, strict=True):
                    worker.order.copy(self._host.record(host_slot, n_bytes), worker.arena.record(item.slot, n_bytes))
                unsummed = [item for item in moved if item.checksums is None]
                sums = worker.sums([self._run(item) for item in unsummed]) if unsummed else []
        except BaseException:
            self._discard(host_slots)
            raise
        for item, checksums in zip(unsummed, sums, strict=True):
            item.checksums = checksums
        for item, host_slot in zip(moved, host_slots, strict=True):
            item.above, item.arena, item.slot = item.slot, self._host, host_slot
        return len(moved)

    def _reserve(self, n_slots: int) -> list[int]:
        """Waits for one, and takes what more is free at once: who waits for all would hold some meanwhile."""
        slots: list[int] = []
        while len(slots) < n_slots:
            slot = self._host.reserve(0.0 if slots else self._worker.timeout_s)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _discard(self, host_slots: Sequence[int]) -> None:
        for slot in host_slots:
            self._host.discard(slot)

    def _run(self, item: Staged) -> SlabRun:
        slabs = self._worker.arena.slabs(item.slot, PAGE_BYTES, self._writes.n_heads, self._slab_bytes)
        return SlabRun(slabs, item.chunk.key, self._writes.first_head, self._writes.first_layer)
