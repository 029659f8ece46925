"""LRU order of eviction, with future times corrected.

A time of a segment set later than now comes from a wrong clock, and the set was not used after it was first seen with
that time. Uncorrected, it would stay for as long as that clock was ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtier.index.base import SetInfo

FUTURE_S = 60.0  # a time is called later than now beyond this, seconds: clocks that are kept together differ by less


def least_recent_first(sets: Iterable[SetInfo]) -> list[SetInfo]:
    """Return the sets in the order in which they are evicted."""
    return sorted(sets, key=lambda info: (info.used_s, info.set_id))


class _Seen(NamedTuple):
    """A set with a time in the future. at_s: when it was seen first with this count of uses."""

    uses: int
    at_s: float


class FutureTimes:
    """Memory of one evictor: the sets of the last look that had such times. Writes nothing, because the clock that is
    wrong may be this node's, for a moment."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def corrected(self, sets: Sequence[SetInfo], now_s: float) -> list[SetInfo]:
        """Return the sets, each such time replaced by when it was seen first; a use since then counts as one now."""
        seen, found = {}, []
        for info in sets:
            if max(info.created_s, info.used_s) > now_s + FUTURE_S:
                before = self._seen.get(info.set_id)
                is_known = before is not None and before.uses == info.uses
                at_s = min(before.at_s, now_s) if before is not None and is_known else now_s
                seen[info.set_id] = _Seen(info.uses, at_s)
                info = replace(info, created_s=min(info.created_s, at_s), used_s=min(info.used_s, at_s))
            found.append(info)
        self._seen = seen
        return found
