"""The lease under which one process at a time looks after a root's files: sweeps them, or reads them back."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.index.base import Index

SWEEP_LEASE = "sweep"
LEASE_TTL_S = 5.0
"""Renewed while a sweep or rebuild goes on; so long, nobody sweeps after one that was killed."""
LEASE_RENEWAL_S = 1.0

Clock = Callable[[], float]


class SweepLease:
    """Of one process. owner: its name, unique among all that share the root. clock: seconds since the epoch."""

    def __init__(self, index: Index, owner: str, clock: Clock) -> None:
        self._index = index
        self.owner = owner
        self._clock = clock
        self._renew_s = 0.0
        self._held_until_s = 0.0
        self.lapses = 0
        """How often it was seen that others may have had it since it was asked for last."""

    def take(self) -> bool:
        """Or renews it; False when others have it."""
        asked_s = self._clock()
        self.lapses += asked_s >= self._held_until_s
        self._renew_s = asked_s + LEASE_RENEWAL_S
        is_ours = self._index.acquire_lease(SWEEP_LEASE, self.owner, asked_s, LEASE_TTL_S) is not None
        self._held_until_s = asked_s + LEASE_TTL_S if is_ours else 0.0
        return is_ours

    def renew(self) -> None:
        """Now and then: it is called for each of maybe very many sets."""
        if self._clock() >= self._renew_s:
            self.take()

    def is_held_since(self, lapses: int) -> bool:
        """Whether nobody else can have had it since there were so many lapses. Looked at right before a segment is cut
        or read back, without asking the index: in a sweep that was held up, another may have read back what this one
        would cut."""
        return self.lapses == lapses and self._clock() < self._held_until_s

    def release(self) -> None:
        self._index.release_lease(SWEEP_LEASE, self.owner)
