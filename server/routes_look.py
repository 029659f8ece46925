"""Routes that only read, open to both tokens; and the routes for monitoring."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import ConfigDict, Field

from kvtier.admin.answers import HexId, LookupAnswer, Pins, QuotaList, SetDetails, SetId, SetPage
from kvtier.admin.change import list_pins, list_quotas
from kvtier.admin.listing import PAGE_MAX, describe_set, list_sets
from kvtier.admin.lookup import look_up
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.maintenance.sweeper import is_to_be_rebuilt
from kvtier.server.access import TheRole, TheService, no_parameters, problems, the_role
from kvtier.server.auth import Role
from kvtier.server.problems import RETRY
from kvtier.server.prometheus import CONTENT_TYPE, exposition
from kvtier.server.requests import Named, Tenant, TokensToLookUp
from kvtier.server.schemas import VERSION, Deployment, Health, History, Overview, Readiness

router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_parameters), Depends(the_role)])
paged = APIRouter(prefix="/api/v1", dependencies=[Depends(the_role)])  # its query is checked by name
health = APIRouter()  # for monitoring


class SetQuery(Named):
    """after: a set's id, `next_after` of the page before."""

    model_config = ConfigDict(extra="forbid")
    namespace: HexId | None = None
    tenant: Tenant | None = None
    is_open: bool | None = None
    after: SetId | None = None
    limit: Annotated[int, Field(ge=1, le=PAGE_MAX)] = 100


@router.get("/overview", summary="All figures of the dashboard", tags=["stats"], responses=problems())
def overview(role: TheRole, service: TheService) -> Overview:
    """Return everything that the dashboard shows."""
    seen, settings = service.snapshot(), service.settings
    deployment = Deployment(
        root=str(settings.root),
        index_kind=settings.index.kind,
        version=VERSION,
        role="admin" if role is Role.ADMIN else "read-only",
    )
    return Overview(deployment=deployment, **{name: getattr(seen, name) for name in type(seen).model_fields})


@router.get("/history", summary="Figures of the last while", tags=["stats"], responses=problems())
def history(service: TheService) -> History:
    """Return the figures that this service recorded, for curves."""
    return History(interval_s=service.settings.server.history_s, points=service.history())


@router.post("/lookup", summary="What is stored of a prompt", tags=["lookup"], responses=problems(404, 409, 415))
def lookup(service: TheService, asked: TokensToLookUp) -> LookupAnswer:
    """Return how much of a prompt is stored, and where. Changes nothing, not even recency."""
    return look_up(service.opened, asked.tokens, asked.cache_salt, bytes_of(asked.namespace))


@paged.get("/segments", summary="Segment sets, by page", tags=["segments"], responses=problems())
def segments(service: TheService, query: Annotated[SetQuery, Query()]) -> SetPage:
    """Return segment sets by age, a page at a time."""
    after = -1 if query.after is None else int(query.after, 16)
    return list_sets(service.opened, bytes_of(query.namespace), query.tenant, query.is_open, after, query.limit)


@router.get("/segments/{set_id}", summary="One segment set", tags=["segments"], responses=problems(404))
def segment_set(service: TheService, set_id: SetId) -> SetDetails:
    """Return one segment set, with its files."""
    return describe_set(service.opened, int(set_id, 16))


@router.get("/pins", summary="All pins", tags=["pins"], responses=problems())
def pins(service: TheService) -> Pins:
    """Return all pins, and the bytes that pins may protect."""
    return list_pins(service.opened)


@router.get("/quotas", summary="All quotas", tags=["quotas"], responses=problems())
def quotas(service: TheService) -> QuotaList:
    """Return the quotas of the settings, and those that were set at run time and win over them."""
    return list_quotas(service.opened)


# --- monitoring ---


@health.get("/healthz", summary="Liveness", tags=["health"], responses=problems())
def healthz() -> Health:
    """Answer as long as the service runs."""
    return Health(status="ok")


@health.get(
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
        response.headers.update(RETRY)
        return Readiness(is_ready=False, index="not available")


@health.get(
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


def bytes_of(hex_id: str | None) -> bytes | None:
    return None if hex_id is None else bytes.fromhex(hex_id)
