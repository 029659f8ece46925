"""Snapshot of the tier: one read of the index's sets, counts and records, and one statvfs of the disk. It reads no
segment, and lists their folders only if the index is empty, so that its cost does not depend on the number of files."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from kvtier.admin import figures
from kvtier.admin.answers import Capacity, IndexState, NamespaceRow, Snapshot, TenantRow, TierFill
from kvtier.admin.opened import Opened
from kvtier.errors import Corrupt
from kvtier.eviction import pins
from kvtier.eviction.limits import Quotas
from kvtier.index.base import SetInfo
from kvtier.maintenance.sweeper import is_to_be_rebuilt
from kvtier.scheduler.engine_report import LABEL_CHARS_MAX, NOTE_PREFIX, WorkerReport

ROWS_MAX = 500  # namespaces, and tenants, that are shown: those with the most bytes


def snapshot(opened: Opened) -> Snapshot:
    """Raises IndexUnavailable."""
    now = opened.clock()
    sets = opened.index.sets()
    counts = opened.index.counts()
    reports, unreadable = read_reports(opened, now)
    keys = {key.hex() for pin in pins.pins_in(opened.index, now) for key in pin.keys or ()}
    protected = opened.protected(sets)
    capacity = _capacity(opened, sets, protected)
    on_disk = TierFill(tier="filesystem", used_bytes=capacity.used_bytes, size_bytes=capacity.capacity_bytes)
    quotas = opened.evictor.quotas()
    return Snapshot(
        at_s=now,
        index=IndexState(
            is_being_rebuilt=is_to_be_rebuilt(opened.index, opened.root.folder),
            chunks=counts.chunks,
            records=counts.records,
            sets=counts.sets,
            set_bytes=counts.n_bytes,
        ),
        capacity=capacity,
        tiers=[*figures.arenas_of(reports), on_disk],
        rates=figures.rates_of(reports),
        totals=figures.totals_of(reports),
        latencies=figures.latencies_of(reports),
        read_ceiling_bytes_s=figures.ceiling_of(reports),
        namespaces=_namespaces(opened, sets, protected, reports, quotas),
        tenants=_tenants(sets, quotas),
        workers=figures.workers_of(reports, now),
        unreadable_reports=unreadable,
        top_prefixes=figures.prefixes_of(reports, keys),
    )


def read_reports(opened: Opened, now_s: float) -> tuple[list[WorkerReport], int]:
    """Return the reports of living engines, and the number of records that are no reports, or name another owner. Those
    are not shown: Prometheus refuses a second series of one name."""
    notes = opened.index.notes(NOTE_PREFIX, now_s)
    reports = []
    for name, note in notes.items():
        with suppress(Corrupt):
            report = WorkerReport.read(note)
            if report.owner == name.removeprefix(NOTE_PREFIX)[:LABEL_CHARS_MAX]:
                reports.append(report.model_copy(update={"at_s": max(0.0, opened.index.local_s(report.at_s))}))
    return reports, len(notes) - len(reports)


def _capacity(opened: Opened, sets: Sequence[SetInfo], protected: Collection[int]) -> Capacity:
    settings = opened.settings
    disk = os.statvfs(opened.root.folder)
    return Capacity(
        capacity_bytes=settings.capacity_bytes,
        used_bytes=sum(info.n_bytes for info in sets),
        pinned_bytes=sum(info.n_bytes for info in sets if info.set_id in protected),
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
        high_watermark=settings.capacity.high_watermark,
        low_watermark=settings.capacity.low_watermark,
    )


def _namespaces(
    opened: Opened, sets: Sequence[SetInfo], protected: Collection[int], reports: Sequence[WorkerReport], quotas: Quotas
) -> list[NamespaceRow]:
    models = {report.namespace: report.model for report in reports}
    mine: dict[bytes, list[SetInfo]] = {namespace: [] for namespace in opened.book.ids()}
    for info in sets:
        mine.setdefault(info.namespace, []).append(info)
    shown = sorted(mine, key=lambda namespace: -sum(info.n_bytes for info in mine[namespace]))[:ROWS_MAX]
    rows = []
    for id_ in shown:
        found = opened.book.find(id_)
        shape = found.geometry if found else None
        rows.append(
            NamespaceRow(
                id=id_.hex(),
                engine=found.engine if found else "",
                model=models.get(id_.hex()) or opened.book.model(id_),
                kv=f"{shape.layers}x{shape.kv_heads} {shape.dtype}" if shape else "",
                codec=found.codec.name if found else "",
                chunk_tokens=shape.chunk_tokens if shape else 0,
                open_sets=sum(info.is_open for info in mine[id_]),
                pinned_sets=sum(info.set_id in protected for info in mine[id_]),
                quota_bytes=quotas.of_namespace(id_),
                is_readable=found is not None,
                **_usage(mine[id_]),
            )
        )
    return rows


def _tenants(sets: Sequence[SetInfo], quotas: Quotas) -> list[TenantRow]:
    """Return the tenants that have sets or a quota."""
    mine: dict[str, list[SetInfo]] = {name: [] for name in quotas.tenants if name}
    for info in sets:
        mine.setdefault(info.tenant, []).append(info)
    rows = [
        TenantRow(label=label, quota_bytes=quotas.of_tenant(label), **_usage(infos)) for label, infos in mine.items()
    ]
    return sorted(rows, key=lambda found: (-found.n_bytes, found.label))[:ROWS_MAX]


def _usage(sets: Sequence[SetInfo]) -> dict[str, Any]:
    """Return the sums of the sets of a namespace or a tenant, by the names of their rows."""
    return {
        "sets": len(sets),
        "n_bytes": sum(info.n_bytes for info in sets),
        "hits": sum(info.uses for info in sets),
        "last_used_s": max((info.used_s for info in sets), default=None),
    }
