"""Evictor: removes the sets that kvtier.eviction.choice chooses. One evictor works on a root at a time.

The evictor holds a lease and renews it with every set. If the lease has expired and another engine has taken it, the
index rejects the removal by its fencing token, and the evictor stops.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvtier.errors import StaleLease
from kvtier.eviction import limits, pins
from kvtier.eviction.choice import EvictionChoice, FutureTimes, Kept, Selection
from kvtier.eviction.limits import UNLIMITED, Need, Quotas, Rules, Used
from kvtier.eviction.pins import Pin
from kvtier.eviction.set_removal import Remover
from kvtier.index import entry as entries
from kvtier.index.base import EVICT_LEASE, Index, SetInfo, writer_lease
from kvtier.runtime.units import exact, size

log = logging.getLogger("kvtier")

LEASE_TTL_S = 5.0  # seconds, renewed with every set; after a killed evictor, no engine evicts for this long
HOLES_MAX = 64  # limit of gaps among a pin's stored keys; keys behind further gaps are not protected

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """Sets that were removed, or would be. freed_bytes: disk space that was freed; 0 for a preview. kept: sets that an
    administrator selected and that stay."""

    sets: tuple[SetInfo, ...]
    freed_bytes: int
    kept: tuple[Kept, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Return the size of the sets by the index."""
        return sum(info.n_bytes for info in self.sets)


class Evictor:
    """Thread-safe as far as its index is. `folder`: `<root>/v2`, with one folder a namespace."""

    def __init__(
        self, index: Index, folder: Path, owner: str, rules: Rules = UNLIMITED, clock: Clock = time.time
    ) -> None:
        self.rules = rules
        self._index = index
        self._remover = Remover(index, folder, clock)
        self._owner = owner
        self._clock = clock
        self._evicting = threading.Lock()  # the threads of one evictor have one lease between them
        self._future = FutureTimes()
        self._evicted_bytes = 0  # since the last `take_evicted`

    def fits(self, need: Need, capacity_bytes: int) -> bool:
        """Return True if the set fits into the capacity and the quotas of its tenant and namespace. Sets that are being
        removed count until their files are gone."""
        return self._lacking(need, capacity_bytes) is None

    def waits_for_space(self, need: Need, capacity_bytes: int) -> bool:
        """Return True if the set fits as soon as processes have closed the files of evicted sets."""
        held_bytes = self._remover.held_bytes()
        return held_bytes > 0 and self.fits(need, capacity_bytes + held_bytes)

    def why_no_room(self, need: Need, capacity_bytes: int, full_capacity_bytes: int) -> str:
        """Name the limit that keeps a set from being made, and the fix. full_capacity_bytes: the configured capacity;
        `capacity_bytes` is less if the disk has less room."""
        lacking, quotas = self._lacking(need, capacity_bytes), self.quotas()
        if lacking == "capacity" and capacity_bytes < full_capacity_bytes:
            return (
                f"the root's disk has {size(capacity_bytes)} for the tier, capacity_bytes is "
                f"{exact(full_capacity_bytes)}, and nothing there can be evicted right now; if this lasts, free space "
                "on the disk"
            )
        if lacking == "capacity":
            return (
                f"capacity_bytes ({exact(full_capacity_bytes)}) is taken, and nothing can be evicted right now; if "
                "this lasts, raise it, or look at `kvtier pin`"
            )
        if lacking == "tenant":
            of, key = f"tenant {need.tenant!r}", f"capacity.tenants.{need.tenant}.quota_bytes"
            quota_bytes = quotas.of_tenant(need.tenant)
        elif lacking == "namespace":
            of, key = f"namespace {need.namespace.hex()}", "capacity.namespace_quota_bytes"
            quota_bytes = quotas.of_namespace(need.namespace)
        else:
            return "another process took the room, or has just made some; it is tried again"
        return f"{of} is at its quota of {exact(quota_bytes or 0)}; raise {key}, or set another with `kvtier quota`"

    def _lacking(self, need: Need, capacity_bytes: int) -> Literal["capacity", "tenant", "namespace"] | None:
        """Return the limit that the set would exceed."""
        now_s, n_bytes = self._clock(), self._index.counts().n_bytes
        taken_bytes = n_bytes + self._remover.pending_bytes(now_s) + self._remover.held_bytes()
        if taken_bytes + need.n_bytes > capacity_bytes:
            return "capacity"
        quotas = self.quotas()
        if quotas.of_tenant(need.tenant) is None and quotas.of_namespace(need.namespace) is None:
            return None
        sets = self._index.sets()
        used = Used.of([*sets, *self._remover.pending(sets, self._clock())])
        if quotas.tenant_excess(need.tenant, used, need.n_bytes) > 0:
            return "tenant"
        return "namespace" if quotas.namespace_excess(need.namespace, used, need.n_bytes) > 0 else None

    def make_room(self, need: Need, capacity_bytes: int) -> int | None:
        """Evict until the set fits. Return the freed bytes; None if it does not fit: another evictor or thread is at
        work, too few sets may be removed (then none is), or others took the room."""
        if self.fits(need, capacity_bytes):
            return 0

        def choose(choice: EvictionChoice) -> bool:
            return choice.make_room(need, self.quotas(), capacity_bytes)

        done = self._evict(choose, capacity_bytes)
        return done.freed_bytes if done is not None and self.fits(need, capacity_bytes) else None

    def take_evicted(self) -> int:
        """Return the bytes freed since the last call, also by evictions after which a set did not fit yet."""
        taken, self._evicted_bytes = self._evicted_bytes, 0
        return taken

    def keep_limits(self, capacity_bytes: int) -> int:
        """Remove sets that were unused for the TTL or exceed a lowered quota, and, above the high watermark, sets down
        to the low one. Return the freed bytes."""
        rules, quotas = self.rules, self.quotas()
        high_bytes = int(capacity_bytes * rules.high_fraction)
        is_below = self._index.counts().n_bytes <= high_bytes and not self._remover.pending_bytes(self._clock())
        if rules.ttl_s is None and quotas.are_none and is_below:
            return 0

        def choose(choice: EvictionChoice) -> bool:
            if rules.ttl_s is not None:
                choice.drop_unused(self._clock() - rules.ttl_s)
            choice.keep_quotas(quotas)
            choice.keep_watermarks(high_bytes, int(capacity_bytes * rules.low_fraction))
            return bool(choice.victims)

        done = self._evict(choose, capacity_bytes)
        return 0 if done is None else done.freed_bytes

    def preview(self, selection: Selection, capacity_bytes: int, ignore_pins: bool = False) -> EvictionResult:
        """Return the sets that `evict` would remove now."""
        choice = self._choice(0 if ignore_pins else capacity_bytes, for_admin=True)
        choice.select(selection, self._clock())
        return EvictionResult(tuple(choice.victims), 0, tuple(choice.kept))

    def evict(self, selection: Selection, capacity_bytes: int, ignore_pins: bool = False) -> EvictionResult | None:
        """Remove the selected sets. Return None while another evictor runs. Sets that a living engine fills stay, and
        pinned ones unless `ignore_pins`."""

        def choose(choice: EvictionChoice) -> bool:
            choice.select(selection, self._clock())
            return True

        return self._evict(choose, 0 if ignore_pins else capacity_bytes, for_admin=True)

    def sets_of(self, keys: Sequence[bytes]) -> frozenset[int]:
        """Return the ids of the sets that contain the records of these chunks."""
        found: set[int] = set()
        first = 0
        for _ in range(HOLES_MAX):
            values = self._index.resolve(keys[first:])
            found.update(location.set_id for value in values for location in entries.locations_of(value))
            first += len(values) + 1
            if first >= len(keys):
                break
        return frozenset(found)

    def quotas(self) -> Quotas:
        """Return the quotas of the settings, overridden by those set at run time."""
        return self.rules.quotas.with_notes(self._index.notes(limits.PREFIX, self._clock()))

    def protected(self, sets: Sequence[SetInfo], capacity_bytes: int) -> frozenset[int]:
        """Return the ids of the sets that pins protect, within their cap."""
        found = pins.pins_in(self._index, self._clock())
        return pins.protected_sets(sets, found, self.held(found), self.pinned_max_bytes(capacity_bytes))

    def held(self, found: Sequence[Pin]) -> dict[str, frozenset[int]]:
        """Return the sets of each pin with keys, by its id. Each pin costs the index a lookup."""
        return {pin.pin_id: self.sets_of(pin.keys) for pin in found if pin.keys}

    def pinned_max_bytes(self, capacity_bytes: int) -> int:
        """Return how many bytes pins may protect."""
        return int(capacity_bytes * self.rules.pinned_max_fraction)

    def _filled(self, sets: Sequence[SetInfo]) -> frozenset[int]:
        """Return the ids of the open sets of living engines. An open set of a killed engine can be evicted before a
        sweep closes it, because the index refuses records of removed sets."""
        owners = {info.owner for info in sets if info.is_open}
        living = {o for o in owners if self._index.lease_owner(writer_lease(o), self._clock()) is not None}
        return frozenset(info.set_id for info in sets if info.is_open and info.owner in living)

    def _choice(self, capacity_bytes: int, for_admin: bool) -> EvictionChoice:
        sets = self._future.corrected(self._index.sets(), self._clock())
        pending = self._remover.pending(sets, self._clock())  # those that `finish` could not complete
        return EvictionChoice(
            sets, self.protected(sets, capacity_bytes), self._filled(sets) if for_admin else None, pending
        )

    def _evict(
        self, choose: Callable[[EvictionChoice], bool], capacity_bytes: int, for_admin: bool = False
    ) -> EvictionResult | None:
        """Remove the sets that `choose` chooses, if it returns True. Return None if it does not, or if another evictor
        or thread is at work. for_admin: an open set of a dead engine may be removed too."""
        if not self._evicting.acquire(blocking=False):
            return None
        with ExitStack() as release:
            release.callback(self._evicting.release)
            token = self._lease()
            if token is None:
                return None
            release.callback(self._index.release_lease, EVICT_LEASE, self._owner)
            self._remover.finish(self._clock())
            choice = self._choice(capacity_bytes, for_admin)
            if not choose(choice):
                return None
            done = self._remove(choice.victims, token)
            not_reached = [Kept(info, "not reached") for info in choice.victims[len(done.sets) :]]
            return replace(done, kept=(*choice.kept, *not_reached))

    def _remove(self, victims: Sequence[SetInfo], token: int) -> EvictionResult:
        """Remove sets as long as this evictor holds the lease."""
        removed, freed_bytes = [], 0
        for info in victims:
            if self._lease() != token:
                break
            try:
                freed_bytes += self._remover.remove(info, token)
            except StaleLease:
                break
            removed.append(info)
        self._evicted_bytes += freed_bytes
        return EvictionResult(tuple(removed), freed_bytes)

    def _lease(self) -> int | None:
        """Take the lease, or renew it. Return its fencing token; None if another process holds the lease."""
        return self._index.acquire_lease(EVICT_LEASE, self._owner, self._clock(), LEASE_TTL_S)
