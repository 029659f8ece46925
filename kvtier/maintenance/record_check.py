"""Record check: verifies one record outside the load path, a piece at a time.

On a file system whose clients cache, a read may be stale: it may show bytes from before another node's write, for a
second or two. So a record that failed its checksums in a load is read a second time, later, before it is retracted from
the index. Until then the chunk is a miss.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from enum import Enum

from kvtier.errors import Corrupt, IndexUnavailable, TierUnavailable
from kvtier.format.checksum import slab_seed
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import record_bytes
from kvtier.index.base import Index, Location
from kvtier.io.native import checksum
from kvtier.io.ring import AlignedBuffer
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.storage.open_segments import OpenSegment
from kvtier.storage.segments import SegmentFiles, SegmentFolders, refuse_early_end, segment_name

RECHECK_S = 1.0  # time after which a record is read again, seconds; clients showed new bytes within it
RECHECK_INTERVAL_S = 0.5  # interval at which due records are read, seconds
WAITING_MAX = 1024  # limit of the waiting records; a further one is added by the next load that fails on it

PIECE_BYTES = 4 << 20
# Largest record that is read, bytes. One of 256 tokens of the largest models takes 1 GiB; a sparse file may claim any
# size.
RECORD_BYTES_MAX = 4 << 30
_PAIR_BYTES = 8

_Record = tuple[bytes, bytes, Location]  # namespace, key of the chunk, and place


class Rechecks:
    """Queue of records to read a second time. Thread-safe."""

    def __init__(
        self, files: SegmentFolders, index: Index, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._index, self._metrics, self._clock = files, index, metrics, clock
        self._lock = threading.Lock()
        self._log = RepeatedLog(clock)
        self._waiting: dict[_Record, float] = {}  # -> when it is due

    def add(self, namespace: bytes, key: bytes, location: Location) -> None:
        """Queue a record for `run`, and count the miss."""
        self._metrics.add(names.STALE_READS)
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.setdefault((namespace, key, location), self._clock() + RECHECK_S)

    def run(self) -> None:
        """Read the records that are due, and retract those that still do not match their checksums. Reads in the
        caller's thread, so it must not be called where a request waits."""
        now_s = self._clock()
        with self._lock:
            due = [record for record, due_s in self._waiting.items() if due_s <= now_s]
            for record in due:
                del self._waiting[record]
        for record in due:
            self._recheck(*record)

    def _recheck(self, namespace: bytes, key: bytes, location: Location) -> None:
        try:
            # A missing file is left to garbage collection, which distinguishes removed files from missing storage.
            if judge(self._files(namespace), key, location) is not RecordVerdict.OTHER:
                return
            self._index.retract(key, location)
        except TierUnavailable:
            return  # a later load that fails queues it again
        except IndexUnavailable:
            self._metrics.add(names.INDEX_ERRORS)
            return
        self._metrics.add(names.CHECKSUM_FAILURES)
        name = segment_name(location.set_id, location.part)
        self._log.line(
            logging.ERROR,
            "bad",
            "slot %d of segment %s is bad, also when it is read again after %.0f s: it is not offered any more",
            location.slot,
            name,
            RECHECK_S,
        )


class RecordVerdict(Enum):
    """Result of reading a record's place. UNKNOWN: it cannot be read for now, or exceeds RECORD_BYTES_MAX."""

    AS_SUMMED = 0
    OTHER = 1  # other bytes, or the file is another segment or too short
    GONE = 2  # no such file
    UNKNOWN = 3


def judge(files: SegmentFiles, key: bytes, location: Location) -> RecordVerdict:
    """Read the slabs at `location`, through a descriptor that is opened now, and compare them with its checksums."""
    try:
        segment = files.lease_anew(location.set_id, location.part)
    except TierUnavailable:
        return RecordVerdict.UNKNOWN
    except Corrupt:
        return RecordVerdict.OTHER
    if segment is None:
        return RecordVerdict.GONE
    try:
        return _judge(segment, key, location)
    except OSError:
        return RecordVerdict.UNKNOWN
    finally:
        segment.release()


def _judge(segment: OpenSegment, key: bytes, location: Location) -> RecordVerdict:
    header, extent = segment.header, location.extent
    if header.offset_of(location.slot, extent, location.slab_bytes) is None:
        return RecordVerdict.OTHER
    if record_bytes(extent, header.slab_bytes) > RECORD_BYTES_MAX:
        return RecordVerdict.UNKNOWN
    buffer = AlignedBuffer(min(PIECE_BYTES, header.slab_bytes))
    start = header.slot_offset(location.slot) + PAGE_BYTES
    for number, expected in enumerate(location.checksums):
        seed = slab_seed(key, extent.first_head + number, extent.first_layer)
        if _sum(segment.fd, start + number * header.slab_bytes, header.slab_bytes, seed, buffer) != expected:
            return RecordVerdict.OTHER
    return RecordVerdict.AS_SUMMED


def _sum(fd: int, start: int, n_bytes: int, seed: int, buffer: AlignedBuffer) -> int | None:
    """Return the checksum of a slab; None where the file ends before it."""
    total = 0
    for done in range(0, n_bytes, buffer.n_bytes):
        piece = min(buffer.n_bytes, n_bytes - done)
        if not _read_fully(fd, buffer.view[:piece], start + done):
            return None
        total += checksum(buffer.address, piece, seed, done // _PAIR_BYTES)
    return total % (1 << 64)


def _read_fully(fd: int, view: memoryview, offset: int) -> bool:
    """Fill the buffer, with several reads if they are short. Return False if the file ends before. Raises as
    `refuse_early_end`."""
    while view:
        n_read = os.preadv(fd, [view], offset)
        if n_read == 0:
            refuse_early_end(fd, offset + len(view))
            return False
        view, offset = view[n_read:], offset + n_read
    return True
