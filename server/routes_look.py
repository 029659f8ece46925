"""Routes that only read, for both tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
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
from kvtier.admin.listing import PAGE_MAX, Filter, describe_set, list_sets
from kvtier.admin.lookup import TOKENS_MAX, TokenPrompt, UnknownNamespace, look_up
from kvtier.admin.prompts import NoTokenizer
from kvtier.scheduler.engine_report import LABEL_CHARS_MAX
from kvtier.server.access import TheRole, TheRoot, TheService, no_parameters, problems
from kvtier.server.auth import Role
from kvtier.server.problems import Refused
from kvtier.server.requests import Named, Tenant, TokensToLookUp, ToLookUp
from kvtier.server.schemas import Deployment, History, Overview, Stats, Workers
from kvtier.server.service import Service
from kvtier.server.version import VERSION

router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_parameters)])
paged = APIRouter(prefix="/api/v1")  # its query is checked by name

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
def history(role: TheRole, service: TheService) -> History:
    """Return the figures that this service recorded, for curves."""
    return History(interval_s=service.settings.server.history_s, points=service.history())


@router.get("/workers", summary="All engines", tags=["workers"], responses=problems())
def workers(role: TheRole, service: TheService) -> Workers:
    """Return the engines whose lease is alive, with their last reports."""
    seen = service.snapshot()
    return Workers(workers=seen.workers, unreadable=seen.unreadable_reports)


@router.get("/workers/{owner}", summary="One engine", tags=["workers"], responses=problems(404))
def worker(
    role: TheRole, service: TheService, owner: Annotated[str, Path(min_length=1, max_length=LABEL_CHARS_MAX)]
) -> Worker:
    """Return one engine, by the name that it reports as `owner`."""
    found = next((seen for seen in service.snapshot().workers if seen.report.owner == owner), None)
    if found is None:
        raise Refused(404, "no engine of that name gives signs of life")
    return found


@router.post("/lookup", summary="What is stored of a prompt", tags=["lookup"], responses=problems(404, 409, 415))
def lookup(role: TheRole, opened: TheRoot, service: TheService, asked: ToLookUp) -> LookupAnswer:
    """Return how much of a prompt is stored, and where. Changes nothing, not even recency."""
    namespace = None if asked.namespace is None else bytes.fromhex(asked.namespace)
    try:
        if isinstance(asked, TokensToLookUp):
            tokens = asked.tokens
        else:
            tokens = service.tokenizers.tokens(opened, asked.prompt, namespace)
            if len(tokens) > TOKENS_MAX:
                raise Refused(409, f"the prompt has {len(tokens)} tokens, and {TOKENS_MAX} are looked up at most")
        return look_up(opened, TokenPrompt(tokens, asked.cache_salt), namespace)
    except UnknownNamespace as fault:
        raise Refused(404, str(fault)) from None
    except NoTokenizer as fault:
        raise Refused(409, str(fault)) from None


@paged.get("/segments", summary="Segment sets, by page", tags=["segments"], responses=problems())
def segments(role: TheRole, opened: TheRoot, query: Annotated[SetQuery, Query()]) -> SetPage:
    """Return segment sets by age, a page at a time."""
    namespace = None if query.namespace is None else bytes.fromhex(query.namespace)
    wanted = Filter(namespace, query.tenant, query.is_open)
    return list_sets(opened, wanted, -1 if query.after is None else int(query.after, 16), query.limit)


@router.get("/segments/{set_id}", summary="One segment set", tags=["segments"], responses=problems(404))
def segment_set(role: TheRole, opened: TheRoot, set_id: SetId) -> SetDetails:
    """Return one segment set, with its files."""
    found = describe_set(opened, int(set_id, 16))
    if found is None:
        raise Refused(404, "the index has no such segment set")
    return found


@router.get("/pins", summary="All pins", tags=["pins"], responses=problems())
def pins(role: TheRole, opened: TheRoot) -> Pins:
    """Return all pins, and the bytes that pins may protect."""
    return list_pins(opened)


@router.get("/quotas", summary="All quotas", tags=["quotas"], responses=problems())
def quotas(role: TheRole, opened: TheRoot) -> QuotaList:
    """Return the quotas of the settings, and those that were set at run time and win over them."""
    return list_quotas(opened)


@router.get("/verify", summary="The last verify jobs", tags=["verify"], responses=problems())
def verify_jobs(role: TheRole, service: TheService) -> VerifyJobs:
    """Return the last jobs, the latest first."""
    return VerifyJobs(jobs=service.verifying.all())


@router.get("/verify/{job_id}", summary="One verify job", tags=["verify"], responses=problems(404))
def verify_job(role: TheRole, service: TheService, job_id: JobId) -> VerifyJob:
    """Return the progress of a job, and its findings."""
    found = service.verifying.find(job_id)
    if found is None:
        raise Refused(404, "there is no such job, or it was long ago")
    return found


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
