"""Version of kvtier."""

from __future__ import annotations

from kvtier.runtime.versions import installed

VERSION = installed("kvtier", "0")
