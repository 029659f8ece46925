"""How a file system in memory is read into host memory, on this processor: measured at start.

In place, through bounce buffers, or out of mapped files: `native/landing.h` says what the last two save there. But a
bounce buffer is one more copy, and a mapping costs page faults; whether that is less than what they save depends on
the processor's caches, on the kernel, and on what a virtual machine makes of page tables.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.io.ring import AlignedBuffer, InMemory, ReadOp, Ring, RingSizes

FILE_BYTES, SLAB_BYTES = 16 << 20, 512 << 10
"""The file, and the memory that it is read into, fit no core's own caches, as slots of an arena do not."""

BOUNCE_BYTES_MAX = 1 << 20
"""A larger bounce buffer fits no core's own cache either, and is not tried."""

READS = 2
"""Of the whole file, for each way, behind a `forget`: a mapping is made once, read twice and let go of. Segments are
read more often than that while their descriptors are open, as a rule."""

ROUNDS = 5
FASTER_BY = 1.03
HANGS_S = 5.0

IN_PLACE = InMemory()
BOUNCED = InMemory(bounce_reads=True)

_left_behind: list[object] = []
"""Of a read without an answer: late bytes may still land there."""


class MemoryReads(NamedTuple):
    """how: of a ring. said: for the log, which way that is and why."""

    how: InMemory
    said: str


def measured(folder: Path, sizes: RingSizes, clock: Callable[[], float] = time.process_time) -> MemoryReads:
    """Reads of rings of these sizes, in each way, from a nameless file in `folder`; about 0.1 s. Never fails.

    The simplest way is taken unless another is clearly faster. What cannot be mapped is read in the faster of the other
    two. clock: there the processor does all the work, so its time is what counts, and other processes show less in it.
    """
    ways = [IN_PLACE, BOUNCED] if sizes.piece_bytes <= BOUNCE_BYTES_MAX else [IN_PLACE]
    try:
        seconds = _seconds_of([*ways, IN_PLACE._replace(map_reads=True)], folder, sizes, clock)
    except (OSError, TierUnavailable) as fault:
        return MemoryReads(IN_PLACE, f"in place, for nothing else could be measured ({fault})")
    *of_ways, mapped_s = seconds
    best, best_s = ways[0], of_ways[0]
    if of_ways[-1] * FASTER_BY < best_s:
        best, best_s = ways[-1], of_ways[-1]
    if mapped_s * FASTER_BY < best_s:
        best = best._replace(map_reads=True)
    found = [
        *(f"{name_of(way)} {s * 1e3:.1f}" for way, s in zip(ways, of_ways, strict=True)),
        f"mapped {mapped_s * 1e3:.1f}",
    ]
    return MemoryReads(best, f"{name_of(best)} (ms of processor for {FILE_BYTES >> 20} MiB: {', '.join(found)})")


def name_of(how: InMemory) -> str:
    return "mapped" if how.map_reads else "through bounce buffers" if how.bounce_reads else "in place"


def _seconds_of(ways: list[InMemory], folder: Path, sizes: RingSizes, clock: Callable[[], float]) -> list[float]:
    """Of one read, in each way. Raises OSError, TierUnavailable."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - a hanging read keeps it open
    rings: list[Ring] = []
    try:
        target = AlignedBuffer(FILE_BYTES)
        for start in range(0, FILE_BYTES, SLAB_BYTES):
            os.pwrite(file.fileno(), target.view[start : start + SLAB_BYTES], start)
        for way in ways:  # one by one: those before one that fails are closed, too
            rings.append(Ring(sizes.threads, sizes.piece_bytes, in_memory=way))
        rounds = [[_seconds(ring, file, target, clock) for ring in rings] for _ in range(ROUNDS)]
    finally:
        closed = [ring.close() for ring in rings]
        if all(closed):
            file.close()
    return [min(seconds) / READS for seconds in zip(*rounds, strict=True)]


def _seconds(ring: Ring, file: IO[bytes], target: AlignedBuffer, clock: Callable[[], float]) -> float:
    """Of reading the whole file READS times. Raises TierUnavailable, OSError."""
    op = ReadOp(file.fileno(), 0, target.address, SLAB_BYTES, FILE_BYTES // SLAB_BYTES, bytes(16), 0, 0, None)
    started_s = clock()
    ring.forget(file.fileno())
    for _ in range(READS):
        batch = ring.submit([op])
        if not batch.wait(HANGS_S):
            batch.cancel()
            _left_behind.append((batch, file, target))
            raise TierUnavailable(f"no answer in {HANGS_S:g} s")
        (result,) = batch.results()
        if result.error:
            raise OSError(result.error, os.strerror(result.error))
    return clock() - started_s
