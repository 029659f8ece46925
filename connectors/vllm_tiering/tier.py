"""KVTierSecondaryTier: kvtier behind the CPU tier of vLLM's own OffloadingConnector (configs/vllm-tiering/).

    "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm_tiering",
                         "config": "/etc/kvtier/kvtier.yaml"}]

Tested with vLLM 0.32.0 and 0.33.0, which call this interface experimental; a release without it is refused. Where one
can choose, kvtier.connectors.vllm is the shorter way: there KV goes from storage to the GPU past a CPU tier, and keys
are kvtier's.

One object is one row of the CPU tier, under vLLM's own block hash and group, behind the hash that all of vLLM's chains
begin with. That hash tells algorithm and seed: engines share where both are equal, so with xxhash, which vLLM seeds at
random, only where PYTHONHASHSEED is set. What else must be equal, and what can't be told: identity.

vLLM calls from its scheduler's thread, so nothing here waits but `drain_jobs` and `shutdown`. It drains when its cache
is reset, as after new weights: from then on this engine neither finds nor leaves anything in what it shared before.
A request's cache_salt is in vLLM's hashes, but no tier hears it: tenants are accounted by a "cache_salt" in the
request's `kv_transfer_params`. There are no KV events: what others evict from here would never be announced.
"""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import vllm

from kvtier.connectors.faults import Faults, contains_faults
from kvtier.connectors.objects.store import Object, ObjectTier, settings_of
from kvtier.connectors.vllm.platform import join_log
from kvtier.connectors.vllm_tiering.identity import host_of
from kvtier.connectors.vllm_tiering.lookups import StepLookups
from kvtier.errors import ConfigError
from kvtier.runtime import metrics
from kvtier.runtime.threads import ThreadJobs

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingCounterMetadata, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as lacking:
    fix = f"its tiers are not those of 0.32.0; use that or a later one, or kvtier.connectors.vllm ({lacking})"
    raise ConfigError("vllm", vllm.__version__, fix) from None

log = logging.getLogger("kvtier")

TESTED_VERSIONS = ("0.32.0", "0.33.0")
"""Their scheduler's half, without a GPU: 0.32.0 by the tests, 0.33.0 once by hand with the same tests."""
LOAD_THREADS, SAVE_THREADS = 4, 2
TASKS_MAX = 1024  # tasks that wait, of each kind; a further one fails at once. vLLM makes one for a request's step
LOADS_MAX = TASKS_MAX // 2  # loads that wait before hits are asked for again; those of this step still find room

REFUSED = "refused_chunks_queue_full"
FAULTS = "faults"
PREFIX = "vllm:kv_offload_kvtier_"
HELP: Mapping[str, str] = {
    metrics.CHECKSUM_FAILURES: "Chunks refused because their bytes failed the checksum.",
    metrics.GONE_CHUNKS: "Chunks whose segment file, or its end, was gone: evicted meanwhile, removed or cut short.",
    metrics.AWAY_CHUNKS: "Chunks whose file was missing on shared storage though the index has it: kept, a miss.",
    metrics.REREAD_CHUNKS: "Chunks read again through a new descriptor, because other nodes' writes may show late.",
    metrics.STALE_READS: "Chunks that were not as written when read again: a miss, looked at once more a second later.",
    metrics.LOAD_FAILURES: "Loads from kvtier that failed in part or whole; what was not loaded is computed.",
    metrics.INDEX_ERRORS: "Operations that kvtier's index did not answer.",
    metrics.SKIPPED_NO_SPACE: "Chunks not stored because there was no space.",
    metrics.SKIPPED_QUOTA: "Chunks not stored because their tenant or namespace is at its quota.",
    metrics.SKIPPED_FAILED: "Chunks not stored because writing them failed.",
    metrics.EVICTED_BYTES: "Bytes of segment sets that this engine evicted.",
    REFUSED: "Chunks not stored or loaded because too much waited already.",
    FAULTS: "Faults of kvtier that were turned into misses.",
}
"""Counters that vLLM exports, under PREFIX and with _total behind them."""


class _Ended(NamedTuple):
    """A task of vLLM's: of each key whether it went well."""

    job: TransferJob
    results: list[bool]
    seconds: float


class KVTierSecondaryTier(SecondaryTierManager):
    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        config: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes what stands in `secondary_tiers`; an unknown key is a TypeError. Raises ConfigError.

        primary_kv_view: (n_chunks, row bytes), the CPU tier that this process shares with the workers.
        config: a YAML file of kvtier's settings. settings: these, which win over that file and the environment.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_log()
        release = vllm.__version__.split("+")[0]
        if release not in TESTED_VERSIONS:
            log.warning("vLLM %s is not tested as a host of tiers (tested: %s)", release, ", ".join(TESTED_VERSIONS))
        given = settings_of(config, settings)
        host = host_of(offloading_spec.config, given, self.block_size_bytes)
        self._tier = ObjectTier.opened(given, host, [self.block_size_bytes])
        self._rows = np.asarray(primary_kv_view)
        self._faults = Faults()
        self._saves = ThreadJobs("tiering-save", SAVE_THREADS, TASKS_MAX)
        self._loads = ThreadJobs("tiering-load", LOAD_THREADS, TASKS_MAX)
        self._asking = ThreadJobs("tiering-lookup", 1, TASKS_MAX)
        self._lookups = StepLookups(self._exist, self._asking, given.index.answer_timeout_s)
        self._drain_s = given.shutdown_drain_s
        self._is_hurried = False
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._epoch = b""
        self._running: set[str] = set()
        self._of_before: set[str] = set()
        self._counted: dict[str, float] = {REFUSED: 0, FAULTS: 0}
        self._reported: dict[str, float] = {}

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._running.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)
        self._running.discard(req_context.req_id)
        self._of_before.discard(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """RETRY until the index has answered, which it is asked at the end of the step, and while there is no room for
        another load: vLLM would take one that is refused for a fault."""
        is_there = self._lookups.ask(key, req_context.req_id)
        if is_there is None or (is_there and self._loads.pending() >= LOADS_MAX):
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.end_step()

    def submit_store(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._of_before:  # its KV is partly of what there was before a reset
            self._fail(job_metadata)
        else:
            self._begin(self._saves, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(self._loads, self._load, job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Of a load that failed in part, what came is kept; the rest is a miss for the requests that hold it."""
        finished = []
        while not self._ended.empty():
            job, results, seconds = self._ended.get()
            good = tuple(key for key, is_good in zip(job.keys, results, strict=True) if is_good)
            if job.is_promotion:
                self._lookups.mark_missing(set(job.keys).difference(good))
            finished.append(
                JobResult(
                    job_id=job.job_id,
                    success=all(results),
                    successful_keys=good or None,
                    transfer_time=seconds,
                    transfer_bytes=len(good) * self.block_size_bytes,
                )
            )
        return finished

    def drain_jobs(self) -> None:
        """Waits until nothing touches the CPU tier, which vLLM hands on after it, so there is no deadline but those of
        the tasks; those that only wait fail when this takes long. Then begins an epoch of this engine's own."""
        for jobs in (self._saves, self._loads):
            while not jobs.drain(self._drain_s):
                self._is_hurried = True
                log.warning("vLLM resets its cache and waits for kvtier's tasks")
        self._is_hurried = False
        self._epoch = uuid.uuid4().bytes
        self._of_before |= self._running
        self._lookups.mark_all_missing()

    def shutdown(self) -> None:
        """Waits for tasks that are under way, for a few seconds at most; those that wait then are dropped."""
        for jobs in (self._saves, self._loads, self._asking):
            jobs.drain(self._drain_s)
            jobs.close()
        self._close_tier()
        self._rows = np.empty((0, 0), dtype=np.uint8)  # vLLM unmaps its memory, which no view of ours may hold

    @contains_faults("closing the tier")
    def _close_tier(self) -> None:
        self._tier.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingCounterMetadata]:
        return {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in HELP.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What came since the last call; None for nothing."""
        self._counted[FAULTS] += self._faults.take()
        total = self._tier.counters() | self._counted
        grown = {name: total[name] - self._reported.get(name, 0) for name in HELP if name in total}
        self._reported = total
        stats = OffloadingConnectorStats()
        for name, by in grown.items():
            if by:
                stats.increase_counter(PREFIX + name, by)
        return None if stats.is_empty() else stats

    def _begin(self, jobs: ThreadJobs, move: Callable[[TransferJob], list[bool]], job: TransferJob) -> None:
        if not jobs.submit(partial(self._run, move, job)):
            self._counted[REFUSED] += len(job.keys)
            self._fail(job)

    def _run(self, move: Callable[[TransferJob], list[bool]], job: TransferJob) -> None:
        begun_s = time.monotonic()
        results = [False] * len(job.keys) if self._is_hurried else move(job)
        self._ended.put(_Ended(job, results, time.monotonic() - begun_s))

    def _fail(self, job: TransferJob) -> None:
        self._ended.put(_Ended(job, [False] * len(job.keys), 0.0))

    @contains_faults("storing vLLM's chunks", default=lambda self, job: [False] * len(job.keys))
    def _store(self, job: TransferJob) -> list[bool]:
        return self._tier.put(self._objects(job))

    @contains_faults("loading vLLM's chunks", default=lambda self, job: [False] * len(job.keys))
    def _load(self, job: TransferJob) -> list[bool]:
        return self._tier.get(self._objects(job))

    @contains_faults("a lookup", default=lambda self, keys: [False] * len(keys))
    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        return self._tier.exists(self._own(keys))

    def _objects(self, job: TransferJob) -> list[Object]:
        salt = _salt(job.req_context.kv_transfer_params)
        rows = [memoryview(self._rows[number]) for number in job.chunk_ids]
        return [Object(key, row, salt) for key, row in zip(self._own(list(job.keys)), rows, strict=True)]

    def _own(self, keys: Sequence[bytes]) -> list[bytes]:
        """vLLM's keys behind what they depend on. It makes the first hash of all after its tiers."""
        root = bytes(kv_cache_utils.NONE_HASH)
        before = bytes([len(root)]) + root + bytes([len(self._epoch)]) + self._epoch
        return [before + key for key in keys]


def _salt(parameters: Any) -> str:
    salt = parameters.get("cache_salt") if isinstance(parameters, Mapping) else None
    return salt if isinstance(salt, str) else ""
