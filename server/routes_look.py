"""Routes that only read, open to both tokens; and the routes for monitoring."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import ConfigDict, Field

from kvtier.admin.answers import (
    HexId,
    LookupAnswer,
    Pins,
    QuotaList,
    SetDetails,
    SetId,
    SetPage,
    VerifyJob,
    VerifyJobs,
    Worker,
)
from kvtier.admin.change import list_pins, list_quotas
from kvtier.admin.listing import PAGE_MAX, describe_set, list_sets
from kvtier.admin.lookup import TOKENS_MAX, look_up
from kvtier.admin.prompts import tokenize
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.maintenance.sweeper import is_to_be_rebuilt
from kvtier.scheduler.engine_report import LABEL_CHARS_MAX
from kvtier.server.access import TheRole, TheService, no_parameters, problems, the_role
from kvtier.server.auth import Role
from kvtier.server.problems import RETRY, Refused
from kvtier.server.prometheus import CONTENT_TYPE, exposition
from kvtier.server.requests import Named, Tenant, TokensToLookUp, ToLookUp
from kvtier.server.schemas import VERSION, Deployment, Health, History, Overview, Readiness, Stats, Workers
from kvtier.server.service import Service

router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_parameters), Depends(the_role)])
paged = APIRouter(prefix="/api/v1", dependencies=[Depends(the_role)])  # its query is checked by name
health = APIRouter()  # for monitoring

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


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
    return Overview(deployment=_deployment(service, role), **_fields(service))


@router.get("/stats", summary="How full it is, and how fast", tags=["stats"], responses=problems())
def stats(role: TheRole, service: TheService) -> Stats:
    """Return fill, rates and latencies by tier, namespace and tenant."""
    fields = {name: value for name, value in _fields(service).items() if name in Stats.model_fields}
    return Stats(deployment=_deployment(service, role), **fields)


@router.get("/history", summary="Figures of the last while", tags=["stats"], responses=problems())
def history(service: TheService) -> History:
    """Return the figures that this service recorded, for curves."""
    return History(interval_s=service.settings.server.history_s, points=service.history())


@router.get("/workers", summary="All engines", tags=["workers"], responses=problems())
def workers(service: TheService) -> Workers:
    """Return the engines whose lease is alive, with their last reports."""
    seen = service.snapshot()
    return Workers(workers=seen.workers, unreadable=seen.unreadable_reports)


@router.get("/workers/{owner}", summary="One engine", tags=["workers"], responses=problems(404))
def worker(service: TheService, owner: Annotated[str, Path(min_length=1, max_length=LABEL_CHARS_MAX)]) -> Worker:
    """Return one engine, by the name that it reports as `owner`."""
    found = next((seen for seen in service.snapshot().workers if seen.report.owner == owner), None)
    if found is None:
        raise Refused(404, "no running engine has that name")
    return found


@router.post("/lookup", summary="What is stored of a prompt", tags=["lookup"], responses=problems(404, 409, 415))
def lookup(service: TheService, asked: ToLookUp) -> LookupAnswer:
    """Return how much of a prompt is stored, and where. Changes nothing, not even recency."""
    opened, namespace = service.opened, bytes_of(asked.namespace)
    if isinstance(asked, TokensToLookUp):
        tokens = asked.tokens
    else:
        tokens = tokenize(opened, asked.prompt, namespace)
        if len(tokens) > TOKENS_MAX:
            raise Refused(409, f"the prompt has {len(tokens)} tokens, and {TOKENS_MAX} are looked up at most")
    return look_up(opened, tokens, asked.cache_salt, namespace)


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


@router.get("/verify", summary="The last verify jobs", tags=["verify"], responses=problems())
def verify_jobs(service: TheService) -> VerifyJobs:
    """Return the last jobs, the latest first."""
    return VerifyJobs(jobs=service.verifying.all())


@router.get("/verify/{job_id}", summary="One verify job", tags=["verify"], responses=problems(404))
def verify_job(service: TheService, job_id: JobId) -> VerifyJob:
    """Return the progress of a job, and its findings."""
    return service.verifying.find(job_id)


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


def _fields(service: Service) -> dict[str, object]:
    seen = service.snapshot()
    return {name: getattr(seen, name) for name in type(seen).model_fields}


def _deployment(service: Service, role: Role) -> Deployment:
    settings = service.settings
    return Deployment(
        root=str(settings.root),
        index_kind=settings.index.kind,
        version=VERSION,
        role="admin" if role is Role.ADMIN else "read-only",
    )
