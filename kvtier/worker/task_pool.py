"""Task pool: work of the transfer loop that may wait for storage or the index runs on its threads, and comes back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvtier.errors import KVTierError, TierUnavailable
from kvtier.runtime.threads import Jobs
from kvtier.worker.record_reader import FetchFailed

STUCK_S = 1.0  # a task that runs for so long may hang in the kernel, seconds; at most a quarter of the timeout

Then = Callable[[object], None]


class TaskPool:
    """Thread-safe.

    Args:
        ended: called on the pool's thread with a task's `then` and its result.
    """

    def __init__(
        self, jobs: Jobs, clock: Callable[[], float], timeout_s: float, ended: Callable[[Then, object], object]
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._stuck_s = min(STUCK_S, timeout_s / 4)
        self._tell = ended
        self._lock = threading.Lock()
        self.tasks: deque[tuple[Callable[[], object], Then | None]] = deque()
        self._runners: dict[object, float] = {}  # jobs that run tasks until there are none -> when their task began
        self.n_stuck = 0  # runners whose tasks may hang

    @property
    def is_busy(self) -> bool:
        return bool(self.tasks or self._runners)

    def is_due(self, now_s: float) -> bool:
        """Return True if a task may hang. Called on any thread."""
        with self._lock:
            return any(map((now_s - self._stuck_s).__gt__, self._runners.values()))

    def add(
        self, work: Callable[[], object], then: Then | None = None, *, cleanup: Callable[[], object] | None = None
    ) -> None:
        """Run `work` on a thread of the pool, and then have `then` called with its result or its exception.

        cleanup: queued behind `work` as a task of its own, which delays no result and may run beside `work`.
        """
        with self._lock:
            self.tasks.append((work, then))
            if cleanup is not None:
                self.tasks.append((cleanup, None))
        self.staff()

    def staff(self) -> None:
        """Start a runner if there are tasks and fewer runners than the pool has threads, not counting stuck ones."""
        if not self.tasks and not self.n_stuck:
            return
        dropped: list[Then] = []
        stuck_since_s = self._clock() - self._stuck_s
        with self._lock:
            n_stuck = sum(map(stuck_since_s.__gt__, self._runners.values()))
            if n_stuck != self.n_stuck:
                self.n_stuck = n_stuck
                self._jobs.widen(n_stuck)
            if not self.tasks or len(self._runners) - n_stuck >= self._jobs.threads:
                return
            runner = object()
            self._runners[runner] = self._clock()
            if not self._jobs.submit(partial(self._run, runner)):
                del self._runners[runner]
                if not self._runners:
                    dropped = [then for _, then in self.tasks if then is not None]
                    self.tasks.clear()
        for then in dropped:
            self._tell(then, TierUnavailable("the worker is closed"))

    def _run(self, runner: object) -> None:
        """Run tasks until there are none: a job of the pool."""
        while True:
            with self._lock:
                if not self.tasks:
                    del self._runners[runner]
                    return
                work, then = self.tasks.popleft()
                self._runners[runner] = self._clock()
            result: object = None
            try:
                result = work()
            except (FetchFailed, KVTierError, OSError) as fault:
                result = fault
            except BaseException:
                result = TierUnavailable("a fault of kvtier's own")
                with self._lock:
                    del self._runners[runner]
                self.staff()  # this thread ends
                raise
            finally:
                if then is not None:
                    self._tell(then, result)
