"""Loads of a worker, as part of its transfer loop: which chunks are read, in which order, and for which requests.

A turn takes the reads, copies, scatters and tasks of the pool that have ended. It verifies the chunks of all loads that
have arrived in one launch, scatters the verified ones in another, and begins reads up to the limit. Each load is
answered exactly once, by its deadline unless its scatters still run (I10). Bytes that fail their checksum never reach
the engine (I2): from the first bad chunk on, the blocks are reported as failed.
"""

import math
from bisect import insort
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

from kvtier.arena.admission import Admissions
from kvtier.errors import Corrupt, TierUnavailable
from kvtier.index.entry import FIRST_SET
from kvtier.maintenance.record_check import Rechecks
from kvtier.plan import LoadChunk, LoadDone, LoadPlan
from kvtier.runtime import metrics as names
from kvtier.runtime import switch_interval
from kvtier.runtime.repeated_log import RepeatedLog, cause_of
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.loading import ChunkLoader, Fetch, Load, Part, State
from kvtier.worker.loop import Then, TransferLoop, Turn
from kvtier.worker.record_reader import FetchFailed, SegmentGone

# Chunks that may hold slots at a time, over all loads. A chunk is opened, read, verified and scattered in turns of its
# own, and on an H100 beside a thread that holds the interpreter lock for 4 of 7 ms a turn took 7 to 15 ms, in which
# 0.7 GiB are read: with a window of 1 GiB the storage idled.
WINDOW_BYTES = 2 << 30
WINDOW_MIN, WINDOW_MAX = 8, 256
TOGETHER_MAX = 64  # chunks that are verified or scattered in one launch on a device
BEGUN_MAX = 64  # chunks that are begun in a turn, before those that have arrived are looked at again
# Most chunks, and most bytes, of one scatter on the CPU, where the loop itself moves them: 8 MiB take 2 ms, but a codec
# may be slower.
MOVED_MAX, MOVED_BYTES = 8, 8 << 20
# A load waits behind those that were asked for earlier, unless they are larger: each counts as asked for later by the
# time that its bytes take at this rate.
ORDER_BYTES_S = 10e9
LAUNCH_TIMEOUT_S = 5.0  # longest wait of `stop` for the launch of a scatter: only that of a hung device takes longer
ANSWER_LOOK_S = 0.05  # interval at which a thread that waits for an answer checks for passed deadlines, seconds

_n_pending_of, _waiting_of, _deadline_of, _turn_of = map(attrgetter, ("n_pending", "waiting", "deadline_s", "turn_s"))
_first_token_of, _moved_of = map(attrgetter, ("first_token", "moved_s"))


class Loader:
    """Part of the loop (kvtier.worker.loop.LoopPart). `load`, `is_busy` and `take_done` are called on the engine's
    thread, all else on the loop's.

    Args:
        pool: runs tasks that may wait for storage or the index.
    """

    def __init__(self, worker: WorkerContext, admit: Admissions, loop: TransferLoop, pool: ThreadJobs) -> None:
        self.work: list[Load] = []  # in the order in which they are served
        self.marks: list[tuple[Mark, Then, Any]] = []
        self.due_s = math.inf
        self._worker = worker
        self._loop = loop
        self._pool = loop.pool(pool)
        self._chunks = ChunkLoader(worker, admit, self, loop, self._pool)
        self._log = RepeatedLog(worker.clock)
        self._unanswered: dict[Load, None] = {}  # the engine's thread adds, the loop's removes
        self._fetches: dict[bytes, Fetch] = {}
        # Under the loop's lock:
        self._done: list[LoadDone] = []
        self._timings: list[tuple[int, float]] = []
        slot_bytes, is_device = worker.arena.slot_bytes, worker.arena.is_device
        self._window = max(WINDOW_MIN, min(WINDOW_MAX, WINDOW_BYTES // slot_bytes))  # chunks that hold slots at a time
        self._together = TOGETHER_MAX if is_device else max(1, min(MOVED_MAX, MOVED_BYTES // slot_bytes))
        self._lacks_slot = False
        loop.parts.append(self)

    @property
    def rechecks(self) -> Rechecks:
        return self._chunks.reader.rechecks

    # --- the engine's thread ---

    def load(self, plan: LoadPlan) -> None:
        """Queue a plan. Its answer comes with `take_done`."""
        now_s, n_chunks = self._worker.clock(), len(plan.chunks)
        turn_s = now_s + n_chunks * self._worker.arena.slot_bytes / ORDER_BYTES_S
        waiting = list(range(n_chunks - 1, -1, -1))
        deadline_s = now_s + self._worker.timeout_s
        after = self._worker.order.mark()
        load = Load(plan, after, now_s, deadline_s, turn_s, waiting, n_chunks, n_chunks)
        switch_interval.hold()
        self._unanswered[load] = None
        if not self._loop.post(self._take, load):  # closed
            self._answer(load)

    def is_busy(self) -> bool:
        """Return True while a load is under way. Called on any thread."""
        return bool(self._unanswered)

    def take_done(self, timeout_s: float) -> tuple[list[LoadDone], list[tuple[int, float]]]:
        """Return the answers since the last take, and (tokens, seconds from request to end) of the complete loads; wait
        at most `timeout_s` for one."""
        ends_s = self._worker.clock() + timeout_s
        while True:
            self._loop.look()
            left_s = ends_s - self._worker.clock()
            with self._loop.changed:
                if not self._done and left_s > 0:
                    self._loop.changed.wait(min(left_s, ANSWER_LOOK_S))
                if self._done or left_s <= 0:
                    done, self._done = self._done, []
                    timings, self._timings = self._timings, []
                    return done, timings

    def stop(self, timeout_s: float) -> bool:
        """Fail the loads under way and refuse later ones. No scatter begins after this returns, even if a read that
        hangs ends later. Return False if launched scatters have not ended within `timeout_s`, or the launch of one has
        not within LAUNCH_TIMEOUT_S."""
        scattering, self._chunks.is_stopped = self._chunks.scattering, True
        has_launched = scattering.acquire(timeout=LAUNCH_TIMEOUT_S)
        if has_launched:
            scattering.release()
        if self._unanswered:
            self._loop.post(self._fail_all)
        return self._loop.wait_until(lambda: not self._unanswered, timeout_s) and has_launched

    # --- the loop's thread ---

    def turn(self) -> Turn:
        """Take every chunk as far as it goes now."""
        chunks, loads = self._chunks, self.work
        reading, arrived = chunks.in_state[State.READING], chunks.in_state[State.ARRIVED]
        verified, suspect = chunks.in_state[State.VERIFIED], chunks.in_state[State.SUSPECT]
        has_moved = goes_on = self._lacks_slot = False
        if reading:
            has_moved = chunks.take_reads()
        if arrived:
            chunks.verify(list(islice(arrived, self._together)))
            has_moved = True
        if verified:
            has_moved, goes_on = self._scatter(has_moved)
        if suspect:
            has_moved |= self._judge()
        deadline_s = min(map(_deadline_of, loads))
        if deadline_s <= self._worker.clock():
            has_moved |= self._expire()
        if any(map(_waiting_of, loads)):
            has_begun, is_more = self._begin()
            has_moved |= has_begun
            goes_on |= is_more or (has_begun and bool(verified or suspect))  # a load may have joined one of these
        if not all(map(_n_pending_of, loads)):
            self._answer_ended()
            has_moved = True
        self.due_s = -math.inf if self._lacks_slot else deadline_s if loads else math.inf
        if len(loads) > 1 and any(map(_waiting_of, loads)):
            self.due_s = min(self.due_s, min(map(_moved_of, loads)) + self._worker.timeout_s / 4)  # see `_held_up`
        is_polled = self._lacks_slot and not self._loop.n_tasks
        first = next(iter(reading), None)
        io = None if first is None or first.reads is None else first.reads.batch
        return Turn(has_moved, goes_on or bool(arrived), io, len(reading) * self._worker.arena.slot_bytes, is_polled)

    def _take(self, load: Load) -> None:
        if self._chunks.is_stopped:
            self._answer(load)
            return
        load.begun_s = load.moved_s = self._worker.clock()
        insort(self.work, load, key=_turn_of)

    def _scatter(self, has_moved: bool) -> tuple[bool, bool]:
        """Launch the scatter of verified chunks of all loads whose blocks are free to be written. If there is no such
        load, launch that of the load that was asked for first; the device then waits for its mark. (Marks of the
        engine's stream are done in the order of their loads.) Return (whether the turn has moved anything, whether
        there is more to launch)."""
        verified = self._next_verified()
        if not verified:
            return has_moved, False
        loads = {part.load: None for _, part in verified}
        for load in loads:
            load.is_free = load.is_free or self._worker.order.is_done(load.after)
        among = [load for load in loads if load.is_free] or [min(loads, key=lambda load: load.asked_s)]
        moving = [(fetch, part) for fetch, part in verified if part.load in among][: self._together]
        with self._chunks.scattering:
            if self._chunks.is_stopped:
                return has_moved, False
            mark = self._chunks.scatter(moving, [] if among[0].is_free else [among[0].after])
        now_s = self._worker.clock()
        for fetch, part in moving:
            fetch.wanted_by.remove(part)
            fetch.n_moving += 1
            part.load.n_scattered += 1
            part.load.moved_s = now_s
        self._loop.when_done(self, mark, self._landed, moving)
        return True, len(moving) < len(verified)

    def _next_verified(self) -> list[tuple[Fetch, Part]]:
        """Return what may be scattered now, in the order of the loads: of each the next chunks of its prompt, as far as
        they are verified."""
        by_load: dict[Load, dict[int, tuple[Fetch, Part]]] = {}
        for fetch in self._chunks.in_state[State.VERIFIED]:
            for part in fetch.wanted_by:
                by_load.setdefault(part.load, {})[part.number] = fetch, part
        found = []
        for load in self.work:
            parts, number = by_load.get(load, {}), load.n_scattered
            while number in parts:
                found.append(parts[number])
                number += 1
        return found

    def _landed(self, moved: Sequence[tuple[Fetch, Part]]) -> None:
        left = []
        for fetch, (load, _) in moved:
            fetch.n_moving -= 1
            load.n_landed += 1
            load.n_pending -= 1
            for source in fetch.sources:
                load.n_bytes += source.cut.n_bytes
            if not fetch.wanted_by and not fetch.n_moving:
                self._fetches.pop(fetch.chunk.key, None)
                left.append(fetch)
        self._chunks.leave(left)

    def _judge(self) -> bool:
        """Have bad bytes looked at once nothing before them in the prompt is on its way: most often what follows is
        bad like them, and need not be looked at."""
        next_ones = [
            fetch
            for fetch in self._chunks.in_state[State.SUSPECT]
            if any(load.n_scattered == number for load, number in fetch.wanted_by)
        ]
        for fetch in next_ones:
            self._chunks.judge(fetch)
        return bool(next_ones)

    def _expire(self) -> bool:
        now_s, has_moved = self._worker.clock(), False
        for load in self.work:
            if load.deadline_s <= now_s and load.end:
                has_moved = True
                reading = self._chunks.in_state[State.READING]
                reads = next((fetch.reads for fetch in reading if fetch.is_wanted_by(load)), None)
                if reads is not None:
                    self._chunks.reader.note_slow(reads)
                    self._cut(load, 0, FetchFailed("the storage does not answer in time"))
                else:
                    self._cut(load, 0, FetchFailed("its time is over"))
        return has_moved

    def _fail_all(self, _: object) -> None:
        for load in self.work:
            self._cut(load, 0, FetchFailed("the worker is closed"))

    def _begin(self) -> tuple[bool, bool]:
        """Begin chunks of the loads in their order, as many as the window and the arena have room for, up to BEGUN_MAX.
        Return (whether any was begun, whether there may be room for more)."""
        has_moved, is_full = False, False
        held_up = self._held_up() if len(self.work) > 1 else set()
        most = len(self._fetches) + BEGUN_MAX
        for load in self.work:
            while load.waiting:
                part = Part(load, load.waiting[-1])
                fetch = self._fetches.get(part.chunk.key)
                if fetch is not None:
                    load.waiting.pop()
                    self._join(fetch, part)
                elif is_full or load in held_up or not self._begin_some(load):
                    is_full |= load not in held_up  # others may still join what is under way
                    break
                has_moved = True
                if len(self._fetches) >= most:
                    return True, True
        return has_moved, False

    def _begin_some(self, load: Load) -> bool:
        """Begin the next chunks of a load, which are in no fetch. Return False if there is no room."""
        plan, room = load.plan, min(self._chunks.begun_together, self._window - len(self._fetches))
        begun: dict[bytes, Fetch] = {}
        first_set = plan.chunks[load.waiting[-1]].entry[FIRST_SET]  # if its file hangs, other sets are still opened
        for number in islice(reversed(load.waiting), max(0, room)):
            chunk = plan.chunks[number]
            if chunk.key in self._fetches or chunk.key in begun or chunk.entry[FIRST_SET] != first_set:
                break
            begun[chunk.key] = Fetch(plan.namespace, chunk, [Part(load, number)])
        if not begun:
            return False
        self._fetches.update(begun)  # first: `give_up` finds them if that raises
        n_begun = self._chunks.begin(list(begun.values()))
        for key in islice(begun, n_begun, None):
            del self._fetches[key]
        del load.waiting[len(load.waiting) - n_begun :]
        if n_begun:
            return True
        self._lacks_slot = True
        if self._worker.quarantine.is_due(self._worker.clock()):
            self._pool.add(self._worker.quarantine.sweep)
        n_waiting = len(self._chunks.in_state[State.VERIFIED]) + len(self._chunks.in_state[State.SUSPECT])
        if self._fetches and not self.marks and n_waiting == len(self._fetches):
            # All slots are held by chunks that wait for this one: the one that was begun last gives its slot up.
            self.begin_again(next(reversed(self._fetches.values())))
        return False

    def _held_up(self) -> set[Load]:
        """Return the loads whose next chunk has not come for long while other loads wait: they begin nothing more, and
        give the slots of chunks behind it to the others, for one segment that hangs is not to stop all loads."""
        long_ago_s = self._worker.clock() - self._worker.timeout_s / 4
        held_up = set()
        for load in self.work:
            if load.moved_s < long_ago_s and load.n_scattered < load.end:
                fetch = self._fetches.get(load.plan.chunks[load.n_scattered].key)
                if fetch is not None and fetch.state in (State.OPENING, State.READING):
                    held_up.add(load)
        if not held_up or not any(load.waiting for load in self.work if load not in held_up):
            return set()
        for fetch in list(self._chunks.in_state[State.VERIFIED]):
            if not fetch.n_moving and all(part.load in held_up for part in fetch.wanted_by):
                self.begin_again(fetch)
        return held_up

    def _join(self, fetch: Fetch, part: Part) -> None:
        """Let the part have what another load brings, unless that waits for a segment that does not answer."""
        fetch.wanted_by.append(part)
        fetch.n_loads += 1
        if fetch.state in (State.OPENING, State.READING):
            try:
                self._chunks.reader.refuse_stuck(part.chunk)
            except FetchFailed as failure:
                fetch.wanted_by.remove(part)
                part.load.n_pending -= 1
                self._cut(part.load, part.number, failure)

    def _cut(self, load: Load, end: int, failure: Exception) -> None:
        """Give up a load's chunks from number `end` on, but for those that are being scattered."""
        if end >= load.end:
            return
        load.end, load.failure = end, failure
        kept = [number for number in load.waiting if number < end]
        load.n_pending -= len(load.waiting) - len(kept)
        load.waiting = kept
        for fetch in list(self._fetches.values()):
            wanted_by = [part for part in fetch.wanted_by if part.load is not load or part.number < end]
            load.n_pending -= len(fetch.wanted_by) - len(wanted_by)
            if len(wanted_by) < len(fetch.wanted_by):
                fetch.wanted_by = wanted_by
                if not wanted_by and not fetch.n_moving:
                    self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        """Give up a chunk that no load wants. One that is in the pool is given back when the pool returns it."""
        self._forget(fetch)
        if fetch.state in (State.OPENING, State.JUDGING):
            self._chunks.set_state([fetch], State.DROPPED)
        else:
            self._chunks.abandon(fetch)

    def _forget(self, fetch: Fetch) -> None:
        if self._fetches.get(fetch.chunk.key) is fetch:
            del self._fetches[fetch.chunk.key]

    # --- what the chunks need of the loop ---

    def failed(self, fetch: Fetch, failure: Exception) -> None:
        """End a chunk that cannot be loaded, and give its slot back."""
        parts, fetch.wanted_by = fetch.wanted_by, []
        self._forget(fetch)
        self._chunks.abandon(fetch)
        for part in parts:
            if part.chunk.entry == fetch.chunk.entry:
                part.load.n_pending -= 1
                self._cut(part.load, part.number, failure)
            else:  # its own entry may name other records
                part.load.wait_again(part.number)

    def begin_again(self, fetch: Fetch) -> None:
        """Give the fetch up. The loads that want its chunk begin it again."""
        parts, fetch.wanted_by = fetch.wanted_by, []
        self._drop(fetch)
        for part in parts:
            part.load.wait_again(part.number)

    def waits_for_storage(self) -> bool:
        """Return True if storage, and not the loop, limits the loads: the loop has time for other work."""
        if not any(load.waiting for load in self.work):
            return True
        return len(self._chunks.in_state[State.READING]) >= self._window // 2

    # --- answers ---

    def _answer_ended(self) -> None:
        ended = [load for load in self.work if not load.n_pending]
        self.work[:] = filter(_n_pending_of, self.work)
        for load in ended:
            self._end(load)

    def _end(self, load: Load) -> None:
        n_landed, plan, failure = load.n_landed, load.plan, load.failure
        counted = {
            names.LOAD_REQUESTS: 1,
            names.LOAD_TOKENS: tokens_of(self._worker, plan.chunks[:n_landed]),
            names.LOAD_BYTES: load.n_bytes,
            names.LOAD_SECONDS: self._worker.clock() - load.begun_s,
        }
        self._worker.metrics.add_each(counted)
        if failure is not None:
            self._log.warning(
                cause_of(failure),
                "request %s: recomputed from chunk %d of its load on: %s",
                plan.request_id,
                n_landed,
                failure,
            )
        if isinstance(failure, SegmentGone):  # else a long prompt is recomputed once for each of its chunks
            self._pool.add(partial(self._retract_gone, plan.namespace, plan.chunks[n_landed:]))
        self._answer(load)

    def _retract_gone(self, namespace: bytes, chunks: Sequence[LoadChunk]) -> None:
        with suppress(Corrupt, TierUnavailable, OSError):  # a load that is offered one of them finds out then
            self._chunks.reader.retract_gone(namespace, chunks)

    def _answer(self, load: Load) -> None:
        worker, plan, failed = self._worker, load.plan, set[int]()
        for chunk in plan.chunks[load.n_landed :]:
            failed.update(chunk.block_ids[self._chunks.first_block(chunk) :])
        if failed:
            worker.metrics.add(names.LOAD_FAILURES)
        del self._unanswered[load]
        switch_interval.release()
        with self._loop.changed:
            self._done.append(LoadDone(plan.request_id, frozenset(failed)))
            if not failed:
                self._timings.append((tokens_of(worker, plan.chunks), worker.clock() - load.asked_s))
            self._loop.changed.notify_all()

    def give_up(self) -> None:
        """End all loads that were taken."""
        for fetch in list(self._fetches.values()):
            fetch.wanted_by = []
            with suppress(Exception):
                self._drop(fetch)
        self.work.clear()
        for load in list(self._unanswered):
            if load.begun_s:
                self._answer(load)


def tokens_of(worker: WorkerContext, chunks: Sequence[LoadChunk]) -> int:
    """Return the tokens of the chunks that the engine did not have."""
    return worker.geometry.chunk_tokens * len(chunks) - int(sum(map(_first_token_of, chunks)))
