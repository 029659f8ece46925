"""Loader: the loads of a worker, as part of its transfer loop. It decides which chunks are read, and in which order.

A turn takes the reads, copies, scatters and tasks of the pool that have ended. It verifies all chunks that have arrived
in one launch, scatters the verified chunks in another, and begins reads up to the limit. Each load is answered exactly
once, by its deadline unless its scatters still run (I10). Bytes that fail their checksum never reach the engine (I2):
from the first bad chunk on, the blocks are reported as failed.
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
from kvtier.worker.cuda_events import CudaEvent
from kvtier.worker.loading import ChunkLoader, Fetch, Load, State, Waiter
from kvtier.worker.loop import Then, TransferLoop, Turn
from kvtier.worker.record_reader import FetchFailed, SegmentGone

# Limits of the chunks that may hold slots at a time, over all loads. Opening, reading, verifying and scattering a chunk
# take a turn each. On an H100, beside a thread that held the interpreter lock for 4 of 7 ms, a turn took 7 to 15 ms, in
# which the storage delivers 0.7 GiB: with a window of 1 GiB it idled.
WINDOW_BYTES = 2 << 30
WINDOW_MIN, WINDOW_MAX = 8, 256
TOGETHER_MAX = 64  # chunks that are verified or scattered in one launch on a device
BEGUN_MAX = 64  # chunks that are begun in a turn
# Limits, in chunks and bytes, of one scatter on the CPU, where the loop's own thread copies: 8 MiB take 2 ms, and a
# codec may be slower.
MOVED_MAX, MOVED_BYTES = 8, 8 << 20
# Rate in the order of service: loads are served by the time of their request plus bytes / this rate, so that a small
# load may overtake a large one.
ORDER_BYTES_S = 10e9
LAUNCH_TIMEOUT_S = 5.0  # longest wait of `stop` for the launch of a scatter: only that of a hung device takes longer
ANSWER_POLL_S = 0.05  # interval at which a thread that waits for an answer checks the deadlines, seconds

_n_pending_of, _waiting_of, _deadline_of, _turn_of = map(attrgetter, ("n_pending", "waiting", "deadline_s", "turn_s"))
_first_token_of, _progress_of = map(attrgetter, ("first_token", "progress_s"))


class Loader:
    """Part of the loop (kvtier.worker.loop.LoopPart). `load`, `is_busy` and `take_done` are called on the engine's
    thread, all else on the loop's.

    Args:
        pool: runs tasks that may wait for storage or the index.
    """

    def __init__(self, worker: WorkerContext, admit: Admissions, loop: TransferLoop, pool: ThreadJobs) -> None:
        self.work: list[Load] = []  # in the order in which they are served
        self.events: list[tuple[CudaEvent, Then, Any]] = []
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
        after = self._worker.order.record()
        load = Load(plan, after, now_s, deadline_s, turn_s, waiting, n_chunks, n_chunks)
        switch_interval.hold()
        self._unanswered[load] = None
        if not self._loop.post(self._take, load):  # closed
            self._answer(load)

    def is_busy(self) -> bool:
        """Return True while a load is under way. May be called on any thread."""
        return bool(self._unanswered)

    def take_done(self, timeout_s: float) -> tuple[list[LoadDone], list[tuple[int, float]]]:
        """Wait at most `timeout_s` for an answer. Return the answers since the last call, and (tokens, seconds from
        request to end) of the loads that did not fail."""
        ends_s = self._worker.clock() + timeout_s
        while True:
            self._loop.check_deadlines()
            left_s = ends_s - self._worker.clock()
            with self._loop.changed:
                if not self._done and left_s > 0:
                    self._loop.changed.wait(min(left_s, ANSWER_POLL_S))
                if self._done or left_s <= 0:
                    done, self._done = self._done, []
                    timings, self._timings = self._timings, []
                    return done, timings

    def stop(self, timeout_s: float) -> bool:
        """Fail the loads under way and refuse later ones. No scatter begins after this returns, even if a read that
        hangs ends later. Return False if launched scatters did not end within `timeout_s`, or if a launch did not end
        within LAUNCH_TIMEOUT_S."""
        scattering, self._chunks.is_stopped = self._chunks.scattering, True
        has_launched = scattering.acquire(timeout=LAUNCH_TIMEOUT_S)
        if has_launched:
            scattering.release()
        if self._unanswered:
            self._loop.post(self._fail_all)
        return self._loop.wait_until(lambda: not self._unanswered, timeout_s) and has_launched

    # --- the loop's thread ---

    def turn(self) -> Turn:
        """Advance every chunk as far as possible without a wait."""
        chunks, loads = self._chunks, self.work
        reading, arrived = chunks.in_state[State.READING], chunks.in_state[State.ARRIVED]
        verified, suspect = chunks.in_state[State.VERIFIED], chunks.in_state[State.SUSPECT]
        has_moved = self._answer_ended()  # first: the engine need not wait for the launches below
        goes_on = self._lacks_slot = False
        if not loads:
            self.due_s = math.inf
            return Turn(has_moved)
        if reading:
            has_moved |= chunks.take_reads()
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
        has_moved |= self._answer_ended()
        self.due_s = -math.inf if self._lacks_slot else deadline_s if loads else math.inf
        if len(loads) > 1 and any(map(_waiting_of, loads)):
            self.due_s = min(self.due_s, min(map(_progress_of, loads)) + self._worker.timeout_s / 4)  # see `_stalled`
        is_polled = self._lacks_slot and not self._loop.n_tasks
        first = next(iter(reading), None)
        io = None if first is None or first.reads is None else first.reads.batch
        return Turn(has_moved, goes_on or bool(arrived), io, len(reading) * self._worker.arena.slot_bytes, is_polled)

    def _take(self, load: Load) -> None:
        if self._chunks.is_stopped:
            self._answer(load)
            return
        load.begun_s = load.progress_s = self._worker.clock()
        insort(self.work, load, key=_turn_of)

    def _scatter(self, has_moved: bool) -> tuple[bool, bool]:
        """Launch the scatter of verified chunks of all loads whose blocks may be written already. Without such a load,
        launch the scatter of the oldest load, behind its event: events of the engine's stream are done in the order of
        the loads. Return (True if the turn has changed anything, True if there is more to launch)."""
        verified = self._next_verified()
        if not verified:
            return has_moved, False
        loads = {waiter.load: None for _, waiter in verified}
        for load in loads:
            load.is_free = load.is_free or self._worker.order.is_done(load.after)
        among = [load for load in loads if load.is_free] or [min(loads, key=lambda load: load.asked_s)]
        moving = [(fetch, waiter) for fetch, waiter in verified if waiter.load in among][: self._together]
        with self._chunks.scattering:
            if self._chunks.is_stopped:
                return has_moved, False
            event = self._chunks.scatter(moving, [] if among[0].is_free else [among[0].after])
        now_s = self._worker.clock()
        for fetch, waiter in moving:
            fetch.waiters.remove(waiter)
            fetch.n_scattering += 1
            waiter.load.n_scattered += 1
            waiter.load.progress_s = now_s
        self._loop.when_done(self, event, self._landed, moving)
        return True, len(moving) < len(verified)

    def _next_verified(self) -> list[tuple[Fetch, Waiter]]:
        """Return the chunks that may be scattered now, in the order of the loads: for each load the next chunks of its
        prompt, up to the first that is not verified."""
        by_load: dict[Load, dict[int, tuple[Fetch, Waiter]]] = {}
        for fetch in self._chunks.in_state[State.VERIFIED]:
            for waiter in fetch.waiters:
                by_load.setdefault(waiter.load, {})[waiter.number] = fetch, waiter
        found = []
        for load in self.work:
            by_number, number = by_load.get(load, {}), load.n_scattered
            while number in by_number:
                found.append(by_number[number])
                number += 1
        return found

    def _landed(self, moved: Sequence[tuple[Fetch, Waiter]]) -> None:
        left = []
        for fetch, (load, _) in moved:
            fetch.n_scattering -= 1
            load.n_landed += 1
            load.n_pending -= 1
            for source in fetch.sources:
                load.n_bytes += source.cut.n_bytes
            if not fetch.waiters and not fetch.n_scattering:
                self._fetches.pop(fetch.chunk.key, None)
                left.append(fetch)
        self._chunks.leave(left)

    def _judge(self) -> bool:
        """Judge bad chunks for which all chunks before them in a prompt are scattered. The chunks behind are most often
        bad too, and are given up with the load unjudged."""
        next_ones = [
            fetch
            for fetch in self._chunks.in_state[State.SUSPECT]
            if any(load.n_scattered == number for load, number in fetch.waiters)
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
                reads = next((fetch.reads for fetch in reading if fetch.has_waiter_of(load)), None)
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
        Return (True if any was begun, True if there may be room for more)."""
        has_moved, is_full = False, False
        stalled = self._stalled() if len(self.work) > 1 else set()
        most = len(self._fetches) + BEGUN_MAX
        for load in self.work:
            while load.waiting:
                waiter = Waiter(load, load.waiting[-1])
                fetch = self._fetches.get(waiter.chunk.key)
                if fetch is not None:
                    load.waiting.pop()
                    self._join(fetch, waiter)
                elif is_full or load in stalled or not self._begin_some(load):
                    is_full |= load not in stalled  # loads behind it may still join fetches under way
                    break
                has_moved = True
                if len(self._fetches) >= most:
                    return True, True
        return has_moved, False

    def _begin_some(self, load: Load) -> bool:
        """Begin fetches of a load's next chunks. Return False if there is no room."""
        plan, room = load.plan, min(self._chunks.begun_together, self._window - len(self._fetches))
        begun: dict[bytes, Fetch] = {}
        # One set at a time: if the open of its file hangs, files of other sets are opened by other tasks.
        first_set = plan.chunks[load.waiting[-1]].entry[FIRST_SET]
        for number in islice(reversed(load.waiting), max(0, room)):
            chunk = plan.chunks[number]
            if chunk.key in self._fetches or chunk.key in begun or chunk.entry[FIRST_SET] != first_set:
                break
            begun[chunk.key] = Fetch(plan.namespace, chunk, [Waiter(load, number)])
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
        if self._fetches and not self.events and n_waiting == len(self._fetches):
            # All slots are held by chunks that wait for an earlier chunk of their prompt, so free the latest one's.
            self.begin_again(next(reversed(self._fetches.values())))
        return False

    def _stalled(self) -> set[Load]:
        """Return loads without progress for a quarter of the timeout, if other loads wait. A stalled load begins no
        chunk and gives the slots of its verified chunks to the others: one file that hangs must not stop all loads."""
        long_ago_s = self._worker.clock() - self._worker.timeout_s / 4
        stalled = set()
        for load in self.work:
            if load.progress_s < long_ago_s and load.n_scattered < load.end:
                fetch = self._fetches.get(load.plan.chunks[load.n_scattered].key)
                if fetch is not None and fetch.state in (State.OPENING, State.READING):
                    stalled.add(load)
        if not stalled or not any(load.waiting for load in self.work if load not in stalled):
            return set()
        for fetch in list(self._chunks.in_state[State.VERIFIED]):
            if not fetch.n_scattering and all(waiter.load in stalled for waiter in fetch.waiters):
                self.begin_again(fetch)
        return stalled

    def _join(self, fetch: Fetch, waiter: Waiter) -> None:
        """Add the waiter to a fetch of another load, unless that waits for a segment that does not answer."""
        fetch.waiters.append(waiter)
        fetch.n_loads += 1
        if fetch.state in (State.OPENING, State.READING):
            try:
                self._chunks.reader.refuse_stuck(waiter.chunk)
            except FetchFailed as failure:
                fetch.waiters.remove(waiter)
                waiter.load.n_pending -= 1
                self._cut(waiter.load, waiter.number, failure)

    def _cut(self, load: Load, end: int, failure: Exception) -> None:
        """Give up a load's chunks from number `end` on, except those that are being scattered."""
        if end >= load.end:
            return
        load.end, load.failure = end, failure
        kept = [number for number in load.waiting if number < end]
        load.n_pending -= len(load.waiting) - len(kept)
        load.waiting = kept
        for fetch in list(self._fetches.values()):
            waiters = [waiter for waiter in fetch.waiters if waiter.load is not load or waiter.number < end]
            load.n_pending -= len(fetch.waiters) - len(waiters)
            if len(waiters) < len(fetch.waiters):
                fetch.waiters = waiters
                if not waiters and not fetch.n_scattering:
                    self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        """Give up a chunk for which no load waits. If a task of the pool has it, free its slot when the task ends."""
        self._forget(fetch)
        if fetch.state in (State.OPENING, State.JUDGING):
            self._chunks.set_state([fetch], State.DROPPED)
        else:
            self._chunks.abandon(fetch)

    def _forget(self, fetch: Fetch) -> None:
        if self._fetches.get(fetch.chunk.key) is fetch:
            del self._fetches[fetch.chunk.key]

    # --- called by ChunkLoader ---

    def failed(self, fetch: Fetch, failure: Exception) -> None:
        """End a chunk that cannot be loaded, and free its slot."""
        waiters, fetch.waiters = fetch.waiters, []
        self._forget(fetch)
        self._chunks.abandon(fetch)
        for waiter in waiters:
            if waiter.chunk.entry == fetch.chunk.entry:
                waiter.load.n_pending -= 1
                self._cut(waiter.load, waiter.number, failure)
            else:  # the waiter's own index entry may name other records
                waiter.load.wait_again(waiter.number)

    def begin_again(self, fetch: Fetch) -> None:
        """Give the fetch up. The loads that wait for its chunk begin another fetch later."""
        waiters, fetch.waiters = fetch.waiters, []
        self._drop(fetch)
        for waiter in waiters:
            waiter.load.wait_again(waiter.number)

    def waits_for_storage(self) -> bool:
        """Return True if storage, and not the loop, limits the rate of loads, so that the loop has time for copies."""
        if not any(load.waiting for load in self.work):
            return True
        return len(self._chunks.in_state[State.READING]) >= self._window // 2

    # --- answers ---

    def _answer_ended(self) -> bool:
        """Answer the loads of which no chunk is pending. Return False without any."""
        if all(map(_n_pending_of, self.work)):
            return False
        ended = [load for load in self.work if not load.n_pending]
        self.work[:] = filter(_n_pending_of, self.work)
        for load in ended:
            self._end(load)
        return True

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
        if isinstance(failure, SegmentGone):  # see RecordReader.retract_gone
            self._pool.add(partial(self._retract_gone, plan.namespace, plan.chunks[n_landed:]))
        self._answer(load)

    def _retract_gone(self, namespace: bytes, chunks: Sequence[LoadChunk]) -> None:
        with suppress(Corrupt, TierUnavailable, OSError):  # a later load of these chunks fails, and tries it again
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
        """Fail all loads that were taken."""
        for fetch in list(self._fetches.values()):
            fetch.waiters = []
            with suppress(Exception):
                self._drop(fetch)
        self.work.clear()
        for load in list(self._unanswered):
            if load.begun_s:
                self._answer(load)


def tokens_of(worker: WorkerContext, chunks: Sequence[LoadChunk]) -> int:
    """Return the tokens of the chunks that the engine did not have."""
    return worker.geometry.chunk_tokens * len(chunks) - int(sum(map(_first_token_of, chunks)))
