"""Tasks of the load loop that may wait for storage or the index: they run on threads of a pool, and come back to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtier.errors import KVTierError, TierUnavailable
from kvtier.runtime.threads import Jobs
from kvtier.worker.record_reader import FetchFailed

STILL_S = 1.0  # a task that runs for so long may hang in the kernel, seconds; at most a quarter of the time-out

Then = Callable[[object], None]


class Task(NamedTuple):
    """then: called by the loop with the result of `work`, or with its exception."""

    work: Callable[[], object]
    then: Then


@dataclass(eq=False, slots=True)
class TaskRunner:
    """A job of the pool that runs tasks until there are none. since_s: when its task began."""

    since_s: float


class TaskPool:
    """Thread-safe.

    Args:
        ended: called on the pool's thread with a task's `then` and its result.
    """

    def __init__(
        self, jobs: Jobs, clock: Callable[[], float], timeout_s: float, ended: Callable[[Then, object], None]
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._still_s = min(STILL_S, timeout_s / 4)
        self._tell = ended
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._runners: dict[TaskRunner, None] = {}
        self._n_still = 0  # runners whose tasks may hang

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks or self._runners)

    def has_still(self) -> bool:
        """Return True if a task may hang."""
        with self._lock:
            return self._count_still() > 0

    def add(self, work: Callable[[], object], then: Then) -> None:
        with self._lock:
            self._tasks.append(Task(work, then))
        self.staff()

    def staff(self) -> None:
        """Have as many runners as the pool is wide, beside those whose tasks may hang."""
        dropped: list[Task] = []
        with self._lock:
            n_still = self._count_still()
            if n_still != self._n_still:
                self._n_still = n_still
                self._jobs.widen(n_still)
            if not self._tasks or len(self._runners) - n_still >= self._jobs.threads:
                return
            runner = TaskRunner(self._clock())
            self._runners[runner] = None
            if not self._jobs.submit(partial(self._run, runner)):
                del self._runners[runner]
                if not self._runners:
                    dropped = list(self._tasks)
                    self._tasks.clear()
        for task in dropped:
            self._tell(task.then, TierUnavailable("the worker is closed"))

    def _count_still(self) -> int:
        still_s = self._clock() - self._still_s
        return sum(runner.since_s < still_s for runner in self._runners)

    def _run(self, runner: TaskRunner) -> None:
        """A job of the pool."""
        while True:
            with self._lock:
                if not self._tasks:
                    del self._runners[runner]
                    return
                task = self._tasks.popleft()
                runner.since_s = self._clock()
            result: object = TierUnavailable("a fault of kvtier's own")
            try:
                result = task.work()
            except (FetchFailed, KVTierError, OSError) as fault:
                result = fault
            except BaseException:
                with self._lock:
                    del self._runners[runner]
                raise
            finally:
                self._tell(task.then, result)
