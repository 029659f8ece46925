"""Metrics in Prometheus' format. Counters are each engine's own, labelled by `worker`: a sum over engines would fall
when an engine ends. Every label has a bounded number of values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from kvtier.admin.answers import Snapshot, Worker
from kvtier.runtime import metrics as names
from kvtier.scheduler.engine_report import BOUNDS_S, Latency
from kvtier.server.schemas import VERSION

CONTENT_TYPE = CONTENT_TYPE_LATEST
WORKERS_MAX = 500
NAMESPACES_MAX = 100
TENANTS_MAX = 100
OF_A_WORKER = ("worker", "host", "model")


def exposition(seen: Snapshot | None) -> bytes:
    """Return the text. seen: None if the index does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(seen))
    text: bytes = generate_latest(registry)
    return text


@dataclass(frozen=True, eq=False)
class _Collected(Collector):
    seen: Snapshot | None

    def collect(self) -> Iterator[Metric]:
        yield _gauge("kvtier_info", "Release of this service.", 1, version=VERSION)
        yield _gauge("kvtier_index_up", "1 when the index answers.", 0 if self.seen is None else 1)
        if self.seen is not None:
            yield from _of_root(self.seen)
            yield from _of_shares(self.seen)
            yield from _of_workers(self.seen.workers[:WORKERS_MAX])


def _of_root(seen: Snapshot) -> Iterator[Metric]:
    capacity, index = seen.capacity, seen.index
    for name, text, value in (
        ("kvtier_capacity_bytes", "Bytes that segment sets may reserve.", capacity.capacity_bytes),
        ("kvtier_used_bytes", "Bytes that segment sets reserve: open ones with their whole size.", capacity.used_bytes),
        ("kvtier_pinned_bytes", "Bytes that pins protect.", capacity.pinned_bytes),
        ("kvtier_disk_free_bytes", "Free bytes on the root's disk.", capacity.disk_free_bytes),
        ("kvtier_high_watermark_ratio", "Above this part of the capacity, sets are evicted.", capacity.high_watermark),
        ("kvtier_low_watermark_ratio", "Down to this part of the capacity.", capacity.low_watermark),
        ("kvtier_index_chunks", "Chunks that the index knows.", index.chunks),
        ("kvtier_index_records", "Records that the index knows.", index.records),
        ("kvtier_index_sets", "Segment sets that the index knows.", index.sets),
        ("kvtier_index_rebuilding", "1 while the index is read back from segments.", index.is_being_rebuilt),
        ("kvtier_workers", "Engines that give signs of life.", len(seen.workers)),
        ("kvtier_unreadable_reports", "Records in the index that are no valid reports.", seen.unreadable_reports),
        (
            "kvtier_read_ceiling_bytes_per_second",
            "Calibrated rate of the storage, over all hosts.",
            seen.read_ceiling_bytes_s,
        ),
    ):
        if value is not None:
            yield _gauge(name, text, value)
    used = GaugeMetricFamily("kvtier_tier_used_bytes", "Bytes of chunks in a tier.", labels=("tier",))
    size = GaugeMetricFamily("kvtier_tier_size_bytes", "Size of a tier in bytes.", labels=("tier",))
    for tier in seen.tiers:
        used.add_metric((tier.tier,), tier.used_bytes)
        size.add_metric((tier.tier,), tier.size_bytes)
    yield from (used, size)


def _of_shares(seen: Snapshot) -> Iterator[Metric]:
    labels = ("namespace", "model", "codec")
    n_bytes = GaugeMetricFamily("kvtier_namespace_bytes", "Bytes reserved by a namespace's sets.", labels=labels)
    for space in seen.namespaces[:NAMESPACES_MAX]:
        n_bytes.add_metric((space.id, space.model, space.codec), space.n_bytes)
    of_tenant = GaugeMetricFamily("kvtier_tenant_bytes", "Bytes reserved by a tenant's sets.", labels=("tenant",))
    quota = GaugeMetricFamily(
        "kvtier_tenant_quota_bytes", "Bytes that a tenant's sets may reserve.", labels=("tenant",)
    )
    for tenant in seen.tenants[:TENANTS_MAX]:
        of_tenant.add_metric((tenant.label,), tenant.n_bytes)
        if tenant.quota_bytes is not None:
            quota.add_metric((tenant.label,), tenant.quota_bytes)
    yield from (n_bytes, of_tenant, quota)


def _of_workers(workers: Sequence[Worker]) -> Iterator[Metric]:
    for name in names.NAMES:
        counter = CounterMetricFamily(f"kvtier_{name}", names.HELP[name], labels=OF_A_WORKER)
        for worker in workers:
            counter.add_metric(_labels(worker), worker.report.counters.get(name, 0.0))
        yield counter
    age = GaugeMetricFamily("kvtier_worker_report_age_seconds", "Age of an engine's last report.", labels=OF_A_WORKER)
    saved = GaugeMetricFamily(
        "kvtier_ttft_saved_seconds", "Time to first token that loads have saved, as estimated.", labels=OF_A_WORKER
    )
    started = GaugeMetricFamily("kvtier_worker_start_time_seconds", "Start time of an engine.", labels=OF_A_WORKER)
    for worker in workers:
        age.add_metric(_labels(worker), worker.age_s)
        if worker.report.ttft_saved_s is not None:  # no prefill was timed yet
            saved.add_metric(_labels(worker), worker.report.ttft_saved_s)
        started.add_metric(_labels(worker), worker.report.started_s)
    yield from (age, saved, started)
    texts = {
        "lookup": "Lookups in the index, a prompt each.",
        "load": "Loads, a request on a rank each, from asking a worker to the last byte.",
        "save": "Saves, a chunk each, from its gather in the worker to its publication.",
    }
    for what, text in texts.items():
        family = HistogramMetricFamily(f"kvtier_{what}_duration_seconds", text, labels=OF_A_WORKER)
        for worker in workers:
            latency: Latency = getattr(worker.report, what)
            family.add_metric(_labels(worker), _buckets(latency), sum_value=latency.sum_s)
        yield family


def _buckets(latency: Latency) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets."""
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    total, found = 0, []
    for bound, count in zip(bounds, latency.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def _labels(worker: Worker) -> tuple[str, str, str]:
    return worker.report.owner, worker.report.host, worker.report.model


def _gauge(name: str, text: str, value: float, version: str | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=() if version is None else ("version",))
    family.add_metric(() if version is None else (version,), float(value))
    return family
