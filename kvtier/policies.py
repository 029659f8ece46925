"""Which class a configured policy of eviction means. Apart from `assemble`, for the administration evicts, too, and
should not have to wait for torch."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.config import Settings
from kvtier.eviction.base import Policy
from kvtier.eviction.limits import Rules
from kvtier.eviction.lru import Lru
from kvtier.eviction.s3fifo import S3Fifo
from kvtier.evictor import Evictor
from kvtier.index.base import Index
from kvtier.root import Root

POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "s3fifo": S3Fifo}


def make_evictor(settings: Settings, index: Index, root: Root, owner: str) -> Evictor:
    """Of a root; `owner` is whoever it removes things for."""
    capacity = settings.capacity
    return Evictor(index, root.folder, owner, Rules.of(capacity), POLICIES[capacity.policy]())
