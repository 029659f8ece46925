"""The save walk on a worker: gather and encode now, write and publish in the background.

Gathering is launched on the engine's thread, after the forward that computed the blocks and before anything can
overwrite them; from then on the bytes belong in an arena slot of ours, which nobody may touch before the gather is done
(kvtier.worker.cuda_events). Published last, when all of them are on disk (I1).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from kvtier.arena.admission import Admissions
from kvtier.codecs.base import Encoded, slab_bytes
from kvtier.errors import Corrupt, IndexUnavailable, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader, SegmentHeader, record_bytes
from kvtier.index.base import Location, NewRecord
from kvtier.io.ring import FlushOp, OpResult, WriteOp
from kvtier.kernels.paged import Move, Patch
from kvtier.plan import SaveChunk, SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.runtime.backoff import Backoff
from kvtier.runtime.repeated_log import RepeatedLog, cause_of
from kvtier.runtime.threads import Jobs
from kvtier.storage.filesystem import FULL
from kvtier.storage.open_segments import OpenSegment
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.lower import Lowering, Staged
from kvtier.worker.own_segments import OwnSegments
from kvtier.worker.read_plan import Source

ANSWER_GRACE_S = 0.25  # a job that has not ended so long after its deadline is answered for its thread, seconds
FULL_PAUSE_S = 0.5  # pause after a save met a full disk or quota; the next one finds out whether there is room, seconds
JOB_CHUNKS = 16
"""Chunks of one background job: one job copies down and the next writes."""

# QUEUE_FULL and RESTING are not counted here: the scheduler's half plans those chunks again, and counts the ones that
# are dropped in the end.
_SKIPS = {
    SaveOutcome.PRESENT: names.SKIPPED_PRESENT,
    SaveOutcome.NO_SPACE: names.SKIPPED_NO_SPACE,
    SaveOutcome.FAILED: names.SKIPPED_FAILED,
    SaveOutcome.REFUSED: names.SKIPPED_REFUSED,
}


class _Gathered(NamedTuple):
    """mark: when it is done. encoded: what the codec says of the chunks then."""

    mark: Mark
    encoded: Encoded | None


@dataclass(eq=False, slots=True)
class _Write:
    """A background job that writes chunks. It ends by its thread, or at its deadline if the thread hangs outside of the
    ring: creating, opening or preallocating a segment. (The ring's writes have the same deadline.)

    ours: chunks whose slots are to be given back. in_ring: writes are, or were, under way. has_ended: the
    chunks were answered, and their slots given back; the thread touches nothing more.
    """

    staged: list[Staged]
    ours: list[Staged]
    deadline_s: float
    in_ring: bool = False
    has_ended: bool = False


class _GivenUp(Exception):
    """The job ended at its deadline."""


class _Answers:
    """Answers to saves, each with the time since its chunk was gathered. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s: dict[bytes, float] = {}  # by key, of chunks that are not answered yet
        self._done: list[SaveDone] = []

    def begin(self, chunks: Iterable[SaveChunk]) -> None:
        now = self._clock()
        with self._lock:
            self._began_s.update((chunk.key, now) for chunk in chunks)

    def add(self, outcomes: Iterable[tuple[SaveChunk, SaveOutcome]]) -> None:
        now = self._clock()
        with self._lock:
            for chunk, outcome in outcomes:
                took_s = max(0.0, now - self._began_s.pop(chunk.key, now))
                self._done.append(SaveDone(chunk.key, chunk.set_id, chunk.slot, outcome, took_s))

    def take(self) -> list[SaveDone]:
        with self._lock:
            done, self._done = self._done, []
        return done


class SaveBounds(NamedTuple):
    """Chunks that saves may hold in the arena that they are gathered into. gathered_max: until they are copied down, or
    written from it; held_max: beside those, copied down already, until they may stay there as a cache."""

    gathered_max: int
    held_max: int = 0


class Saver:
    """Saves are bounded (SaveBounds), and a forward never waits (I4)."""

    def __init__(self, worker: WorkerContext, lower: Jobs, jobs: Jobs, bounds: SaveBounds, admit: Admissions) -> None:
        self._worker = worker
        self._lower_jobs = lower
        self._jobs = jobs
        host, writes = worker.host, worker.share.writes
        is_whole = writes == worker.share.reads
        self._keeps_written = is_whole and (admit.arena if host is None else admit.host).keeps_saved()
        held_max = bounds.held_max if is_whole and admit.arena.keeps_saved() else 0
        self._bounds = SaveBounds(bounds.gathered_max, held_max)
        self._lowering = None if host is None or writes is None else Lowering(worker, host, writes)
        self._segments = None if writes is None else OwnSegments(worker, writes)
        self._lock = threading.Lock()
        self._answers = _Answers(worker.clock)
        self._in_flight = 0
        self._n_held = 0
        self._disk = Backoff()
        self._writing: dict[_Write, None] = {}
        self._log = RepeatedLog(worker.clock)
        self._slots_used: dict[tuple[bytes, int], tuple[int, int]] = {}

    def save(self, plan: SavePlan) -> None:
        """Gathers the plan's chunks now and queues the rest of the work. Every chunk is answered, exactly once;
        a rank that writes nothing of them (it holds a copy of another's heads) answers nothing."""
        writes = self._worker.share.writes
        if writes is None:
            return
        self.end_overdue()
        self._answers.begin(plan.chunks)
        staged: list[Staged] = []  # ours to give back until a job has them
        outcomes = {chunk.key: SaveOutcome.FAILED for chunk in plan.chunks}  # of those that no job answers
        try:
            for number, chunk in enumerate(plan.chunks):
                slot, refusal = self._take_slot()
                if slot is None:  # nor are those behind it taken: a chunk behind a hole is of no use
                    outcomes.update((refused.key, refusal) for refused in plan.chunks[number:])
                    break
                staged.append(Staged(chunk, self._worker.arena, slot, len(staged)))
            gathered = self._gather(staged, writes)
            outcomes.update((item.chunk.key, SaveOutcome.QUEUE_FULL) for item in staged)
            while staged:
                part = staged[:JOB_CHUNKS]
                if not self._queue(plan, part, gathered, writes):
                    break
                for item in part:
                    del outcomes[item.chunk.key]
                staged = staged[len(part) :]
        finally:
            try:
                if staged:  # only when closed or by a fault: there are no more jobs than chunks in flight
                    self._worker.order.wait(self._worker.order.mark())
                self._give_back(staged)  # not when the wait failed: the gather may still write into the slots
            finally:
                self._answer([(chunk, outcomes[chunk.key]) for chunk in plan.chunks if chunk.key in outcomes])

    def _queue(self, plan: SavePlan, part: list[Staged], gathered: _Gathered, writes: Extent) -> bool:
        if self._lowering is None:
            return self._jobs.submit(partial(self._write, plan, part, writes, gathered))
        return self._lower_jobs.submit(partial(self._lower, plan, part, writes, gathered))

    def take_done(self) -> list[SaveDone]:
        self.end_overdue()
        return self._answers.take()

    def end_overdue(self) -> None:
        """Answer the jobs whose threads hang beyond the deadline, give their slots back, and have others' jobs run."""
        late_s = self._worker.clock() - ANSWER_GRACE_S
        with self._lock:
            overdue = [w for w in self._writing if w.deadline_s < late_s and not (w.in_ring or w.has_ended)]
            for write in overdue:
                write.has_ended = True
        for write in overdue:
            self._end_hold(write.staged, {})
            self._give_back(write.ours)
            self._rest(f"creating or opening a segment took more than {self._worker.timeout_s:.0f} s")
            self._answer([(item.chunk, SaveOutcome.FAILED) for item in write.staged])
        if overdue:
            self._widen()

    def trim(self) -> None:
        """After the last save: gives back the slots of our segments that will stay empty."""
        if self._segments is not None:
            self._segments.erase_unpublished()
        for (namespace, set_id), (used, slots) in self._slots_used.items():
            if used == slots:
                continue
            files = self._worker.files(namespace)
            try:
                files.trim_rank(set_id, self._worker.share.rank, used)
                self._worker.index.close_set(set_id, files.set_bytes_of(set_id))
            except (Corrupt, TierUnavailable, IndexUnavailable) as fault:
                self._log.warning("trim", "segment set %016x is not trimmed: %s", set_id, fault)
        self._slots_used.clear()

    def _take_slot(self) -> tuple[int | None, SaveOutcome]:
        """A slot, or None and why there is none."""
        with self._lock:
            if self._disk.is_resting(self._worker.clock()):
                return None, SaveOutcome.RESTING
            slot = self._worker.arena.reserve() if self._in_flight < self._bounds.gathered_max else None
            self._in_flight += slot is not None
            return slot, SaveOutcome.QUEUE_FULL

    def _give_back(self, items: Sequence[Staged]) -> None:
        """Frees the items' slots, in whichever arena they are by now."""
        for item in items:
            item.arena.discard(item.slot)
        self._left_arena(sum(item.arena is self._worker.arena for item in items))

    def _left_arena(self, n_chunks: int) -> None:
        with self._lock:
            self._in_flight -= n_chunks

    def _hold(self, lowered: Sequence[Staged]) -> None:
        """What may stay above waits there for its record, as many as the hbm arena is for; other staging slots are
        free. None counts as gathered: the next step finds as many slots as ever, however slow the storage is."""
        with self._lock:
            n_held = min(len(lowered), self._bounds.held_max - self._n_held)
            self._n_held += n_held
        for item in lowered[n_held:]:
            assert item.above is not None
            self._worker.arena.discard(item.above)
            item.above = None
        self._left_arena(len(lowered))

    def _end_hold(self, items: Sequence[Staged], kept: Mapping[bytes, Source]) -> None:
        """Ends all that is held of the items: those of `kept`, by their keys, stay as a cache of themselves."""
        held = [(item, item.above) for item in items if item.above is not None]
        for item, slot in held:
            source = kept.get(item.chunk.key)
            if source is None:
                self._worker.arena.discard(slot)
            else:
                self._worker.arena.commit(slot, item.chunk.key, (source,))
            item.above = None
        with self._lock:
            self._n_held -= len(held)

    def _gather(self, staged: Sequence[Staged], writes: Extent) -> _Gathered:
        """One launch for all of them, after one that zeroes the slabs' padding, where they have any: files are to hold
        nothing of the chunks that lay in the slots before."""
        if not staged:
            return _Gathered(None, None)
        worker, held = self._worker, self._worker.share.reads
        assert all(len(item.chunk.block_ids) == worker.chunk_blocks for item in staged)
        patch = Patch(
            0,
            writes.first_layer - held.first_layer,
            writes.n_layers,
            writes.first_head - held.first_head,
            writes.n_heads,
        )
        size = self._slab_bytes(writes)
        moves = [
            Move(
                patch,
                item.chunk.block_ids,
                worker.arena.slabs(item.slot, PAGE_BYTES, writes.n_heads, size),
                key=item.chunk.key,
            )
            for item in staged
        ]
        layers = range(writes.first_layer, writes.end_layer)
        n_bytes = worker.codec.layers_bytes(worker.geometry, layers)
        worker.arena.blank([item.slot for item in staged], writes.n_heads, size, n_bytes)
        encoded = worker.codec.encode(worker.pages, moves)
        return _Gathered(worker.order.mark(), encoded)

    def _judge(self, staged: Sequence[Staged], gathered: _Gathered) -> list[Staged]:
        """Waits until they are gathered, whatever happens. Takes the sums; those that the codec could not keep."""
        self._worker.order.wait(gathered.mark)
        if gathered.encoded is None:
            return []
        verdicts = gathered.encoded.wait()
        for item in staged:
            item.checksums = verdicts[item.place].sums
        refused = [item for item in staged if verdicts[item.place].is_refused]
        self._note_refused(len(refused))
        return refused

    def _note_refused(self, count: int) -> None:
        """Log that chunks are refused: a tier that stores nothing must not look like one that was not asked. All are
        refused where KV is near nothing, as that of vLLM's dummy weights can be."""
        if not count:
            return
        so_far = count + int(self._worker.metrics.total().get(names.SKIPPED_REFUSED, 0))
        self._log.warning(
            "refused",
            "codec %s cannot keep the KV of %d chunks so far, and they are not saved: it holds what is no "
            "number, is infinite, or is too small or too large for the codec's scales; with codec: raw they are",
            self._worker.codec.name,
            so_far,
        )

    def _slab_bytes(self, writes: Extent) -> int:
        return slab_bytes(self._worker.codec, self._worker.geometry, writes)

    def _lower(self, plan: SavePlan, staged: list[Staged], writes: Extent, gathered: _Gathered) -> None:
        """A background job: out of the staging slots, so that the next step finds them free, however slow the storage
        is; then the rest is queued."""
        assert self._lowering is not None
        outcome = SaveOutcome.FAILED
        try:
            refused = self._judge(staged, gathered)  # after this the slots may be given to others, come what may
            staged = [item for item in staged if item not in refused]
            self._give_back(refused)
            self._answer([(item.chunk, SaveOutcome.REFUSED) for item in refused])
            while staged:
                n_moved = self._lowering.move(staged)
                part = staged[:n_moved]
                self._hold(part)
                if not part or not self._jobs.submit(partial(self._write, plan, part, writes)):
                    outcome = SaveOutcome.QUEUE_FULL
                    break
                staged = staged[n_moved:]
        finally:
            self._end_hold(staged, {})
            self._give_back(staged)
            self._answer([(item.chunk, outcome) for item in staged])

    def _write(self, plan: SavePlan, staged: list[Staged], writes: Extent, gathered: _Gathered | None = None) -> None:
        """A background job: from the arena slots to the index. Answers every chunk, whatever happens.

        gathered: unless they were judged already."""
        started = time.perf_counter()
        outcomes = {item.chunk.key: SaveOutcome.FAILED for item in staged}
        write = _Write(staged, list(staged), math.inf)
        try:
            refused = [] if gathered is None else self._judge(staged, gathered)
            is_begun = self._begin(write)
            outcomes.update((item.chunk.key, SaveOutcome.REFUSED) for item in refused)
            kept = [item for item in staged if item not in refused]
            if not is_begun:
                outcomes.update((item.chunk.key, SaveOutcome.RESTING) for item in kept)
                return
            fresh = [item for item in kept if not self._is_present(item.chunk.key)]
            outcomes.update((item.chunk.key, SaveOutcome.PRESENT) for item in kept if item not in fresh)
            results = self._write_records(plan, fresh, write)
            for item, result in results:
                if result.bad_slabs:
                    self._worker.metrics.add(names.CHECKSUM_FAILURES)
                    self._log.line(
                        logging.ERROR,
                        "changed",
                        "chunk %s changed on its way to the storage; it is not stored",
                        item.chunk.key.hex(),
                    )
            outcomes.update((item.chunk.key, _failure(result)) for item, result in results)
            written = [
                (item, self._location(item.chunk, writes, result.checksums)) for item, result in results if result.ok
            ]
            published = self._publish(plan, written, write.deadline_s)
            self._end(write)
            outcomes.update((item.chunk.key, SaveOutcome.SAVED) for item, _ in published)
            self._keep_slots(published, write.ours)
            self._note_disk(outcomes)
        except _GivenUp:
            pass
        except TierUnavailable as fault:
            if fault.is_full:
                outcomes.update(
                    (key, SaveOutcome.NO_SPACE) for key, was in outcomes.items() if was is SaveOutcome.FAILED
                )
                self._wait_for_room(str(fault))
            else:
                self._rest(str(fault))
        except IndexUnavailable as fault:  # nobody would find what is written now
            self._rest(str(fault))
        except Corrupt as fault:
            self._log.warning(cause_of(fault), "a save fails: %s", fault)
        finally:
            self._finish(write, outcomes)
        saved = sum(outcome is SaveOutcome.SAVED for outcome in outcomes.values())
        if saved and self._segments is not None and self._segments.has_unpublished():  # the storage works again
            self._jobs.submit(self._segments.erase_unpublished)
        self._worker.metrics.add(names.SAVE_TOKENS, saved * self._worker.geometry.chunk_tokens)
        self._worker.metrics.add(names.SAVE_BYTES, saved * record_bytes(writes, self._slab_bytes(writes)))
        self._worker.metrics.add(names.SAVE_SECONDS, time.perf_counter() - started)

    def _location(self, chunk: SaveChunk, writes: Extent, checksums: tuple[int, ...]) -> Location:
        return Location(chunk.set_id, self._worker.share.rank, chunk.slot, self._slab_bytes(writes), writes, checksums)

    def _begin(self, write: _Write) -> bool:
        """Start the job's time. Return False if saving rests because others hang: what is queued does not follow."""
        now = self._worker.clock()
        hangs = len(self._worker.quarantine) > 0
        with self._lock:
            hangs |= any(other.has_ended for other in self._writing)
            if hangs and self._disk.is_resting(now):
                return False
            write.deadline_s = now + self._worker.timeout_s
            self._writing[write] = None
            return True

    def _enter_ring(self, write: _Write) -> None:
        """Keep the job from ending at its deadline from here on: its records may become visible late, and their set is
        not to be closed and trimmed before. (Ring and index have deadlines.) Raises _GivenUp when it has ended."""
        with self._lock:
            if write.has_ended:
                raise _GivenUp
            write.in_ring = True

    def _end(self, write: _Write) -> None:
        """Keep the job from ending at its deadline: its thread answers now. Raises _GivenUp."""
        with self._lock:
            if write.has_ended:
                raise _GivenUp
            self._writing.pop(write, None)

    def _finish(self, write: _Write, outcomes: Mapping[bytes, SaveOutcome]) -> None:
        with self._lock:
            self._writing.pop(write, None)
            was_given_up = write.has_ended
        if was_given_up:
            self._widen()
            return
        self._end_hold(write.staged, {})
        self._give_back(write.ours)
        self._answer([(item.chunk, outcomes[item.chunk.key]) for item in write.staged])

    def _widen(self) -> None:
        with self._lock:  # until the queue has it: an older count that came later would leave it without a thread
            self._jobs.widen(sum(write.has_ended for write in self._writing))

    def _is_present(self, key: bytes) -> bool:
        try:
            return bool(self._worker.index.resolve([key]))
        except IndexUnavailable:
            return False

    def _write_records(self, plan: SavePlan, fresh: list[Staged], write: _Write) -> list[tuple[Staged, OpResult]]:
        """Writes the records of those whose sets are still ours; no results when that took too long (their slots are
        then no longer the job's). Raises _GivenUp."""
        assert self._segments is not None
        with ExitStack() as stack:
            leased = []
            for item in fresh:
                segment = self._segments.lease(plan, item.chunk, write.deadline_s)
                if segment is not None:
                    stack.callback(segment.release)
                    leased.append((item, segment))
            self._enter_ring(write)
            begun = [item for item, _ in leased]
            ops = [self._write_op(plan, item, segment) for item, segment in leased]
            batch = self._worker.io.ring.submit(ops)
            results = batch.results() if batch.wait(self._left_s(write)) else None
            if results is not None and self._worker.files.sharing.flushes:
                # Once a batch and file: other nodes may read nothing of it before.
                files = sorted({op.fd for op, result in zip(ops, results, strict=True) if result.ok})
                batch = self._worker.io.ring.submit([FlushOp(fd) for fd in files])
                has_flushed = batch.wait(self._left_s(write))
                flushed = dict(zip(files, batch.results(), strict=True)) if has_flushed else None
                results = (
                    None
                    if flushed is None
                    else [
                        result._replace(error=flushed[op.fd].error) if result.ok else result
                        for op, result in zip(ops, results, strict=True)
                    ]
                )
            if results is not None:
                failed = [item.chunk for item, result in zip(begun, results, strict=True) if not result.ok]
                self._segments.note_unpublished(plan.namespace, failed)
                return list(zip(begun, results, strict=True))
            # Descriptors and slots stay taken until the kernel gives the last write back.
            for item in begun:
                write.ours.remove(item)
            stack.callback(self._give_back, begun)
            stack.callback(self._erase_late, plan.namespace, [item.chunk for item in begun])
            self._worker.quarantine.add(batch, stack.pop_all().close)
            self._rest(f"a write took more than {self._worker.timeout_s:.0f} s")
            return []

    def _erase_late(self, namespace: bytes, chunks: Sequence[SaveChunk]) -> None:
        """Erase records of a batch that returned after its deadline."""
        assert self._segments is not None
        self._segments.note_unpublished(namespace, chunks)
        self._segments.erase_unpublished()

    def _left_s(self, write: _Write) -> float:
        return max(0.0, write.deadline_s - self._worker.clock())

    def _write_op(self, plan: SavePlan, item: Staged, segment: OpenSegment) -> WriteOp:
        chunk, arena, header = item.chunk, item.arena, segment.header
        blank = (0,) * header.extent.n_heads  # the I/O engine fills in the checksums as the bytes pass
        page = RecordHeader(
            chunk.key,
            chunk.parent,
            plan.namespace,
            header.slab_bytes,
            self._worker.geometry.chunk_tokens,
            chunk.slot,
            header.extent,
            chunk.set_id,
            blank,
        ).pack(self._tags(plan, item, header))
        arena.header(item.slot).copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        with self._lock:
            owner = (plan.namespace, chunk.set_id)
            # Remembered of a full set too: its first slots may be written after its last ones, by another job.
            used, _ = self._slots_used.get(owner, (0, 0))
            self._slots_used[owner] = max(used, chunk.slot + 1), header.slots
        return WriteOp(
            segment.fd,
            header.slot_offset(chunk.slot),
            arena.address(item.slot),
            header.slab_bytes,
            header.extent.n_heads,
            chunk.key,
            header.extent.first_head,
            header.extent.first_layer,
            item.checksums,
        )

    def _tags(self, plan: SavePlan, item: Staged, header: SegmentHeader) -> tuple[bytes, ...]:
        """Of a chunk in host memory; none where nothing is signed."""
        signer = self._worker.io.signer
        if signer is None:
            return ()
        assert not item.arena.is_device
        slabs = item.arena.slabs(item.slot, PAGE_BYTES, header.extent.n_heads, header.slab_bytes)
        return signer.tags(plan.namespace, item.chunk.key, header.extent, slabs.numpy())

    def _publish(
        self, plan: SavePlan, written: list[tuple[Staged, Location]], deadline_s: float
    ) -> list[tuple[Staged, Location]]:
        """Those that are visible now, or others' records of the same; not what lies in a set that was removed or taken
        over meanwhile."""
        assert self._segments is not None
        index, whole = self._worker.index, self._worker.geometry.whole
        if index.publish([NewRecord(item.chunk.key, location, whole) for item, location in written]) == len(written):
            return written
        ours = self._segments.leave(plan.namespace, [location for _, location in written], deadline_s)
        return [(item, location) for item, location in written if location.set_id in ours]

    def _keep_slots(self, written: list[tuple[Staged, Location]], ours: list[Staged]) -> None:
        """What was saved may stay as a cache of itself, in the arena that it was written from and in the one above."""
        sources = {item.chunk.key: Source(location, location.extent, PAGE_BYTES) for item, location in written}
        items = [item for item, _ in written]
        self._end_hold(items, sources)
        if not self._keeps_written:
            return
        for item in items:
            ours.remove(item)
            item.arena.commit(item.slot, item.chunk.key, (sources[item.chunk.key],))
        self._left_arena(sum(item.arena is self._worker.arena for item in items))

    def _note_disk(self, outcomes: dict[bytes, SaveOutcome]) -> None:
        if SaveOutcome.NO_SPACE in outcomes.values():
            self._wait_for_room("a write met a full disk or quota")
        elif SaveOutcome.SAVED in outcomes.values():
            with self._lock:
                self._disk.worked()

    def _wait_for_room(self, why: str) -> None:
        """Pause briefly: the keeper evicts, and once there is room the next save works."""
        with self._lock:
            self._disk.pause(self._worker.clock(), FULL_PAUSE_S)
        self._log.warning("full", "no room to save, tried again every %.1f s: %s", FULL_PAUSE_S, why)

    def _rest(self, why: str) -> None:
        with self._lock:
            pause_s = self._disk.refused(self._worker.clock())
        self._log.warning("rests", "saving rests for %.0f s: %s", pause_s, why)

    def _answer(self, outcomes: Sequence[tuple[SaveChunk, SaveOutcome]]) -> None:
        for _, outcome in outcomes:
            if outcome in _SKIPS:
                self._worker.metrics.add(_SKIPS[outcome])
        self._answers.add(outcomes)


def _failure(result: OpResult) -> SaveOutcome:
    """What is said of a record that was not written, or not published."""
    return SaveOutcome.NO_SPACE if result.error in FULL else SaveOutcome.FAILED
