"""LMCacheConnector: kvtier behind LMCache's multi-process server, as an L2 adapter `native_plugin` (configs/lmcache/).

Tested with LMCache 0.5.3 and 0.5.6. The server makes the object from `adapter_params` and calls seven methods:
`submit_batch_*` begin a task and return its number, `event_fd` is readable when a task has ended, and
`drain_completions` returns the ended tasks. Keys are texts, `<model>@<rank>@<group>@<hash>`, or with `@<cache salt>`
behind them.

All of the key is in kvtier's key, and the object's length under its checksum: an object of another length is a miss.
LMCache's keys do not contain the weights' revision, quantization, LoRA adapters, a layout or dtype that makes objects
equally long, or serdes ("serde" in the adapter's JSON). Models that differ in these under one name need a `model_tag`
each. LMCache informs its L2 of neither a change of weights nor a reset of its cache: raise `epoch` when weights change.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvtier.connectors.faults import Faults
from kvtier.connectors.objects.store import Object, ObjectHost, ObjectTier, settings_of
from kvtier.errors import ConfigError
from kvtier.runtime.threads import ThreadJobs
from kvtier.runtime.versions import installed

log = logging.getLogger("kvtier")

# first and last tested version of LMCache; all wheels from 0.4.5 to 0.5.6 have this interface
TESTED = ((0, 5, 3), (0, 5, 6))
LOAD_THREADS, SAVE_THREADS = 4, 2
# Queued tasks; a further one fails at once, and what it would have loaded is computed. LMCache itself bounds what is
# under way (prefetches in flight, and stores by the size of its L1), so this is far above what it asks for.
TASKS_MAX = 1 << 20
CLOSE_TIMEOUT_S = 5.0  # wait for running tasks of each kind, seconds
KEY_PARTS = 4  # parts of a key without a cache salt, between the @s; LMCache allows no @ within them


class Completion(NamedTuple):
    """An ended task for LMCache: its number, whether all of it succeeded, the error, and the result of each key; for
    stores LMCache reads only the result of the whole."""

    future_id: int
    ok: bool
    error: str
    results: list[bool] | None


class LMCacheConnector:
    """Native client of LMCache. Thread-safe. No submission waits, and every task is answered once."""

    def __init__(
        self, config: str | None = None, settings: Mapping[str, Any] | None = None, object_bytes: Sequence[int] = ()
    ) -> None:
        """Take `adapter_params`; an unknown one is a TypeError. Raises ConfigError.

        config: a YAML file of kvtier's settings. settings: these, which override that file and the environment.
        object_bytes: object sizes that the tier is opened for at once, so that a size that cannot work stops the start;
        other sizes are opened with their first object. An object of LMCache is a chunk's KV on one rank.
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
        """Return the descriptor that is readable while there are completions to drain."""
        return self._event_fd

    def submit_batch_set(self, keys: Sequence[str], memory: Sequence[memoryview]) -> int:
        """Store objects. LMCache may change the memory once the task has ended."""
        return self._begin(self._saves, "storing", len(keys), lambda: self._tier.put(_objects(keys, memory)))

    def submit_batch_get(self, keys: Sequence[str], memory: Sequence[memoryview]) -> int:
        """Load objects into the memory; the memory of a key that failed is undefined."""
        return self._begin(self._loads, "loading", len(keys), lambda: self._tier.get(_objects(keys, memory)))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._begin(self._loads, "looking up", len(keys), lambda: self._tier.exists(_encoded(keys)), True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete objects. They are misses at once; their space is freed with their segment sets."""
        return self._begin(self._loads, "deleting", len(keys), lambda: self._tier.delete(_encoded(keys)), True)

    def drain_completions(self) -> list[Completion]:
        """Return the tasks that ended since the last call."""
        with self._lock:
            if self._ended and self._event_fd >= 0:
                os.eventfd_read(self._event_fd)
            ended, self._ended = self._ended, []
        return ended

    def usage_bytes(self) -> dict[str, int]:
        """Return the bytes of the tier's segment sets by tenant (`capacity.tenants`), of all servers on the root.
        LMCache's own report, by salt, counts only since its server started."""
        return self._tier.usage_bytes()

    def counters(self) -> dict[str, float]:
        """Return the counters of kvtier.runtime.metrics."""
        return self._tier.counters()

    def close(self) -> None:
        """Wait a few seconds for running tasks; drop the queued ones."""
        for jobs in (self._saves, self._loads):
            jobs.drain(CLOSE_TIMEOUT_S)
            jobs.close()
        with self._faults.contained("closing the tier"):
            self._tier.close()
        with self._lock:  # a task that hangs may end later, when the descriptor's number may be reused
            event_fd, self._event_fd = self._event_fd, -1
        if event_fd >= 0:
            os.close(event_fd)

    def _begin(
        self, jobs: ThreadJobs, what: str, n_keys: int, work: Callable[[], list[bool]], may_lack: bool = False
    ) -> int:
        """Queue a task and return its number. may_lack: an absent key is an answer, not a failure."""
        with self._lock:
            self._last_id += 1
            task = self._last_id
        if not jobs.submit(partial(self._run, task, what, n_keys, work, may_lack)):
            self._end(Completion(task, False, f"{what}: too many tasks wait", [False] * n_keys))
        return task

    def _run(self, task: int, what: str, n_keys: int, work: Callable[[], list[bool]], may_lack: bool) -> None:
        results = None
        with self._faults.contained(f"{what} LMCache's objects"):
            results = work()
        if results is None:
            self._end(Completion(task, False, f"{what} failed; kvtier's log says why", [False] * n_keys))
            return
        n_lacking = results.count(False)
        is_good = may_lack or not n_lacking
        self._end(Completion(task, is_good, "" if is_good else f"{what}: {n_lacking} of {n_keys} did not", results))

    def _end(self, completion: Completion) -> None:
        with self._lock:
            if self._event_fd >= 0:
                self._ended.append(completion)
                os.eventfd_write(self._event_fd, 1)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _objects(keys: Sequence[str], memory: Sequence[memoryview]) -> list[Object]:
    return [Object(key.encode(), view, _salt(key)) for key, view in zip(keys, memory, strict=True)]


def _salt(key: str) -> str:
    """Return the cache salt of a key. Raises ValueError if the key is not one of LMCache's."""
    parts = key.split("@")
    if len(parts) not in (KEY_PARTS, KEY_PARTS + 1):
        raise ValueError(f"{key!r} is no key as LMCache {TESTED[0]} to {TESTED[1]} make them")
    return parts[KEY_PARTS] if len(parts) > KEY_PARTS else ""


def _lmcache_version() -> str:
    """Return the installed release, "" without one; warn of one that was not tested."""
    found = installed("lmcache")
    first, last = (".".join(map(str, tested)) for tested in TESTED)
    if found and not TESTED[0] <= _release(found) <= TESTED[1]:
        log.warning("LMCache is %s; kvtier was tested with %s and %s", found, first, last)
    return found


def _release(text: str) -> tuple[int, ...]:
    """Return (0, 5, 6) for "0.5.6rc1"."""
    numbers = (part[: next((n for n, c in enumerate(part) if not c.isdigit()), len(part))] for part in text.split("."))
    return tuple(int(number) for number in numbers if number)[:3]


def _checked_sizes(object_bytes: Sequence[int]) -> Sequence[int]:
    """Refuse a value that is no list of sizes. Raises ConfigError."""
    is_list = isinstance(object_bytes, list | tuple)
    if not is_list or not all(type(size) is int and size > 0 for size in object_bytes):
        raise ConfigError("object_bytes", object_bytes, "must be a list of sizes in bytes, such as [33554432]")
    return object_bytes


KVTierConnector = LMCacheConnector  # name in the adapters' JSON (configs/lmcache), in use on users' machines
