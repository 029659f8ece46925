"""S3-FIFO over segment sets: a small queue for the new, a main one for what was used again.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), with two differences that sets bring: a set
never comes back under its id, so there is no queue of ghosts; and sets that are still filled stand in no queue yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.eviction.base import Mark, State
from kvtier.index.base import SetInfo

SMALL_FRACTION = 0.2
"""Of the bytes: while the small queue has more, sets go from there. Twice the paper's: a set holds chunks of many
requests, and conversations come back to theirs after minutes (benchmarks/eviction_policies.py --tune)."""
PROMOTED_USES = 1
"""A set with so many uses leaves the small queue for the main one."""
PASSES_MAX = 3
"""However often it was used, so often at most a set is passed over in the main queue without a further use."""


@dataclass(frozen=True, slots=True)
class S3Fifo:
    """See `kvtier.eviction.base.Policy`. A set with a Mark stands in the main queue, the others in the small one."""

    small_fraction: float = SMALL_FRACTION
    promoted_uses: int = PROMOTED_USES

    def victims(self, sets: Sequence[SetInfo], state: State) -> Iterator[SetInfo]:
        new = [info for info in sets if info.set_id not in state]
        small = deque(sorted(new, key=lambda info: (info.created_s, info.set_id)))
        old = [info for info in sets if info.set_id in state]
        main = deque(sorted(old, key=lambda info: (state[info.set_id].place, info.set_id)))
        small_bytes, total_bytes = sum(info.n_bytes for info in small), sum(info.n_bytes for info in sets)
        place = max((mark.place for mark in state.values()), default=0)
        while small or main:
            place += 1
            if small and (not main or small_bytes > self.small_fraction * total_bytes):
                info = small.popleft()
                small_bytes -= info.n_bytes
                stays, left = info.uses >= self.promoted_uses, 0
            else:
                info = main.popleft()
                mark = state[info.set_id]
                left = min(PASSES_MAX, mark.left + info.uses - mark.seen)
                stays, left = left > 0, left - 1
            if stays:
                state[info.set_id] = Mark(place, info.uses, left)
                main.append(info)
            else:
                total_bytes -= info.n_bytes
                state.pop(info.set_id, None)
                yield info
