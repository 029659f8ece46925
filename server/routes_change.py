"""Routes that change something, for the admin token. Each change is written to the log."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from kvtier.admin import change
from kvtier.admin.answers import Evicted, HexId, PinRow, QuotaList, VerifyJob
from kvtier.admin.lookup import TokenPrompt, UnknownNamespace, keys_of
from kvtier.admin.opened import Opened
from kvtier.admin.verifying import TooMany
from kvtier.config.capacity import TENANT_BYTES_MAX
from kvtier.eviction.choice import Selection
from kvtier.eviction.limits import namespace_note
from kvtier.server.access import AnAdmin, TheRoot, TheService, no_parameters, no_values, problems
from kvtier.server.problems import RETRY_AFTER_S, Refused
from kvtier.server.requests import Clearing, Eviction, PinRequest, PromptPrefix, Quota
from kvtier.server.routes_look import JobId
from kvtier.server.service import Service

log = logging.getLogger("kvtier")

router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_parameters)])
remove = partial(router.delete, status_code=204, response_class=Response)

Label = Annotated[str, Path(min_length=1, max_length=TENANT_BYTES_MAX, pattern=r"^[^/]+$")]
NamespaceId = Annotated[HexId, Path()]
PinId = Annotated[HexId, Path()]


@router.post("/evict", summary="Evict segment sets", tags=["eviction"], responses=problems(404, 409, 415, 429))
def evict(role: AnAdmin, opened: TheRoot, service: TheService, wanted: Eviction) -> Evicted:
    """Remove segment sets, or with dry_run (the default) list them. The answer names the sets that stay, and why."""
    if wanted.is_of_all and not wanted.dry_run:
        raise Refused(409, "this would evict everything: say which sets are meant, or use /api/v1/clear")
    selection = Selection(
        n_bytes=wanted.n_bytes,
        unused_s=wanted.unused_s,
        namespace=_id(wanted.namespace),
        tenant=wanted.tenant,
        set_ids=None if wanted.prefix is None else opened.evictor.sets_of(_keys(opened, wanted.prefix)),
    )
    return _evict(opened, service, selection, wanted.dry_run, False)


@router.post(
    "/clear",
    summary="Evict everything, or a whole namespace",
    tags=["eviction"],
    responses=problems(404, 409, 415, 429),
)
def clear(role: AnAdmin, opened: TheRoot, service: TheService, wanted: Clearing) -> Evicted:
    """Remove all segment sets of a namespace, or of all; with dry_run (the default) list them. The answer names the
    sets that stay, and why."""
    selection = Selection(namespace=_id(wanted.namespace))
    return _evict(opened, service, selection, wanted.dry_run, wanted.include_pinned)


@router.post(
    "/pins", summary="Pin a namespace or a prefix", tags=["pins"], status_code=201, responses=problems(404, 409, 415)
)
def pin(role: AnAdmin, opened: TheRoot, service: TheService, wanted: PinRequest) -> PinRow:
    """Protect a namespace, or a prefix in it, from eviction."""
    namespace = bytes.fromhex(wanted.namespace)
    if wanted.tokens is not None and wanted.keys is not None:
        raise Refused(409, "give tokens or keys, not both")
    if opened.book.find(namespace) is None:
        raise Refused(404, f"there is no namespace {wanted.namespace}")
    if wanted.cache_salt and wanted.tokens is None:
        raise Refused(409, "cache_salt belongs to tokens: give these, too")
    keys = None if wanted.keys is None else tuple(bytes.fromhex(key) for key in wanted.keys)
    if wanted.tokens is not None:
        prefix = PromptPrefix(namespace=wanted.namespace, tokens=wanted.tokens, cache_salt=wanted.cache_salt)
        keys = tuple(_keys(opened, prefix))
        if len(keys) > change.PIN_KEYS_MAX:
            raise Refused(409, f"these are {len(keys)} chunks; a pin is of {change.PIN_KEYS_MAX} at most")
    expires_s = None if wanted.expires_in_s is None else opened.clock() + wanted.expires_in_s
    try:
        row = change.add_pin(opened, change.NewPin(namespace, keys, wanted.label, expires_s))
    except (change.OverCap, change.WrongLabel) as fault:
        raise Refused(409, str(fault)) from None
    log.info("pin %s: %s of namespace %s", row.id, "all" if keys is None else f"{len(keys)} chunks", row.namespace)
    service.changed()
    return row


@remove("/pins/{pin_id}", summary="Remove a pin", tags=["pins"], responses=problems(404))
def unpin(role: AnAdmin, opened: TheRoot, service: TheService, pin_id: PinId) -> None:
    """Remove a pin. The sets that it protected may be evicted again."""
    if not change.drop_pin(opened, pin_id):
        raise Refused(404, "there is no such pin")
    log.info("pin %s is removed", pin_id)
    service.changed()


@router.put("/quotas/tenants/{label}", summary="Set a tenant's quota", tags=["quotas"], responses=problems(409, 415))
def put_tenant_quota(role: AnAdmin, opened: TheRoot, service: TheService, label: Label, wanted: Quota) -> QuotaList:
    """Set a quota. It wins over the settings; sets above it are evicted soon."""
    return _set_quota(opened, service, _tenant_note(label), wanted)


@remove("/quotas/tenants/{label}", summary="Reset a tenant's quota", tags=["quotas"], responses=problems(404, 409))
def drop_tenant_quota(role: AnAdmin, opened: TheRoot, service: TheService, label: Label) -> None:
    """Return to the quota of the settings."""
    _drop_quota(opened, service, _tenant_note(label))


@router.put(
    "/quotas/namespaces/{namespace}",
    summary="Set a namespace's quota",
    tags=["quotas"],
    responses=problems(404, 409, 415),
)
def put_namespace_quota(
    role: AnAdmin, opened: TheRoot, service: TheService, namespace: NamespaceId, wanted: Quota
) -> QuotaList:
    """Set a quota. It wins over the settings; sets above it are evicted soon."""
    if opened.book.find(bytes.fromhex(namespace)) is None:
        raise Refused(404, f"there is no namespace {namespace} in {opened.root.path}")
    return _set_quota(opened, service, namespace_note(bytes.fromhex(namespace)), wanted)


@remove("/quotas/namespaces/{namespace}", summary="Reset a namespace's quota", tags=["quotas"], responses=problems(404))
def drop_namespace_quota(role: AnAdmin, opened: TheRoot, service: TheService, namespace: NamespaceId) -> None:
    """Return to the quota of the settings."""
    _drop_quota(opened, service, namespace_note(bytes.fromhex(namespace)))


@router.post(
    "/verify",
    summary="Begin a verify job",
    tags=["verify"],
    status_code=202,
    responses=problems(429),
    dependencies=[Depends(no_values)],
)
def start_verify(role: AnAdmin, service: TheService) -> VerifyJob:
    """Begin a background job that reads every record and checks every checksum."""
    try:
        job = service.verifying.start()
    except TooMany as fault:
        raise Refused(429, str(fault), {"Retry-After": str(RETRY_AFTER_S)}) from None
    log.info("verify job %s", job.id)
    return job


@router.post(
    "/verify/{job_id}/cancel",
    summary="End a verify job",
    tags=["verify"],
    responses=problems(404),
    dependencies=[Depends(no_values)],
)
def cancel_verify(role: AnAdmin, service: TheService, job_id: JobId) -> VerifyJob:
    """End a job after the segment that it reads."""
    job = service.verifying.cancel(job_id)
    if job is None:
        raise Refused(404, "there is no such job, or it was long ago")
    log.info("verify job %s is to end", job_id)
    return job


def _evict(opened: Opened, service: Service, selection: Selection, dry_run: bool, include_pinned: bool) -> Evicted:
    try:
        done = change.evict(opened, selection, dry_run, include_pinned)
    except change.Busy as fault:
        raise Refused(429, str(fault), {"Retry-After": str(RETRY_AFTER_S)}) from None
    except (change.UnknownTenant, UnknownNamespace) as fault:
        raise Refused(404, str(fault)) from None
    if not dry_run:
        stay = sum(kept.n_sets for kept in done.kept)
        log.info("evicted by an administrator: %d sets, %d bytes; %d sets stay", done.n_sets, done.n_bytes, stay)
        service.changed()
    return done


def _set_quota(opened: Opened, service: Service, note: str, wanted: Quota) -> QuotaList:
    try:
        change.set_quota(opened, note, wanted.quota_bytes)
    except change.UselessQuota as fault:
        raise Refused(409, str(fault)) from None
    log.info("%s: %s bytes", note, wanted.quota_bytes)
    service.changed()
    return change.list_quotas(opened)


def _drop_quota(opened: Opened, service: Service, note: str) -> None:
    if not change.drop_quota(opened, note):
        raise Refused(404, "no such quota was set at run time")
    log.info("%s: reset to the quota of the settings", note)
    service.changed()


def _tenant_note(label: str) -> str:
    try:
        return change.tenant_note(label)
    except change.WrongLabel as fault:
        raise Refused(409, str(fault)) from None


def _keys(opened: Opened, prefix: PromptPrefix) -> list[bytes]:
    try:
        keys = keys_of(opened, TokenPrompt(prefix.tokens, prefix.cache_salt), bytes.fromhex(prefix.namespace))
    except UnknownNamespace as fault:
        raise Refused(404, str(fault)) from None
    if not keys:
        raise Refused(409, f"{len(prefix.tokens)} tokens are less than a chunk: nothing is stored of them")
    return keys


def _id(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
