"""The table of the index in Redis, from benchmarks/results/redis_index.json; written by benchmarks/tables.py."""

from __future__ import annotations

from typing import Any

from benchmarks.tables_common import made, table, verdict
from benchmarks.tables_cpu import read

LOOKUP_TARGET_MS, PUBLISH_TARGET_S = 2.0, 10_000


def redis_index() -> list[str]:
    """Lookup, publishing and memory, and the plan that follows from them."""
    result = read("redis_index")
    one, cluster, plan = result["one"], result["cluster"], result["plan"]
    sets = one["redis_benchmark_sets_per_s"]
    return [
        f"**The index in Redis** (`benchmarks/redis_index.py`, Redis {result['redis']} on the same machine as its "
        f"clients, {result['cores']} cores of {result['cpu']}, on which {result['load_before']:.1f} other processes "
        f"ran when it began; {made(result)}):",
        "",
        *table(
            ["", "one server", "cluster of 3 masters"],
            [
                ["lookup of 391 chunks, one round trip to each shard: median (p99)", _ms(one, "lookup"),
                 _ms(cluster, "lookup")],
                ["the same keys by redis-py alone: MGET; its cluster pipeline", _ms(one, "bare MGET"),
                 _ms(cluster, "redis-py's pipeline")],
                ["an empty round trip (PING)", _ms(one, "PING"), ""],
                ["published by 4 processes, chunks a second", *(f"{part['publish']['chunks_per_s']:,.0f}"
                                                                for part in (one, cluster))],
                ["SET of as many bytes by redis-benchmark, a second", f"{sets:,.0f}", ""],
                ["memory a chunk, sets of 32 / of 256 chunks", *(_bytes(part) for part in (one, cluster))],
            ],
        ),
        "",
        f"Goals: a lookup within {LOOKUP_TARGET_MS:.0f} ms in the median on one server: "
        f"{verdict(one['lookup']['lookup']['p50_ms'] <= LOOKUP_TARGET_MS)}; {PUBLISH_TARGET_S:,} chunks a second: "
        f"{verdict(one['publish']['chunks_per_s'] >= PUBLISH_TARGET_S)}. In the cluster, three servers and four "
        "clients share the cores.",
        "",
        f"On paper, from these figures: {plan['chunks'] / 1e6:,.0f} million chunks in {plan['sets']:,} sets take "
        f"{plan['bytes'] / 2**30:.1f} GiB: {plan['shards']} shards of {plan['shard_bytes'] / 2**30:.0f} GiB, "
        f"{plan['fill']:.0%} full, between which entries spread with a deviation of {plan['tag_spread_percent']:.0f}%. "
        f"The servers' time in scripts allows {plan['published_per_s_and_shard']:,} published chunks a second and "
        f"shard, and that in MGET {plan['looked_up_per_s_and_shard'] / 1e6:.1f} million looked up ones; network and "
        "protocol come on top, so plan for a fraction. Sets are listed whole by evictors: with so many chunks, choose "
        "`segment_bytes` so that a set holds hundreds of them.",
    ]  # fmt: skip


def _ms(part: dict[str, Any], name: str) -> str:
    spread = part["lookup"][name]
    return f"{spread['p50_ms']:.2f} ms ({spread['p99_ms']:.2f})"


def _bytes(part: dict[str, Any]) -> str:
    return " / ".join(f"{part['bytes_per_chunk'][slots]:.0f} B" for slots in ("32", "256"))
