"""Tenants: map from a request's cache salt to the label of its tenant. Pure."""

import fnmatch
import re
from collections.abc import Sequence

from kvtier.config.capacity import TenantSettings


class Tenants:
    """Tenants of the settings. A salt listed literally belongs to that tenant; otherwise the first matching pattern
    decides."""

    def __init__(self, tenants: Sequence[TenantSettings]) -> None:
        self._exact = {salt: tenant.name for tenant in tenants for salt in tenant.cache_salts}
        self._patterns = [
            (re.compile(fnmatch.translate(salt)), tenant.name) for tenant in tenants for salt in tenant.cache_salts
        ]

    def label(self, cache_salt: str | None) -> str:
        """Return the tenant's name; "" for a request without a tenant."""
        if not cache_salt:
            return ""
        exact = self._exact.get(cache_salt)
        if exact is not None:
            return exact
        return next((name for pattern, name in self._patterns if pattern.match(cache_salt)), "")


NO_TENANTS = Tenants(())  # all requests are without a tenant
