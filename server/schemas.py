"""JSON answers of the admin service besides those of operations (kvtier.admin.answers).

`Overview` has all figures of the dashboard: the page requests it every few seconds, and `History` once when it opens.
"""

from __future__ import annotations

from typing import Literal

from kvtier.admin.answers import Answer, Figures, Snapshot, Worker
from kvtier.runtime.versions import installed

VERSION = installed("kvtier", "0")


class Problem(Answer):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str = ""
    errors: list[FieldError] = []


class FieldError(Answer):
    """One fault of a request. where: such as `body.tokens.3`."""

    where: str
    what: str


class Health(Answer):
    status: Literal["ok"]


class Readiness(Answer):
    """is_ready: the index answers. to be rebuilt: it lacks the segments; the next engine that starts, or `kvtier index
    rebuild`, reads them."""

    is_ready: bool
    index: Literal["ok", "to be rebuilt", "not available"]


class Deployment(Answer):
    """Deployment that this service manages. role: rights of the caller."""

    root: str
    index_kind: str
    version: str
    role: Literal["read-only", "admin"]


class Overview(Snapshot):
    """All that the dashboard shows."""

    deployment: Deployment


class HistoryPoint(Answer):
    at_s: float
    used_bytes: int
    workers: int
    hit_ratio: float | None
    load_bytes_s: float
    save_bytes_s: float
    evicted_bytes_s: float
    ttft_saved_s_per_s: float | None


class History(Answer):
    """History since the start of the service, oldest first, one point every `interval_s` seconds, limited in length. It
    ends with the service: Prometheus keeps more."""

    interval_s: float
    points: list[HistoryPoint]


class Stats(Figures):
    """Overview without the lists of engines and prefixes."""

    deployment: Deployment


class Workers(Answer):
    """unreadable: notes in the index that are no reports."""

    workers: list[Worker]
    unreadable: int


Problem.model_rebuild()
