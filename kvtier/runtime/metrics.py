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

# Help texts of Prometheus: of the counters in vLLM, and of those in the admin service.
HELP = {
    SKIPPED_QUOTA: "Chunks that were not saved because their tenant or namespace is at its quota.",
    INDEX_FAST_FAILS: "Requests to the index that failed at once, during a pause after faults.",
    INDEX_PAUSES: "Pauses of requests to the index after faults.",
    PUBLISH_QUEUED: "Records queued for publication because the index did not answer.",
    PUBLISH_SENT_LATE: "Records published from that queue.",
    PUBLISH_DROPPED: "Records dropped from that queue.",
    LOOKUPS: "Prompts that were looked up in the tier.",
    LOOKUP_SECONDS: "Seconds spent on lookups in the index.",
    LOOKUP_TOKENS: "Tokens that were looked up in the tier.",
    HIT_TOKENS: "Tokens found in the tier and passed to a load, including loads that failed later.",
    LOAD_REQUESTS: "Requests for which a load ended.",
    LOAD_TOKENS: "Tokens whose KV was loaded, without what failed.",
    LOAD_BYTES: "Bytes of KV that were loaded, over all ranks.",
    LOAD_SECONDS: "Seconds that loads took, summed over requests.",
    LOAD_FAILURES: "Loads that failed in part or whole; their requests were recomputed.",
    SHARED_WAITS: "Requests that waited for another request's load of the same chunks.",
    SHARED_WAIT_SECONDS: "Seconds that requests waited for others' loads, summed over requests.",
    SHARED_TOKENS: "Tokens that requests then had from vLLM's own cache instead of loading them again.",
    ARENA_HIT_CHUNKS: "Chunks that were in the arena beside the engine's pages: in GPU memory, or on the CPU.",
    HOST_HIT_CHUNKS: "Chunks that were loaded from host memory to the GPU instead of from storage.",
    FILE_READ_BYTES: "Bytes that were read from storage for loads, over all ranks.",
    KVIKIO_READ_BYTES: "Bytes of these that KvikIO (cuFile) read instead of kvtier's own ring.",
    SAVE_TOKENS: "Tokens whose KV was saved.",
    SAVE_BYTES: "Bytes of KV that were saved, over all ranks.",
    SAVE_SECONDS: "Seconds that batches of saves took to be written and published, without waits in queues.",
    SAVED_LATER: "Chunks saved in a later step than the one that computed them: no queue or set had room then.",
    DROPPED_TAILS: "Requests that ended before the last chunks of their prompt could be taken to be saved.",
    SKIPPED_QUEUE_FULL: "Chunks not saved because the queue was full until the engine reused their blocks.",
    SKIPPED_NO_SPACE: "Chunks not saved because there was no space.",
    SKIPPED_PRESENT: "Chunks not saved because another engine had saved them.",
    SKIPPED_RESTING: "Chunks not saved because the storage refused others until their request had ended.",
    SKIPPED_FAILED: "Chunks not saved because writing them failed.",
    SKIPPED_OVERWRITTEN: "Chunks not saved because vLLM writes to their blocks before they can be gathered.",
    SKIPPED_REFUSED: "Chunks not saved because the codec cannot keep what they hold, such as NaN.",
    CHECKSUM_FAILURES: "Chunks refused because their bytes failed the checksum.",
    GONE_CHUNKS: "Chunks whose segment file, or its end, was gone: evicted, removed or truncated.",
    AWAY_CHUNKS: "Chunks whose file was missing on shared storage though the index has it: kept, a miss.",
    REREAD_CHUNKS: "Chunks read again through a new descriptor, because other nodes' writes may show late.",
    STALE_READS: "Chunks that differed when read again: a miss, read once more a second later.",
    INDEX_ERRORS: "Operations that the index did not answer.",
    EVICTED_BYTES: "Bytes of segment sets that this engine evicted.",
}


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
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
