"""Where the tier keeps a prompt's bytes: whether all of them are durable, and how fast they are read without kvtier."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import direct_flags, each_piece
from benchmarks.gpu.engine import Engine
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.namespace import chunk_keys
from kvtier.format.record import record_bytes
from kvtier.index.entry import unpack
from kvtier.storage.segments import segment_name

READ_THREADS = 16
READ_PIECE_BYTES = 1 << 20
"""The best of ceilings.READ_GRID on the disks that were seen."""


def stored_chunks(engine: Engine, tokens: list[int]) -> tuple[int, int]:
    """(chunks of the prompt that the index offers, its whole chunks)."""
    entries, n_chunks = _entries(engine, tokens)
    return len(entries), n_chunks


def direct_read(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """Reads the records of a stored prompt with direct I/O into plain buffers; bytes, seconds, bytes a second.

    `again_bytes_s`: the same bytes once more. Much faster, it says that something below the file system caches.
    """
    records = _records(engine, tokens)
    piece = min(READ_PIECE_BYTES, min(n_bytes for _, _, n_bytes in records))
    paths = sorted({path for path, _, _ in records})
    found = {path: direct_flags(path, os.O_RDONLY) for path in paths}
    files = {path: os.open(path, flags) for path, (flags, _) in found.items()}
    pieces = [
        (files[path], first + offset)
        for path, first, n_bytes in records
        for offset in range(0, n_bytes - piece + 1, piece)
    ]

    def move(view: memoryview, offset: int) -> int:
        fd, place = pieces[offset // piece]
        return os.preadv(fd, [view], place)

    n_bytes = piece * len(pieces)
    try:
        started = time.time()
        first_s, again_s = (each_piece(n_bytes, move, READ_THREADS, piece) for _ in range(2))
    finally:
        for fd in files.values():
            os.close(fd)
    return {
        "bytes": n_bytes,
        "seconds": first_s,
        "bytes_s": n_bytes / first_s,
        "again_bytes_s": n_bytes / again_s,
        "at": round(started, 2),
        "direct": all(is_direct for _, is_direct in found.values()),
    }


def _entries(engine: Engine, tokens: list[int]) -> tuple[list[bytes], int]:
    store = engine.store()
    keys = chunk_keys(store.namespace_id, tokens, store._chunk_tokens, {})
    return store.lookup(keys), len(keys)


def _records(engine: Engine, tokens: list[int]) -> list[tuple[Path, int, int]]:
    """(file, byte of its first slab, bytes of its slabs) of each record. Raises LookupError where one is missing."""
    entries, n_chunks = _entries(engine, tokens)
    if len(entries) < n_chunks:
        raise LookupError(f"only {len(entries)} of {n_chunks} chunks are stored")
    folder = next(engine.data.rglob(engine.store().namespace_id.hex()))
    records = []
    for location in (location for entry in entries for location in unpack(entry)):
        whole = record_bytes(location.extent, location.slab_bytes)
        first = PAGE_BYTES + location.slot * whole + PAGE_BYTES
        path = folder / segment_name(location.set_id, location.rank)
        records.append((path, first, location.extent.n_heads * location.slab_bytes))
    return records
