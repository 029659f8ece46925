"""The place that all processes of a simulation share: runtime, root, disk, index and rules; and the modules under test,
put on that place's threads, time and system calls for as long as it is there."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import kvtier.arena.arena
import kvtier.eviction.set_removal
import kvtier.index.async_lookup
import kvtier.index.guard
import kvtier.index.lmdb.environment
import kvtier.index.lmdb.index
import kvtier.maintenance.record_check
import kvtier.maintenance.sweeper
import kvtier.runtime.file_descriptors
import kvtier.scheduler.background
import kvtier.scheduler.engine_report
import kvtier.scheduler.segment_allocator
import kvtier.storage.atomic_files
import kvtier.storage.open_segments
import kvtier.storage.safe_open
import kvtier.storage.segments
import kvtier.storage.stuck_files
import kvtier.worker.context
import kvtier.worker.loop
import kvtier.worker.own_segments
import kvtier.worker.record_reader
import kvtier.worker.transfer
from kvtier.eviction.limits import UNLIMITED, Rules
from kvtier.format.namespace import Namespace
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.root import Root
from kvtier.storage.segments import SegmentFiles
from tests.simulation.disk import Disk, SimOs, meeting
from tests.simulation.index import SharedIndex
from tests.simulation.own_thread import OwnThread, for_own_thread
from tests.simulation.primitives import SimEvent, SimMachine, SimThreading, SimTicker, SimTime
from tests.simulation.runtime import Runtime
from tests.simulation.truth import Truth

THREADED = (
    kvtier.index.guard,
    kvtier.scheduler.background,
    kvtier.worker.loop,
    kvtier.index.async_lookup,
    kvtier.maintenance.record_check,
    kvtier.scheduler.segment_allocator,
    kvtier.storage.stuck_files,
    kvtier.worker.record_reader,
    kvtier.arena.arena,
    kvtier.storage.open_segments,
    kvtier.storage.segments,
    kvtier.worker.context,
    kvtier.worker.own_segments,
)
TIMED = (
    kvtier.maintenance.sweeper,
    kvtier.index.lmdb.environment,
    kvtier.storage.atomic_files,
    kvtier.storage.open_segments,
    kvtier.storage.safe_open,
    kvtier.worker.loop,
    kvtier.worker.own_segments,
)
TICKING = (
    kvtier.index.guard,
    kvtier.scheduler.background,
    kvtier.worker.transfer,
)
ON_MACHINE = (
    (kvtier.storage.atomic_files, "uuid", uuid),
    (kvtier.index.lmdb.index, "uuid", uuid),
    (kvtier.scheduler.engine_report, "os", os),
    (kvtier.scheduler.engine_report, "socket", socket),
)
ON_DISK = (
    kvtier.maintenance.sweeper,
    kvtier.runtime.file_descriptors,
    kvtier.storage.open_segments,
    kvtier.maintenance.record_check,
    kvtier.storage.segments,
)
LOCAL_DISK, SHARED_DISK = FileSystem("ext4", False, "/"), FileSystem("nfs4", True, "/")


def run_in_place(name: str, timeout_s: float, work: Callable[[], None]) -> bool:
    """`kvtier.runtime.threads.run_within` on the thread that asks."""
    work()
    return True


@dataclass(eq=False)
class Place:
    """capacity_bytes: what the tier may take. planned: keys of all chunks that an engine ever meant to save. claims: of
    those that all its ranks said are saved, and that were visible then, unless they were evicted since. published: keys
    of which a record was ever taken into the index."""

    runtime: Runtime
    root: Root
    disk: Disk
    index: SharedIndex
    capacity_bytes: int
    rules: Rules = UNLIMITED
    truth: Truth = field(default_factory=Truth)
    planned: set[bytes] = field(default_factory=set)
    claims: set[bytes] = field(default_factory=set)
    published: set[bytes] = field(default_factory=set)


@contextmanager
def installed(runtime: Runtime, disk: Disk) -> Iterator[None]:
    """The library's modules run on these while it lasts, as far as the calling thread runs them."""
    threads, clock, calls, machine = SimThreading(runtime), SimTime(runtime), SimOs(disk), SimMachine(runtime)
    question = kvtier.index.async_lookup._Lookup

    def ask(keys: Any, asked_s: float) -> Any:  # its own event was made for threads when its module was imported
        return question(keys, asked_s, is_answered=SimEvent(runtime))  # type: ignore[arg-type]

    with ExitStack() as stack:

        def put(module: object, name: str, stand_in: object) -> None:
            stack.enter_context(patch.object(module, name, stand_in))

        def put_function(module: object, name: str, stand_in: Callable[..., Any]) -> None:
            put(module, name, for_own_thread(stand_in, getattr(module, name)))

        for module in THREADED:
            put(module, "threading", OwnThread(threads, threading))
        for module in TIMED:
            put(module, "time", OwnThread(clock, time))
        for module in TICKING:
            put_function(module, "Ticker", partial(SimTicker, runtime))
        for module in (kvtier.scheduler.background, kvtier.worker.transfer):
            put_function(module, "run_within", run_in_place)
        for module in ON_DISK:
            put(module, "os", OwnThread(calls, os))
        for module, name, real in ON_MACHINE:
            put(module, name, OwnThread(machine, real))
        put_function(SegmentFiles, "unlink", meeting(disk, SegmentFiles.unlink))
        for module in (kvtier.maintenance.sweeper, kvtier.eviction.set_removal, kvtier.storage.segments):
            put_function(module, "file_system_of", lambda path: SHARED_DISK if disk.is_shared else LOCAL_DISK)
        put_function(kvtier.storage.segments, "fallocate", calls.fallocate)
        # Simulated processes are one real process: none closes the files of another, and later tests that run out of
        # descriptors close none of a simulated process, whose numbers are others' by then.
        put_function(kvtier.storage.open_segments, "register", lambda pool: None)
        put_function(kvtier.storage.segments, "close_in_process", lambda folder, set_id: None)
        put(kvtier.storage.segments, "_folders", WeakSet())  # later tests close sets in all folders of their process
        put_function(kvtier.index.async_lookup, "_Lookup", ask)
        put_function(kvtier.scheduler.engine_report, "installed", lambda name: "simulated")
        put(Namespace, "canonical_json", lru_cache(Namespace.canonical_json))  # asked for in every tick
        yield
