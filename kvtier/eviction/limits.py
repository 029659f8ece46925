"""Limits of a root: rules from the settings, and quotas that an administrator set at run time.

A quota set at run time is a note `quota/tenant/<name>` or `quota/namespace/<hex>` with {"bytes": number | null}; it
wins over the settings, and null lifts theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvtier.config.capacity import CapacitySettings
from kvtier.eviction.set_removal import Removal
from kvtier.index.base import SetInfo
from kvtier.runtime.repeated_log import RepeatedLog

_repeated = RepeatedLog()  # quotas are read each time room is made

PREFIX = "quota/"
_TENANT, _NAMESPACE = PREFIX + "tenant/", PREFIX + "namespace/"


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes that a namespace or tenant may take; None: as much as there is."""

    default_namespace_bytes: int | None = None
    namespaces: Mapping[bytes, int | None] = field(default_factory=dict)
    tenants: Mapping[str, int | None] = field(default_factory=dict)

    def of_namespace(self, namespace: bytes) -> int | None:
        return self.namespaces.get(namespace, self.default_namespace_bytes)

    def of_tenant(self, tenant: str) -> int | None:
        return self.tenants.get(tenant)

    def tenant_excess(self, tenant: str, used: Used, more_bytes: int = 0) -> int:
        """Return by how many bytes the tenant would exceed its quota with `more_bytes`; 0 or less: it would not."""
        quota_bytes = self.of_tenant(tenant)
        return 0 if quota_bytes is None else used.tenants.get(tenant, 0) + more_bytes - quota_bytes

    def namespace_excess(self, namespace: bytes, used: Used, more_bytes: int = 0) -> int:
        """Return the same for a namespace."""
        quota_bytes = self.of_namespace(namespace)
        return 0 if quota_bytes is None else used.namespaces.get(namespace, 0) + more_bytes - quota_bytes

    @property
    def are_none(self) -> bool:
        values = (self.default_namespace_bytes, *self.namespaces.values(), *self.tenants.values())
        return all(value is None for value in values)

    def with_notes(self, notes: Mapping[str, bytes]) -> Quotas:
        """Return the quotas overridden by notes. Malformed notes are ignored."""
        namespaces, tenants = dict(self.namespaces), dict(self.tenants)
        for name, value in notes.items():
            try:
                n_bytes = json.loads(value)["bytes"]
                if n_bytes is not None and (isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 0):
                    raise ValueError(n_bytes)
                if name.startswith(_TENANT):
                    tenants[name.removeprefix(_TENANT)] = n_bytes
                elif name.startswith(_NAMESPACE):
                    namespaces[bytes.fromhex(name.removeprefix(_NAMESPACE))] = n_bytes
            except (ValueError, KeyError, TypeError, RecursionError) as fault:
                _repeated.warning(name, "the note %s is not a quota and limits nothing: %r", name, fault)
        return replace(self, namespaces=namespaces, tenants=tenants)


def tenant_note(tenant: str) -> str:
    return _TENANT + tenant


def namespace_note(namespace: bytes) -> str:
    return _NAMESPACE + namespace.hex()


def quota_value(n_bytes: int | None) -> bytes:
    """Return the content of a quota's note."""
    return json.dumps({"bytes": n_bytes}).encode()


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of kvtier.config.capacity. Fractions are of the capacity that is passed to each call: a disk may have less
    space than configured."""

    high_fraction: float = 1.0
    low_fraction: float = 1.0
    reserve_bytes: int = 0
    ttl_s: float | None = None
    pinned_max_fraction: float = 1.0
    quotas: Quotas = Quotas()

    @classmethod
    def of(cls, settings: CapacitySettings) -> Rules:
        tenants = {tenant.name: tenant.quota_bytes for tenant in settings.tenants if tenant.quota_bytes is not None}
        return cls(
            settings.high_watermark,
            settings.low_watermark,
            settings.reserve_bytes,
            settings.ttl_s,
            settings.pinned_max_fraction,
            Quotas(settings.namespace_quota_bytes, {}, tenants),
        )


UNLIMITED = Rules()  # no limit but the capacity


@dataclass(frozen=True, slots=True)
class Need:
    """Segment set to be created."""

    n_bytes: int
    namespace: bytes
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """Size of sets in total, by namespace and by tenant."""

    n_bytes: int
    namespaces: Mapping[bytes, int]
    tenants: Mapping[str, int]

    @classmethod
    def of(cls, sets: Iterable[SetInfo | Removal]) -> Used:
        namespaces: dict[bytes, int] = {}
        tenants: dict[str, int] = {}
        for info in sets:
            namespaces[info.namespace] = namespaces.get(info.namespace, 0) + info.n_bytes
            tenants[info.tenant] = tenants.get(info.tenant, 0) + info.n_bytes
        return cls(sum(namespaces.values()), namespaces, tenants)
