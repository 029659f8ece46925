"""An index that fails on purpose: it is late, does not answer (before or after it did what was asked), gives answers of
a while ago, does what was asked once more later, or forgets everything. Below it is a real one."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtier.errors import IndexUnavailable
from kvtier.index.base import EVICT_LEASE, Index, Location, NewRecord, SetInfo
from tests.simulation.runtime import Process, Runtime

REMEMBERED_MAX = 256  # entries of a while ago, for stale answers


@dataclass
class IndexWeather:
    """How often a call is slow (up to so many seconds), is not answered, a lookup is answered from the past, and a
    publish arrives once more (up to so many seconds later)."""

    slow: float = 0.2
    slow_s: float = 0.005
    lost: float = 0.0
    stale: float = 0.0
    repeated: float = 0.0
    repeated_s: float = 30.0


@dataclass(eq=False)
class SharedIndex:
    """What all processes ask. make: a new, empty one, as after its loss. is_remote: asked over a network. evict_token:
    the latest that an evictor was given. on_publish: told of what becomes visible now. on_retract: called before
    a record is retracted. removing: what the removal of a set by a process is done within."""

    runtime: Runtime
    make: Callable[[], Index]
    is_remote: bool
    weather: IndexWeather = field(default_factory=IndexWeather)
    past: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.real = self.make()
        self.real.rebuilt(self.real.loss())
        self.evict_token = 0
        self.on_publish: Callable[[Sequence[NewRecord], bool, bool], None] = lambda *what: None
        self.on_retract: Callable[[bytes, Location], None] = lambda key, location: None
        self.removing: Callable[[int, Process], AbstractContextManager[None]] = lambda set_id, process: nullcontext()

    def forget(self) -> None:
        """Amnesia."""
        self.runtime.tried["the index forgets everything"] += 1
        self.real.close()
        self.real = self.make()
        self.evict_token = 0


class SimIndex:
    """One process's way to the shared index; see `kvtier.index.base.Index`.

    ahead_s: the clock of the process, ahead of the index's own: an index of many nodes turns their times.
    """

    def __init__(self, shared: SharedIndex, process: Process, ahead_s: Callable[[], float] = lambda: 0.0) -> None:
        self._shared = shared
        self._process = process
        self._ahead_s = ahead_s

    def __getattr__(self, name: str) -> Any:
        if name == "was_reset":
            return self._call(name, lambda: self._shared.real.was_reset)
        return partial(self._ask, name)

    def close(self) -> None:
        """The shared one stays."""

    def shared_s(self, at_s: float) -> float:
        return self._shared.real.shared_s(at_s - self._ahead_s())

    def local_s(self, at_s: float) -> float:
        return self._shared.real.local_s(at_s) + self._ahead_s()

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        return self._call(name, lambda: getattr(self._shared.real, name)(*args, **options))

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        shared = self._shared
        found: list[bytes] = self._call("resolve", lambda: shared.real.resolve(keys))
        if shared.runtime.tries("the index answers from the past", shared.weather.stale):
            found = [shared.past.get(key, entry) for key, entry in zip(keys, found, strict=False)]
            found += [shared.past[key] for key in keys[len(found) :][:1] if key in shared.past]
        for key, entry in zip(keys, found, strict=False):
            if len(shared.past) < REMEMBERED_MAX:
                shared.past.setdefault(key, entry)
            elif shared.runtime.rng.random() < 0.01:
                shared.past.popitem(last=False)
        return found

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        shared, weather = self._shared, self._shared.weather

        def work() -> int:
            shared.on_publish(records, from_files, into_unowned)
            return shared.real.publish(records, from_files, into_unowned)

        if records and shared.runtime.tries("a publish arrives once more, later", weather.repeated):
            later_s = shared.runtime.rng.random() * weather.repeated_s
            shared.runtime.call_at(shared.runtime.now_s + later_s, lambda: self._arrive(records, into_unowned))
        taken: int = self._call("publish", work)
        return taken

    def retract(self, key: bytes, location: Location) -> bool:
        def work() -> bool:
            self._shared.on_retract(key, location)
            return self._shared.real.retract(key, location)

        was_there: bool = self._call("retract", work)
        return was_there

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        def work() -> bool:
            is_new = self._shared.real.create_set(info, records)
            if is_new:  # of a set that was known, nothing becomes visible
                self._shared.on_publish(records, True, True)
            return is_new

        is_new: bool = self._call("create_set", work)
        return is_new

    def _arrive(self, records: Sequence[NewRecord], into_unowned: bool) -> None:
        """A copy of what was sent long ago."""
        self._shared.real.publish(records, into_unowned=into_unowned)

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        def work() -> int | None:
            token = self._shared.real.acquire_lease(name, owner, now_s, ttl_s)
            if name == EVICT_LEASE and token is not None:
                self._shared.evict_token = token
            return token

        taken: int | None = self._call("acquire_lease", work)
        return taken

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        def work() -> int:
            with self._shared.removing(set_id, self._process):
                return self._shared.real.remove_set(set_id, token)

        gone: int = self._call("remove_set", work)
        return gone

    def _call(self, name: str, work: Callable[[], Any]) -> Any:
        self._on_its_way(name)
        result = work()
        self._on_its_way(name)
        return result

    def _on_its_way(self, name: str) -> None:
        runtime, weather = self._shared.runtime, self._shared.weather
        if self._process.is_dead:
            runtime.die()
        if not runtime.is_inside:
            return
        runtime.note_call(name)
        runtime.pause()
        is_waited_for = runtime.is_engine_thread and not self._shared.is_remote
        if not is_waited_for and runtime.tries("the index is slow", weather.slow):
            runtime.sleep(runtime.rng.random() * weather.slow_s)
        if runtime.tries("the index does not answer", weather.lost):
            raise IndexUnavailable(f"{name} is not answered")
