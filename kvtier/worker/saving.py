"""Saver: the saves of a worker, as parts of its transfer loop, from the engine's blocks to storage and index.

The engine's thread reserves slots and launches the gather, after the forward that computed the blocks and before any
launch that can overwrite them. From then on the loop owns the chunks. Each is in one of these states:

    state       ends when                                                     next state
    GATHERED    the gather is done; chunks that the codec refused are ENDED   COPYING, without a host arena READY
    COPYING     the copies into the host arena are done                       READY
    READY       there is room in the window, and no other batch opens its file OPENING
    OPENING     its chunk is looked up and its segment is open (pool)         WRITING
    WRITING     the ring has written the record, its header page last         FLUSHING, on local disks PUBLISHING
    FLUSHING    the ring has flushed the file                                 PUBLISHING
    PUBLISHING  the index has its record (pool): last, when all is stored (I1) ENDED
    ENDED       the chunk is answered, and its slots are given back

A fault in any state makes its chunks ENDED at once. But a batch that is OPENING, WRITING or FLUSHING at its deadline is
HUNG until its task returns or the kernel returns its writes. Until then its slots and segments stay in quarantine; then
its records are erased. Chunks of a slow file wait, and fail while the file is HUNG; chunks of other files go on.
Batches contain chunks of all requests; in WRITING and FLUSHING all chunks of a batch are in one file. The states READY
to PUBLISHING are those of kvtier.worker.record_writer."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvtier.arena.admission import Admissions
from kvtier.codecs.base import Encoded
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import part_of
from kvtier.kernels.paged import Move, Patch, SlabRun
from kvtier.plan import SaveChunk, SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import CudaEvent
from kvtier.worker.loop import Then, TransferLoop, Turn
from kvtier.worker.own_segments import OwnSegments
from kvtier.worker.read_plan import Cut, Source
from kvtier.worker.record_writer import RecordWriter, Staged

COPIED_TOGETHER = 16  # chunks that are copied into the host arena behind one event

# QUEUE_FULL and RESTING are not counted here: the scheduler's half plans those chunks again, and counts those that it
# drops in the end.
_SKIPS = {
    SaveOutcome.PRESENT: names.SKIPPED_PRESENT,
    SaveOutcome.NO_SPACE: names.SKIPPED_NO_SPACE,
    SaveOutcome.FAILED: names.SKIPPED_FAILED,
    SaveOutcome.REFUSED: names.SKIPPED_REFUSED,
}


class SaveBounds(NamedTuple):
    """Limits of the chunks that saves may hold in the arena into which they are gathered. gathered_max: chunks that are
    not copied into the host arena yet or, without one, not written yet. held_max: further chunks that were copied, and
    stay until their records are written and the arena may cache them."""

    gathered_max: int
    held_max: int = 0


class Gathered(NamedTuple):
    """Chunks whose gather is launched. event: behind the gather. encoded: the codec's verdicts, once it is done."""

    staged: list[Staged]
    event: CudaEvent
    encoded: Encoded | None


def _own_cut(worker: WorkerContext, segments: OwnSegments) -> Cut:
    """Return the place of a record that this rank saves, in its slot and in the rank's pages."""
    writes, held, slab_bytes = segments.writes, worker.share.reads, segments.slab_bytes
    layer, head = writes.first_layer - held.first_layer, writes.first_head - held.first_head
    patch = Patch(0, layer, writes.n_layers, head, writes.n_heads)
    return Cut(writes, 0, slab_bytes, writes.n_heads * slab_bytes, PAGE_BYTES, patch)


class Saver:
    """Part of the loop (kvtier.worker.loop.LoopPart): copies of saves into the host arena. `save` and `take_done` are
    called on the engine's thread, all else on the loop's, unless a method says otherwise.

    A rank whose heads are copies of another rank's writes nothing and answers nothing. A forward never waits for saves,
    because their number is bounded (I4).

    Args:
        pool: runs tasks that may wait for storage or the index.
    """

    due_s = math.inf  # saves have no timed work here

    def __init__(
        self, worker: WorkerContext, loop: TransferLoop, pool: ThreadJobs, bounds: SaveBounds, admit: Admissions
    ) -> None:
        share = worker.share
        self.work: deque[Staged] = deque()  # to be copied into the host arena
        self.events: list[tuple[CudaEvent, Then, Any]] = []
        self.staged: dict[Staged, None] = {}  # not answered yet
        self._worker = worker
        self._loop = loop
        self._pool = loop.pool(pool)
        self.writer = RecordWriter(worker, self._pool, self)
        is_whole = share.writes == share.reads
        self._keeps_written = is_whole and (admit.arena if worker.host is None else admit.host).keeps_saved()
        self.bounds = bounds if is_whole and admit.arena.keeps_saved() else bounds._replace(held_max=0)
        self._cut = _own_cut(worker, self.writer.segments)
        self._log = RepeatedLog(worker.clock)
        self._done: deque[SaveDone] = deque()
        self._n_taken, self._n_left = 0, 0  # chunks ever gathered into the arena (engine's thread), and ever moved out
        self._n_held = 0
        loop.parts += [self, self.writer]

    # --- the engine's thread ---

    @property
    def n_gathered(self) -> int:
        """Return how many chunks still hold the slot that they were gathered into, without those in `_n_held`."""
        return self._n_taken - self._n_left

    def save(self, plan: SavePlan) -> None:
        """Gather the plan's chunks now and queue the rest of the work. Every chunk is answered exactly once."""
        if self._worker.share.writes is None:
            return
        staged, refusal = self._stage(plan)
        outcome: SaveOutcome | None = SaveOutcome.FAILED
        try:
            if not staged or self._loop.post(self._take, self._gather(staged)):
                outcome = None
            else:
                outcome = SaveOutcome.QUEUE_FULL  # the loop is closed
        finally:
            try:
                if outcome is not None:
                    self._take_back(staged, outcome)
            finally:
                if len(staged) < len(plan.chunks):
                    now_s = self._worker.clock()
                    self._answer([(chunk, now_s) for chunk in plan.chunks[len(staged) :]], refusal)

    def take_done(self) -> list[SaveDone]:
        """Return the answers since the last take, each to one caller. May be called on any thread."""
        done = list[SaveDone]()
        with suppress(IndexError):  # Another thread may take the last one after a check, so there is none.
            while True:
                done.append(self._done.popleft())
        return done

    def _stage(self, plan: SavePlan) -> tuple[list[Staged], SaveOutcome]:
        """Reserve a slot for each chunk, up to the first that gets none: a chunk behind a hole is of no use. Return the
        staged chunks, and the outcome of the others."""
        now_s, arena, rank = self._worker.clock(), self._worker.arena, self._worker.share.rank
        if self.writer.disk.is_resting(now_s):
            return [], SaveOutcome.RESTING
        slots = arena.reserve_some(min(len(plan.chunks), self.bounds.gathered_max - self.n_gathered))
        staged = []
        for chunk, slot in zip(plan.chunks, slots, strict=False):
            file = chunk.set_id, part_of(chunk.set_id, rank, chunk.slot)
            staged.append(Staged(chunk, plan, arena, slot, now_s, file))
        self._n_taken += len(staged)
        return staged, SaveOutcome.QUEUE_FULL

    def _gather(self, staged: list[Staged]) -> Gathered:
        """Launch one gather for all chunks, behind one launch that zeroes the slabs' padding: files must not contain
        bytes of the chunks that were in the slots before."""
        worker, cut = self._worker, self._cut
        chunk_blocks = worker.geometry.chunk_tokens // worker.pages.block_tokens
        slots, moves = list[int](), list[Move]()
        for item in staged:
            chunk = item.chunk
            assert len(chunk.block_ids) == chunk_blocks
            slabs = worker.arena.slabs(item.slot, PAGE_BYTES, cut.wanted.n_heads, cut.slab_bytes)
            position = chunk.number * worker.geometry.chunk_tokens
            moves.append(Move(cut.patch, chunk.block_ids, slabs, key=chunk.key, position=position))
            slots.append(item.slot)
        worker.arena.blank(slots, cut.wanted.n_heads, cut.slab_bytes, self.writer.segments.filled_bytes)
        encoded = worker.codec.encode(worker.pages, moves)
        return Gathered(staged, worker.order.record(), encoded)

    def _take_back(self, staged: Sequence[Staged], outcome: SaveOutcome) -> None:
        """Answer chunks that the loop does not take. If the wait fails, their slots are lost, because the gather may
        still write into them."""
        try:
            self._worker.order.wait(self._worker.order.record())
            self._worker.arena.discard(*[item.slot for item in staged])
            self._n_taken -= len(staged)
        finally:
            self._answer([(item.chunk, item.begun_s) for item in staged], outcome)

    def _answer(self, chunks: Sequence[tuple[SaveChunk, float]], outcome: SaveOutcome) -> None:
        """Answer chunks. Each comes with the time at which its save began, in seconds."""
        if outcome in _SKIPS:
            self._worker.metrics.add(_SKIPS[outcome], len(chunks))
        now_s = self._worker.clock()
        for chunk, begun_s in chunks:
            self._done.append(SaveDone(chunk.key, chunk.set_id, chunk.slot, outcome, max(0.0, now_s - begun_s)))

    # --- the loop's thread ---

    def turn(self) -> Turn:
        """Begin copies. While chunks wait for a slot of the host arena, the loop polls: loads may free one."""
        has_moved = self._copy_down()
        return Turn(has_moved, has_moved and bool(self.work), is_polled=bool(self.work))

    def _take(self, gathered: Gathered) -> None:
        self.staged.update(dict.fromkeys(gathered.staged))
        self._loop.when_done(self, gathered.event, self._gathered, gathered)

    def _gathered(self, gathered: Gathered) -> None:
        staged = gathered.staged
        if gathered.encoded is not None:
            verdicts = gathered.encoded.wait()
            refused = [item for item, verdict in zip(staged, verdicts, strict=True) if verdict.is_refused]
            for item, verdict in zip(staged, verdicts, strict=True):
                item.checksums = verdict.sums
            self._note_refused(len(refused))
            self.end(refused, SaveOutcome.REFUSED)
            staged = [item for item in staged if item not in refused]
        if self._worker.host is None:
            self._sign(staged)
            return
        for item in staged:
            item.deadline_s = self._worker.clock() + self._worker.timeout_s
        self.work.extend(staged)

    def _note_refused(self, count: int) -> None:
        """Log that the codec refuses chunks, or a user would not learn why nothing is stored. With vLLM's dummy weights
        it can refuse all of them, because their KV is near 0."""
        if count:
            so_far = count + int(self._worker.metrics.total().get(names.SKIPPED_REFUSED, 0))
            self._log.warning(
                "refused",
                "codec %s cannot keep the KV of %d chunks so far, and they are not saved: it holds NaN, "
                "infinity, or values too small or too large for the codec's scales; codec: raw keeps them",
                self._worker.codec.name,
                so_far,
            )

    def _copy_down(self) -> bool:
        """Begin to copy chunks into the host arena, as many as it has slots for: then the next step finds free staging
        slots even if storage is slow. Compute the checksums that the codec did not compute in the staging slots, so
        that a fault of the copy is found before the record is published."""
        worker, host, moved = self._worker, self._worker.host, list[Staged]()
        while host is not None and self.work and len(moved) < COPIED_TOGETHER:
            slot = host.reserve()
            if slot is None:
                break
            item = self.work.popleft()
            item.staging_slot, item.arena, item.slot = item.slot, host, slot
            moved.append(item)
        if host is None or not moved:
            late = [item for item in self.work if item.deadline_s <= worker.clock()]
            for item in late:
                self.work.remove(item)
            self.end(late, SaveOutcome.QUEUE_FULL)
            return bool(late)
        unsummed = [item for item in moved if item.checksums is None]
        if unsummed:
            with worker.order.launching():
                sums = worker.sums([self._slab_run(item, worker.arena, item.staging_slot) for item in unsummed])
            for item, checksums in zip(unsummed, sums, strict=True):
                item.checksums = checksums
        n_bytes = self._cut.n_bytes
        pairs = [(host.record(item.slot, n_bytes), worker.arena.record(item.staging_slot, n_bytes)) for item in moved]
        self._loop.when_done(self, worker.order.begin_copies_down(pairs), self._copied, moved)
        return True

    def _copied(self, moved: Sequence[Staged]) -> None:
        """Free the staging slots, except up to `held_max`: those chunks stay in the hbm arena until their records are
        written, and may then be cached there. Held chunks do not count as gathered, so they take no slot from saves."""
        n_held = min(len(moved), self.bounds.held_max - self._n_held)
        self._worker.arena.discard(*[item.staging_slot for item in moved[n_held:]])
        for item in moved[n_held:]:
            item.staging_slot = -1
        for item in moved:
            item.is_in_staging = False
        self._n_held += n_held
        self._n_left += len(moved)
        self._sign(moved)

    def _sign(self, staged: Sequence[Staged]) -> None:
        if self._worker.io.signer is None:
            self.writer.ready.extend(staged)
        elif staged:
            self._pool.add(partial(self._tags, staged), partial(self._signed, staged))

    def _tags(self, staged: Sequence[Staged]) -> list[tuple[bytes, ...]]:
        """Return the signatures of chunks in host memory. Runs in the pool, because it hashes each byte."""
        signer, writes = self._worker.io.signer, self._cut.wanted
        assert signer is not None
        return [
            signer.tags(
                item.plan.namespace, item.chunk.key, writes, self._slab_run(item, item.arena, item.slot).slabs.numpy()
            )
            for item in staged
        ]

    def _signed(self, staged: Sequence[Staged], result: Any) -> None:
        waiting = [item for item in staged if item in self.staged]  # the others were given up
        if isinstance(result, list):
            for item, tags in zip(staged, result, strict=True):
                item.tags = tags
            self.writer.ready += waiting
        else:  # a fault of the task, or the pool refused it
            self.end(waiting, SaveOutcome.FAILED)

    def end(self, staged: Sequence[Staged], outcome: SaveOutcome, *, frees_slots: bool = True) -> bool:
        """Answer chunks. Cache saved ones in their slots, or free the slots. Return False if there are no chunks."""
        if not staged:
            return False
        arena, is_saved = self._worker.arena, outcome is SaveOutcome.SAVED
        staged_slots, written = list[tuple[Staged, int]](), list[tuple[Staged, int]]()
        answered = list[tuple[SaveChunk, float]]()
        for item in staged:
            del self.staged[item]
            answered.append((item.chunk, item.begun_s))
            written.append((item, item.slot))
            self._n_left += item.is_in_staging and frees_slots
            if item.staging_slot >= 0:
                staged_slots.append((item, item.staging_slot))
                self._n_held -= not item.is_in_staging
        if staged_slots and is_saved:
            self._commit(arena, staged_slots)
        elif staged_slots:
            arena.discard(*[slot for _, slot in staged_slots])
        if is_saved and self._keeps_written:
            self._commit(self.writer.arena, written)
        elif frees_slots:
            _discard(staged)
        self._answer(answered, outcome)
        return True

    def _commit(self, arena: ChunkArena, saved: Sequence[tuple[Staged, int]]) -> None:
        """Cache saved chunks in the slots from which they were saved."""
        filled = []
        for item, slot in saved:
            at = item.location
            assert at is not None, "the record is written"
            filled.append((slot, item.chunk.key, (Source(at, self._cut, at.checksums),)))
        arena.commit(filled)

    def _slab_run(self, item: Staged, arena: ChunkArena, slot: int) -> SlabRun:
        writes = self._cut.wanted
        slabs = arena.slabs(slot, PAGE_BYTES, writes.n_heads, self._cut.slab_bytes)
        return SlabRun(slabs, item.chunk.key, writes.first_head, writes.first_layer)

    def give_back(self, staged: Sequence[Staged], then: Callable[[], None]) -> None:
        """Free the slots that chunks kept when they were answered, and run `then` on the loop's thread. May be called
        on any thread."""
        _discard(staged)
        n_left = sum(item.is_in_staging for item in staged)
        if not self._loop.post(partial(self._left, then), n_left):  # it has ended
            self._left(then, n_left)

    def _left(self, then: Callable[[], None], n_chunks: int) -> None:
        self._n_left += n_chunks
        then()

    def give_up(self) -> None:
        """Hand all chunks to the writer, which ends them."""
        self.work.clear()


def _discard(staged: Sequence[Staged]) -> None:
    for arena in {item.arena: None for item in staged}:
        arena.discard(*[item.slot for item in staged if item.arena is arena])
