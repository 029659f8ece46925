"""kvtier behind LMCache's multi-process server, as an L2 adapter of type `native_plugin` (configs/lmcache/).

Tested with LMCache 0.5.3 and 0.5.6. The server calls seven methods of an object that it makes from `adapter_params`:
`submit_batch_*` begin something and return a number, `event_fd` becomes readable when something has ended, and
`drain_completions` says what. Keys are texts, `<model>@<rank>@<group>@<hash>`, or with `@<cache salt>` behind them.

All of the key is in kvtier's key, and the object's length under its checksum: an object of another length is a miss.
What LMCache's keys lack can't be told apart: the weights' revision, quantization, LoRA adapters, and a layout or dtype
of the KV that makes objects equally long. Where models differ in these under one name, give each a `model_tag` of its
own; raise `epoch` when weights change. LMCache's serdes ("serde" in the adapter's JSON) are not in its keys, either.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvtier.connectors.faults import Faults, contains_faults
from kvtier.connectors.objects.store import Object, ObjectHost, ObjectTier, settings_of
from kvtier.errors import ConfigError
from kvtier.runtime.threads import ThreadJobs
from kvtier.runtime.versions import installed

log = logging.getLogger("kvtier")

TESTED = ((0, 5, 3), (0, 5, 6))
"""Versions of LMCache, the first and the last; the interface is the same in all wheels from 0.4.5 to 0.5.6."""
LOAD_THREADS, SAVE_THREADS = 4, 2
TASKS_MAX = 1024
"""That wait; a further one fails at once. LMCache has eight prefetches under way, and the stores of its L1's size."""
CLOSE_TIMEOUT_S = 5.0
KEY_PARTS = 4
"""Of a key without a cache salt, between the @s; LMCache allows none within them."""


class Completion(NamedTuple):
    """What LMCache is told of a task: its number, whether all of it went well, what did not, and of each key the same;
    for stores it looks at the whole only."""

    future_id: int
    ok: bool
    error: str
    results: list[bool] | None


class LMCacheConnector:
    """Thread-safe. Nothing that is submitted is waited for, and every task is answered, once."""

    def __init__(
        self, config: str | None = None, settings: Mapping[str, Any] | None = None, object_bytes: Sequence[int] = ()
    ) -> None:
        """Takes `adapter_params`; unknown ones are a TypeError. Raises ConfigError.

        config: a YAML file of kvtier's settings. settings: these, which win over that file and the environment.
        object_bytes: sizes of objects that the tier is to be opened for now, so that what can't work shows at start;
            others are when the first of them comes. LMCache's are a chunk's KV on one rank.
        """
        of_lmcache = _lmcache_version()
        given, host = settings_of(config, settings), ObjectHost("lmcache", version=of_lmcache)
        self._tier = ObjectTier.opened(given, host, _checked_sizes(object_bytes))
        self._faults = Faults()
        self._lock = threading.Lock()
        self._last_id = 0
        self._ended: list[Completion] = []
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loads = ThreadJobs("lmcache-load", LOAD_THREADS, TASKS_MAX)
        self._saves = ThreadJobs("lmcache-save", SAVE_THREADS, TASKS_MAX)

    def event_fd(self) -> int:
        """Readable while there are completions to drain."""
        return self._event_fd

    def submit_batch_set(self, keys: Sequence[str], memory: Sequence[memoryview]) -> int:
        """Stores objects. The memory is LMCache's to change once the task has ended."""
        return self._begin(self._saves, "storing", len(keys), lambda: self._store(keys, memory))

    def submit_batch_get(self, keys: Sequence[str], memory: Sequence[memoryview]) -> int:
        """Loads objects into the memory; what is there of a key that failed means nothing."""
        return self._begin(self._loads, "loading", len(keys), lambda: self._load(keys, memory))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._begin(self._loads, "looking up", len(keys), lambda: self._exist(keys), True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """A deleted object is a miss at once; its room comes back with its segment set."""
        return self._begin(self._loads, "deleting", len(keys), lambda: self._delete(keys), True)

    def drain_completions(self) -> list[Completion]:
        """What has ended since the last call."""
        with self._lock:
            if self._ended and self._event_fd >= 0:
                os.eventfd_read(self._event_fd)
            ended, self._ended = self._ended, []
        return ended

    def usage_bytes(self) -> dict[str, int]:
        """What the tier's segment sets take, by tenant (`capacity.tenants`), of all servers on the root. (What LMCache
        reports itself, by salt, is what it stored and deleted since its server started.)"""
        return self._tier.usage_bytes()

    def counters(self) -> dict[str, float]:
        """See kvtier.runtime.metrics."""
        return self._tier.counters()

    def close(self) -> None:
        """Waits for tasks that are under way, for a few seconds at most; those that wait are dropped."""
        for jobs in (self._saves, self._loads):
            jobs.drain(CLOSE_TIMEOUT_S)
            jobs.close()
        self._close_tier()
        with self._lock:  # a task that hangs may still end, and the number of the descriptor be another's by then
            event_fd, self._event_fd = self._event_fd, -1
        if event_fd >= 0:  # closed only once, however often it is asked for
            os.close(event_fd)

    def _begin(
        self, jobs: ThreadJobs, what: str, n_keys: int, work: Callable[[], list[bool] | None], may_lack: bool = False
    ) -> int:
        """may_lack: a key that is not there is an answer, too."""
        with self._lock:
            self._last_id += 1
            task = self._last_id
        if not jobs.submit(partial(self._run, task, what, n_keys, work, may_lack)):
            self._end(Completion(task, False, f"{what}: too many tasks wait", [False] * n_keys))
        return task

    def _run(self, task: int, what: str, n_keys: int, work: Callable[[], list[bool] | None], may_lack: bool) -> None:
        results = work()
        if results is None:
            self._end(Completion(task, False, f"{what} failed; kvtier's log says why", [False] * n_keys))
            return
        n_lacking = results.count(False)
        is_good = may_lack or not n_lacking
        self._end(Completion(task, is_good, "" if is_good else f"{what}: {n_lacking} of {n_keys} did not", results))

    @contains_faults("storing LMCache's objects")
    def _store(self, keys: Sequence[str], memory: Sequence[memoryview]) -> list[bool] | None:
        return self._tier.put(_objects(keys, memory))

    @contains_faults("loading LMCache's objects")
    def _load(self, keys: Sequence[str], memory: Sequence[memoryview]) -> list[bool] | None:
        return self._tier.get(_objects(keys, memory))

    @contains_faults("looking up LMCache's objects")
    def _exist(self, keys: Sequence[str]) -> list[bool] | None:
        return self._tier.exists([key.encode() for key in keys])

    @contains_faults("deleting LMCache's objects")
    def _delete(self, keys: Sequence[str]) -> list[bool] | None:
        return self._tier.delete([key.encode() for key in keys])

    @contains_faults("closing the tier")
    def _close_tier(self) -> None:
        self._tier.close()

    def _end(self, completion: Completion) -> None:
        with self._lock:
            if self._event_fd >= 0:
                self._ended.append(completion)
                os.eventfd_write(self._event_fd, 1)


def _objects(keys: Sequence[str], memory: Sequence[memoryview]) -> list[Object]:
    return [Object(key.encode(), view, _salt(key)) for key, view in zip(keys, memory, strict=True)]


def _salt(key: str) -> str:
    """Raises ValueError for a key that is none of LMCache's: whose it is can't be told."""
    parts = key.split("@")
    if len(parts) not in (KEY_PARTS, KEY_PARTS + 1):
        raise ValueError(f"{key!r} is no key as LMCache {TESTED[0]} to {TESTED[1]} make them")
    return parts[KEY_PARTS] if len(parts) > KEY_PARTS else ""


def _lmcache_version() -> str:
    """ "" where the package is not installed."""
    found = installed("lmcache")
    first, last = (".".join(map(str, tested)) for tested in TESTED)
    if found and not TESTED[0] <= _release(found) <= TESTED[1]:
        log.warning("LMCache is %s; kvtier was tested with %s and %s", found, first, last)
    return found


def _release(text: str) -> tuple[int, ...]:
    """(0, 5, 6) of "0.5.6rc1"."""
    numbers = (part[: next((n for n, c in enumerate(part) if not c.isdigit()), len(part))] for part in text.split("."))
    return tuple(int(number) for number in numbers if number)[:3]


def _checked_sizes(object_bytes: Sequence[int]) -> Sequence[int]:
    """Raises ConfigError."""
    is_list = isinstance(object_bytes, list | tuple)
    if not is_list or not all(type(size) is int and size > 0 for size in object_bytes):
        raise ConfigError("object_bytes", object_bytes, "must be a list of sizes in bytes, such as [33554432]")
    return object_bytes


KVTierConnector = LMCacheConnector  # name in the adapters' JSON (configs/lmcache), in use on users' machines
