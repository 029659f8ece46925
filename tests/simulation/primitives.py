"""Stand-ins for `threading`, `time`, queues and tickers, on a Runtime; put in place of them in the modules that run in
the simulation, so that the library's own code is what runs."""

import threading
import uuid
from collections import deque
from collections.abc import Callable

from kvtier.runtime.threads import Job
from tests.simulation.runtime import Process, Runtime, Task


class SimLock:
    """Whoever takes it may have to give way first: that is where threads meet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_held = False
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        runtime = self._runtime
        runtime.pause()
        if self._is_held and not runtime.is_inside:
            raise AssertionError("the simulation itself cannot wait for a lock")
        while self._is_held:
            if not blocking or not runtime.wait(self._waiters, None if timeout < 0 else timeout):
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        assert self._is_held
        self._is_held = False
        self._runtime.wake(self._waiters, 1)

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition(SimLock):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._sleepers: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        try:
            return self._runtime.wait(self._sleepers, timeout)
        finally:
            while self._is_held and self._runtime.process is not None and not self._runtime.process.is_dead:
                self._runtime.wait(self._waiters, None)
            self._is_held = True

    def notify(self, n: int = 1) -> None:
        self._runtime.wake(self._sleepers, n)

    def notify_all(self) -> None:
        self._runtime.wake(self._sleepers)


class SimEvent:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._runtime.wake(self._waiters)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and self._runtime.is_inside:
            self._runtime.wait(self._waiters, timeout)
        return self._is_set


class SimThreading:
    """What modules under test use of `threading`."""

    local = threading.local
    get_ident = staticmethod(threading.get_ident)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def Lock(self) -> SimLock:
        return SimLock(self._runtime)

    def Condition(self) -> SimCondition:
        return SimCondition(self._runtime)

    def Event(self) -> SimEvent:
        return SimEvent(self._runtime)


class SimTime:
    """Replaces `time` in the modules under test. All clocks go at the same rate."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def time(self) -> float:
        return self._runtime.now_s

    def monotonic(self) -> float:
        return self._runtime.monotonic_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._runtime.sleep(seconds)


class SimMachine:
    """What modules under test ask a machine that is not time: who they are, and what nobody can guess."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def gethostname(self) -> str:
        return "simulated"

    def getpid(self) -> int:
        return 1

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._runtime.rng.getrandbits(128), version=4)


class SimJobs:
    """`kvtier.runtime.threads.ThreadJobs` with tasks for threads."""

    def __init__(self, runtime: Runtime, process: Process, name: str, threads: int, queued_max: int) -> None:
        self.queued_max = queued_max
        self._runtime = runtime
        self._process = process
        self._name = name
        self.threads = threads
        self._n_stuck = 0
        self._running: dict[object, float] = {}
        self.is_closed = False
        self._queue: deque[Job] = deque()
        self._idle: list[Task] = []

    def submit(self, job: Job) -> bool:
        if self.is_closed or len(self._queue) >= self.queued_max:
            return False
        self._queue.append(job)
        self._start(1)
        return True

    def widen(self, stuck_s: float) -> None:
        began_before_s = self._runtime.now_s - stuck_s
        self._n_stuck = sum(began_s < began_before_s for began_s in self._running.values())
        self._start(len(self._queue))

    def pending(self) -> int:
        return len(self._queue) + len(self._running)

    def drain(self, timeout_s: float) -> bool:
        ends_s = self._runtime.now_s + timeout_s
        while self.pending():
            if not self._runtime.wait(self._idle, ends_s - self._runtime.now_s):
                return not self.pending()
        return True

    def close(self) -> None:
        self.is_closed = True
        self._queue.clear()

    def _start(self, n_jobs: int) -> None:
        for _ in range(min(n_jobs, self.threads + self._n_stuck - len(self._running))):
            token = object()
            self._running[token] = self._runtime.now_s
            self._runtime.spawn(self._process, self._name, lambda token=token: self._work(token))

    def _work(self, token: object) -> None:
        try:
            while self._queue and len(self._running) <= self.threads + self._n_stuck:
                self._running[token] = self._runtime.now_s
                self._queue.popleft()()
        finally:
            del self._running[token]
            self._runtime.wake(self._idle)


class SimTicker:
    """`kvtier.runtime.threads.Ticker` with a task for its thread, of the process that makes it."""

    def __init__(self, runtime: Runtime, name: str, interval_s: float, tick: Callable[[], None]) -> None:
        assert runtime.process is not None
        self._runtime = runtime
        self._interval_s = interval_s
        self._tick = tick
        self._is_closed = self._has_ended = False
        self._is_woken = False
        self._sleepers: list[Task] = []
        self._joiners: list[Task] = []
        runtime.spawn(runtime.process, name, self._work)

    def wake(self) -> None:
        self._is_woken = True
        self._runtime.wake(self._sleepers)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        self.wake()
        if not self._has_ended:
            self._runtime.wait(self._joiners, timeout_s)
        return self._has_ended

    def _work(self) -> None:
        try:
            while not self._is_closed:
                self._is_woken = False
                self._tick()
                if not self._is_closed and not self._is_woken:
                    self._runtime.wait(self._sleepers, self._interval_s)
        finally:
            self._has_ended = True
            self._runtime.wake(self._joiners)
