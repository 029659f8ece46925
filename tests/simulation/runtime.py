"""Threads that are no threads: each is a greenlet, one runs at a time, and a seed draws which one goes on.

Tasks give way only within the runtime's own primitives (tests.simulation.primitives) and wherever the doubles of disk
and index say so. Time is virtual: it moves when nothing can run, and now and then while something can, as on a machine
that is busy. So one seed is one run, to the last byte.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import greenlet

START_S = 1_700_000_000.0
BOOTED_S = 2.0**29  # start of the machines' monotonic clock; sums of either clock are rounded alike, seconds
BUSY_CHANCE, BUSY_MAX_S = 0.02, 0.02  # how often time moves although something could run, and how far at most
LOOP = "loop"  # name of the tasks of a worker's loop (kvtier.worker.loop)
ENGINE_WAIT_MAX_S = 0.05  # no wait of an engine's own thread lasts longer while nothing else can run (I4, I10)


@dataclass(eq=False)
class Process:
    """What ends together. closing: called when it is killed, after its tasks are gone. moves: how often something of it
    went on."""

    name: str
    is_dead: bool = False
    tasks: list[Task] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    moves: int = 0


@dataclass(eq=False)
class Task:
    """A thread. is_engine: the engine's own, which must never wait for storage. waiters: where it waits, if it does.
    is_patient: it may wait there for long. turn: grows with each wait, so that an old timer is told from the one that
    it waits for."""

    process: Process
    name: str
    run: greenlet.greenlet
    is_engine: bool = False
    is_waiting: bool = False
    was_woken: bool = False
    is_patient: bool = False
    turn: int = 0
    waiters: list[Task] | None = None


class Runtime:
    """Tasks, the clock and the seed. `preempt`: how often a task gives way where it could. tried: how often each kind
    of fault was."""

    def __init__(self, seed: int, preempt: float = 0.1) -> None:
        self.rng = random.Random(seed)
        self.now_s = START_S
        self.preempt = preempt
        self.violations: list[str] = []
        self.tried: Counter[str] = Counter()
        self.switches = 0
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._n_timers = 0
        self._root = greenlet.getcurrent()
        self._current: Task | None = None
        self._engine_tasks: list[Task] = []

    def tries(self, fault: str, chance: float) -> bool:
        """Whether this fault happens now."""
        is_so = chance > 0 and self.rng.random() < chance
        self.tried[fault] += is_so
        return is_so

    # --- what tasks call ---

    @property
    def monotonic_s(self) -> float:
        """Return the machines' monotonic time. It is far from the time of day, so that code which mistakes one for the
        other fails."""
        return self.now_s - BOOTED_S

    @property
    def process(self) -> Process | None:
        """Whose task runs now; None: the simulation itself."""
        return None if self._current is None else self._current.process

    @property
    def is_engine_thread(self) -> bool:
        return self._current is not None and self._current.is_engine

    def note_call(self, what: str) -> None:
        """Note a call that may wait for the disk or the index. A worker's loop makes none."""
        if self._current is not None and self._current.name == LOOP:
            self.violate(f"{self._current.process.name}: the loop's thread may wait: {what}")

    @property
    def is_inside(self) -> bool:
        """Whether a task runs, and not the simulation itself."""
        return self._current is not None

    def spawn(self, process: Process, name: str, work: Callable[[], None], *, is_engine: bool = False) -> None:
        """A new thread. One that ends by an exception is a violation: jobs must not raise."""

        def run() -> None:
            try:
                work()
            except greenlet.GreenletExit:
                pass
            except BaseException as fault:
                self.violate(f"{process.name}/{name} ended by {type(fault).__name__}: {fault}", fault)
            finally:
                process.tasks.remove(task)
                if is_engine:
                    self._engine_tasks.remove(task)

        task = Task(process, name, greenlet.greenlet(run, self._root), is_engine)
        if is_engine:
            self._engine_tasks.append(task)
        process.tasks.append(task)
        self._ready.append(task)

    def violate(self, what: str, fault: BaseException | None = None) -> None:
        """Something that must never be was seen. The first is what counts: others may follow from it."""
        if fault is not None and fault.__traceback__ is not None:
            last = fault.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            what += f" ({last.tb_frame.f_code.co_filename}:{last.tb_lineno})"
        self.violations.append(what)

    def pause(self) -> None:
        """A place where another thread may go on, now and then."""
        task = self._current
        if task is not None and not task.process.is_dead and self.rng.random() < self.preempt:
            self._ready.append(task)
            self._switch()

    def sleep(self, seconds: float) -> None:
        self.wait([], seconds)

    def wait(self, waiters: list[Task], timeout_s: float | None) -> bool:
        """Until somebody wakes this task, which stands among `waiters` meanwhile; False: the time was over first."""
        task = self._current
        assert task is not None, "only tasks wait"
        if task.process.is_dead:
            self.die()
        task.turn += 1
        task.is_waiting, task.was_woken, task.waiters = True, False, waiters
        task.is_patient = timeout_s is None or timeout_s > ENGINE_WAIT_MAX_S
        waiters.append(task)
        if timeout_s is not None:
            turn = task.turn
            self.call_at(self.now_s + max(0.0, timeout_s), lambda: self._time_over(task, turn))
        self._switch()
        return task.was_woken

    def wake(self, waiters: list[Task], n_tasks: int | None = None) -> None:
        """Wakes so many of them, whichever; None: all."""
        n_left = len(waiters) if n_tasks is None else min(n_tasks, len(waiters))
        while n_left > 0:
            task = waiters.pop(self.rng.randrange(len(waiters)))
            task.is_waiting, task.was_woken, task.waiters = False, True, None
            self._ready.append(task)
            n_left -= 1

    def call_at(self, at_s: float, work: Callable[[], None]) -> None:
        """Runs `work`, which never waits, when its time has come."""
        self._n_timers += 1
        heapq.heappush(self._timers, (at_s, self._n_timers, work))

    # --- what the simulation calls ---

    def run(self, switches: int, seconds: float) -> None:
        """Lets so many tasks go on at most, and time pass by `seconds` at most."""
        ends_s = self.now_s + seconds
        for _ in range(switches):
            if not self._ready and not self._pass_time(ends_s):
                return
            self._go_on()

    def run_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """False: it was not done in that time."""
        ends_s = self.now_s + seconds
        while not is_done():
            if not self._ready and not self._pass_time(ends_s):
                return is_done()
            self._go_on()
        return True

    def kill(self, process: Process) -> None:
        """As SIGKILL does: no task of it does anything more. (They are unwound, so that descriptors are closed, but
        all that reaches beyond the process refuses a dead one.)"""
        process.is_dead = True
        for task in list(process.tasks):
            if task.waiters is not None:
                task.waiters.remove(task)
            task.waiters, task.turn = None, task.turn + 1
            self._ready = [ready for ready in self._ready if ready is not task]
            before, self._current = self._current, task
            task.run.throw(greenlet.GreenletExit())
            self._current = before
            if task in process.tasks:  # it had not begun
                process.tasks.remove(task)
                if task.is_engine:
                    self._engine_tasks.remove(task)
        for close in process.closing:
            close()

    def die(self) -> None:
        """Ends the task that runs: its process was killed while it was about to do this."""
        raise greenlet.GreenletExit

    # --- its own ---

    def _switch(self) -> None:
        task = self._current
        assert task is not None
        self._root.switch()
        if task.process.is_dead:
            raise greenlet.GreenletExit

    def _go_on(self) -> None:
        if not self._ready:
            return
        if self.rng.random() < BUSY_CHANCE:
            self._advance(self.now_s + self.rng.random() * BUSY_MAX_S)
        place = self.rng.randrange(len(self._ready))
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        task = self._ready.pop()
        self.switches += 1
        self._current = task
        task.process.moves += 1
        task.run.switch()
        self._current = None

    def _pass_time(self, ends_s: float) -> bool:
        """Nothing can run: on to the next timer, if it comes before `ends_s`; else to that."""
        for task in self._engine_tasks:
            if task.is_waiting and task.is_patient:
                self.violate(f"{task.process.name}: the engine's own thread waits for something slow (I4, I10)")
                task.is_patient = False
        if not self._timers or self._timers[0][0] > ends_s:
            self.now_s = max(self.now_s, ends_s)
            return False
        self._advance(self._timers[0][0])
        return True

    def _advance(self, to_s: float) -> None:
        self.now_s = max(self.now_s, to_s)
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()

    def _time_over(self, task: Task, turn: int) -> None:
        if task.is_waiting and task.turn == turn and task.waiters is not None:
            task.waiters.remove(task)
            task.is_waiting, task.waiters = False, None
            self._ready.append(task)
