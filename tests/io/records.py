"""Records in memory and in files, for the tests of this folder."""

import os
import random
from pathlib import Path

import numpy as np

from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader
from kvtier.io.ring import AlignedBuffer, Batch, OpResult, ReadOp, Ring, WriteOp

FIRST_HEAD, FIRST_LAYER = 3, 5
TIMEOUT_S = 20.0
PIECE_BYTES = 64 * 1024


class Record:
    """A record with random slabs, in memory, at `offset` of a file to be."""

    def __init__(self, seed: int, slab_bytes: int, n_slabs: int, offset: int = 0) -> None:
        rng = random.Random(seed)
        self.key, self.slab_bytes, self.n_slabs, self.offset = rng.randbytes(16), slab_bytes, n_slabs, offset
        self.n_bytes = PAGE_BYTES + slab_bytes * n_slabs
        self.buffer: AlignedBuffer = AlignedBuffer(self.n_bytes)
        self.slabs = rng.randbytes(slab_bytes * n_slabs)
        extent = Extent(FIRST_LAYER, 2, FIRST_HEAD, n_slabs)
        self.header = RecordHeader(
            self.key,
            bytes(16),
            b"n" * 16,
            slab_bytes,
            256,
            7,
            extent,
            99,
            (0,) * n_slabs,
        )
        self.buffer.view[:PAGE_BYTES] = self.header.pack()
        self.buffer.view[PAGE_BYTES : self.n_bytes] = self.slabs

    def reference_checksums(self) -> tuple[int, ...]:
        return tuple(
            slab_checksum(
                np.frombuffer(self.slabs[i * self.slab_bytes : (i + 1) * self.slab_bytes], np.uint8),
                slab_seed(self.key, FIRST_HEAD + i, FIRST_LAYER),
            )
            for i in range(self.n_slabs)
        )

    def write_op(self, fd: int) -> WriteOp:
        return WriteOp(
            fd, self.offset, self.buffer.address, self.slab_bytes, self.n_slabs, self.key, FIRST_HEAD, FIRST_LAYER
        )

    def read_op(
        self, fd: int, target: AlignedBuffer, checksums: tuple[int, ...] | None, slabs: range | None = None
    ) -> ReadOp:
        """Read the run `slabs` (all by default) of this record into the start of `target`."""
        run = slabs if slabs is not None else range(self.n_slabs)
        return ReadOp(
            fd,
            self.offset + PAGE_BYTES + run.start * self.slab_bytes,
            target.address,
            self.slab_bytes,
            len(run),
            self.key,
            FIRST_HEAD + run.start,
            FIRST_LAYER,
            checksums,
        )


def open_file(path: Path, direct: bool) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)


def finished(batch: Batch) -> list[OpResult]:
    assert batch.wait(TIMEOUT_S)
    return batch.results()


def written(ring: Ring, fd: int, records: list[Record]) -> list[OpResult]:
    results = finished(ring.submit([record.write_op(fd) for record in records]))
    assert [result.error for result in results] == [0] * len(records)
    return results
