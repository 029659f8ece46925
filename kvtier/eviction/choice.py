"""Choice of the sets to evict, in LRU order: for a new set, for a limit, or on an administrator's request. Pure: it
gets sets, limits and the time, and returns the sets to remove."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kvtier.eviction.limits import Need, Quotas, Used
from kvtier.eviction.set_removal import Removal
from kvtier.index.base import SetInfo

FUTURE_S = 60.0  # time beyond now from which on a time counts as future, seconds: synchronized clocks differ by less


@dataclass(frozen=True, slots=True)
class Selection:
    """Sets that an administrator selects: those that meet all conditions which are not None.

    n_bytes: only as many as make up so many bytes, the least recently used first. unused_s: only sets not used for so
    long. set_ids: only these sets.
    """

    n_bytes: int | None = None
    unused_s: float | None = None
    namespace: bytes | None = None
    tenant: str | None = None
    set_ids: Collection[int] | None = None

    def matches(self, info: SetInfo, now_s: float) -> bool:
        return (
            (self.unused_s is None or now_s - info.used_s >= self.unused_s)
            and (self.namespace is None or info.namespace == self.namespace)
            and (self.tenant is None or info.tenant == self.tenant)
            and (self.set_ids is None or info.set_id in self.set_ids)
        )


KeptReason = Literal["open", "pinned", "not reached"]


class Kept(NamedTuple):
    """A set that an administrator selected and that stays. open: an engine fills it; not reached: the evictor stopped
    before it came to this set."""

    info: SetInfo
    why: KeptReason


class EvictionChoice:
    """Sets to evict, chosen step by step, the least recently used first. A chosen set counts as removed in later steps.

    protected: sets that pins keep. filled: sets that stay because they are being filled; None: all open ones.
    pending: removals whose files may still take space, which is not available to a new set.
    """

    def __init__(
        self,
        sets: Sequence[SetInfo],
        protected: Collection[int],
        filled: Collection[int] | None = None,
        pending: Sequence[Removal] = (),
    ) -> None:
        if filled is None:
            filled = {info.set_id for info in sets if info.is_open}
        self.victims: list[SetInfo] = []
        self.kept: list[Kept] = []
        self._sets = sets
        self._pending = pending
        self._filled = filled
        evictable = [info for info in sets if info.set_id not in filled and info.set_id not in protected]
        self._candidates = sorted(evictable, key=lambda info: (info.used_s, info.set_id))  # in the order of eviction
        self._gone: set[int] = set()

    @property
    def used(self) -> Used:
        """Return the size of the remaining sets."""
        return Used.of([info for info in self._sets if info.set_id not in self._gone])

    @property
    def _taken(self) -> Used:
        """Return the size of the remaining sets and of pending removals."""
        return Used.of([*(info for info in self._sets if info.set_id not in self._gone), *self._pending])

    def take(self, n_bytes: int, of: Callable[[SetInfo], bool] = lambda info: True) -> bool:
        """Choose sets for which `of` holds, until they make up `n_bytes`. Return False if all of them are not
        enough."""
        if n_bytes <= 0:
            return True
        for info in self._candidates:
            if info.set_id in self._gone or not of(info):
                continue
            self.victims.append(info)
            self._gone.add(info.set_id)
            n_bytes -= info.n_bytes
            if n_bytes <= 0:
                return True
        return False

    def make_room(self, need: Need, quotas: Quotas, capacity_bytes: int) -> bool:
        """Choose sets to make room for `need`. Return True if it fits then.

        For the quota of its tenant only sets of that tenant are chosen, for the quota of its namespace only sets of
        that namespace, and then, for the capacity, any sets."""
        return (
            self._keep_tenant(need.tenant, quotas, need.n_bytes)
            and self._keep_namespace(need.namespace, quotas, need.n_bytes)
            and self.take(self._taken.n_bytes + need.n_bytes - capacity_bytes)
        )

    def keep_quotas(self, quotas: Quotas) -> None:
        """Choose sets above each quota, which may have been lowered."""
        for tenant in self.used.tenants:
            self._keep_tenant(tenant, quotas)
        for namespace in self.used.namespaces:
            self._keep_namespace(namespace, quotas)

    def _keep_tenant(self, tenant: str, quotas: Quotas, more_bytes: int = 0) -> bool:
        excess = quotas.tenant_excess(tenant, self._taken, more_bytes)
        return self.take(excess, lambda info: info.tenant == tenant)

    def _keep_namespace(self, namespace: bytes, quotas: Quotas, more_bytes: int = 0) -> bool:
        excess = quotas.namespace_excess(namespace, self._taken, more_bytes)
        return self.take(excess, lambda info: info.namespace == namespace)

    def drop_unused(self, since_s: float) -> None:
        """Choose all sets that were not used since then."""
        self.take(self.used.n_bytes, lambda info: info.used_s < since_s)

    def keep_watermarks(self, high_bytes: int, low_bytes: int) -> None:
        """Above `high_bytes`, choose sets down to `low_bytes`."""
        n_bytes = self.used.n_bytes
        if n_bytes > high_bytes:
            self.take(n_bytes - low_bytes)

    def select(self, selection: Selection, now_s: float) -> None:
        """Choose the selected sets. `kept` then has the sets that are selected too but must stay."""
        n_bytes = self.used.n_bytes if selection.n_bytes is None else selection.n_bytes
        if not self.take(n_bytes, lambda info: selection.matches(info, now_s)):
            self.kept = [
                Kept(info, "open" if info.set_id in self._filled else "pinned")
                for info in self._sets
                if info.set_id not in self._gone and selection.matches(info, now_s)
            ]


class _Seen(NamedTuple):
    """A set with a time in the future. at_s: time at which the set was first seen with this count of uses."""

    uses: int
    at_s: float


class FutureTimes:
    """Sets whose times were in the future when this evictor last read the index. A node with a wrong clock wrote such a
    time; without a correction the set would stay until then. Corrections are not written to the index, because this
    node's own clock may be the wrong one."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def corrected(self, sets: Sequence[SetInfo], now_s: float) -> list[SetInfo]:
        """Return the sets. A time in the future is replaced by the time at which it was first seen, or, if the set was
        used since, by now."""
        seen, found = {}, []
        for info in sets:
            if info.used_s > now_s + FUTURE_S:
                before = self._seen.get(info.set_id)
                at_s = min(before.at_s, now_s) if before is not None and before.uses == info.uses else now_s
                seen[info.set_id] = _Seen(info.uses, at_s)
                info = replace(info, created_s=min(info.created_s, at_s), used_s=at_s)
            found.append(info)
        self._seen = seen
        return found
