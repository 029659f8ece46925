"""Transfer loop: one thread that owns the state of a worker's loads and saves, and never waits for storage or index.

Other threads hand it work with `post`. What may wait runs on the threads of a pool, and comes back with `post`. A turn
takes what was posted and what the device has done, and then runs the steps of the loads and those of the saves. The
loop is a job: it ends when only a pool or the engine can give it work, and they wake it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from kvtier.io.base import Reads
from kvtier.runtime.threads import Jobs
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.task_pool import TaskPool, Then

PAUSE_MIN_S, PAUSE_MAX_S = 0.0003, 0.008  # pause after a turn in which nothing had ended; it doubles up to the maximum
# Pause after any turn while I/O is queued for longer. Each turn takes the interpreter lock from the engine: beside 16
# loads of 12,000 tokens, 16 decoding requests got 1.1 to 2 times as many tokens, and the last load ended between 1 %
# later and 11 % earlier (two H100).
QUEUED_PAUSE_S, QUEUED_BYTES = 0.004, 512 << 20


class Turn(NamedTuple):
    """Result of a turn. has_moved: something changed. goes_on: the next turn has work at once. io: the reads,
    writes or flushes under way that were begun first. n_bytes: of all I/O under way. is_polled: something else is under
    way that does not wake the loop."""

    has_moved: bool = False
    goes_on: bool = False
    io: Reads | None = None
    n_bytes: int = 0
    is_polled: bool = False


IDLE = Turn()


class Half(Protocol):
    """The loads or the saves. All methods but `is_due` are called on the loop's thread."""

    def turn(self) -> Turn:
        """Take every chunk as far as it goes now."""
        ...

    def is_due(self, now_s: float) -> bool:
        """Return True if the loop has work that comes with time alone, such as a deadline. Called on any thread."""
        ...

    def give_up(self) -> None:
        """End all that was taken, after a fault of the loop."""
        ...


class TransferLoop:
    """`post`, `look` and `pool` may be called on any thread, all else on the loop's.

    marks: (mark of launches or copies that are under way, callback that runs once it is done).

    Args:
        jobs: run the loop, on one thread.
    """

    def __init__(self, worker: WorkerContext, jobs: Jobs) -> None:
        self.halves: list[Half] = []
        self._worker = worker
        self._jobs = jobs
        self._pools: list[TaskPool] = []
        self.marks: list[tuple[Mark, Callable[[], None]]] = []
        self._pause_s = PAUSE_MIN_S
        # All threads use these, under the lock:
        self._changed = threading.Condition()
        self._is_running = False
        self._posted: deque[tuple[Then, Any]] = deque()
        self.n_posted = 0

    def pool(self, jobs: Jobs) -> TaskPool:
        """Return a pool of threads whose results come back to the loop."""
        made = TaskPool(jobs, self._worker.clock, self._worker.timeout_s, self.post)
        self._pools.append(made)
        return made

    def post(self, then: Then, value: Any) -> bool:
        """Have `then(value)` called on the loop's thread. Return False if the loop is closed, and it will not be."""
        with self._changed:
            self._posted.append((then, value))
            self.n_posted += 1
            if self._wake():
                return True
            self._posted.pop()
            return False

    def look(self) -> None:
        """Wake the loop where it has work although nothing was posted."""
        now_s = self._worker.clock()
        may_be_due: list[Half | TaskPool] = [*self.halves, *self._pools]
        for each in may_be_due:
            if each.is_due(now_s):
                with self._changed:
                    self._wake()
                return

    def when_done(self, mark: Mark, then: Callable[[], None]) -> None:
        """Run `then` on the loop's thread once the mark is done."""
        if mark is None:  # on the CPU
            then()
        else:
            self.marks.append((mark, then))

    def turn(self) -> Turn:
        """Take all work as far as it goes now."""
        has_moved = bool(self._posted)
        for _ in range(len(self._posted)):  # one at a time: if one raises, the others are not lost
            then, value = self._posted.popleft()
            then(value)
        if self.marks:
            has_moved |= self._take_marks()
        for pool in self._pools:
            if pool.n_stuck or (pool.tasks and pool.is_due(self._worker.clock())):
                pool.staff()
        goes_on, io, n_bytes, is_polled = False, None, 0, False
        for half in self.halves:
            turn = half.turn()
            if turn is not IDLE:
                has_moved |= turn.has_moved
                goes_on |= turn.goes_on
                io = io or turn.io
                n_bytes += turn.n_bytes
                is_polled |= turn.is_polled
        return Turn(has_moved, goes_on, io, n_bytes, is_polled or bool(self.marks))

    def _wake(self) -> bool:
        """Have the loop run. Return False if it is closed. The caller holds the lock."""
        if self._is_running:
            self._changed.notify_all()
            return True
        self._is_running = self._jobs.submit(self._run)
        return self._is_running

    def _run(self) -> None:
        try:
            while True:
                turn = self.turn()
                if turn.has_moved:
                    self._pause_s = PAUSE_MIN_S
                    if turn.n_bytes >= QUEUED_BYTES:
                        self._wait_for_posts(QUEUED_PAUSE_S)
                        continue
                if turn.goes_on:
                    continue
                with self._changed:
                    if self._posted:
                        continue
                    if turn.io is None and not turn.is_polled:
                        self._is_running = False
                        return
                self._pause(turn.io)
        except BaseException:  # our bug, or CUDA's: no chunk is left without an answer, and no slot is lost
            self._give_up()
            raise

    def _pause(self, io: Reads | None) -> None:
        """Wait in native code for what ends next, without the interpreter lock."""
        if io is not None:
            io.wait(self._pause_s)
        elif self.marks:
            self._worker.order.wait_within(self.marks[0][0], self._pause_s)
        else:
            self._wait_for_posts(self._pause_s)
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    def _wait_for_posts(self, timeout_s: float) -> None:
        with self._changed:
            if not self._posted:
                self._changed.wait(timeout_s)

    def _take_marks(self) -> bool:
        done = [entry for entry in self.marks if self._worker.order.is_done(entry[0])]
        for entry in done:
            self.marks.remove(entry)
            entry[1]()
        return bool(done)

    def _give_up(self) -> None:
        """End all that was taken, after what was launched for it has ended; what was posted goes on."""
        marks, self.marks = self.marks, []
        for mark, then in marks:
            with suppress(Exception):
                self._worker.order.wait(mark)
                then()
        for half in self.halves:
            with suppress(Exception):
                half.give_up()
        with self._changed:
            self._is_running = False
            if self._posted:
                self._wake()
