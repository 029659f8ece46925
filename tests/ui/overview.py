"""An overview as a busy deployment gives it, made of the service's own models: a field that is renamed breaks this."""

import math
import random

from kvtier.admin.answers import (
    Capacity,
    IndexState,
    Latencies,
    LatencySummary,
    NamespaceRow,
    Prefix,
    Rates,
    TenantRow,
    TierFill,
    Totals,
    Worker,
)
from kvtier.admin.figures import workers_of
from kvtier.scheduler.engine_report import ArenaFill, Latency, Times, TopPrefix, WorkerReport
from kvtier.server.schemas import Deployment, History, HistoryPoint, Overview

AT_S = 1_795_000_000.0
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B")
NAMESPACES = ("73d5c1a90e2f44b68a11c09b27de5f03", "0b9e62f7d1534c0aa4c8e3f1905b7d62")
GIB, TIB = 1 << 30, 1 << 40


def latency(middle_s: float, count: int, seed: int) -> Latency:
    times, rng = Times(), random.Random(seed)
    for _ in range(count):
        times.add(rng.lognormvariate(math.log(middle_s), 0.6))
    return times.latency()


def summary(found: Latency, times: int) -> LatencySummary:
    total = sum(found.counts)
    return LatencySummary(
        count=total * times,
        mean_s=found.sum_s / total if total else None,
        p50_s=found.quantile_s(0.5),
        p95_s=found.quantile_s(0.95),
        p99_s=found.quantile_s(0.99),
        counts=[count * times for count in found.counts],
        sum_s=found.sum_s * times,
    )


def worker(number: int) -> Worker:
    model = number % 5 // 4
    counters = {
        "lookup_tokens": 4.1e8 + number * 1e7,
        "hit_tokens": 2.9e8 + number * 6e6,
        "load_bytes": (38 + number) * 1e12,
        "save_bytes": (9 + number) * 1e11,
        "evicted_bytes": 2e11,
        "skipped_chunks_present": 88_000.0 * number,
        "skipped_chunks_queue_full": 1000.0 * number,
        "skipped_chunks_quota": 204.0 * number,
        "load_failures": 2.0 if number == 3 else 0.0,
    }
    report = WorkerReport(
        owner=f"gpu-{number:02d}-4711-a1b2c3d4",
        host=f"gpu-{number:02d}",
        pid=4711 + 13 * number,
        kvtier_version="0.1.0",
        engine="vllm",
        engine_version="0.32.0",
        model=MODELS[model],
        namespace=NAMESPACES[model],
        ranks=(1, 4)[model],
        started_s=AT_S - 86_400 * 3,
        at_s=AT_S - 2,
        interval_s=10.0,
        counters=counters,
        read_ceiling_bytes_s=51.4e9,
        prefill_token_s=6.5e-5,
        ttft_saved_s=8_120.0 + 71 * number,
        arenas=(
            ArenaFill(tier="hbm", size_bytes=4 * GIB, used_bytes=int((2.1 + number / 10) * GIB)),
            ArenaFill(tier="host", size_bytes=32 * GIB, used_bytes=(30 - number) * GIB),
        ),
    )
    (made,) = workers_of([report], AT_S)
    return made.model_copy(update={"age_s": 2.0 + number, "hit_ratio": 0.62 + 0.03 * number})


def point(at_s: float, rng: random.Random) -> HistoryPoint:
    wave = math.sin(at_s / 700) + 0.4 * math.sin(at_s / 190 + 1)
    load = max(0.0, 92e9 + 34e9 * wave + rng.gauss(0, 6e9))
    return HistoryPoint(
        at_s=at_s,
        used_bytes=int(17.1 * TIB + (at_s - AT_S) * 2e8),
        workers=5,
        hit_ratio=min(0.99, max(0.0, 0.72 + 0.09 * wave + rng.gauss(0, 0.012))),
        load_bytes_s=load,
        save_bytes_s=max(0.0, 11e9 - 4e9 * wave + rng.gauss(0, 1.2e9)),
        evicted_bytes_s=max(0.0, rng.gauss(0, 1e9) + 6e9) if at_s % 900 < 200 else 0.0,
        ttft_saved_s_per_s=load * 4.2e-10,
    )


def history(points: int = 240, interval_s: float = 15.0) -> History:
    rng = random.Random(7)
    made = [point(AT_S - n * interval_s, rng) for n in reversed(range(1, points + 1))]
    return History(interval_s=interval_s, points=made)


def top_prefixes() -> list[Prefix]:
    rng = random.Random(3)
    rows = []
    for n in range(9):
        model = n % 3 // 2
        top = TopPrefix(key=f"{rng.getrandbits(128):032x}", tokens=256 * (9 + 37 * n % 90), hits=int(18_400 / (n + 1)))
        rows.append(
            Prefix(
                **top.model_dump(),
                namespace=NAMESPACES[model],
                model=MODELS[model],
                workers=5 - n // 2,
                is_pinned=n in (0, 3),
            )
        )
    return rows


def namespace(number: int, sets: int, n_bytes: int, quota_bytes: int | None) -> NamespaceRow:
    return NamespaceRow(
        id=NAMESPACES[number],
        engine="vllm",
        model=MODELS[number],
        kv=("32x8 bfloat16", "64x8 bfloat16")[number],
        codec=("k4v4", "raw")[number],
        chunk_tokens=256,
        sets=sets,
        open_sets=6,
        pinned_sets=3,
        n_bytes=n_bytes,
        quota_bytes=quota_bytes,
        hits=918_233 >> number,
        last_used_s=AT_S - 1,
        is_readable=True,
    )


def tenants() -> list[TenantRow]:
    rows = (("", 9_412, 9.1, None), ("search", 4_120, 3.9, 4), ("support", 3_011, 2.9, 6), ("batch", 1_290, 1.2, 2))
    return [
        TenantRow(
            label=label,
            sets=sets,
            n_bytes=int(tib * TIB),
            quota_bytes=quota and quota * TIB,
            hits=sets * 61,
            last_used_s=AT_S - 3,
        )
        for label, sets, tib, quota in rows
    ]


def busy() -> Overview:
    latest = point(AT_S, random.Random(1))
    return Overview(
        at_s=AT_S,
        deployment=Deployment(root="/mnt/lustre/kvtier", index_kind="redis", version="0.1.0", role="read-only"),
        index=IndexState(
            is_being_rebuilt=False, chunks=8_120_334, records=9_020_110, sets=17_833, set_bytes=int(17.1 * TIB)
        ),
        capacity=Capacity(
            capacity_bytes=20 * TIB,
            used_bytes=int(17.1 * TIB),
            pinned_bytes=int(0.9 * TIB),
            disk_free_bytes=11 * TIB,
            high_watermark=0.95,
            low_watermark=0.85,
        ),
        tiers=[
            TierFill(tier="hbm", used_bytes=12 * GIB, size_bytes=20 * GIB),
            TierFill(tier="host", used_bytes=140 * GIB, size_bytes=160 * GIB),
            TierFill(tier="filesystem", used_bytes=int(17.1 * TIB), size_bytes=20 * TIB),
        ],
        rates=Rates(
            hit_ratio=latest.hit_ratio,
            lookup_tokens_s=1.9e6,
            hit_tokens_s=1.4e6,
            load_bytes_s=latest.load_bytes_s,
            file_read_bytes_s=latest.load_bytes_s * 0.81,
            save_bytes_s=latest.save_bytes_s,
            evicted_bytes_s=latest.evicted_bytes_s,
            skipped_chunks_s=1.5,
            errors_s=0.0,
            ttft_saved_s_per_s=latest.ttft_saved_s_per_s,
        ),
        totals=Totals(
            hit_ratio=0.704,
            lookup_tokens=2.1e9,
            hit_tokens=1.48e9,
            load_bytes=2.1e14,
            file_read_bytes=1.7e14,
            save_bytes=5.5e12,
            evicted_bytes=1.0e12,
            skipped_chunks=12_040,
            errors=2,
            ttft_saved_s=41_300,
        ),
        latencies=Latencies(
            lookup=summary(latency(0.0013, 800, 1), 57),
            load=summary(latency(0.11, 800, 2), 55),
            save=summary(latency(0.35, 800, 3), 21),
        ),
        read_ceiling_bytes_s=148e9,
        namespaces=[namespace(0, 12_101, int(11.2 * TIB), None), namespace(1, 5_732, int(5.9 * TIB), 8 * TIB)],
        tenants=tenants(),
        workers=[worker(number) for number in range(1, 6)],
        unreadable_reports=0,
        top_prefixes=top_prefixes(),
    )


def idle() -> Overview:
    """A root that nobody has used yet, and no engine."""
    nothing = dict.fromkeys(Rates.model_fields, 0.0) | {"hit_ratio": None}
    empty = summary(Latency(), 1)
    return Overview(
        at_s=AT_S,
        deployment=Deployment(root="/srv/kv", index_kind="embedded", version="0.1.0", role="admin"),
        index=IndexState(is_being_rebuilt=True, chunks=0, records=0, sets=0, set_bytes=0),
        capacity=Capacity(
            capacity_bytes=64 * GIB,
            used_bytes=0,
            pinned_bytes=0,
            disk_free_bytes=500 * GIB,
            high_watermark=0.95,
            low_watermark=0.85,
        ),
        tiers=[
            TierFill(tier="hbm", used_bytes=0, size_bytes=0),
            TierFill(tier="host", used_bytes=0, size_bytes=0),
            TierFill(tier="filesystem", used_bytes=0, size_bytes=64 * GIB),
        ],
        rates=Rates.model_validate(nothing),
        totals=Totals.model_validate(dict.fromkeys(Totals.model_fields, 0.0) | {"hit_ratio": None}),
        latencies=Latencies(lookup=empty, load=empty, save=empty),
        read_ceiling_bytes_s=None,
        namespaces=[],
        tenants=[],
        workers=[],
        unreadable_reports=0,
        top_prefixes=[],
    )
