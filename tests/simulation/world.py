"""A whole root in one process: engines come, serve, hang and are killed, while others sweep, evict and rebuild, the
disk and the index fail, and after every step all that must hold is looked at. One seed is one run.

    python -m tests.simulation --seed 7 --steps 500 --recipe hung_reads
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from blake3 import blake3

from kvtier.errors import KVTierError
from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import quota_value, tenant_note
from kvtier.eviction.pins import Pin
from kvtier.format.geometry import PAGE_BYTES
from kvtier.index.base import Index
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweep_lease import LEASE_TTL_S, SWEEP_LEASE
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import Root
from tests.simulation.checks import Checks, watching
from tests.simulation.disk import Disk, Vandal
from tests.simulation.disk import Weather as CalmDisk
from tests.simulation.engine import Build, EngineProcess
from tests.simulation.index import IndexWeather as CalmIndex
from tests.simulation.index import SharedIndex, SimIndex
from tests.simulation.place import Place, installed
from tests.simulation.recipes import Recipe
from tests.simulation.runtime import Process, Runtime
from tests.simulation.serving import Prompt, Seat, Serving
from tests.simulation.truth import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS

SET_BYTES = 4 * (PAGE_BYTES + 3 * 3 * PAGE_BYTES)  # about the size of a set, bytes
SETTLE_S = 6.0  # time for what was saved last to be answered: a read once more, tidying, seconds
CALM_S = 400.0
ORPHANS_S = 700.0
LEASE_WAITS_MAX = 100  # of ORPHANS_S each: more than clocks jump in a run


class Violation(AssertionError):
    """What must never be was seen."""


class World:
    """Made in an empty folder; `run` raises Violation. told: what happened, so that a test sees it was no calm. tried:
    how often each kind of fault was."""

    def __init__(self, folder: Path, seed: int, recipe: Recipe) -> None:
        rng = random.Random(f"{seed}/{recipe.name}")
        self.recipe = recipe
        self.told: Counter[str] = Counter()
        self.trace = blake3()
        self._stack = ExitStack()
        self.operations = self._n_indexes = 0
        self._processes: list[Process] = []
        self._runtime = Runtime(rng.getrandbits(64), preempt=rng.choice([0.0, 0.05, 0.2]))
        self.rng, self.tried = self._runtime.rng, self._runtime.tried
        capacity_bytes = recipe.sets * SET_BYTES
        disk = Disk(self._runtime, folder / "v2", 2 * capacity_bytes + (1 << 20), is_shared=recipe.is_shared)
        disk.folder.mkdir()
        self._stack.enter_context(installed(self._runtime, disk))
        kind = rng.choice(recipe.kinds)
        index = SharedIndex(self._runtime, partial(self._new_index, kind, folder), kind == "remote")
        self.place = Place(self._runtime, Root(folder, disk.folder, None), disk, index, capacity_bytes)
        self.checks = Checks(self.place)
        self._stack.enter_context(watching(self.checks))
        self._vandal = Vandal(disk)
        self._prompts: list[Prompt] = []
        self._seats: list[Seat] = []
        self._admins: list[Process] = []
        self._has_strays = False
        self.place.disk.weather, self.place.index.weather = recipe.disk, recipe.index
        for _ in range(recipe.engines):
            self.open()

    def _new_index(self, kind: str, folder: Path) -> Index:
        if kind != "lmdb":
            return MemoryIndex()
        self._n_indexes += 1
        return LmdbIndex(str(folder / f"index-{self._n_indexes}"), map_bytes=8 << 20, boot_id="simulated", mountinfo="")

    # --- running ---

    def run(self, steps: int) -> None:
        acts = self.recipe.weights()
        names, weights = list(acts), list(acts.values())
        for number in range(steps):
            (name,) = self.rng.choices(names, weights)
            act: Callable[[], None] = getattr(self, name)
            act()
            self.told[name] += 1
            self.operations += 1
            self._runtime.run(self.rng.randrange(60), self.rng.choice([0.0, 0.005, 0.05, 0.3]))
            self._look(number)
            self.trace.update(f"{name} {self._runtime.now_s} {self._runtime.switches}\n".encode())
        self._calm_down()

    def close(self) -> None:
        """Nothing of it goes on, however it ended: tasks that wait are unwound while its own disk is still there, not
        when they are collected, in the middle of another run."""
        for seat in list(self._seats):
            self._end(seat)
        for process in self._processes:
            if not process.is_dead:
                self._runtime.kill(process)
                self.place.disk.close_all_of(process)
        self.place.index.real.close()
        self._stack.close()

    def _look(self, number: int) -> None:
        for seat in self._seats:
            if seat.serving is not None and not seat.is_leaving and seat.looked_at != seat.process.moves:
                seat.looked_at = seat.process.moves
                self.checks.look_at_engine(seat.serving)
        if number % 20 == 0:
            self._look_at_budget()
        if number % 50 == 0:
            self.checks.look_at_index()
        self._stop_at_violations()

    def _look_at_budget(self) -> None:
        """Not when the index forgot what lies there: some is in no index then, and counted by nobody."""
        disk, index = self.place.disk.weather, self.place.index.weather
        # A writer whose index is slow for longer than a lease lasts may write to a set that a sweep has just measured.
        is_late = disk.hang + disk.hang_calls > 0 or index.slow_s > LEASE_TTL_S
        if not self._has_strays:
            self.checks.look_at_budget(SET_BYTES if is_late else 0)

    def _stop_at_violations(self) -> None:
        if self._runtime.violations:
            raise Violation(self._runtime.violations[0])

    # --- what engines do ---

    def arrive(self) -> None:
        seat = self._any(ready=True)
        if seat is not None and seat.serving is not None and len(seat.serving.arrived) < 6:
            seat.serving.arrived.append(self._a_prompt())

    def step(self) -> None:
        seat = self._any(ready=True)
        if seat is not None and seat.serving is not None:
            self._do(seat, seat.serving.step, is_engine=True)

    def nap(self) -> None:
        self._runtime.run(400, 1.5 * self.rng.random())

    def long_nap(self) -> None:
        self._runtime.run(4000, 100.0 * self.rng.random())

    def open(self) -> None:
        if len(self._seats) >= self.recipe.engines:
            return
        process = self._process("engine")
        seat = Seat(process)
        self._seats.append(seat)
        build = Build.drawn(self.rng, self.rng.choice(["w0", "w0", "w0", "w0", "w1"]))
        seed = self.rng.getrandbits(32)

        def start() -> None:
            engine = EngineProcess(self.place, process, build, random.Random(seed))
            seat.serving, seat.is_busy = Serving(engine), False

        self._runtime.spawn(process, "start", start)

    def kill(self) -> None:
        seat = self._any()
        if seat is not None:
            self.tried["an engine is killed"] += 1
            self._end(seat)

    def leave(self) -> None:
        """An engine is told to stop."""
        seat = self._any(ready=True)
        if seat is not None:
            self._let_leave(seat)

    def _let_leave(self, seat: Seat) -> None:
        seat.is_leaving = True

        def close() -> None:
            assert seat.serving is not None
            seat.serving.engine.close()
            self._end(seat, is_killed=False)

        self._do(seat, close)

    def reset(self) -> None:
        seat = self._any(ready=True)
        if seat is not None and seat.serving is not None:
            self._do(seat, seat.serving.reset)

    def _do(self, seat: Seat, work: Callable[[], None], *, is_engine: bool = False) -> None:
        """On the engine's own thread, which does one thing at a time."""
        seat.is_busy = True

        def run() -> None:
            work()
            seat.is_busy = False

        self._runtime.spawn(seat.process, "engine", run, is_engine=is_engine)

    def _any(self, ready: bool = False) -> Seat | None:
        found = [s for s in self._seats if not ready or (s.serving is not None and not s.is_busy and not s.is_leaving)]
        return self.rng.choice(found) if found else None

    def _end(self, seat: Seat, is_killed: bool = True) -> None:
        self._seats.remove(seat)
        if seat.serving is not None:
            self.told.update(seat.serving.told)
        if is_killed:
            self._runtime.kill(seat.process)
            self.place.disk.close_all_of(seat.process)

    def _process(self, what: str) -> Process:
        process = Process(f"{what}-{len(self._processes) + 1}")
        self._processes.append(process)
        return process

    def _a_prompt(self) -> Prompt:
        """Prompts share beginnings, and the same words come behind different ones."""
        rng = self.rng
        if self._prompts and rng.random() < 0.6:
            prompt = rng.choice(self._prompts[-12:])
        else:
            words = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
            tokens = [100 * word + n for word in words for n in range(CHUNK_TOKENS)]
            tokens += range(BLOCK_TOKENS * rng.randrange(CHUNK_BLOCKS))
            prompt = Prompt(tuple(tokens), rng.choice(["", "", "", "a", "b"]))
            self._prompts.append(prompt)
        n_blocks = len(prompt.tokens) // BLOCK_TOKENS
        return replace(prompt, local_blocks=rng.randrange(n_blocks + 1) if rng.random() < 0.25 else 0)

    # --- what others do to the root ---

    def sweep(self) -> None:
        self._administer(lambda keeper, evictor: keeper.sweep())

    def rebuild(self) -> None:
        self._administer(lambda keeper, evictor: keeper.rebuild())

    def evict(self) -> None:
        selection = Selection(n_bytes=self.rng.randint(1, 3) * SET_BYTES)
        self._administer(lambda keeper, evictor: evictor.evict(selection, self.place.capacity_bytes))

    def keep_limits(self) -> None:
        self._administer(lambda keeper, evictor: evictor.keep_limits(self.place.capacity_bytes // 2))

    def pin(self) -> None:
        """All of a namespace, or no longer; up to the evictor's cap."""
        index = self.place.index.real
        for namespace in sorted({info.namespace for info in index.sets()}):  # a set has another order in each process
            pin = Pin(namespace.hex(), namespace, None, "", 0.0, None)
            if self.rng.random() < 0.3:
                index.put_note(pin.name, pin.pack(), None)
            else:
                index.drop_note(pin.name)

    def set_quota(self) -> None:
        quota = self.rng.choice([None, SET_BYTES, 3 * SET_BYTES])
        self.place.index.real.put_note(tenant_note(self.rng.choice(["a", "b"])), quota_value(quota), None)

    def _administer(self, work: Callable[[Sweeper, Evictor], object]) -> None:
        """On somebody's command line."""
        place, process = self.place, self._process("admin")
        index: Index = SimIndex(place.index, process)  # type: ignore[assignment]
        keeper = Sweeper(index, place.root.folder, process.name, lambda: place.runtime.now_s)
        evictor = Evictor(index, place.root.folder, process.name, clock=lambda: place.runtime.now_s)

        def run() -> None:
            try:
                work(keeper, evictor)
            except (KVTierError, OSError):
                self.told["administration put off"] += 1
            place.disk.close_all_of(process)

        self._runtime.spawn(process, "admin", run)
        self._admins.append(process)

    def kill_admin(self) -> None:
        """Whoever evicts or sweeps ends in the middle of it."""
        self._admins = [process for process in self._admins if process.tasks]
        if self._admins:
            process = self._admins.pop(self.rng.randrange(len(self._admins)))
            self.tried["who evicts, sweeps or rebuilds is killed"] += 1
            self._runtime.kill(process)
            self.place.disk.close_all_of(process)

    # --- what goes wrong ---

    def forget(self) -> None:
        self.place.index.forget()
        self._has_strays = True

    def fill_disk(self) -> None:
        self.place.disk.is_full = not self.place.disk.is_full

    def vandalize(self) -> None:
        self._vandal.strike()

    def flip_in_memory(self) -> None:
        """A bit of a cached chunk that nobody is reading."""
        seat = self._any(ready=True)
        if seat is None or seat.serving is None:
            return
        self.tried["a bit of a cached chunk is flipped in memory"] += seat.serving.engine.flip_in_memory(self.rng)

    def jump_clock(self) -> None:
        seat = self._any(ready=True)
        if seat is not None and seat.serving is not None:
            self.tried["a node's clock jumps"] += 1
            seat.serving.engine.skew_s += self.rng.choice([-3600.0, -40.0, -7.0, -1.0, 1.0, 7.0, 40.0, 3600.0])

    def lose_power(self) -> None:
        """Of what was written lately, any pages may be lost; so is the index."""
        self.tried["power is lost"] += 1
        while self._seats:
            self._end(self._seats[0])
        for path, segment in self.place.disk.segments():
            status = path.stat()
            if self._runtime.now_s - status.st_mtime > 30.0:
                continue
            self.place.disk.damaged.add(segment)
            with path.open("r+b") as file:
                for page in range(status.st_size // PAGE_BYTES):
                    if self.rng.random() < 0.3:
                        file.seek(page * PAGE_BYTES)
                        file.write(bytes(PAGE_BYTES))
        self.forget()
        for _ in range(self.recipe.engines):
            self.open()

    # --- the end ---

    def _calm_down(self) -> None:
        """Nothing fails any more. All requests end, all that was held comes back, and what was saved is there."""
        place, runtime = self.place, self._runtime
        place.disk.weather, place.disk.is_full, place.index.weather = CalmDisk(), False, CalmIndex()
        place.index.past.clear()
        ends_s = runtime.now_s + CALM_S
        while runtime.now_s < ends_s and any(not self._is_at_rest(seat) for seat in self._seats):
            self._step_all()
        for wait_s in (0.0, SETTLE_S + 2 * self.recipe.disk.hang_s):
            self._step_all()  # what ended last is saved, and then answered
            runtime.run(100_000, wait_s)
        self._step_all()
        for seat in self._seats:
            if seat.serving is None:
                runtime.violate(f"{seat.process.name} never came up")
            elif not seat.is_leaving:
                self.checks.look_at_engine(seat.serving)
                self.checks.look_at_rest(seat.serving)
        self._stop_at_violations()
        self._end_all()
        self.checks.look_at_claims()
        if self.recipe.name == "calm":
            self.checks.look_at_agreement()
        self._stop_at_violations()

    def _step_all(self) -> None:
        for seat in self._seats:
            if seat.serving is not None and not seat.is_busy and not seat.is_leaving:
                self._do(seat, seat.serving.step, is_engine=True)
        self._runtime.run(2000, 0.05)
        self._stop_at_violations()

    def _is_at_rest(self, seat: Seat) -> bool:
        return seat.serving is not None and not seat.is_busy and seat.serving.is_idle

    def _end_all(self) -> None:
        """Engines leave, somebody tidies up, and again when nobody can be about to write any more."""
        for seat in list(self._seats):
            if not seat.is_leaving:
                self._let_leave(seat)
        self._runtime.run(100_000, 60.0)
        for seat in list(self._seats):
            self._end(seat)
        for wait_s in (ORPHANS_S, 60.0):
            self._runtime.run(100_000, wait_s)
            self._outwait_leases()
            if self.place.index.real.was_reset:
                self.rebuild()
                self._runtime.run(100_000, 30.0)
                self.place.index.real.rebuilt(self.place.index.real.loss())
            self.sweep()
            self._runtime.run(100_000, 30.0)
        self.checks.look_at_index(may_be_gone=False)

    def _outwait_leases(self) -> None:
        """Wait until the sweep lease of an engine expires that was killed while its clock was ahead."""
        for _ in range(LEASE_WAITS_MAX):
            if self.place.index.real.lease_owner(SWEEP_LEASE, self._runtime.now_s) is None:
                return
            self._runtime.run(100_000, ORPHANS_S)
        self._runtime.violate("the sweep lease of a dead engine does not expire")


def play(folder: Path, seed: int, steps: int, recipe: Recipe) -> World:
    """One run, to its end; raises Violation."""
    world = World(folder, seed, recipe)
    try:
        world.run(steps)
    finally:
        world.close()
    return world
