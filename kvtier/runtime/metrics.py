"""Counters of one engine half: lookups, loads, saves, skipped chunks and errors. Thread-safe; exporters are elsewhere.

A name ends in its unit, or in the reason for skipping; all are sums since the start, so that exporters can add them.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

LOOKUPS = "lookups"
LOOKUP_SECONDS = "lookup_seconds"
LOOKUP_TOKENS = "lookup_tokens"
# Tokens passed to a load, even if it failed, as in vLLM's vllm:external_prefix_cache_hits; LOAD_TOKENS were loaded.
HIT_TOKENS = "hit_tokens"
LOAD_REQUESTS = "load_requests"
LOAD_TOKENS = "load_tokens"
LOAD_BYTES = "load_bytes"
LOAD_SECONDS = "load_seconds"
LOAD_FAILURES = "load_failures"
SHARED_WAITS = "shared_wait_requests"
SHARED_WAIT_SECONDS = "shared_wait_seconds"
SHARED_TOKENS = "shared_load_tokens"
GONE_CHUNKS = "gone_chunks"
AWAY_CHUNKS = "away_chunks"
REREAD_CHUNKS = "reread_chunks"
STALE_READS = "stale_reads"
ARENA_HIT_CHUNKS = "arena_hit_chunks"
HOST_HIT_CHUNKS = "host_hit_chunks"
FILE_READ_BYTES = "file_read_bytes"
KVIKIO_READ_BYTES = "kvikio_read_bytes"
SAVE_TOKENS = "save_tokens"
SAVE_BYTES = "save_bytes"
SAVE_SECONDS = "save_seconds"  # of writing and publishing batches of chunks; waits in queues are not in it
SAVED_LATER = "saved_later_chunks"
DROPPED_TAILS = "dropped_tail_requests"
SKIPPED_QUEUE_FULL = "skipped_chunks_queue_full"
SKIPPED_NO_SPACE = "skipped_chunks_no_space"
SKIPPED_RESTING = "skipped_chunks_resting"
SKIPPED_PRESENT = "skipped_chunks_present"
SKIPPED_FAILED = "skipped_chunks_failed"
SKIPPED_REFUSED = "skipped_chunks_refused"
SKIPPED_QUOTA = "skipped_chunks_quota"
SKIPPED_OVERWRITTEN = "skipped_chunks_overwritten"
CHECKSUM_FAILURES = "checksum_failures"
INDEX_ERRORS = "index_errors"
INDEX_FAST_FAILS = "index_fast_fails"
INDEX_PAUSES = "index_pauses"
PUBLISH_QUEUED = "publish_queued_records"
PUBLISH_SENT_LATE = "publish_sent_late_records"
PUBLISH_DROPPED = "publish_dropped_records"
EVICTED_BYTES = "evicted_bytes"

# Chunks that were not saved although the tier did not have them.
UNSAVED = (
    SKIPPED_QUEUE_FULL, SKIPPED_NO_SPACE, SKIPPED_RESTING, SKIPPED_FAILED, SKIPPED_REFUSED, SKIPPED_QUOTA,
    SKIPPED_OVERWRITTEN,
)  # fmt: skip
ERRORS = (LOAD_FAILURES, CHECKSUM_FAILURES, INDEX_ERRORS)

# Counters of skipped chunks and errors are listed by their groups, so that no sum over a group misses one.
NAMES = (
    LOOKUPS, LOOKUP_SECONDS, LOOKUP_TOKENS, HIT_TOKENS,
    LOAD_REQUESTS, LOAD_TOKENS, LOAD_BYTES, LOAD_SECONDS, SHARED_WAITS, SHARED_WAIT_SECONDS, SHARED_TOKENS,
    ARENA_HIT_CHUNKS, HOST_HIT_CHUNKS, FILE_READ_BYTES, KVIKIO_READ_BYTES,
    GONE_CHUNKS, AWAY_CHUNKS, REREAD_CHUNKS, STALE_READS,
    SAVE_TOKENS, SAVE_BYTES, SAVE_SECONDS, SAVED_LATER, DROPPED_TAILS, *UNSAVED, SKIPPED_PRESENT,
    *ERRORS, INDEX_FAST_FAILS, INDEX_PAUSES,
    PUBLISH_QUEUED, PUBLISH_SENT_LATE, PUBLISH_DROPPED, EVICTED_BYTES,
)  # fmt: skip


class Metrics:
    """Values of the counters above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        assert name in NAMES, name
        with self._lock:
            self._total[name] += value  # type: ignore[assignment]

    def add_each(self, values: Mapping[str, float]) -> None:
        assert values.keys() <= set(NAMES), values
        with self._lock:
            self._total.update(values)  # a Counter's update adds

    def total(self) -> dict[str, float]:
        with self._lock:
            return dict(self._total)

    def take(self) -> dict[str, float]:
        """Return the increments since the last `take`; counters without change are left out."""
        with self._lock:
            since = {name: value - self._taken[name] for name, value in self._total.items()}
            self._taken = Counter(self._total)
        return {name: value for name, value in since.items() if value}


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
