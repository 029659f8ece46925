"""Worker context: objects that loads and saves of a rank share, and the quarantine of late I/O."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvtier.arena.arena import Arena
from kvtier.codecs.base import Codec
from kvtier.errors import IndexUnavailable
from kvtier.format.geometry import PAGE_BYTES, Geometry, RankShare, padded
from kvtier.index.base import Index
from kvtier.io.base import Reads
from kvtier.io.engines import Engines
from kvtier.kernels.paged import PagedKV, SlabRun
from kvtier.runtime.metrics import Metrics
from kvtier.storage.segments import SegmentFolders
from kvtier.worker.cuda_events import Order
from kvtier.worker.read_plan import Source

ChunkArena = Arena[tuple[Source, ...]]

SWEEP_INTERVAL_S = 0.05  # least time between two sweeps of the quarantine, seconds


class Quarantine:
    """I/O that did not end by its deadline. A read or write that hangs in the kernel cannot be cancelled, so its slots
    are not used again until it returns: late bytes land in slots, never in engine blocks (I10)."""

    def __init__(self) -> None:
        self._late: list[tuple[Reads, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._next_sweep_s = 0.0

    def add(self, batch: Reads, release: Callable[[], None]) -> None:
        """Cancel the operations that have not begun. `sweep` calls `release` once all others have returned."""
        batch.cancel()
        with self._lock:
            self._late.append((batch, release))

    def sweep(self) -> None:
        """Release the batches that have returned. Not for the engine's thread, because closing a file may take long."""
        with self._lock:
            returned = [entry for entry in self._late if entry[0].wait(0)]
            self._late = [entry for entry in self._late if entry not in returned]
        with ExitStack() as stack:  # calls all of them, even if one raises
            for _, release in returned:
                stack.callback(release)

    def is_due(self, now_s: float) -> bool:
        """Return True if a sweep may find something, at most once in SWEEP_INTERVAL_S."""
        with self._lock:
            if not self._late or now_s < self._next_sweep_s:
                return False
            self._next_sweep_s = now_s + SWEEP_INTERVAL_S
            return True

    def __len__(self) -> int:
        with self._lock:
            return len(self._late)


@dataclass(frozen=True)
class WorkerContext:
    """Objects of one rank that its loads and saves share.

    arena: slots for gathers and scatters, in the memory of the engine's pages (GPU or host). host: arena in host memory
    between `arena` and storage; None where `arena` is in host memory itself. order: order of copies against the
    engine's work. sums: computes checksums of slabs in `arena`. io: engines that read and write. files: the segments of
    a namespace, by its id.
    """

    geometry: Geometry
    share: RankShare
    codec: Codec
    pages: PagedKV
    arena: ChunkArena
    host: ChunkArena | None
    order: Order
    sums: Callable[[Sequence[SlabRun]], list[tuple[int, ...]]]
    io: Engines
    index: Index
    files: SegmentFolders
    quarantine: Quarantine
    metrics: Metrics
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    def close_removed(self) -> None:
        """Close segments whose sets the index does not list any more, and segments that were unlinked.

        If the index does not answer or has lost its content, segments of removed sets stay open. A segment that is
        closed without need costs the next read an open.
        """
        open_sets = self.files.open_sets()
        if open_sets:
            with suppress(IndexUnavailable):
                was_lost = self.index.was_reset
                known = {info.set_id for info in self.index.some_sets(open_sets)}
                if not (was_lost or self.index.was_reset):  # the index may be lost between the two calls
                    self.files.close_sets(open_sets - known)
        self.files.close_unlinked()


def arena_slot_bytes(geometry: Geometry, codec: Codec, share: RankShare) -> int:
    """Return the largest size of a chunk of this rank in an arena, whichever ranks wrote it: a header page and slabs.

    A slab is verified, and so read, as a whole, even if the rank needs only some of its layers: a slot has room for all
    layers of the model. At worst each layer is padded, as by a writer with one layer for each pipeline stage.
    """
    per_head = sum(padded(codec.layers_bytes(geometry, range(n, n + 1))) for n in range(geometry.layers))
    return PAGE_BYTES + share.reads.n_heads * per_head
