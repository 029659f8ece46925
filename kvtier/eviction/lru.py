"""Longest unused first. Remembers nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.eviction.base import State
from kvtier.index.base import SetInfo


class Lru:
    """See `kvtier.eviction.base.Policy`."""

    def victims(self, sets: Sequence[SetInfo], state: State) -> Iterator[SetInfo]:
        return iter(sorted(sets, key=lambda info: (info.used_s, info.set_id)))
