"""Sweep lease: lets one process at a time sweep a root's files or read them back."""

from collections.abc import Callable

from kvtier.index.base import Index

SWEEP_LEASE = "sweep"
# Lifetime of the lease, seconds. It is renewed during a sweep or rebuild; after a kill, no process sweeps for so long.
LEASE_TTL_S = 5.0
LEASE_RENEWAL_S = 1.0  # interval between two renewals, seconds

Clock = Callable[[], float]


class SweepLease:
    """Lease of one process. owner: its name, unique among all that share the root. clock: seconds since the epoch."""

    def __init__(self, index: Index, owner: str, clock: Clock) -> None:
        self._index = index
        self.owner = owner
        self._clock = clock
        self._renew_s = 0.0
        self._held_until_s = 0.0
        self.lapses = 0  # number of times that the lease may have expired between two calls of `take`

    def take(self) -> bool:
        """Take or renew the lease; False while another process holds it."""
        asked_s = self._clock()
        self.lapses += asked_s >= self._held_until_s
        self._renew_s = asked_s + LEASE_RENEWAL_S
        is_ours = self._index.acquire_lease(SWEEP_LEASE, self.owner, asked_s, LEASE_TTL_S) is not None
        self._held_until_s = asked_s + LEASE_TTL_S if is_ours else 0.0
        return is_ours

    def renew(self) -> None:
        """Renew the lease when it is due; cheap enough to be called for each set."""
        if self._clock() >= self._renew_s:
            self.take()

    def is_held_since(self, lapses: int) -> bool:
        """Return True if no other process can have held the lease since `self.lapses` was `lapses`. Asks no index.

        Called right before a segment is truncated or read back: if this sweep was delayed, another one may have read
        back the records that this one would truncate.
        """
        return self.lapses == lapses and self._clock() < self._held_until_s

    def release(self) -> None:
        self._index.release_lease(SWEEP_LEASE, self.owner)
