"""Sums, rates and rankings over the reports of engines. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import get_args

from kvtier.admin.answers import Latencies, LatencySummary, Prefix, Rates, TierFill, Totals, Worker
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import summed
from kvtier.scheduler.engine_report import Latency, Operation, WorkerReport, arena_sums, hit_ratio

PREFIXES_SHOWN = 32
INTERVAL_S_MIN = 1e-3  # shortest interval of a report from which rates are computed, seconds


def workers_of(reports: Sequence[WorkerReport], now_s: float) -> list[Worker]:
    return [
        Worker(
            age_s=max(0.0, now_s - report.at_s),
            hit_ratio=hit_ratio(report.counters),
            skipped_chunks=_sum(report.counters, names.UNSAVED),
            errors=_sum(report.counters, names.ERRORS),
            report=report,
        )
        for report in reports
    ]


def totals_of(reports: Sequence[WorkerReport]) -> Totals:
    """Sum the counters since each engine's start. Engines that have ended do not count."""
    counters = summed(report.counters for report in reports)
    ttft_saved_s = _known_sum(report.ttft_saved_s for report in reports)
    return Totals(hit_ratio=hit_ratio(counters), ttft_saved_s=ttft_saved_s, **_amounts(counters))


def rates_of(reports: Sequence[WorkerReport]) -> Rates:
    timed = [report for report in reports if report.interval_s >= INTERVAL_S_MIN]
    rates = summed({name: value / of.interval_s for name, value in of.recent.items()} for of in timed)
    return Rates(
        hit_ratio=hit_ratio(summed(report.recent for report in reports)),
        ttft_saved_s_per_s=_known_sum(
            None if report.ttft_saved_recent_s is None else report.ttft_saved_recent_s / report.interval_s
            for report in timed
        ),
        **{f"{name}_s": value for name, value in _amounts(rates).items()},
    )


def latencies_of(reports: Sequence[WorkerReport]) -> Latencies:
    found = {what: _summary([getattr(report, what) for report in reports]) for what in get_args(Operation)}
    return Latencies(**found)


def arenas_of(reports: Sequence[WorkerReport]) -> list[TierFill]:
    """Sum sizes and fills of both upper tiers over all engines, without a tier that no engine has."""
    sums = arena_sums(arena for report in reports for arena in report.arenas)
    return [TierFill(tier=tier, used_bytes=used, size_bytes=n_bytes) for tier, (n_bytes, used) in sorted(sums.items())]


def ceiling_of(reports: Sequence[WorkerReport]) -> float | None:
    """Engines of one host share its way to the storage: there the best rate counts, and hosts add up."""
    best: dict[str, float] = {}
    for report in reports:
        if report.read_ceiling_bytes_s is not None:
            best[report.host] = max(best.get(report.host, 0.0), report.read_ceiling_bytes_s)
    return sum(best.values()) if best else None


def prefixes_of(reports: Sequence[WorkerReport], pinned_keys: Collection[str]) -> list[Prefix]:
    """Return the prefixes that are loaded most often, over all engines."""
    found: dict[str, Prefix] = {}
    for report in reports:
        for prefix in report.top_prefixes:
            other = found.get(prefix.key)
            found[prefix.key] = Prefix(
                key=prefix.key,
                tokens=max(prefix.tokens, other.tokens if other else 0),
                hits=prefix.hits + (other.hits if other else 0),
                namespace=report.namespace,
                model=report.model,
                workers=1 + (other.workers if other else 0),
                is_pinned=prefix.key in pinned_keys,
            )
    return sorted(found.values(), key=lambda prefix: (-prefix.hits, prefix.key))[:PREFIXES_SHOWN]


def _amounts(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the amounts of which totals and rates are shown, by the names of the totals."""
    shown = (
        names.LOOKUP_TOKENS,
        names.HIT_TOKENS,
        names.LOAD_BYTES,
        names.FILE_READ_BYTES,
        names.SAVE_BYTES,
        names.EVICTED_BYTES,
    )
    groups = {"skipped_chunks": _sum(counters, names.UNSAVED), "errors": _sum(counters, names.ERRORS)}
    return {name: counters.get(name, 0.0) for name in shown} | groups


def _known_sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that were measured; None where none was."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum(counters: Mapping[str, float], group: Sequence[str]) -> float:
    return sum(counters.get(name, 0.0) for name in group)


def _summary(latencies: Sequence[Latency]) -> LatencySummary:
    whole = reduce(Latency.merged, latencies, Latency())
    count = sum(whole.counts)
    p50, p95, p99 = (whole.quantile_s(fraction) for fraction in (0.5, 0.95, 0.99))
    return LatencySummary(
        count=count,
        mean_s=whole.sum_s / count if count else None,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        counts=list(whole.counts),
        sum_s=whole.sum_s,
    )
