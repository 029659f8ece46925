"""Composition of a root's index: the only place that maps a configured kind to a class."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config.index import IndexSettings
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.format.record import FORMAT_VERSION
from kvtier.index.async_lookup import InBackground, Lookups
from kvtier.index.base import Index, RemoteState
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.threads import ThreadJobs
from kvtier.storage.root import Root, open_again
from kvtier.storage.root_owner import read_owner

if TYPE_CHECKING:
    from kvtier.index.redis.index import RedisIndex

log = logging.getLogger("kvtier")

MEND_REPLY_MS = 10_000.0  # least reply timeout of `kvtier index` commands, milliseconds
LOOKUP_THREADS = 4
LOOKUPS_MAX = 256  # queued lookups of a remote index; a further one is a miss

_memory_indexes: dict[Path, MemoryIndex] = {}
_memory_lock = threading.Lock()


def open_index(settings: Settings, root: Root, metrics: Metrics | None = None, *, is_engines: bool = False) -> Index:
    """Open the index of a root. One in memory is shared within the process.

    metrics: for the counters of a remote index's guard. is_engines: opened by an engine, not by a tool: a removed
    embedded index is then created again, with its root if need be (`root.open_again`). Raises ConfigError, and
    IndexUnavailable where an embedded index does not open. A Redis that does not answer raises nothing here: an engine
    logs a warning, and a tool's first call fails.
    """
    if root.root_id:
        return _open_redis(settings.index, root, metrics or Metrics(), is_engines)
    if root.index_path is None:
        with _memory_lock:
            return _memory_indexes.setdefault(root.path, MemoryIndex())
    reopen = partial(open_again, settings, root) if is_engines else None
    index = LmdbIndex(str(root.index_path), settings.index.map_bytes, settings.index.timeout_s, reopen=reopen)
    with closed_on_fault(index):
        index.bind(root.folder)
    return index


@contextmanager
def closed_on_fault(index: Index) -> Iterator[None]:
    """Close the index if the body finds that it cannot be used."""
    try:
        yield
    except (ConfigError, IndexUnavailable):
        index.close()
        raise


def open_redis_to_mend(settings: Settings, root: Root) -> Index:
    """Open a Redis index with a long reply timeout and without a guard. Raises ConfigError, IndexUnavailable."""
    reply_ms = max(MEND_REPLY_MS, settings.index.reply_timeout_ms)
    index = _redis(settings.index.model_copy(update={"reply_timeout_ms": reply_ms}))
    with closed_on_fault(index):
        index.bind(root.root_id)
    return index


def look_at_redis(settings: Settings) -> RemoteState:
    """Return what an engine's start would find in Redis. Writes nothing. Raises ConfigError where the start would."""
    index, url = _redis(settings.index), settings.index.url
    assert url is not None, "it is checked with the settings"
    try:
        return RemoteState(url, True, *index.look(_root_id(settings)))
    except IndexUnavailable as fault:
        return RemoteState(url, False, str(fault), fix=fault.fix)
    finally:
        index.close()


def _root_id(settings: Settings) -> str | None:
    """Return the id of the configured root, "" where it has none yet, None where it cannot be read."""
    folder = settings.root / f"v{FORMAT_VERSION}"
    try:
        owner = read_owner(folder) if folder.is_dir() else None
    except OSError:
        return None
    return owner.root_id if owner is not None else ""


def _redis(settings: IndexSettings) -> RedisIndex:
    try:
        from kvtier.index.redis.index import RedisIndex
    except ImportError as error:
        fix = f'it needs packages that are not installed ({error}): pip install "./kvtier[redis]" beside its checkout'
        raise ConfigError("index.kind", "redis", fix) from None
    settings.check()
    return RedisIndex(settings)


def _open_redis(settings: IndexSettings, root: Root, metrics: Metrics, is_engines: bool) -> Index:
    index = _redis(settings)
    try:
        index.bind(root.root_id)
    except ConfigError as fault:
        index.close()
        log.debug("Redis refuses this process", exc_info=fault)
        raise fault from None  # redis-py's traceback would stand above the reason, and say less
    except IndexUnavailable as fault:
        if is_engines:
            log.warning("the index does not answer; everything is a miss until it does: %s", fault)
    bounds = QueueBounds(settings.publish_queue_records, settings.publish_queue_bytes)
    guard = GuardedIndex(index, Breaker(settings.breaker, random.SystemRandom()), bounds, metrics)
    guard.start()
    return guard


def open_lookups(index: Index) -> Lookups:
    if isinstance(index, GuardedIndex):
        return InBackground(index, ThreadJobs("lookup", LOOKUP_THREADS, LOOKUPS_MAX))
    return Lookups(index)
