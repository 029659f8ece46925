"""Whether reads from a file system in memory are faster through bounce buffers, on this processor: measured at start.

`native/landing.h` says what a bounce buffer saves there. It is one more copy, though, and whether that costs less than
it saves depends on the processor's caches and on how the kernel copies.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvtier.errors import TierUnavailable
from kvtier.io.ring import AlignedBuffer, InMemory, ReadOp, Ring, RingSizes, aligned_buffer

FILE_BYTES, SLAB_BYTES = 16 << 20, 512 << 10
"""The file, and the memory that it is read into, fit no core's own caches, as slots of an arena do not."""

PIECE_BYTES_MAX = 1 << 20
"""A larger bounce buffer fits no core's own cache either, and is not tried."""

ROUNDS = 5
FASTER_BY = 1.03
HANGS_S = 5.0

_left_behind: list[object] = []
"""Of a read without an answer: late bytes may still land there."""


def pays(folder: Path, sizes: RingSizes, clock: Callable[[], float] = time.process_time) -> bool:
    """Reads of a ring of these sizes, with and without, from a nameless file in `folder`; about 0.1 s. Never fails.

    clock: there the processor does all the work, so its time is what counts, and other processes show less in it.
    """
    if sizes.piece_bytes > PIECE_BYTES_MAX:
        return False
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - a hanging read keeps it open
    except OSError:
        return False
    rings: list[Ring] = []
    target = aligned_buffer(FILE_BYTES)
    try:
        for start in range(0, FILE_BYTES, SLAB_BYTES):
            os.pwrite(file.fileno(), target.view[start : start + SLAB_BYTES], start)
        ways = [InMemory(bounce_reads=bounces) for bounces in (False, True)]
        rings += [Ring(sizes.threads, sizes.piece_bytes, in_memory=way) for way in ways]
        pairs = [[_seconds(ring, file, target, clock) for ring in rings] for _ in range(ROUNDS)]
    except (OSError, TierUnavailable):
        return False
    finally:
        closed = [ring.close() for ring in rings]
        if all(closed):
            file.close()
    in_place_s, bounced_s = (min(pair[way] for pair in pairs) for way in (0, 1))
    return in_place_s > FASTER_BY * bounced_s


def _seconds(ring: Ring, file: IO[bytes], target: AlignedBuffer, clock: Callable[[], float]) -> float:
    """Of reading the whole file. Raises TierUnavailable, OSError."""
    op = ReadOp(file.fileno(), 0, target.address, SLAB_BYTES, FILE_BYTES // SLAB_BYTES, bytes(16), 0, 0, None)
    started_s = clock()
    batch = ring.submit([op])
    if not batch.wait(HANGS_S):
        batch.cancel()
        _left_behind.append((batch, file, target))
        raise TierUnavailable(f"no answer in {HANGS_S:g} s")
    seconds = clock() - started_s
    (result,) = batch.results()
    if result.error:
        raise OSError(result.error, os.strerror(result.error))
    return seconds
