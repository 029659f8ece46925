"""Which kvtier this is."""

from __future__ import annotations

from kvtier.releases import installed

VERSION = installed("kvtier", "0")
