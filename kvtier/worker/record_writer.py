"""Record writer: writes chunks from arena slots into segments, and publishes their records in the index.

Its states are READY to PUBLISHING of the table in kvtier.worker.saving.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvtier.errors import Corrupt, IndexUnavailable, KVTierError, TierUnavailable
from kvtier.format.record import RecordHeader, parts_of, slot_start
from kvtier.index.base import Location, NewRecord
from kvtier.io.base import Reads
from kvtier.io.ring import FlushOp, OpResult, WriteOp
from kvtier.plan import SaveChunk, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.runtime.backoff import Backoff
from kvtier.runtime.repeated_log import RepeatedLog, cause_of
from kvtier.storage.filesystem import FULL
from kvtier.storage.open_segments import Name, OpenSegment
from kvtier.storage.segments import segment_name
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import CudaEvent
from kvtier.worker.loop import TaskPool, Then, Turn
from kvtier.worker.own_segments import OwnSegments

if TYPE_CHECKING:
    from kvtier.worker.saving import Saver

OPEN_GRACE_S = 0.25  # time after its deadline at which a batch that is still OPENING is given up, seconds
SLOW_SHARE = 0.25  # share of the timeout after which chunks of other files do not wait for a file that may hang
FULL_PAUSE_S = 0.5  # pause after a save met a full disk or quota, seconds; the next save shows whether there is room
# Limits of the chunks between READY and ENDED. A batch is half of them at most, so that one batch is opened or
# published while another is written. All of them must be written within one timeout.
WINDOW_BYTES = 1 << 30
WINDOW_MIN, WINDOW_MAX = 8, 128

_key_of = attrgetter("chunk.key")  # a comprehension would be one call more for each chunk


class SaveState(Enum):
    """State of a batch; kvtier.worker.saving has the table. Chunks in the states before have no batch yet: GATHERED and
    COPYING wait for events, READY ones in a queue."""

    OPENING = auto()
    WRITING = auto()
    FLUSHING = auto()
    PUBLISHING = auto()
    HUNG = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Staged:
    """A chunk that was gathered, and the slot, reserved for it, that its bytes are in by now.

    begun_s: time of the gather. file: the segment file that it is written to. deadline_s: end of its wait for a slot of
    the host arena. checksums: of its slabs as they were gathered; None: not known, so the I/O engine computes them.
    staging_slot: slot from which it was copied into the host arena, while that is still reserved for it; -1: none.
    is_in_staging: it was not copied yet. tags: signatures. location: of its record, once that is written.
    """

    chunk: SaveChunk
    plan: SavePlan
    arena: ChunkArena
    slot: int
    begun_s: float
    file: Name
    deadline_s: float = math.inf
    checksums: tuple[int, ...] | None = None
    staging_slot: int = -1
    is_in_staging: bool = True
    tags: tuple[bytes, ...] = ()
    location: Location | None = None


@dataclass(eq=False, slots=True)
class SaveBatch:
    """Chunks of one namespace that are in one state together, from OPENING on; of one file in WRITING and FLUSHING.

    slow_s: time from which on its file counts as slow. opening: file that a task opens now. is_split: that takes long,
    so the task opens no further file. held: segments that are open for the batch. io: writes or flushes under way.
    results: of the writes.
    """

    namespace: bytes
    staged: list[Staged]
    state: SaveState
    begun_s: float
    slow_s: float = math.inf
    deadline_s: float = math.inf
    opening: Name | None = None
    is_split: bool = False
    held: dict[Name, OpenSegment] = field(default_factory=dict)
    io: Reads | None = None
    results: list[OpResult] = field(default_factory=list)

    @property
    def files(self) -> set[Name]:
        return {item.file for item in self.staged}


Opened = OpenSegment | SaveOutcome | Exception  # of one chunk


class RecordWriter:
    """Writer of the records of a rank: part of the loop (kvtier.worker.loop.LoopPart). Called on the loop's thread,
    unless a method says otherwise.

    ready: chunks to write. arena: the arena in host memory from which they are written.

    Args:
        pool: runs tasks that may wait for storage or the index.
    """

    def __init__(self, worker: WorkerContext, pool: TaskPool, saver: Saver) -> None:
        self.work = saver.staged
        self.events: list[tuple[CudaEvent, Then, Any]] = []
        self.due_s = math.inf
        self.disk = Backoff()
        self.segments = OwnSegments(worker, worker.share.writes or worker.share.reads)
        self.ready: list[Staged] = []
        self._worker = worker
        self.arena = worker.arena if worker.host is None else worker.host
        self._pool = pool
        self._saver = saver
        self._log = RepeatedLog(worker.clock)
        self._batches: dict[SaveBatch, None] = {}
        self._stored: list[SaveBatch] = []  # to be published
        self._saved_s = -math.inf
        self._slots_used: dict[tuple[bytes, int], tuple[int, int]] = {}

    def turn(self) -> Turn:
        """Advance every batch as far as possible without a wait."""
        has_moved = goes_on = False
        now_s = self._worker.clock()
        for batch in list(self._batches):
            if batch.io is not None and batch.io.wait(0):
                results, batch.io = batch.io.results(), None
                (self._written if batch.state is SaveState.WRITING else self._flushed)(batch, results)
                has_moved = True
            elif batch.deadline_s <= now_s and self._expire(batch, now_s):
                has_moved = True
            elif batch.state is SaveState.OPENING and batch.slow_s <= now_s and not batch.is_split:
                self._split(batch)
        if self._stored:
            self._publish()
        if self.ready and self._begin(now_s):
            has_moved, goes_on = True, bool(self.ready)
        first, n_writing, self.due_s = None, 0, math.inf
        for batch in self._batches:
            first = first or batch.io
            if batch.state is SaveState.WRITING:
                n_writing += len(batch.staged)
            elif batch.state is SaveState.OPENING:
                due_s = batch.deadline_s + OPEN_GRACE_S if batch.is_split else batch.slow_s
                self.due_s = min(self.due_s, due_s)
        return Turn(has_moved, goes_on, first, n_writing * self._worker.arena.slot_bytes)

    def _begin(self, now_s: float) -> bool:
        """Open segments for the chunks that are ready, as many as the window has room for. While saving backs off
        because storage hangs, end them instead. Return False if nothing changed."""
        hung, busy, n_under_way = set[Name](), set[Name](), 0
        for batch in self._batches:
            if batch.state is SaveState.HUNG:
                hung |= batch.files
                continue
            n_under_way += len(batch.staged) if now_s < batch.slow_s else 0
            if batch.slow_s <= now_s or batch.state is SaveState.OPENING:
                busy |= batch.files
        if (hung or len(self._worker.quarantine)) and self.disk.is_resting(now_s):
            ended, self.ready = self.ready, []
            return self._saver.end(ended, SaveOutcome.RESTING)
        window = max(WINDOW_MIN, min(WINDOW_MAX, WINDOW_BYTES // self._worker.arena.slot_bytes))
        room = min(window - n_under_way, window // 2)
        if room <= 0 and not hung:
            return False
        stuck, staged, left = list[Staged](), list[Staged](), list[Staged]()
        n_seen = 0
        for item in self.ready:
            n_seen += 1
            if item.file in hung:
                stuck.append(item)
            elif (
                len(staged) < room
                and item.file not in busy
                and (not staged or item.plan.namespace == staged[0].plan.namespace)
            ):
                staged.append(item)
            else:
                left.append(item)
            if len(staged) == room and not hung:
                break  # thousands of small chunks may wait
        self.ready[:n_seen] = left
        if stuck:
            self._saver.end(stuck, SaveOutcome.FAILED)
            self._hangs("a segment file does not answer")
        if staged:
            namespace, timeout_s = staged[0].plan.namespace, self._worker.timeout_s
            batch = SaveBatch(
                namespace, staged, SaveState.OPENING, now_s, now_s + SLOW_SHARE * timeout_s, now_s + timeout_s
            )
            self._batches[batch] = None
            self._pool.add(partial(self._open, batch, tuple(staged)), partial(self._opened, batch))
        return bool(staged or stuck)

    def _split(self, batch: SaveBatch) -> None:
        """Leave the chunks of a file whose open takes long in the batch, and make the others READY again."""
        batch.is_split = True  # the task sets `opening`, then reads this
        opening = batch.opening  # read once: the task may set the next file at any time
        if opening is None:  # the index is slow
            batch.is_split = False
            return
        self.ready[:0] = [item for item in batch.staged if item.file != opening]
        batch.staged = [item for item in batch.staged if item.file == opening]

    def _open(self, batch: SaveBatch, staged: Sequence[Staged]) -> dict[Staged, Opened]:
        """Look the chunks up and open their segments, each file once. Runs in the pool, and touches no slot, because
        the batch may be given up before it ends."""
        try:
            present = self._worker.index.find(list(map(_key_of, staged)))
        except IndexUnavailable:
            present = [None] * len(staged)
        by_file: dict[Name, Opened] = {}
        results: dict[Staged, Opened] = {}
        for item, entry in zip(staged, present, strict=True):
            if entry is None and item.file not in by_file:
                batch.opening = item.file
                if batch.is_split:
                    break
                try:
                    segment = self.segments.lease(item.plan, item.chunk, item.file[1])
                except (KVTierError, OSError) as fault:
                    by_file[item.file] = fault
                else:
                    by_file[item.file] = segment or SaveOutcome.FAILED
                    if segment is not None:
                        batch.held[item.file] = segment
            results[item] = by_file[item.file] if entry is None else SaveOutcome.PRESENT
        return results

    def _opened(self, batch: SaveBatch, results: Any) -> None:
        """Write the chunks in one batch for each file, so that a file that hangs delays no other."""
        if batch.state is SaveState.HUNG:
            self._finish(batch)
            return
        batch.state = SaveState.WRITING  # the task has ended: see `give_up`
        writing, ended = dict[Name, SaveBatch](), dict[SaveOutcome | Exception, list[Staged]]()
        for item in batch.staged:
            result = results if isinstance(results, Exception) else results.get(item)
            if result is None:
                self.ready.append(item)
            elif not isinstance(result, OpenSegment):  # a fault of the task, or the pool refused it
                ended.setdefault(result, []).append(item)
            elif item.file in writing:
                writing[item.file].staged.append(item)
            else:
                writing[item.file] = SaveBatch(
                    batch.namespace, [item], SaveState.WRITING, batch.begun_s, batch.slow_s, batch.deadline_s
                )
        for file, of_file in writing.items():
            of_file.held[file] = batch.held.pop(file)
            self._batches[of_file] = None
        self._finish(batch)
        for why, staged in ended.items():
            self._saver.end(staged, self._outcome_of(why) if isinstance(why, Exception) else why)
        for of_file in writing.values():
            self._write(of_file)

    def _write(self, batch: SaveBatch) -> None:
        """Put the records' header pages into their slots and submit the writes. The I/O engine computes the checksums
        that are missing while it writes, and fills them in."""
        writes, slab_bytes, namespace = self.segments.writes, self.segments.slab_bytes, batch.namespace
        chunk_tokens, no_sums = self._worker.geometry.chunk_tokens, (0,) * writes.n_heads
        heads, head, layer = writes.n_heads, writes.first_head, writes.first_layer
        (segment,), ops = batch.held.values(), list[WriteOp]()
        for item in batch.staged:
            key, parent, set_id, slot = item.chunk.key, item.chunk.parent, item.chunk.set_id, item.chunk.slot
            page = RecordHeader(key, parent, namespace, slab_bytes, chunk_tokens, slot, writes, set_id, no_sums)
            address = self.arena.put_header(item.slot, page.pack(item.tags))
            offset = slot_start(set_id, slot, segment.header.slot_bytes)
            ops.append(WriteOp(segment.fd, offset, address, slab_bytes, heads, key, head, layer, item.checksums))
            # Full sets are kept in the table too: another batch may write a set's first slots after its last ones.
            used, _ = self._slots_used.get((namespace, set_id), (0, 0))
            self._slots_used[namespace, set_id] = max(used, slot + 1), segment.header.slots
        self._submit(batch, SaveState.WRITING, ops)

    def _submit(self, batch: SaveBatch, state: SaveState, ops: Sequence[WriteOp | FlushOp]) -> None:
        try:
            batch.io, batch.state = self._worker.io.ring.submit(ops), state
        except TierUnavailable as fault:  # its queue is full, or it is closed
            self._fail(batch.staged, self._outcome_of(fault))
            self._finish(batch)

    def _written(self, batch: SaveBatch, results: list[OpResult]) -> None:
        """Flush the file on file systems whose other nodes see the bytes only after that."""
        batch.results = results
        if self._worker.files.sharing.flushes and any(result.ok for result in results):
            self._submit(batch, SaveState.FLUSHING, [FlushOp(segment.fd) for segment in batch.held.values()])
        else:
            self._end_writes(batch)

    def _flushed(self, batch: SaveBatch, results: list[OpResult]) -> None:
        (flush,) = results
        batch.results = [result._replace(error=flush.error) if result.ok else result for result in batch.results]
        self._end_writes(batch)

    def _end_writes(self, batch: SaveBatch) -> None:
        """Fail the records that were not written, and queue the others for the index."""
        written: list[Staged] = []
        rank, slab_bytes, writes = self._worker.share.rank, self.segments.slab_bytes, self.segments.writes
        for item, result in zip(batch.staged, batch.results, strict=True):
            if result.ok:
                chunk = item.chunk
                item.location = Location(chunk.set_id, rank, chunk.slot, slab_bytes, writes, result.checksums)
                written.append(item)
                continue
            if result.bad_slabs:
                self._worker.metrics.add(names.CHECKSUM_FAILURES)
                text = "chunk %s changed on its way to the storage; it is not stored"
                self._log.line(logging.ERROR, "changed", text, item.chunk.key.hex())
            if result.error in FULL:
                self._wait_for_room("a write met a full disk or quota")
            elif result.error:  # no pause: only this file may be at fault
                where, why = segment_name(*item.file), os.strerror(result.error)
                self._log.warning(f"write {result.error}", "a save failed: writing to %s: %s", where, why)
            self._fail([item], SaveOutcome.NO_SPACE if result.error in FULL else SaveOutcome.FAILED)
        if written:
            self._stored.append(SaveBatch(batch.namespace, written, SaveState.PUBLISHING, batch.begun_s))
        self._finish(batch)

    def _publish(self) -> None:
        """Publish the written records, all of a namespace together."""
        by_namespace: dict[bytes, SaveBatch] = {}
        for stored in self._stored:
            batch = by_namespace.setdefault(stored.namespace, stored)
            if batch is not stored:
                batch.staged += stored.staged
        self._stored.clear()
        for batch in by_namespace.values():
            self._batches[batch] = None
            self._pool.add(partial(self._put_in_index, batch.staged), partial(self._published, batch))

    def _put_in_index(self, written: Sequence[Staged]) -> set[int]:
        """Publish the records. Return the ids of the sets whose chunks are visible now, through these records or other
        records of the same chunks; not of sets that were removed or taken over before. Runs in the pool."""
        records, set_ids, files, whole = list[NewRecord](), set[int](), set[Name](), self.segments.whole
        for item in written:
            assert item.location is not None
            records.append(NewRecord(item.chunk.key, item.location, whole))
            set_ids.add(item.chunk.set_id)
            files.add(item.file)
        if self._worker.index.publish(records) == len(records):
            self.segments.accepted += files.difference(self.segments.accepted)
            return set_ids
        return self.segments.leave(written[0].plan.namespace, [record.location for record in records])

    def _published(self, batch: SaveBatch, result: Any) -> None:
        is_visible = result if isinstance(result, set) else ()
        saved, lost = list[Staged](), list[Staged]()
        for item in batch.staged:
            (saved if item.chunk.set_id in is_visible else lost).append(item)
        counted = {names.SAVE_SECONDS: self._worker.clock() - batch.begun_s}
        if saved:
            counted[names.SAVE_TOKENS] = len(saved) * self._worker.geometry.chunk_tokens
            counted[names.SAVE_BYTES] = len(saved) * self.segments.record_bytes
        self._worker.metrics.add_each(counted)
        del self._batches[batch]
        if lost:
            self._saver.end(lost, self._outcome_of(result) if isinstance(result, Exception) else SaveOutcome.FAILED)
        if saved:
            self._saver.end(saved, SaveOutcome.SAVED)
            self.disk.worked()
            self._saved_s = self._worker.clock()
        if saved and self.segments.unpublished:  # the storage works again
            self._pool.add(self.segments.erase_unpublished)

    def _expire(self, batch: SaveBatch, now_s: float) -> bool:
        """Give up a batch after its deadline. Return False if it may go on: calls of the index have own deadlines."""
        if batch.io is not None:
            self._hangs(f"a write took more than {self._worker.timeout_s:.0f} s")
            self._abandon(batch)
        elif batch.state is SaveState.OPENING and batch.deadline_s + OPEN_GRACE_S < now_s:
            batch.state = SaveState.HUNG
            self._hangs(f"creating or opening a segment took more than {self._worker.timeout_s:.0f} s")
            self._saver.end(batch.staged, SaveOutcome.FAILED)
        else:
            return False
        return True

    def _abandon(self, batch: SaveBatch) -> None:
        """Fail a batch whose writes are under way. Its slots and segments stay in use until the kernel returns the
        writes, and no other chunk is written to the file."""
        assert batch.io is not None
        batch.state, io, batch.io = SaveState.HUNG, batch.io, None
        self._worker.quarantine.add(io, partial(self._returned, batch))
        self._saver.end(batch.staged, SaveOutcome.FAILED, frees_slots=False)

    def _returned(self, batch: SaveBatch) -> None:
        """Erase the records of a late batch, and free its slots and segments. Called on any thread that may wait for
        storage."""
        try:
            self.segments.note_unpublished(batch.namespace, [item.chunk for item in batch.staged])
            self.segments.erase_unpublished()
        finally:
            self._saver.give_back(batch.staged, partial(self._finish, batch))

    def _finish(self, batch: SaveBatch) -> None:
        """Release a batch's segments and forget it. All its chunks are answered or in other batches."""
        batch.state = SaveState.ENDED
        self._batches.pop(batch, None)
        for segment in batch.held.values():
            segment.release()

    def _fail(self, staged: Sequence[Staged], outcome: SaveOutcome) -> None:
        """End chunks whose records may be stored in part."""
        self.segments.note_unpublished(staged[0].plan.namespace, [item.chunk for item in staged])
        self._saver.end(staged, outcome)

    # --- pauses after faults ---

    def _outcome_of(self, fault: Exception) -> SaveOutcome:
        """Pause saving after a fault of storage or index, unless a single file is at fault. Return the outcome for the
        chunks of the failed operation."""
        if isinstance(fault, Corrupt):
            self._log.warning(cause_of(fault), "a save failed: %s", fault)
        elif isinstance(fault, TierUnavailable) and fault.is_full:
            self._wait_for_room(str(fault))
            return SaveOutcome.NO_SPACE
        else:  # also if the index does not answer: no lookup would find records written now
            self._back_off(str(fault))
        return SaveOutcome.FAILED

    def _wait_for_room(self, why: str) -> None:
        """Pause briefly: the scheduler's keeper evicts sets, and the next save after that finds room."""
        self.disk.pause(self._worker.clock(), FULL_PAUSE_S)
        self._log.warning("full", "no room to save; saving pauses for %.1f s: %s", FULL_PAUSE_S, why)

    def _hangs(self, why: str) -> None:
        """Log that writes to a file hang. Pause saving if no write to another file has succeeded within the timeout."""
        if self._saved_s < self._worker.clock() - self._worker.timeout_s:
            self._back_off(why)
        else:
            self._log.warning("hangs", "saves to one segment file failed, those to others go on: %s", why)

    def _back_off(self, why: str) -> None:
        pause_s = self.disk.refused(self._worker.clock())
        self._log.warning("rests", "saving pauses for %.0f s: %s", pause_s, why)

    # --- the end ---

    def give_up(self) -> None:
        """Fail all chunks that are not answered. Tasks in the pool still return their results."""
        self.ready.clear()
        self._stored.clear()
        for batch in list(self._batches):
            if batch.io is not None:  # even if it has ended: the loop takes no more results
                self._abandon(batch)
            elif batch.state is SaveState.OPENING:
                batch.state = SaveState.HUNG
            elif batch.state is SaveState.PUBLISHING:
                batch.staged = []
            elif batch.state is not SaveState.HUNG:  # its I/O has ended
                self.segments.note_unpublished(batch.namespace, [item.chunk for item in batch.staged])
                self._finish(batch)
        self._saver.end(list(self.work), SaveOutcome.FAILED)

    def trim(self) -> None:
        """Truncate this rank's segments behind their last record, after the last save."""
        self.segments.erase_unpublished()
        slots_used, self._slots_used = self._slots_used, {}  # an earlier call that hung may still run beside this one
        for (namespace, set_id), (used, slots) in slots_used.items():
            if used == slots:
                continue
            files = self._worker.files(namespace)
            try:
                if not self._worker.index.some_sets([set_id]):  # the set was removed, as a reset does
                    continue
                for part in parts_of(set_id, self._worker.share.rank):
                    files.trim(set_id, part, used)
                self._worker.index.close_set(set_id, files.set_bytes_of(set_id))
            except (Corrupt, TierUnavailable, IndexUnavailable) as fault:
                self._log.warning("trim", "segment set %016x is not trimmed: %s", set_id, fault)
