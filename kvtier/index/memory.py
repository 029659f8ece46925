"""In-memory index: the model that every other index is tested against, and the index of a single process.

Nothing outlives the object. One lock; every method is atomic.
"""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from kvtier.errors import StaleLease
from kvtier.index import entry
from kvtier.index.base import EVICT_LEASE, UNOWNED, Index, IndexCounts, Location, Loss, NewRecord, SetInfo, Use
from kvtier.index.values import Lease

_loss_numbers = count()  # so that the losses of two indexes of this process differ


class MemoryIndex(Index):
    """See `kvtier.index.base.Index`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, bytes] = {}
        self._sets: dict[int, SetInfo] = {}
        self._members: dict[int, dict[tuple[int, int], bytes]] = {}
        self._leases: dict[str, Lease] = {}
        self._notes: dict[str, tuple[bytes, float]] = {}  # value, and when it expires
        self._loss: Loss | None = (b"%d" % next(_loss_numbers),)

    def loss(self) -> Loss | None:
        """Return the loss with which the index began, until `rebuilt` is called: a new index lists no records."""
        return self._loss

    def rebuilt(self, loss: Loss | None) -> None:
        if loss == self._loss:
            self._loss = None

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        with self._lock:
            for key in keys:
                value = self._entries.get(key)
                if value is None or not entry.is_complete(value):
                    break
                found.append(value)
        return found

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            return entry.complete_or_none(map(self._entries.get, keys))

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        with self._lock:
            return sum(self._publish_one(record, into_unowned) for record in records)

    def _publish_one(self, record: NewRecord, into_unowned: bool) -> bool:
        location = record.location
        info = self._sets.get(location.set_id)
        if info is None or (info.owner == UNOWNED and not into_unowned):
            return False
        members = self._members[location.set_id]
        if members.get((location.rank, location.slot), record.key) != record.key:
            return False
        value = entry.add(self._entries.get(record.key), location, record.whole)
        if value is None:
            return False
        self._entries[record.key] = value
        members[location.rank, location.slot] = record.key
        return True

    def retract(self, key: bytes, location: Location) -> bool:
        with self._lock:
            if not self._remove_record(key, location):
                return False
            members = self._members.get(location.set_id, {})  # A damaged entry is in no set.
            members.pop((location.rank, location.slot), None)
            return True

    def _remove_record(self, key: bytes, location: Location) -> bool:
        left = entry.remove(self._entries.get(key), entry.place(location))
        if left:
            self._entries[key] = left
        elif left is not None:
            del self._entries[key]
        return left is not None

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        with self._lock:
            if info.set_id in self._sets:
                return False
            self._sets[info.set_id] = info
            self._members[info.set_id] = {}
            for record in records:
                self._publish_one(record, into_unowned=True)
            return True

    def take_over(self, set_id: int) -> None:
        with self._lock:
            if set_id in self._sets:
                self._sets[set_id] = replace(self._sets[set_id], owner=UNOWNED)

    def close_set(self, set_id: int, n_bytes: int) -> None:
        with self._lock:
            if set_id in self._sets:
                self._sets[set_id] = replace(self._sets[set_id], is_open=False, n_bytes=n_bytes)

    def sets(self) -> list[SetInfo]:
        with self._lock:
            return [self._sets[set_id] for set_id in sorted(self._sets)]

    def some_sets(self, set_ids: Collection[int]) -> list[SetInfo]:
        with self._lock:
            return [self._sets[set_id] for set_id in sorted(set(set_ids)) if set_id in self._sets]

    def members(self, set_id: int) -> list[tuple[bytes, Location]]:
        with self._lock:
            return self._members_of(set_id)

    def _members_of(self, set_id: int) -> list[tuple[bytes, Location]]:
        found = []
        for (rank, slot), key in sorted(self._members.get(set_id, {}).items()):
            locations = {entry.place(location): location for location in entry.unpack(self._entries[key])}
            found.append((key, locations[set_id, rank, slot]))
        return found

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        with self._lock:
            if token is not None and token != self._lease(EVICT_LEASE).token:
                raise StaleLease(f"set {set_id:016x} is not removed: another engine holds the eviction lease")
            members = self._members_of(set_id)
            for key, location in members:
                is_removed = self._remove_record(key, location)
                assert is_removed, "a member is in its key's entry"
            self._members.pop(set_id, None)
            self._sets.pop(set_id, None)
            return len(members)

    def touch(self, used: Mapping[int, Use]) -> None:
        with self._lock:
            for set_id, use in used.items():
                if set_id in self._sets:
                    self._sets[set_id] = self._sets[set_id].with_use(use)

    def _lease(self, name: str) -> Lease:
        return self._leases.get(name, Lease())

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        with self._lock:
            lease = self._lease(name).acquired(owner, now_s, ttl_s)
            if lease is None:
                return None
            self._leases[name] = lease
            return lease.token

    def lease_owner(self, name: str, now_s: float) -> str | None:
        with self._lock:
            return self._lease(name).owner_at(now_s)

    def release_lease(self, name: str, owner: str) -> None:
        with self._lock:
            self._leases[name] = self._lease(name).released(owner)

    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        with self._lock:
            self._notes[name] = (value, math.inf if expires_s is None else expires_s)

    def notes(self, prefix: str, now_s: float) -> dict[str, bytes]:
        with self._lock:
            self._notes = {name: note for name, note in self._notes.items() if now_s < note[1]}
            return {name: self._notes[name][0] for name in sorted(self._notes) if name.startswith(prefix)}

    def drop_note(self, name: str) -> bool:
        with self._lock:
            return self._notes.pop(name, None) is not None

    def counts(self) -> IndexCounts:
        with self._lock:
            return IndexCounts(
                chunks=len(self._entries),
                records=sum(map(len, self._members.values())),
                sets=len(self._sets),
                n_bytes=sum(info.n_bytes for info in self._sets.values()),
            )

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            return iter(list(self._entries.items()))

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._sets.clear()
            self._members.clear()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
