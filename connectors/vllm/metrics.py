"""Counters of the tier in vLLM's own statistics: its log line and its /metrics.

Both halves report the growth since the last step; vLLM adds the workers up and passes the sum to the front end. A
counter `x` of runtime.metrics is exported as `vllm:kvtier_x_total`. With tensor parallelism every rank loads its share
of the same tokens, so counts of tokens, requests and chunks, and seconds, are taken from rank 0 alone; bytes and
failures from all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.runtime import metrics as names

FAULTS = "faults"
PREFIX = "vllm:kvtier_"
# Counters that are summed over the ranks.
OF_ALL_RANKS = frozenset(
    {
        names.LOAD_BYTES,
        names.FILE_READ_BYTES,
        names.KVIKIO_READ_BYTES,
        names.SAVE_BYTES,
        names.LOAD_FAILURES,
        names.CHECKSUM_FAILURES,
        names.GONE_CHUNKS,
        names.AWAY_CHUNKS,
        names.REREAD_CHUNKS,
        names.STALE_READS,
        names.INDEX_ERRORS,
        FAULTS,
    }
)

HELP = names.HELP | {FAULTS: "Faults of the tier that were turned into misses."}


class KVTierStats(KVConnectorStats):
    """Growth of counters by name; `data` is sent between the processes."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        self.data.update(names.summed([self.data, other.data]))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values of vLLM's log line for one interval."""
        load_s, save_s = self.data.get(names.LOAD_SECONDS, 0), self.data.get(names.SAVE_SECONDS, 0)
        load_bytes, save_bytes = self.data.get(names.LOAD_BYTES, 0), self.data.get(names.SAVE_BYTES, 0)
        shown: dict[str, int | float] = {
            "kvtier hit tokens": int(self.data.get(names.HIT_TOKENS, 0)),
            "loaded MB": round(load_bytes / 1e6, 1),
            "load GB/s": round(load_bytes / load_s / 1e9, 2) if load_s else 0.0,
            "saved MB": round(save_bytes / 1e6, 1),
            "save GB/s": round(save_bytes / save_s / 1e9, 2) if save_s else 0.0,
        }
        troubles = (
            names.LOAD_FAILURES,
            names.CHECKSUM_FAILURES,
            names.GONE_CHUNKS,
            names.AWAY_CHUNKS,
            names.STALE_READS,
            names.INDEX_ERRORS,
            FAULTS,
            names.DROPPED_TAILS,
            names.SKIPPED_QUEUE_FULL,
            names.SKIPPED_NO_SPACE,
            names.SKIPPED_FAILED,
            names.SKIPPED_REFUSED,
        )
        return shown | {name.replace("_", " "): int(self.data[name]) for name in troubles if self.data.get(name)}


def stats_of(counted: Mapping[str, float], faults: int, is_first_rank: bool) -> KVTierStats | None:
    """Return one half's report of a step; None if no counter grew."""
    data = {name: value for name, value in counted.items() if is_first_rank or name in OF_ALL_RANKS}
    if faults:
        data[FAULTS] = faults
    return KVTierStats(data=data) if data else None


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters, one by name and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        counters = {
            name: make(name=PREFIX + name, documentation=text, labelnames=labelnames) for name, text in HELP.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            counter = self._counters[engine_idx].get(name)
            if counter is not None and value > 0:
                counter.inc(value)
