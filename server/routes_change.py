"""Routes that change something, for the admin token. Each change is written to the log."""

import logging
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from kvtier.admin import change
from kvtier.admin.answers import Evicted, HexId, PinRow, QuotaList, VerifyJob
from kvtier.admin.lookup import prefix_keys
from kvtier.config.capacity import TENANT_BYTES_MAX
from kvtier.eviction.choice import Selection
from kvtier.eviction.limits import namespace_note
from kvtier.runtime.units import counted
from kvtier.server.access import TheService, an_admin, no_parameters, no_values, problems
from kvtier.server.problems import Refused
from kvtier.server.requests import Clearing, Eviction, PinRequest, Quota
from kvtier.server.routes_look import JobId, bytes_of
from kvtier.server.service import Service

log = logging.getLogger("kvtier")

router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_parameters), Depends(an_admin)])
remove = partial(router.delete, status_code=204, response_class=Response)

Label = Annotated[str, Path(min_length=1, max_length=TENANT_BYTES_MAX, pattern=r"^[^/]+$")]
NamespaceId = Annotated[HexId, Path()]
PinId = Annotated[HexId, Path()]


@router.post("/evict", summary="Evict segment sets", tags=["eviction"], responses=problems(404, 409, 415, 429))
def evict(service: TheService, wanted: Eviction) -> Evicted:
    """Remove segment sets, or with dry_run (the default) list them. The answer names the sets that stay, and why."""
    if not wanted.dry_run and not wanted.model_dump(exclude={"dry_run"}, exclude_none=True):
        raise Refused(409, "this would evict everything: say which sets are meant, or use /api/v1/clear")
    opened, prefix, set_ids = service.opened, wanted.prefix, None
    if prefix is not None:
        keys = prefix_keys(opened, prefix.tokens, prefix.cache_salt, bytes.fromhex(prefix.namespace))
        set_ids = opened.evictor.sets_of(keys)
    selection = Selection(wanted.n_bytes, wanted.unused_s, bytes_of(wanted.namespace), wanted.tenant, set_ids)
    return _evict(service, selection, wanted.dry_run)


@router.post(
    "/clear",
    summary="Evict everything, or a whole namespace",
    tags=["eviction"],
    responses=problems(404, 409, 415, 429),
)
def clear(service: TheService, wanted: Clearing) -> Evicted:
    """Remove all segment sets of a namespace, or of all; with dry_run (the default) list them. The answer names the
    sets that stay, and why."""
    return _evict(service, Selection(namespace=bytes_of(wanted.namespace)), wanted.dry_run, wanted.include_pinned)


@router.post(
    "/pins", summary="Pin a namespace or a prefix", tags=["pins"], status_code=201, responses=problems(404, 409, 415)
)
def pin(service: TheService, wanted: PinRequest) -> PinRow:
    """Protect a namespace, or a prefix in it, from eviction."""
    opened, namespace = service.opened, bytes.fromhex(wanted.namespace)
    if wanted.tokens is not None and wanted.keys is not None:
        raise Refused(409, "give tokens or keys, not both")
    opened.book.get(namespace)
    if wanted.cache_salt and wanted.tokens is None:
        raise Refused(409, "cache_salt belongs to tokens: give these, too")
    keys = None if wanted.keys is None else [bytes.fromhex(key) for key in wanted.keys]
    if wanted.tokens is not None:
        keys = prefix_keys(opened, wanted.tokens, wanted.cache_salt, namespace)
    row = change.add_pin(opened, namespace, keys, wanted.label, wanted.expires_in_s)
    what = "all" if keys is None else counted(len(keys), "chunk")
    log.info("pin %s: %s of namespace %s", row.id, what, row.namespace)
    service.changed()
    return row


@remove("/pins/{pin_id}", summary="Remove a pin", tags=["pins"], responses=problems(404))
def unpin(service: TheService, pin_id: PinId) -> None:
    """Remove a pin. The sets that it protected may be evicted again."""
    change.drop_pin(service.opened, pin_id)
    log.info("pin %s is removed", pin_id)
    service.changed()


@router.put("/quotas/tenants/{label}", summary="Set a tenant's quota", tags=["quotas"], responses=problems(409, 415))
def put_tenant_quota(service: TheService, label: Label, wanted: Quota) -> QuotaList:
    """Set a quota. It wins over the settings; sets above it are evicted soon."""
    return _set_quota(service, change.tenant_note(label), wanted)


@remove("/quotas/tenants/{label}", summary="Reset a tenant's quota", tags=["quotas"], responses=problems(404, 409))
def drop_tenant_quota(service: TheService, label: Label) -> None:
    """Return to the quota of the settings."""
    _drop_quota(service, change.tenant_note(label))


@router.put(
    "/quotas/namespaces/{namespace}",
    summary="Set a namespace's quota",
    tags=["quotas"],
    responses=problems(404, 409, 415),
)
def put_namespace_quota(service: TheService, namespace: NamespaceId, wanted: Quota) -> QuotaList:
    """Set a quota. It wins over the settings; sets above it are evicted soon."""
    service.opened.book.get(bytes.fromhex(namespace))
    return _set_quota(service, namespace_note(bytes.fromhex(namespace)), wanted)


@remove("/quotas/namespaces/{namespace}", summary="Reset a namespace's quota", tags=["quotas"], responses=problems(404))
def drop_namespace_quota(service: TheService, namespace: NamespaceId) -> None:
    """Return to the quota of the settings."""
    _drop_quota(service, namespace_note(bytes.fromhex(namespace)))


@router.post(
    "/verify",
    summary="Begin a verify job",
    tags=["verify"],
    status_code=202,
    responses=problems(429),
    dependencies=[Depends(no_values)],
)
def start_verify(service: TheService) -> VerifyJob:
    """Begin a background job that reads every record and checks every checksum."""
    job = service.verifying.start()
    log.info("verify job %s", job.id)
    return job


@router.post(
    "/verify/{job_id}/cancel",
    summary="End a verify job",
    tags=["verify"],
    responses=problems(404),
    dependencies=[Depends(no_values)],
)
def cancel_verify(service: TheService, job_id: JobId) -> VerifyJob:
    """End a job after the segment that it reads."""
    job = service.verifying.cancel(job_id)
    log.info("verify job %s is to end", job_id)
    return job


def _evict(service: Service, selection: Selection, dry_run: bool, include_pinned: bool = False) -> Evicted:
    done = change.evict(service.opened, selection, dry_run, include_pinned)
    if not dry_run:
        stay = sum(kept.n_sets for kept in done.kept)
        log.info("evicted by an administrator: %d sets, %d bytes; %d sets stay", done.n_sets, done.n_bytes, stay)
        service.changed()
    return done


def _set_quota(service: Service, note: str, wanted: Quota) -> QuotaList:
    change.set_quota(service.opened, note, wanted.quota_bytes)
    log.info("%s: %s", note, "unlimited" if wanted.quota_bytes is None else f"{wanted.quota_bytes} bytes")
    service.changed()
    return change.list_quotas(service.opened)


def _drop_quota(service: Service, note: str) -> None:
    change.drop_quota(service.opened, note)
    log.info("%s: reset to the quota of the settings", note)
    service.changed()
