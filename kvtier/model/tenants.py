"""Whose a request is: from its cache salt to the label of a tenant. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from kvtier.config.capacity import TenantSettings


class Tenants:
    """A salt that stands in the settings letter by letter is that tenant's; else the first pattern counts."""

    def __init__(self, tenants: Sequence[TenantSettings]) -> None:
        self._exact = {salt: tenant.name for tenant in tenants for salt in tenant.cache_salts}
        self._patterns = [
            (re.compile(fnmatch.translate(salt)), tenant.name) for tenant in tenants for salt in tenant.cache_salts
        ]

    def label(self, cache_salt: str | None) -> str:
        """The tenant's name; "" for a request of nobody in particular."""
        if not cache_salt:
            return ""
        exact = self._exact.get(cache_salt)
        if exact is not None:
            return exact
        return next((name for pattern, name in self._patterns if pattern.match(cache_salt)), "")


NO_TENANTS = Tenants(())
"""Everybody is nobody in particular."""
