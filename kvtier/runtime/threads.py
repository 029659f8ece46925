"""Bounded work queues. The only place in the library that starts threads (apart from the native I/O threads).

A job is a callable without arguments or result; it reports through what it closes over. `submit` refuses when the
queue is full and never blocks the engine (I4).
"""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.runtime.repeated_log import RepeatedLog

Job = Callable[[], None]
T = TypeVar("T")

_failures = RepeatedLog()

EXTRA_THREADS_MAX = 16  # threads of one queue beside its own, while jobs hang in the kernel


def no_thread() -> ConfigError:
    """Return the refusal of a process that may start no further thread."""
    fix = "no further thread can be started; raise `ulimit -u`, or the limit of processes of the container (pids.max)"
    return ConfigError("threads", threading.active_count(), fix)


def _start_thread(name: str, work: Job) -> threading.Thread:
    """Run `work` on a daemon thread. Raises ConfigError where this process may have no more threads."""
    thread = threading.Thread(target=work, name=f"kvtier-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise no_thread() from None
    return thread


class ThreadJobs:
    """Daemon threads over one bounded queue. Jobs must not raise: one that does ends its thread, another starts."""

    def __init__(self, name: str, threads: int, queued_max: int) -> None:
        self._queued_max = queued_max
        self._queue: deque[Job] = deque()
        self._running: dict[object, float] = {}  # when each job began
        self.is_closed = False
        self._changed = threading.Condition()
        self._name = name
        self.threads = self._n_wanted = self._n_threads = threads
        for _ in range(threads):
            self._start_thread()

    def submit(self, job: Job) -> bool:
        """Queue a job. Return False when the queue is full or closed."""
        with self._changed:
            if self.is_closed or len(self._queue) >= self._queued_max:
                return False
            self._queue.append(job)
            self._changed.notify()
            return True

    def pending(self) -> int:
        """Return the number of jobs queued or running."""
        with self._changed:
            return len(self._queue) + len(self._running)

    def widen(self, stuck_s: float) -> None:
        """Add a thread for each job that has run for `stuck_s` and may hang in the kernel, up to EXTRA_THREADS_MAX, so
        that other jobs run beside it."""
        began_before_s = time.monotonic() - stuck_s
        with self._changed:
            n_stuck = sum(map(began_before_s.__gt__, self._running.values()))
            self._n_wanted = self.threads + min(n_stuck, EXTRA_THREADS_MAX)
            n_more = 0 if self.is_closed else max(0, self._n_wanted - self._n_threads)
            self._n_threads += n_more
            if self._n_wanted < self._n_threads:
                self._changed.notify_all()  # the threads that were added end
        try:
            for _ in range(n_more):
                self._start_thread()
                n_more -= 1
        except ConfigError as fault:
            _failures.warning("widen", "%s: no thread takes over from those that hang: %s", self._name, fault.fix)
            with self._changed:
                self._n_threads -= n_more

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is pending. Return False when `timeout_s` passed first (I10)."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._queue or self._running:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            return True

    def close(self) -> None:
        """Accept no further jobs and drop the queued ones. Running ones end by themselves."""
        with self._changed:
            self.is_closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        _start_thread(self._name, self._work)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self.is_closed and self._n_threads <= self._n_wanted:
                    self._changed.wait()
                if not self._queue or self._n_threads > self._n_wanted:
                    self._n_threads -= 1
                    return
                job, token = self._queue.popleft(), object()
                self._running[token] = time.monotonic()
            completed = False
            try:
                job()
                completed = True
            finally:
                if not completed:  # our bug: this thread ends with its traceback, the queue keeps its width
                    self._start_thread()
                with self._changed:
                    del self._running[token]
                    self._changed.notify_all()


class Ticker:
    """Calls `tick` every `interval_s` on a daemon thread, sooner after `wake`. Overlong ticks are never doubled."""

    def __init__(self, name: str, interval_s: float, tick: Job) -> None:
        self._interval_s = interval_s
        self._tick = tick
        self._woken = threading.Event()
        self._closed = threading.Event()
        self._name = name
        self._start_thread()

    def wake(self) -> None:
        self._woken.set()

    def close(self, timeout_s: float) -> bool:
        """End after the running tick. Return False when that takes longer than `timeout_s` (I10)."""
        self._closed.set()
        self._woken.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start_thread(self) -> None:
        self._thread = _start_thread(self._name, self._work)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._woken.clear()
            completed = False
            try:
                self._tick()
                completed = True
            finally:
                if not completed and not self._closed.wait(self._interval_s):  # our bug, as in ThreadJobs
                    self._start_thread()
            if not self._closed.is_set():
                self._woken.wait(self._interval_s)


def begin(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` on a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as fault:
            future.set_exception(fault)

    _start_thread(name, run)
    return future


def run_within(name: str, timeout_s: float, work: Job) -> bool:
    """Run `work` on a thread of its own. Return False if it did not end in `timeout_s`, and goes on (I10)."""
    future = begin(name, work)
    if not wait([future], timeout_s).done:
        return False
    future.result()
    return True


def run_each(threads: int, timeout_s: float, work: Callable[[T], object], items: Sequence[T]) -> float:
    """Call `work` with each item, on `threads` threads. Return the seconds that all calls together took.

    Raises the first OSError of a call, or OSError(ETIMEDOUT) if the calls did not all end in `timeout_s`.
    """
    faults: list[OSError] = []

    def run(item: T) -> None:
        try:
            work(item)
        except OSError as fault:
            faults.append(fault)

    jobs = ThreadJobs("bench", threads, len(items))
    started_s = time.perf_counter()
    for item in items:
        jobs.submit(partial(run, item))
    has_ended = jobs.drain(timeout_s)
    taken_s = time.perf_counter() - started_s
    jobs.close()
    if faults or not has_ended:
        raise faults[0] if faults else OSError(errno.ETIMEDOUT, f"no answer in {timeout_s:g} s")
    return taken_s
