"""`kvtier stats`: content of a root; figures of its engines, if the index can be read."""

import os
from collections.abc import Sequence
from dataclasses import asdict

from kvtier.admin.answers import LatencySummary, Snapshot, TierFill
from kvtier.admin.opened import Opened, opened
from kvtier.admin.stats import snapshot
from kvtier.cli.app import app
from kvtier.cli.place import CommandTarget, ConfigOption, JsonOption, PathArgument, deployment, find_place
from kvtier.cli.root import readable_index
from kvtier.cli.tables import UNKNOWN, percent, print_table, seconds, share, when
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import NamespaceStats
from kvtier.maintenance.scrub import stats as stats_of
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import counted, rate, size
from kvtier.storage.filesystem import FreeSpace
from kvtier.storage.root import is_read_only

WORKERS_SHOWN, PREFIXES_SHOWN = 50, 10
OF_ENGINES = {"rates", "totals", "latencies", "workers", "tenants", "top_prefixes"}  # fields that need the index only
Table = tuple[str, list[tuple[str, ...]], tuple[int, ...]]  # title, rows with a header, right-aligned columns


@app.command("stats", epilog=MEANINGS)
def stats(path: PathArgument = None, config: ConfigOption = None, as_json: JsonOption = False) -> int:
    """Show what a root stores and, if its index can be read, how its engines fare."""
    place = find_place(path, config)
    kind = place.settings.index.kind
    if place.is_bare or kind == "memory" or (kind == "embedded" and is_read_only(place.root)):
        return _stats_of_root(place, as_json)
    with deployment(path, config, reads=True) as target:
        seen = snapshot(target)
        if as_json:
            head = {"root": str(target.root.path), "index_kind": target.settings.index.kind}
            print_json(head | seen.model_dump(mode="json"))
        else:
            _print(target, seen)
    return OK if all(row.is_readable for row in seen.namespaces) else FOUND_BAD


def _stats_of_root(place: CommandTarget, as_json: bool) -> int:
    """Print what a root stores and, if its own index can be opened, how its engines fare."""
    root = place.root
    with readable_index(root, place.settings.index) as index:
        found = stats_of(root, index)
        is_own = not isinstance(index, MemoryIndex)  # one made from the headers knows no engines
        seen = snapshot(opened(place.settings, root, index)) if is_own else None
    if as_json:
        namespaces = [{"id": of.namespace.id.hex(), "tokens": of.tokens, **asdict(of)} for of in found.namespaces]
        engines = seen.model_dump(mode="json", include=OF_ENGINES) if seen else {}
        print_json(engines | {"root": str(root.path), **asdict(found), "namespaces": namespaces})
        return FOUND_BAD if found.unreadable else OK
    rows = [_root_row(entry) for entry in found.namespaces]
    if rows:
        titles = ("namespace", "model", "KV", "codec", "chunks", "tokens", "sets", "segments", "on disk", "last used")
        print_table([titles, *rows], right=(4, 5, 6, 7, 8))
    free = FreeSpace.of(os.statvfs(root.folder)).n_bytes
    print(f"{root.path}: {size(found.n_bytes)} in {counted(len(rows), 'namespace')}, {size(free)} free on the disk")
    for fault in found.unreadable:
        print(f"BAD {fault}")
    if seen:
        arenas = [tier for tier in seen.tiers if tier.tier != "filesystem"]  # the size of this one is in the settings
        _print_engines(seen, ("tiers", _tiers(arenas), (1, 2)))
    print(_left_out(place, is_own))
    return FOUND_BAD if found.unreadable else OK


def _left_out(place: CommandTarget, is_own: bool) -> str:
    """Return a line that names what is not shown, and why. is_own: the root's own index was read."""
    if place.is_bare:
        what = "capacity, quotas and pins" if is_own else "engines, capacity, quotas and pins"
        return f"not shown: {what}; name the engines' settings with --config FILE, or set KVTIER_ROOT if they have none"
    where = "in the memory of each engine" if place.settings.index.kind == "memory" else "on a read-only mount"
    return f"not shown: engines, capacity, quotas and pins; the index is {where}"


def _root_row(entry: NamespaceStats) -> tuple[str, ...]:
    namespace, shape = entry.namespace, entry.namespace.geometry
    sets = f"{entry.sets}" + (f" ({entry.open_sets} open)" if entry.open_sets else "")
    return (
        namespace.id.hex()[:12],
        entry.model or namespace.engine,
        f"{shape.layers}x{shape.kv_heads} {shape.dtype}",
        namespace.codec.name,
        f"{entry.chunks:,}",
        f"{entry.tokens:,}",
        sets,
        f"{entry.segments:,}",
        size(entry.n_bytes),
        when(entry.last_used_s),
    )


def _print(target: Opened, seen: Snapshot) -> None:
    capacity, index = seen.capacity, seen.index
    print(
        f"{target.root.path}: {share(capacity.used_bytes, capacity.capacity_bytes)} reserved by segment sets, "
        f"{size(capacity.pinned_bytes)} pinned, {size(capacity.disk_free_bytes)} free on the disk\n"
        f"index: {target.settings.index.kind}, {counted(index.chunks, 'chunk')} in "
        f"{counted(index.sets, 'segment set')}\n"
        f"eviction: above {percent(capacity.high_watermark)} down to {percent(capacity.low_watermark)}"
    )
    _print_engines(seen, ("tiers", _tiers(seen.tiers), (1, 2)), ("namespaces", _namespaces(seen), (3, 4, 5)))


def _print_engines(seen: Snapshot, *tables: Table) -> None:
    """Print how engines and tenants fare. tables: printed before theirs."""
    for text in _facts(seen):
        print(text)
    for title, rows, right in (
        *tables,
        ("tenants", _tenants(seen), (1, 2, 3)),
        ("latencies, since the engines' start", _latencies(seen), (1, 2, 3, 4)),
        ("engines, since the start of each", _workers(seen), (2, 3, 4, 5, 6, 7)),
        ("prefixes that are loaded most", _prefixes(seen), (2, 3, 4)),
    ):
        if len(rows) > 1:
            print(f"\n{title}:")
            print_table(rows, right)
    if len(seen.workers) > WORKERS_SHOWN:
        print(f"... and {len(seen.workers) - WORKERS_SHOWN} more engines")


def _facts(seen: Snapshot) -> list[str]:
    now, total = seen.rates, seen.totals
    if not seen.workers:
        return ["engines: 0; none reports, so there are no rates"]
    saved = "TTFT saved not measured (no prefill was timed yet)"
    if total.ttft_saved_s is not None:
        saved = f"{seconds(total.ttft_saved_s)} of TTFT saved"
    ceiling = seen.read_ceiling_bytes_s
    of_ceiling = f" ({percent(now.file_read_bytes_s / ceiling)} of {rate(ceiling)} from files)" if ceiling else ""
    return [
        f"engines: {len(seen.workers)}",
        f"in the last interval: hit ratio {percent(now.hit_ratio)}, loading {rate(now.load_bytes_s)}{of_ceiling}, "
        f"saving {rate(now.save_bytes_s)}, evicting {rate(now.evicted_bytes_s)}",
        f"since the engines' start: hit ratio {percent(total.hit_ratio)}, {size(total.load_bytes)} loaded, "
        f"{size(total.save_bytes)} saved, {saved}, {total.errors:,.0f} errors",
    ]


def _tiers(tiers: Sequence[TierFill]) -> list[tuple[str, ...]]:
    rows = [
        (found.tier, share(found.used_bytes, found.size_bytes), percent(found.used_bytes / found.size_bytes))
        for found in tiers
        if found.size_bytes
    ]
    return [("tier", "used", "fill"), *rows]


def _namespaces(seen: Snapshot) -> list[tuple[str, ...]]:
    served = {worker.report.namespace for worker in seen.workers}
    rows = [
        (
            row.id[:12],
            (row.model or row.engine or UNKNOWN) + ("" if row.id in served else " (no engine now)"),
            f"{row.kv} {row.codec}, chunks of {row.chunk_tokens}" if row.is_readable else "BAD: unreadable",
            f"{row.sets:,}",
            share(row.n_bytes, row.quota_bytes),
            f"{row.hits:,}",
            when(row.last_used_s),
        )
        for row in seen.namespaces
    ]
    return [("namespace", "model", "KV", "sets", "reserved", "uses", "last used"), *rows]


def _tenants(seen: Snapshot) -> list[tuple[str, ...]]:
    if not any(row.label for row in seen.tenants):  # all engines and requests are without a label
        return []
    rows = [
        (
            row.label or "(without a label)",
            f"{row.sets:,}",
            share(row.n_bytes, row.quota_bytes),
            f"{row.hits:,}",
            when(row.last_used_s),
        )
        for row in seen.tenants
    ]
    return [("tenant", "sets", "reserved", "uses", "last used"), *rows]


def _latencies(seen: Snapshot) -> list[tuple[str, ...]]:
    found: tuple[tuple[str, LatencySummary], ...] = (
        ("lookup of a prompt", seen.latencies.lookup),
        ("load of a request", seen.latencies.load),
        ("save of a chunk, gather to publication", seen.latencies.save),
    )
    rows = [
        (name, f"{of.count:,}", seconds(of.p50_s), seconds(of.p95_s), seconds(of.p99_s))
        for name, of in found
        if of.count
    ]
    return [("", "count", "median", "95 %", "99 %"), *rows]


def _workers(seen: Snapshot) -> list[tuple[str, ...]]:
    rows = []
    for worker in seen.workers[:WORKERS_SHOWN]:
        report = worker.report
        rows.append(
            (
                f"{report.host} {report.pid}",
                report.model or UNKNOWN,
                f"{report.ranks}",
                percent(worker.hit_ratio),
                size(report.counters.get("load_bytes", 0)),
                size(report.counters.get("save_bytes", 0)),
                seconds(report.ttft_saved_s),
                f"{worker.age_s:.0f} s ago",
            )
        )
    return [("engine", "model", "ranks", "hit ratio", "loaded", "saved", "TTFT saved", "report"), *rows]


def _prefixes(seen: Snapshot) -> list[tuple[str, ...]]:
    rows = [
        (
            row.key,
            row.model or row.namespace[:12],
            f"{row.tokens:,}",
            f"{row.hits:,}",
            f"{row.workers}",
            "pinned" if row.is_pinned else "",
        )
        for row in seen.top_prefixes[:PREFIXES_SHOWN]
    ]
    return [("last key", "model", "tokens", "loads", "engines", ""), *rows]
