"""Routes for monitoring: liveness, readiness, Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.maintenance.sweeper import is_to_be_rebuilt
from kvtier.server.access import TheRole, TheService, problems
from kvtier.server.problems import RETRY_AFTER_S
from kvtier.server.prometheus import CONTENT_TYPE, exposition
from kvtier.server.schemas import Health, Readiness

router = APIRouter()


@router.get("/healthz", summary="Liveness", tags=["health"], responses=problems())
def healthz() -> Health:
    """Answer as long as the service runs."""
    return Health(status="ok")


@router.get(
    "/readyz",
    summary="Readiness",
    tags=["health"],
    responses={**problems(), 503: {"model": Readiness, "description": "The index does not answer."}},
)
def readyz(service: TheService, response: Response) -> Readiness:
    """Answer 200 if the index answers, also while it is being rebuilt."""
    try:
        index = service.opened.index
        index.counts()
        is_lost = is_to_be_rebuilt(index, service.opened.root.folder)
        return Readiness(is_ready=True, index="to be rebuilt" if is_lost else "ok")
    except (IndexUnavailable, ConfigError):
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return Readiness(is_ready=False, index="not available")


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    tags=["health"],
    response_class=Response,
    responses={**problems(), 200: {"description": "Prometheus text.", "content": {CONTENT_TYPE: {}}}},
)
def metrics(role: TheRole, service: TheService) -> Response:
    """Return metrics for Prometheus. While the index is down, kvtier_index_up is 0 and its figures are missing."""
    try:
        seen = service.snapshot()
    except (IndexUnavailable, ConfigError):
        seen = None
    return Response(exposition(seen), media_type=CONTENT_TYPE)
