"""Transfer loop: one thread that owns the state of a worker's loads and saves, and never waits for storage or index.

Other threads hand work to the loop with `post`. Work that may wait for storage or index is a task of a thread pool,
which posts its result. A turn runs the callbacks of posts and of CUDA events that are done, then the steps of each
part: the loads, the copies of saves, and the records of saves. The loop runs as a job, which ends when only a task or
the engine can give it more work. The next post starts the job again."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from kvtier.errors import KVTierError, TierUnavailable
from kvtier.io.base import Reads
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import CudaEvent
from kvtier.worker.record_reader import FetchFailed

PAUSE_MIN_S, PAUSE_MAX_S = 0.0003, 0.008  # pause after a turn in which nothing had ended; it doubles up to the maximum
# Pause after a turn in which something ended, while QUEUED_BYTES of I/O are queued: each turn takes the interpreter
# lock from the engine. DECODE_PAUSE_S: while requests decode. At most until half of the I/O may have ended. Beside 16
# loads of 12,000 tokens, each of 16 decoding requests got 63 tokens a second with 0.01 instead of 50 with 0.004, and
# the last of the loads' requests had its first token 6 % later (one H200, means of five in turns;
# results/gpu/under_load_reads.json).
QUEUED_PAUSE_S, DECODE_PAUSE_S, QUEUED_BYTES = 0.004, 0.01, 512 << 20
# While the engine launches a forward, that pause lasts until half of the I/O may have ended, at a rate that no storage
# exceeds, or LAUNCH_PAUSE_MAX_S. Beside 16 loads of 12,000 tokens, 16 decoding requests got 1.3 times as many tokens
# (19.4 a second instead of 14.6), and their longest gap was two thirds (140 ms); the last load ended 1 % later (one
# H200, means of three in turns; results/gpu/under_load_forwards.json).
FASTEST_BYTES_S, LAUNCH_PAUSE_MAX_S = 50e9, 0.02
TASKS_MAX = 4096  # tasks of a pool that wait for a thread: more than all chunks under way can have (I4)
STUCK_S = 1.0  # a task that runs for so long may hang in the kernel, seconds; at most a quarter of the timeout

Then = Callable[[Any], None]
_due_of, _events_of = attrgetter("due_s"), attrgetter("events")


class Turn(NamedTuple):
    """Result of a turn. has_moved: something changed. goes_on: the next turn has work at once. io: the oldest batch of
    reads, writes or flushes under way. n_bytes: size of all I/O under way. is_polled: the loop must poll, because the
    end of some work does not wake it."""

    has_moved: bool = False
    goes_on: bool = False
    io: Reads | None = None
    n_bytes: int = 0
    is_polled: bool = False


class LoopPart(Protocol):
    """Part of the loop's work, called on its thread.

    work: chunks or loads under way; without any, `turn` is not called. events: (event of launches or copies under way,
    callback to run once the event is done, the callback's argument). due_s: time of the next deadline or other timed
    work, as of the last turn.
    """

    events: list[tuple[CudaEvent, Then, Any]]
    due_s: float

    @property
    def work(self) -> Collection[Any]: ...

    def turn(self) -> Turn:
        """Advance every chunk as far as possible without a wait."""

    def give_up(self) -> None:
        """Fail all work that the part has taken, after an exception in the loop."""


class TransferLoop:
    """Loop of a worker. `post`, `check_deadlines` and `drain` may be called on any thread, all else on the loop's.

    Args:
        jobs: the one thread that runs the loop.
    """

    def __init__(self, worker: WorkerContext, jobs: ThreadJobs) -> None:
        self.parts: list[LoopPart] = []
        self._worker = worker
        self._jobs = jobs
        self._pools: list[ThreadJobs] = []
        self._pause_s = PAUSE_MIN_S
        # No lock is needed: the engine's thread clears `_is_launching`, then reads `_gives_way`; the loop sets
        # `_gives_way`, then reads `_is_launching`.
        self._is_launching = self._gives_way = self._decodes = False
        # Shared by all threads, under the lock:
        self.changed = threading.Condition()
        self.n_tasks = 0  # queued and running ones of all pools
        self._is_running = False
        self._posted: deque[tuple[Then, Any]] = deque()

    def pool(self, jobs: ThreadJobs) -> TaskPool:
        """Return a pool of threads that posts its results to this loop."""
        self._pools.append(jobs)
        return TaskPool(self, jobs)

    def post(self, then: Then | None, value: Any = None) -> bool:
        """Request a turn that begins with `then(value)`. Return False if the loop is closed and makes no more turns."""
        with self.changed:
            if then is not None:
                self._posted.append((then, value))
            if self._is_running:
                self.changed.notify_all()
                return True
            self._is_running = self._jobs.submit(self._run)
            if not self._is_running:
                self._posted.clear()
            return self._is_running

    def check_deadlines(self) -> None:
        """Request a turn if a deadline has passed, and add threads to pools whose tasks hang."""
        if min(map(_due_of, self.parts)) <= self._worker.clock():
            self.post(None)
        if self.n_tasks:
            for jobs in self._pools:
                jobs.widen(min(STUCK_S, self._worker.timeout_s / 4))

    def step_begins(self, *, computes: bool, decodes: bool) -> None:
        """Note that the engine begins a step. computes: the engine's thread launches a forward, and needs the
        interpreter lock for that. decodes: requests decode in this step."""
        self._decodes = decodes
        self._is_launching = computes

    def forward_is_launched(self) -> None:
        """Note that the engine's thread has launched its forward. Called in each step, also in one without a
        forward."""
        self._is_launching = False
        if self._gives_way:
            with self.changed:
                self.changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no work is under way. Return False after `timeout_s`."""
        return self.wait_until(lambda: not (self._is_running or self.n_tasks), timeout_s)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_so()` is True. It is called under the lock, each time that `changed` is notified. Return False
        after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        with self.changed:
            while not is_so():
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(left_s)
            return True

    def when_done(self, part: LoopPart, event: CudaEvent, then: Then, value: Any) -> None:
        """Call `then(value)` once the event is done."""
        if event is None:  # on the CPU
            then(value)
        else:
            part.events.append((event, then, value))

    def turn(self) -> Turn:
        """Run all callbacks and steps that are possible without a wait."""
        has_moved = bool(self._posted)
        for _ in range(len(self._posted)):  # one at a time: if one raises, the others are not lost
            then, value = self._posted.popleft()
            then(value)
        goes_on, io, n_bytes, is_polled = False, None, 0, False
        for part in self.parts:
            if part.events:
                has_moved |= self._take_events(part)
            if part.work:
                turn = part.turn()
                has_moved |= turn.has_moved
                goes_on |= turn.goes_on
                io = io or turn.io
                n_bytes += turn.n_bytes
                is_polled |= turn.is_polled
            else:
                part.due_s = math.inf
            is_polled |= bool(part.events)
        return Turn(has_moved, goes_on, io, n_bytes, is_polled)

    def _run(self) -> None:
        try:
            while True:
                turn = self.turn()
                if turn.has_moved:
                    self._pause_s = PAUSE_MIN_S
                    if turn.n_bytes >= QUEUED_BYTES:
                        self._give_way(turn.n_bytes)
                        continue
                if turn.goes_on:
                    continue
                with self.changed:
                    if self._posted:
                        continue
                    if turn.io is None and not turn.is_polled:
                        self._is_running = False
                        self.changed.notify_all()
                        return
                self._pause(turn.io)
        except BaseException:  # a bug here or a CUDA fault: answer every chunk, and free every slot
            self._give_up()
            raise

    def _give_way(self, n_bytes: int) -> None:
        """Leave the interpreter lock to the engine for a while. n_bytes: size of the queued I/O, which goes on
        alone."""
        longest_s = n_bytes / 2 / FASTEST_BYTES_S
        pause_s = min(longest_s, DECODE_PAUSE_S if self._decodes else QUEUED_PAUSE_S)
        time.sleep(pause_s)
        with self.changed:
            self._gives_way = True
            self.changed.wait_for(lambda: not self._is_launching, min(LAUNCH_PAUSE_MAX_S, longest_s) - pause_s)
            self._gives_way = False

    def _pause(self, io: Reads | None) -> None:
        """Wait for an end of I/O or a post, without the interpreter lock. CUDA events are polled: CUDA has no wait with
        a timeout."""
        if io is not None:
            io.wait(self._pause_s)
        else:
            with self.changed:
                if not self._posted:
                    self.changed.wait(self._pause_s)
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    def _take_events(self, part: LoopPart) -> bool:
        done = [entry for entry in part.events if self._worker.order.is_done(entry[0])]
        for entry in done:
            part.events.remove(entry)
            _, then, value = entry
            then(value)
        return bool(done)

    def _give_up(self) -> None:
        """Fail all work that parts have taken, once its launches have ended. Posts that were not taken go on."""
        for part in self.parts:
            events, part.events = part.events, []
            for event, then, value in events:
                with suppress(Exception):
                    self._worker.order.wait(event)
                    then(value)
        for part in self.parts:
            with suppress(Exception):
                part.give_up()
        with self.changed:
            self._is_running = False
            self.changed.notify_all()
        if self._posted or any(map(_events_of, self.parts)):  # callbacks may have begun copies
            self.post(None)


class TaskPool:
    """Threads for tasks that may wait for storage or index."""

    def __init__(self, loop: TransferLoop, jobs: ThreadJobs) -> None:
        self._loop = loop
        self._jobs = jobs

    def add(self, work: Callable[[], object], then: Then | None = None) -> None:
        """Run `work` on a thread of the pool, then `then(result)` on the loop's thread; result: of `work`, or its
        exception."""
        with self._loop.changed:
            self._loop.n_tasks += 1
        if not self._jobs.submit(partial(self._run, work, then)):
            self._run(self._refuse, then)

    def _run(self, work: Callable[[], object], then: Then | None) -> None:
        result: object = None
        try:
            result = work()
        except (FetchFailed, KVTierError, OSError) as fault:
            result = fault
        except BaseException:
            result = TierUnavailable("a fault of kvtier's own")
            raise
        finally:
            if then is not None:
                self._loop.post(then, result)
            with self._loop.changed:
                self._loop.n_tasks -= 1
                self._loop.changed.notify_all()

    def _refuse(self) -> None:
        full = f"the queue of tasks is full: {self._jobs.pending()} of them for {self._jobs.threads} threads"
        raise TierUnavailable("the worker is closed" if self._jobs.is_closed else full)
