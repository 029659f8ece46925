"""For all tests: hypothesis takes no time for a failure, because the machines that run these are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvtier", deadline=None)
settings.load_profile("kvtier")
