"""Second looks at records that were not read as they were summed, before they are taken out of the index.

On a file system whose clients cache, such a read may be stale: bytes that another node wrote can show a second or two
later. Until the second look the chunk is a miss, and nothing is retracted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.index.base import Index, Location
from kvtier.maintenance.record_read import RecordVerdict, judge
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.storage.segments import SegmentFolders, segment_name

RECHECK_S = 1.0  # time after which a record is looked at again, seconds; clients showed new bytes within it
RECHECK_INTERVAL_S = 0.5  # interval between two looks for records that are due, seconds
WAITING_MAX = 1024  # records that wait for their second look; the load that meets a further one again adds it then

_Record = tuple[bytes, bytes, Location]  # namespace, key of the chunk, and place


class Rechecks:
    """Thread-safe."""

    def __init__(
        self, files: SegmentFolders, index: Index, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._index, self._metrics, self._clock = files, index, metrics, clock
        self._lock = threading.Lock()
        self._log = RepeatedLog(clock)
        self._waiting: dict[_Record, float] = {}  # -> when it is due

    def add(self, namespace: bytes, key: bytes, location: Location) -> None:
        """Have `run` look at a record again. Counts the miss."""
        self._metrics.add(names.STALE_READS)
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.setdefault((namespace, key, location), self._clock() + RECHECK_S)

    def run(self) -> None:
        """Look at the records that are due, and retract those whose bytes are still others. Reads in the caller's
        thread, so it must not be called where a request waits."""
        now_s = self._clock()
        with self._lock:
            due = [record for record, due_s in self._waiting.items() if due_s <= now_s]
            for record in due:
                del self._waiting[record]
        for record in due:
            self._look_at(*record)

    def _look_at(self, namespace: bytes, key: bytes, location: Location) -> None:
        try:
            # A missing file is left to garbage collection, which tells a removed one from one that is away.
            if judge(self._files(namespace), key, location) is not RecordVerdict.OTHER:
                return
            self._index.retract(key, location)
        except TierUnavailable:
            return  # a later load finds out
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
