"""Guard around a remote index that may be slow or unreachable: circuit breaker and publish queue.

Calls pass through a circuit breaker; while it is open they raise IndexUnavailable at once. Publishing does not raise:
records are queued (bounded, I4) and published when the index is back. They count as accepted: their bytes are complete
(I1), and a lookup before that is a miss, as after any loss of the index (I5). When the queue is full the oldest are
dropped, and all of them when the process ends. `kvtier index rebuild` finds those, unless a sweep has truncated their
files before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar, TypeVarTuple

from kvtier.errors import IndexRefused, IndexResting, IndexUnavailable, KVTierError
from kvtier.index.base import Index, NewRecord, SetInfo
from kvtier.index.circuit_breaker import Breaker
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.runtime.threads import Ticker

log = logging.getLogger("kvtier")

TICK_INTERVAL_S = 0.25  # interval between attempts to publish queued records, seconds
SENT_AT_ONCE = 256  # queued records of one publish
CLOSE_TIMEOUT_S = 2.0  # for publishing the queue at the end, seconds
RECORD_BYTES, CHECKSUM_BYTES = 480, 44  # memory of a queued record and of each checksum, measured on CPython 3.11

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Clock = Callable[[], float]


class QueueBounds(NamedTuple):
    records: int
    n_bytes: int


def _through(method: Callable[[Index, *Ts], T]) -> Callable[[GuardedIndex, *Ts], T]:
    """Return a method that calls the guarded index's method of that name through the breaker."""
    name = method.__name__

    def call(guard: GuardedIndex, /, *args: *Ts) -> T:
        ask: Callable[[*Ts], T] = getattr(guard._index, name)
        return guard._call(lambda: ask(*args))

    return call


class GuardedIndex:
    """See `kvtier.index.base.Index`. clock: monotonic seconds."""

    def __init__(
        self, index: Index, breaker: Breaker, bounds: QueueBounds, metrics: Metrics, clock: Clock = time.monotonic
    ) -> None:
        self._index = index
        self._breaker = breaker
        self._bounds = bounds
        self.metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[NewRecord] = deque()
        self._waiting_bytes = 0
        self._ticker: Ticker | None = None
        self._log = RepeatedLog(clock)

    def start(self) -> None:
        """Start a thread that calls `tick`; tests call it themselves."""
        self._ticker = Ticker("index", TICK_INTERVAL_S, self.tick)

    def tick(self) -> None:
        """Probe the index after a pause, so that no lookup has to, and publish queued records."""
        try:
            if self._breaker.is_open:
                self._call(lambda: self._index.was_reset)
            while self._send_some():
                pass
        except IndexUnavailable:
            pass

    @property
    def n_waiting(self) -> int:
        """Return the number of queued records."""
        return len(self._waiting)

    def _call(self, work: Callable[[], T]) -> T:
        now = self._clock()
        if not self._breaker.allows(now):
            self.metrics.add(names.INDEX_FAST_FAILS)
            raise IndexResting(f"no calls of the index for {self._breaker.left_s(now):.1f} s: it does not answer")
        try:
            result = work()
        except BaseException as fault:
            # A refusal is an answer, too: a Redis that is full still finds what is stored.
            is_answer = isinstance(fault, KVTierError) and not isinstance(fault, IndexUnavailable)
            if is_answer or isinstance(fault, IndexRefused):
                self._worked()
            else:
                self._failed(fault, now)
            raise
        self._worked()
        return result

    def _worked(self) -> None:
        if self._breaker.worked():
            text = "the index answers again; %d records wait to be published"
            self._log.line(logging.INFO, "answers", text, self.n_waiting)

    def _failed(self, fault: BaseException, began_s: float) -> None:
        now = self._clock()
        if self._breaker.failed(began_s, now):
            self.metrics.add(names.INDEX_PAUSES)
            left_s = self._breaker.left_s(now)
            self._log.warning("pause", "no calls of the index for %.1f s after failures: %s", left_s, fault)

    # --- publishing ---

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        """Publish records, or queue them while the index does not answer; queued ones count as accepted."""
        try:
            return self._call(lambda: self._index.publish(records, from_files, into_unowned))
        except IndexUnavailable:
            if from_files:  # the rebuild reads their files again
                raise
            self._put(records)
            return len(records)

    def _put(self, records: Sequence[NewRecord]) -> None:
        dropped = 0
        with self._lock:
            for record in records:
                self._waiting.append(record)
                self._waiting_bytes += _bytes_of(record)
            while len(self._waiting) > self._bounds.records or self._waiting_bytes > self._bounds.n_bytes:
                self._waiting_bytes -= _bytes_of(self._waiting.popleft())
                dropped += 1
        self.metrics.add(names.PUBLISH_QUEUED, len(records))
        self.metrics.add(names.PUBLISH_DROPPED, dropped)

    def _send_some(self) -> bool:
        """Publish the oldest queued records. Return False when there are none. Raises IndexUnavailable."""
        with self._lock:
            batch = list(islice(self._waiting, SENT_AT_ONCE))
        if not batch:
            return False
        taken = self._call(lambda: self._index.publish(batch))
        with self._lock:  # `_put` may have dropped the oldest since
            sent = set(map(id, batch))
            while self._waiting and id(self._waiting[0]) in sent:
                self._waiting_bytes -= _bytes_of(self._waiting.popleft())
        self.metrics.add(names.PUBLISH_SENT_LATE, taken)
        return True

    # --- all other methods only pass through the breaker ---

    resolve = _through(Index.resolve)
    find = _through(Index.find)
    retract = _through(Index.retract)
    take_over = _through(Index.take_over)
    close_set = _through(Index.close_set)
    sets = _through(Index.sets)
    some_sets = _through(Index.some_sets)
    members = _through(Index.members)
    listed = _through(Index.listed)
    without_list = _through(Index.without_list)
    touch = _through(Index.touch)
    shared_s = _through(Index.shared_s)
    local_s = _through(Index.local_s)
    acquire_lease = _through(Index.acquire_lease)
    lease_owner = _through(Index.lease_owner)
    release_lease = _through(Index.release_lease)
    put_note = _through(Index.put_note)
    notes = _through(Index.notes)
    drop_note = _through(Index.drop_note)
    counts = _through(Index.counts)
    mend_sum = _through(Index.mend_sum)
    recount = _through(Index.recount)
    entries = _through(Index.entries)
    loss = _through(Index.loss)
    rebuilt = _through(Index.rebuilt)
    doubt = _through(Index.doubt)
    clear = _through(Index.clear)

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        return self._call(lambda: self._index.create_set(info, records))

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        return self._call(lambda: self._index.remove_set(set_id, token))

    @property
    def was_reset(self) -> bool:
        return self._call(lambda: self._index.was_reset)

    def close(self) -> None:
        """Publish queued records for at most CLOSE_TIMEOUT_S (I10)."""
        if self._ticker is not None:
            self._ticker.close(CLOSE_TIMEOUT_S)
        deadline_s = self._clock() + CLOSE_TIMEOUT_S
        try:
            while self._clock() < deadline_s and self._send_some():
                pass
        except IndexUnavailable as fault:
            log.warning("%d records were not published; `kvtier index rebuild` adds them: %s", self.n_waiting, fault)
        self._index.close()


def _bytes_of(record: NewRecord) -> int:
    return RECORD_BYTES + CHECKSUM_BYTES * len(record.location.checksums)
