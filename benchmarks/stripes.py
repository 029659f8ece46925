"""Rate at which the I/O ring writes records into segment sets of 1 to 16 files a rank, checksums included.

    python -m benchmarks.stripes --folder /mnt/kv/probe --out benchmarks/results/stripes.json

The best number of files is the one to set as `io.stripes`. On tmpfs run it twice: a virtual machine gets memory slowly
when it is touched for the first time.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import deque
from pathlib import Path

from benchmarks import report
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader, SegmentHeader, new_set_id, part_of, record_bytes
from kvtier.io.ring import AlignedBuffer, Batch, Ring, WriteOp
from kvtier.storage.segments import SegmentFiles, direct_io_works

NAMESPACE = b"stripes-of-a-set"
EXTENT = Extent(0, 32, 0, 8)
SET_BYTES = 1 << 30
BATCH_RECORDS, BATCHES_AHEAD = 16, 4  # records of one batch, and batches in the ring at a time


def write_rate(folder: Path, stripes: int, threads: int, slab_bytes: int, n_bytes: int) -> float:
    """Return bytes a second for `n_bytes` of records, 16 of one batch to consecutive slots."""
    size = record_bytes(EXTENT, slab_bytes)
    slots = (SET_BYTES - PAGE_BYTES) // size
    shutil.rmtree(folder / NAMESPACE.hex(), ignore_errors=True)
    (folder / NAMESPACE.hex()).mkdir(parents=True)
    files = SegmentFiles(folder / NAMESPACE.hex(), direct_io_works(folder))
    buffer = AlignedBuffer(BATCH_RECORDS * BATCHES_AHEAD * size)
    batches: deque[Batch] = deque()
    held = []
    with Ring(threads, 1 << 20, write_piece_bytes=4 << 20) as ring:
        started_s = time.perf_counter()
        for first in range(0, n_bytes // size, BATCH_RECORDS):
            if len(batches) == BATCHES_AHEAD:
                wait_for(batches.popleft())
            ops = []
            for number in range(first, first + BATCH_RECORDS):
                set_id, slot = new_set_id(1000 + number // slots, stripes, 0), number % slots
                fields = (NAMESPACE, set_id, 0, slots, size, EXTENT, slab_bytes, 1000, "", slot % stripes)
                header = SegmentHeader(*fields)
                segment = files.lease(set_id, part_of(set_id, 0, slot))
                if segment is None:
                    files.create(header)
                    segment = files.lease(set_id, part_of(set_id, 0, slot))
                assert segment is not None
                held.append(segment)
                at, key = number % (BATCH_RECORDS * BATCHES_AHEAD) * size, number.to_bytes(16, "big")
                sums = (0,) * EXTENT.n_heads
                record = RecordHeader(key, NAMESPACE, NAMESPACE, slab_bytes, 256, slot, EXTENT, set_id, sums)
                buffer.view[at : at + PAGE_BYTES] = record.pack()
                address, n_slabs = buffer.address + at, EXTENT.n_heads
                ops.append(WriteOp(segment.fd, header.slot_offset(slot), address, slab_bytes, n_slabs, key, 0, 0))
            batches.append(ring.submit(ops))
        while batches:
            wait_for(batches.popleft())
        seconds = time.perf_counter() - started_s
    for segment in held:
        segment.release()
    files.close()
    shutil.rmtree(folder / NAMESPACE.hex())
    return n_bytes // size // BATCH_RECORDS * BATCH_RECORDS * size / seconds


def wait_for(batch: Batch) -> None:
    assert batch.wait(120.0) and all(result.ok for result in batch.results()), "a write failed"


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--threads", type=int, nargs="+", default=[8, 12, 16])
    made.add_argument("--slab-mib", type=int, default=4, help="eight slabs make a record")
    made.add_argument("--gib", type=float, default=15.5, help="written for each figure")
    options = made.parse_args()
    rows = []
    for threads in options.threads:
        for stripes in (1, 2, 4, 8, 16):
            rate = write_rate(options.folder, stripes, threads, options.slab_mib << 20, int(options.gib * (1 << 30)))
            rows.append({"threads": threads, "files": stripes, "gib_s": round(rate / (1 << 30), 1)})
    report.write(options.out, "writing records into sets of several files", {"rows": rows})
    report.table(("threads", "files a rank", "GiB/s"), [tuple(row.values()) for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
