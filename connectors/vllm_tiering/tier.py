"""KVTierSecondaryTier: kvtier behind the CPU tier of vLLM's own OffloadingConnector (configs/vllm-tiering/).

    "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm_tiering",
                         "config": "/etc/kvtier/kvtier.yaml"}]

Tested with vLLM 0.32.0 and 0.33.0, which call this interface experimental; a release without it is refused. Where both
are possible, kvtier.connectors.vllm has the shorter path: KV moves between storage and GPU without a CPU tier, under
kvtier's own keys.

An object is one row of the CPU tier, under vLLM's block hash and group, prefixed by the initial hash of all of vLLM's
chains. That hash depends on algorithm and seed: engines share objects if both are equal, so with xxhash, which vLLM
seeds at random, only if PYTHONHASHSEED is set. The identity module lists what else must be equal.

vLLM calls from its scheduler's thread, so only `drain_jobs` and `shutdown` wait. vLLM drains when its cache is reset,
and kvtier when weights change: from then on this engine neither finds nor writes objects under the keys that it shared
before. A request's cache_salt is in vLLM's hashes but not passed to tiers: tenants are accounted by a "cache_salt" in
the request's `kv_transfer_params`. There are no KV events: evictions by other engines could not be announced.
"""

import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import vllm

from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.objects.store import Object, ObjectTier, settings_of
from kvtier.connectors.vllm.metrics import FAULTS
from kvtier.connectors.vllm.metrics import HELP as COUNTER_HELP
from kvtier.connectors.vllm.platform import join_log
from kvtier.connectors.vllm.weight_changes import watch_weights
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

# the scheduler's half, without a GPU: 0.32.0 by the tests, 0.33.0 once by hand with the same tests
TESTED_VERSIONS = ("0.32.0", "0.33.0")
LOAD_THREADS, SAVE_THREADS = 4, 2
TASKS_MAX = 1024  # queued jobs of each kind; a further one fails at once. vLLM makes one for each request and step
LOADS_MAX = TASKS_MAX // 2  # queued loads from which on hits are deferred; those of this step still find room

REFUSED = "refused_chunks_queue_full"
PREFIX = "vllm:kv_offload_kvtier_"
# Counters that vLLM exports, with PREFIX before and _total behind the name.
SHARED_COUNTERS = (
    metrics.CHECKSUM_FAILURES,
    metrics.GONE_CHUNKS,
    metrics.AWAY_CHUNKS,
    metrics.REREAD_CHUNKS,
    metrics.STALE_READS,
    metrics.LOAD_FAILURES,
    metrics.INDEX_ERRORS,
    metrics.SKIPPED_NO_SPACE,
    metrics.SKIPPED_QUOTA,
    metrics.SKIPPED_FAILED,
    metrics.EVICTED_BYTES,
    FAULTS,
)
HELP = {name: COUNTER_HELP[name] for name in SHARED_COUNTERS}
HELP[REFUSED] = "Chunks not stored or loaded because too many jobs were queued already."


class _Ended(NamedTuple):
    """An ended job of vLLM, with the result of each key."""

    job: TransferJob
    results: list[bool]
    seconds: float


class KVTierSecondaryTier(SecondaryTierManager):
    """Secondary tier of vLLM. Called from the scheduler's thread; jobs run on threads of their own."""

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
        """Take an entry of `secondary_tiers`; an unknown key is a TypeError. Raises ConfigError.

        primary_kv_view: (n_chunks, row bytes), the CPU tier that this process shares with the workers.
        config: a YAML file of kvtier's settings. settings: these override that file and the environment.
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
        self._lookups = StepLookups(self._exist, self._asking, given.index.lookup_timeout_s)
        self._drain_s = given.shutdown_drain_s
        self._is_hurried = False
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._epoch = b""
        self._running: set[str] = set()
        self._of_before: set[str] = set()
        self._counted: dict[str, float] = {REFUSED: 0, FAULTS: 0}
        self._reported: dict[str, float] = {}
        watch_weights(self)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._running.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)
        self._running.discard(req_context.req_id)
        self._of_before.discard(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return RETRY until the index has answered, which is queried at the end of the step, and while there is no
        room for another load: vLLM treats a refused load as a fault."""
        is_there = self._lookups.ask(key, req_context.req_id)
        if is_there is None or (is_there and self._loads.pending() >= LOADS_MAX):
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.end_step()

    def submit_store(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._of_before:  # part of its KV was computed before a reset
            self._fail(job_metadata)
        else:
            self._begin(self._saves, "storing", self._tier.put, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(self._loads, "loading", self._tier.get, job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return ended jobs. Of a load that failed in part the loaded keys are kept; the others become misses for their
        requests."""
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
        """Wait until no job touches the CPU tier, then begin an epoch of this engine's own.

        vLLM reuses the CPU tier afterwards, so the only deadlines are those of the running jobs; queued jobs fail if
        this takes long.
        """
        for jobs in (self._saves, self._loads):
            while not jobs.drain(self._drain_s):
                self._is_hurried = True
                log.warning(
                    "vLLM's reset of its cache waits for loads and saves that run for more than %.0f s", self._drain_s
                )
        self._is_hurried = False
        self._epoch = uuid.uuid4().bytes
        self._of_before |= self._running
        self._lookups.mark_all_missing()

    def weights_changed(self) -> None:
        """Begin an epoch, as after a reset. vLLM's own caches still hold KV of the old weights."""
        log.warning("weights changed in place: call reset_prefix_cache(reset_connector=True), or vLLM reuses old KV")
        self.drain_jobs()

    def shutdown(self) -> None:
        """Wait a few seconds for running jobs, then drop the queued ones."""
        for jobs in (self._saves, self._loads, self._asking):
            jobs.drain(self._drain_s)
            jobs.close()
        with self._faults.contained("closing the tier"):
            self._tier.close()
        self._rows = np.empty((0, 0), dtype=np.uint8)  # vLLM unmaps its memory, so no view may remain

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingCounterMetadata]:
        return {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in HELP.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the growth of counters since the last call; None without any."""
        self._counted[FAULTS] += self._faults.take()
        total = self._tier.counters() | self._counted
        grown = {name: total[name] - self._reported.get(name, 0) for name in HELP if name in total}
        self._reported = total
        stats = OffloadingConnectorStats()
        for name, by in grown.items():
            if by:
                stats.increase_counter(PREFIX + name, by)
        return None if stats.is_empty() else stats

    def _begin(self, jobs: ThreadJobs, what: str, move: Callable[[list[Object]], list[bool]], job: TransferJob) -> None:
        if not jobs.submit(partial(self._run, what, move, job)):
            self._counted[REFUSED] += len(job.keys)
            self._fail(job)

    def _run(self, what: str, move: Callable[[list[Object]], list[bool]], job: TransferJob) -> None:
        begun_s, results = time.monotonic(), [False] * len(job.keys)
        if not self._is_hurried:
            with self._faults.contained(f"{what} vLLM's chunks"):
                results = move(self._objects(job))
        self._ended.put(_Ended(job, results, time.monotonic() - begun_s))

    def _fail(self, job: TransferJob) -> None:
        self._ended.put(_Ended(job, [False] * len(job.keys), 0.0))

    @catch_faults("a lookup", default=lambda self, keys: [False] * len(keys))
    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        return self._tier.exists(self._own(keys))

    def _objects(self, job: TransferJob) -> list[Object]:
        salt = _salt(job.req_context.kv_transfer_params)
        rows = [memoryview(self._rows[number]) for number in job.chunk_ids]
        return [Object(key, row, salt) for key, row in zip(self._own(list(job.keys)), rows, strict=True)]

    def _own(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return vLLM's keys prefixed by the inputs that they lack. vLLM makes its initial hash after its tiers."""
        root = bytes(kv_cache_utils.NONE_HASH)
        before = bytes([len(root)]) + root + bytes([len(self._epoch)]) + self._epoch
        return [before + key for key in keys]


def _salt(parameters: Any) -> str:
    salt = parameters.get("cache_salt") if isinstance(parameters, Mapping) else None
    return salt if isinstance(salt, str) else ""
