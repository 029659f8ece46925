"""Transfer loop: one thread that owns the state of a worker's loads and saves, and never waits for storage or index.

Other threads hand it work with `post`. Work that may wait for storage or index is a task of a pool of threads; its
result is posted to the loop. A turn takes the posts and the marks that the device has reached, and then runs the steps
of each part: the loads, the copies of saves, and their records. The loop is a job: it ends when only a task or the
engine can give it work, and they start it again.
"""

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
from kvtier.worker.cuda_events import Mark
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
_due_of, _marks_of = attrgetter("due_s"), attrgetter("marks")


class Turn(NamedTuple):
    """Result of a turn. has_moved: something changed. goes_on: the next turn has work at once. io: the oldest batch of
    reads, writes or flushes under way. n_bytes: size of all I/O under way. is_polled: work is under way whose end does
    not wake the loop."""

    has_moved: bool = False
    goes_on: bool = False
    io: Reads | None = None
    n_bytes: int = 0
    is_polled: bool = False


class LoopPart(Protocol):
    """Part of the loop's work, called on its thread.

    work: chunks or loads under way; without any, there is no turn. marks: (mark of launches or copies under way,
    callback that runs once the mark is done, its argument). due_s: time of the next deadline or other timed work, as of
    the last turn.
    """

    marks: list[tuple[Mark, Then, Any]]
    due_s: float

    @property
    def work(self) -> Collection[Any]: ...

    def turn(self) -> Turn:
        """Take every chunk as far as it goes now."""

    def give_up(self) -> None:
        """End all that was taken, after a fault of the loop."""


class TransferLoop:
    """The loop of a worker. `post`, `look` and `drain` may be called on any thread, all else on the loop's.

    Args:
        jobs: run the loop, on one thread.
    """

    def __init__(self, worker: WorkerContext, jobs: ThreadJobs) -> None:
        self.parts: list[LoopPart] = []
        self._worker = worker
        self._jobs = jobs
        self._pools: list[ThreadJobs] = []
        self._pause_s = PAUSE_MIN_S
        # Without a lock: the engine's thread notes that its launches ended, then asks whether the loop waits for that;
        # the loop notes that it waits, then asks whether the launches go on.
        self._is_launching = self._gives_way = self._decodes = False
        # All threads use these, under the lock:
        self.changed = threading.Condition()
        self.n_tasks = 0  # queued and running ones of all pools
        self._is_running = False
        self._posted: deque[tuple[Then, Any]] = deque()

    def pool(self, jobs: ThreadJobs) -> TaskPool:
        """Return a pool of threads whose results come back to the loop."""
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

    def look(self) -> None:
        """Request a turn if a deadline has passed, and add threads to pools whose tasks hang."""
        if min(map(_due_of, self.parts)) <= self._worker.clock():
            self.post(None)
        if self.n_tasks:
            for jobs in self._pools:
                jobs.widen(min(STUCK_S, self._worker.timeout_s / 4))

    def step_begins(self, *, computes: bool, decodes: bool) -> None:
        """Note that the engine begins a step. computes: its thread launches a forward, for which it needs the
        interpreter lock. decodes: requests decode in this step."""
        self._decodes = decodes
        self._is_launching = computes

    def forward_is_launched(self) -> None:
        """Note that the engine's thread launches no forward any more. Called in each step, also in one without."""
        self._is_launching = False
        if self._gives_way:
            with self.changed:
                self.changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way. Return False when `timeout_s` was not enough."""
        return self.wait_until(lambda: not (self._is_running or self.n_tasks), timeout_s)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_so()`, which is asked under the lock whenever `changed` is notified. Return False when
        `timeout_s` was not enough."""
        ends_s = time.monotonic() + timeout_s
        with self.changed:
            while not is_so():
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(left_s)
            return True

    def when_done(self, part: LoopPart, mark: Mark, then: Then, value: Any) -> None:
        """Call `then(value)` once the mark is done."""
        if mark is None:  # on the CPU
            then(value)
        else:
            part.marks.append((mark, then, value))

    def turn(self) -> Turn:
        """Take all work as far as it goes now."""
        has_moved = bool(self._posted)
        for _ in range(len(self._posted)):  # one at a time: if one raises, the others are not lost
            then, value = self._posted.popleft()
            then(value)
        goes_on, io, n_bytes, is_polled = False, None, 0, False
        for part in self.parts:
            if part.marks:
                has_moved |= self._take_marks(part)
            if part.work:
                turn = part.turn()
                has_moved |= turn.has_moved
                goes_on |= turn.goes_on
                io = io or turn.io
                n_bytes += turn.n_bytes
                is_polled |= turn.is_polled
            else:
                part.due_s = math.inf
            is_polled |= bool(part.marks)
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
        except BaseException:  # our bug, or CUDA's: no chunk is left without an answer, and no slot is lost
            self._give_up()
            raise

    def _give_way(self, n_bytes: int) -> None:
        """Leave the interpreter lock to the engine: the queued I/O, of so many bytes, needs no turn for now."""
        longest_s = n_bytes / 2 / FASTEST_BYTES_S
        pause_s = min(longest_s, DECODE_PAUSE_S if self._decodes else QUEUED_PAUSE_S)
        time.sleep(pause_s)
        with self.changed:
            self._gives_way = True
            self.changed.wait_for(lambda: not self._is_launching, min(LAUNCH_PAUSE_MAX_S, longest_s) - pause_s)
            self._gives_way = False

    def _pause(self, io: Reads | None) -> None:
        """Wait for what ends next, without the interpreter lock. Marks are polled: CUDA has no wait with a time-out."""
        if io is not None:
            io.wait(self._pause_s)
        else:
            self._wait_for_posts(self._pause_s)
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    def _wait_for_posts(self, timeout_s: float) -> None:
        with self.changed:
            if not self._posted:
                self.changed.wait(timeout_s)

    def _take_marks(self, part: LoopPart) -> bool:
        done = [entry for entry in part.marks if self._worker.order.is_done(entry[0])]
        for entry in done:
            part.marks.remove(entry)
            _, then, value = entry
            then(value)
        return bool(done)

    def _give_up(self) -> None:
        """End all that was taken, after what was launched for it has ended; what was posted goes on."""
        for part in self.parts:
            marks, part.marks = part.marks, []
            for mark, then, value in marks:
                with suppress(Exception):
                    self._worker.order.wait(mark)
                    then(value)
        for part in self.parts:
            with suppress(Exception):
                part.give_up()
        with self.changed:
            self._is_running = False
            self.changed.notify_all()
        if self._posted or any(map(_marks_of, self.parts)):  # callbacks may have begun copies
            self.post(None)


class TaskPool:
    """Threads for tasks that may wait for storage or index."""

    def __init__(self, loop: TransferLoop, jobs: ThreadJobs) -> None:
        self._loop = loop
        self._jobs = jobs

    def add(self, work: Callable[[], object], then: Then | None = None) -> None:
        """Run `work` on a thread, and then `then` on the loop's, with its result or its exception."""
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
