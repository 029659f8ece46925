"""JSON answers of the admin service besides those of operations (kvtier.admin.answers).

`Overview` has all figures of the dashboard: the page requests it every few seconds, and `History` once when it opens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from kvtier.admin.answers import (
    Capacity,
    IndexState,
    Latencies,
    NamespaceRow,
    Rates,
    Snapshot,
    TenantRow,
    TierFill,
    Totals,
    Worker,
)

_ANSWER = ConfigDict(frozen=True)


class Problem(BaseModel):
    """An error (RFC 9457)."""

    model_config = _ANSWER
    type: str
    title: str
    status: int
    detail: str = ""
    errors: list[FieldError] = []


class FieldError(BaseModel):
    """One fault of a request. where: such as `body.tokens.3`."""

    model_config = _ANSWER
    where: str
    what: str


class Health(BaseModel):
    model_config = _ANSWER
    status: Literal["ok"]


class Readiness(BaseModel):
    """is_ready: the index answers. to be rebuilt: it lacks the segments; the next engine that starts, or `kvtier index
    rebuild`, reads them."""

    model_config = _ANSWER
    is_ready: bool
    index: Literal["ok", "to be rebuilt", "not available"]


class Deployment(BaseModel):
    """Deployment that this service manages. role: rights of the caller."""

    model_config = _ANSWER
    root: str
    index_kind: str
    version: str
    role: Literal["read-only", "admin"]


class Overview(Snapshot):
    """All that the dashboard shows."""

    model_config = _ANSWER
    deployment: Deployment


class HistoryPoint(BaseModel):
    model_config = _ANSWER
    at_s: float
    used_bytes: int
    workers: int
    hit_ratio: float | None
    load_bytes_s: float
    save_bytes_s: float
    evicted_bytes_s: float
    ttft_saved_s_per_s: float | None


class History(BaseModel):
    """History since the start of the service, oldest first, one point every `interval_s` seconds, limited in length. It
    ends with the service: Prometheus keeps more."""

    model_config = _ANSWER
    interval_s: float
    points: list[HistoryPoint]


class Stats(BaseModel):
    """Overview without the lists of engines and prefixes."""

    model_config = _ANSWER
    at_s: float
    deployment: Deployment
    index: IndexState
    capacity: Capacity
    tiers: list[TierFill]
    rates: Rates
    totals: Totals
    latencies: Latencies
    namespaces: list[NamespaceRow]
    tenants: list[TenantRow]


class Workers(BaseModel):
    """unreadable: notes in the index that are no reports."""

    model_config = _ANSWER
    workers: list[Worker]
    unreadable: int


Problem.model_rebuild()
