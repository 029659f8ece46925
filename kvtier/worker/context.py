"""Worker context: parts that loads and saves share, and the quarantine of their late I/O."""

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


SWEEP_INTERVAL_S = 0.05


class Quarantine:
    """I/O that outlived its deadline. A read or write that hangs in the kernel can't be taken back, so its buffers
    stay out of use until it returns: late bytes land in slots, never in engine blocks (I10)."""

    def __init__(self) -> None:
        self._late: list[tuple[Reads, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._next_sweep_s = 0.0

    def add(self, batch: Reads, release: Callable[[], None]) -> None:
        """Cancels what has not begun; calls `release` (from `sweep`) when nothing of the batch is under way."""
        batch.cancel()
        with self._lock:
            self._late.append((batch, release))

    def sweep(self) -> None:
        """Releases what has returned. Not for the engine's thread: closing a file may take long."""
        with self._lock:
            returned = [entry for entry in self._late if entry[0].wait(0)]
            self._late = [entry for entry in self._late if entry not in returned]
        with ExitStack() as stack:  # each is released, also if another one's release raises
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
    """One rank's place in the world.

    arena: the slots that gather and scatter work on, in the memory where the pages are.
    host: the arena in host memory below it; None where `arena` is that itself.
    order: what must be waited for before bytes may move. sums: checksums of slabs in `arena`.
    io: what loads and saves go through. files: the segments of a namespace by its id.
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
        """Close segments whose sets are no longer in the index, and those that the file system says were unlinked.

        An index that does not answer, or that lost its content, says nothing of sets: the segments stay open. To close
        one too many costs the next read an open.
        """
        open_sets = self.files.open_sets()
        if open_sets:
            with suppress(IndexUnavailable):
                was_lost = self.index.was_reset
                known = {info.set_id for info in self.index.some_sets(open_sets)}
                if not (was_lost or self.index.was_reset):  # asked twice: it may be lost between the two questions
                    self.files.close_sets(open_sets - known)
        self.files.close_unlinked()


def arena_slot_bytes(geometry: Geometry, codec: Codec, share: RankShare) -> int:
    """Bytes that one chunk of this rank can take in an arena, whichever ranks wrote it: a header page, and slabs.

    A slab is read whole to be verified, also for some of its layers, and is padded at worst once a layer (a writer
    with one layer a pipeline stage); so a pipeline stage's slot has room for the layers of all stages.
    """
    per_head = sum(padded(codec.layers_bytes(geometry, range(n, n + 1))) for n in range(geometry.layers))
    return PAGE_BYTES + share.reads.n_heads * per_head
