"""Changes by an administrator: eviction, pins and quotas."""

import uuid
from collections.abc import Sequence
from typing import Literal, get_args

from kvtier.admin.answers import Evicted, KeptSets, PinRow, Pins, QuotaList, QuotaRow
from kvtier.admin.listing import row_of
from kvtier.admin.lookup import SETS_SHOWN_MAX
from kvtier.admin.opened import AdminRefusal, Busy, NotThere, Opened
from kvtier.config.capacity import TENANT_BYTES_MAX
from kvtier.eviction import limits, pins, pins_backup
from kvtier.eviction.choice import Kept, KeptReason, Selection
from kvtier.eviction.limits import Used, quota_value
from kvtier.eviction.pins import Pin
from kvtier.index.base import SetInfo
from kvtier.runtime.units import exact, size

KEPT_OWNERS_MAX = 5  # engines named in an answer about sets that stay
PINS_MAX = 1000  # pins in a root
PIN_LABEL_CHARS_MAX = 200
# Chunk keys of a pin: 2 million tokens in chunks of 256. A longer record would be slow to read at each eviction.
PIN_KEYS_MAX = 8192


def evict(opened: Opened, selection: Selection, dry_run: bool, include_pinned: bool = False) -> Evicted:
    """Evict whole sets. Raises Busy, NotThere, IndexUnavailable, TierUnavailable."""
    capacity_bytes = opened.settings.capacity_bytes
    sets = opened.index.sets()
    _check_known(opened, selection, sets)
    protected = opened.protected(sets) if include_pinned else ()
    act = opened.evictor.preview if dry_run else opened.evictor.evict
    done = act(selection, capacity_bytes, include_pinned)
    if done is None:
        raise Busy("another evictor is at work; try again in a moment")
    kept = [row for why in get_args(KeptReason) if (row := _kept(done.kept, why)) is not None]
    return Evicted(
        dry_run=dry_run,
        is_complete=all(row.why != "not reached" for row in kept),
        n_sets=len(done.sets),
        n_bytes=done.n_bytes,
        unlinked_bytes=done.freed_bytes,
        sets=[row_of(info, protected) for info in done.sets[:SETS_SHOWN_MAX]],
        kept=kept,
    )


def _check_known(opened: Opened, selection: Selection, sets: Sequence[SetInfo]) -> None:
    tenant, namespace = selection.tenant, selection.namespace
    known = {found.name for found in opened.settings.capacity.tenants} | {info.tenant for info in sets}
    if tenant and tenant not in known:
        labels = ", ".join(repr(label) for label in sorted(known - {""})[:SETS_SHOWN_MAX]) or "none"
        raise NotThere(
            f"no tenant in the settings and no segment set has the label {tenant!r}; known labels: {labels}; "
            'the label "" stands for requests without one'
        )
    if namespace and namespace not in {info.namespace for info in sets} and namespace not in opened.book.ids():
        raise NotThere(f"there is no namespace {namespace.hex()} in {opened.root.path}")


def _kept(found: Sequence[Kept], why: KeptReason) -> KeptSets | None:
    """Summarize the sets that stay for this reason; None if there are none."""
    sets = [kept.info for kept in found if kept.why == why]
    owners = sorted({info.owner for info in sets if info.is_open and info.owner})[:KEPT_OWNERS_MAX]
    n_bytes = sum(info.n_bytes for info in sets)
    return KeptSets(why=why, n_sets=len(sets), n_bytes=n_bytes, owners=owners) if sets else None


def list_pins(opened: Opened) -> Pins:
    """Raises IndexUnavailable."""
    sets = opened.index.sets()
    found = pins.pins_in(opened.index, opened.clock())
    held = opened.evictor.held(found)
    max_bytes = opened.evictor.pinned_max_bytes(opened.settings.capacity_bytes)
    protected = pins.protected_sets(sets, found, held, max_bytes)
    rows = [_pin_row(pin, [info for info in pins.meant(pin, held, sets) if info.set_id in protected]) for pin in found]
    return Pins(
        pins=rows,
        pinned_bytes=sum(info.n_bytes for info in sets if info.set_id in protected),
        max_bytes=max_bytes,
    )


def add_pin(
    opened: Opened, namespace: bytes, keys: Sequence[bytes] | None, label: str = "", ttl_s: float | None = None
) -> PinRow:
    """Pin a namespace or a prefix. A pin also protects chunks that are stored later.

    keys: chunk keys of the prefix, from its first chunk on; None: the whole namespace. ttl_s: life of the pin, seconds.
    Raises AdminRefusal when the pin could not protect all of it, IndexUnavailable, TierUnavailable.
    """
    if keys is not None and len(keys) > PIN_KEYS_MAX:
        raise AdminRefusal(f"the prefix has {len(keys)} chunks; a pin protects at most {PIN_KEYS_MAX}")
    if len(label) > PIN_LABEL_CHARS_MAX or not label.isprintable():
        raise AdminRefusal(f"the label {label!r}: it must have at most {PIN_LABEL_CHARS_MAX} printable characters")
    now, shared_s = opened.clock(), opened.index.shared_s
    expires_s = None if ttl_s is None else now + ttl_s
    named = None if keys is None else tuple(keys)
    expires_shared_s = None if expires_s is None else shared_s(expires_s)
    pin = Pin(uuid.uuid4().hex, namespace, named, label, shared_s(now), expires_shared_s)
    sets = opened.index.sets()
    others = pins.pins_in(opened.index, now)
    if len(others) >= PINS_MAX:
        raise AdminRefusal(f"there are {len(others)} pins already; remove some")
    held = opened.evictor.held([*others, pin])
    max_bytes = opened.evictor.pinned_max_bytes(opened.settings.capacity_bytes)
    meant = pins.meant(pin, held, sets)
    protected = pins.protected_sets(sets, others, held, max_bytes) | {info.set_id for info in meant}
    total = sum(info.n_bytes for info in sets if info.set_id in protected)
    if total > max_bytes:
        raise AdminRefusal(
            f"pins would protect {size(total)} and may protect {size(max_bytes)} "
            "(capacity.pinned_max_fraction of capacity_bytes)"
        )
    pins_backup.put(opened.index, opened.root.folder, pin.name, pin.pack(), expires_s)
    return _pin_row(pin, meant)


def drop_pin(opened: Opened, pin_id: str) -> None:
    """Remove a pin. Raises NotThere, IndexUnavailable, TierUnavailable."""
    if not pins_backup.drop(opened.index, opened.root.folder, pins.PREFIX + pin_id):
        raise NotThere(f"there is no pin {pin_id}")


def list_quotas(opened: Opened) -> QuotaList:
    """Raises IndexUnavailable."""
    noted = opened.index.notes(limits.PREFIX, opened.clock())
    quotas = opened.evictor.quotas()
    used = Used.of(opened.index.sets())

    def row(kind: Literal["tenant", "namespace"], of: str, quota_bytes: int | None, used_bytes: int) -> QuotaRow:
        is_run_time = limits.PREFIX + f"{kind}/{of}" in noted
        return QuotaRow(kind=kind, of=of, quota_bytes=quota_bytes, used_bytes=used_bytes, is_run_time=is_run_time)

    rows = [row("tenant", name, quota, used.tenants.get(name, 0)) for name, quota in sorted(quotas.tenants.items())]
    rows += [
        row("namespace", id_.hex(), quota, used.namespaces.get(id_, 0))
        for id_, quota in sorted(quotas.namespaces.items())
    ]
    return QuotaList(default_namespace_bytes=quotas.default_namespace_bytes, quotas=rows)


def tenant_note(label: str) -> str:
    """Return the name of the metadata record with a tenant's quota. Raises AdminRefusal for an invalid label."""
    is_plain = label.isprintable() and not set("/\ufffd") & set(label) and label == label.strip()
    if not is_plain or not 0 < len(label.encode()) <= TENANT_BYTES_MAX:
        what = "printable, without a / and without blanks around it"
        raise AdminRefusal(f"{label!r} is no tenant's label: a label is 1 to {TENANT_BYTES_MAX} bytes in UTF-8, {what}")
    return limits.tenant_note(label)


def set_quota(opened: Opened, name: str, n_bytes: int | None) -> None:
    """Set the quota of a tenant or a namespace.

    name: `tenant_note` or `limits.namespace_note`. n_bytes: None for no limit, whatever the settings say. Raises
    AdminRefusal if the quota is above 0 and below one segment set, IndexUnavailable, TierUnavailable.
    """
    set_bytes = opened.settings.rank_set_bytes_max
    if n_bytes and n_bytes < set_bytes:
        raise AdminRefusal(
            f"a quota of {exact(n_bytes)} has no room for one segment set ({exact(set_bytes)} or more): set several "
            "times that, or 0 to keep nothing"
        )
    pins_backup.put(opened.index, opened.root.folder, name, quota_value(n_bytes), None)


def drop_quota(opened: Opened, name: str) -> None:
    """Go back to the quota of the settings. Raises NotThere if no other was set, IndexUnavailable, TierUnavailable."""
    if not pins_backup.drop(opened.index, opened.root.folder, name):
        raise NotThere("nothing was reset: no such quota was set at run time")


def _pin_row(pin: Pin, held: Sequence[SetInfo]) -> PinRow:
    return PinRow(
        id=pin.pin_id,
        namespace=pin.namespace.hex(),
        # Lone surrogates are replaced: a record is JSON of unknown origin and may contain them; an answer cannot.
        label=pin.label.encode("utf-8", "replace").decode(),
        created_s=pin.created_s,
        expires_s=pin.expires_s,
        keys=None if pin.keys is None else len(pin.keys),
        sets=len(held),
        n_bytes=sum(info.n_bytes for info in held),
    )
