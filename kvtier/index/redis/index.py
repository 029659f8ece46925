"""Redis index, for engines on many nodes that share one root. The keys are documented in `kvtier.index.redis.keys`.

Every method is a few round trips, each within the configured timeouts; a resolve is one. An answer that is late raises
IndexUnavailable; `kvtier.index.guard` makes that cheap.
"""

import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from kvtier.config.index import IndexSettings
from kvtier.index import entry, values
from kvtier.index.base import UNOWNED, Index, IndexCounts, Location, Loss, NewRecord, SetInfo, Use
from kvtier.index.redis.binding import Binding
from kvtier.index.redis.clock import Clock, ServerClock
from kvtier.index.redis.entries import Caller, EntryTable, adding, batches, removing
from kvtier.index.redis.keys import (
    ADD_MEMBERS,
    CLOSED,
    DONE,
    LIST_STATE,
    MADE,
    MARK_LIST,
    MARK_MADE,
    OPEN,
    PLACE,
    PUT_NOTE,
    REMOVING,
    RESTORE_LIST,
    TAGS,
    UNOWNED_LIST,
    Keys,
)
from kvtier.index.redis.tables import SetTable, Table
from kvtier.index.redis.wire import Request, Wire, open_wire
from kvtier.index.values import Lease

_REFUSED, _WAS_THERE, _ADDED = 0, 1, 2  # answers of ADD_MEMBERS


class RedisIndex(Index):
    """See `kvtier.index.base.Index`. Connects when it is first used. clock: this node's clock, which callers' times are
    by; it may differ from the server's by any amount."""

    def __init__(self, settings: IndexSettings, clock: Clock = time.time) -> None:
        self._wire: Wire = open_wire(settings)
        self._keys = keys = Keys(settings.prefix, TAGS if settings.place.kind == "cluster" else 1)
        self._caller = caller = Caller(self._wire)
        self._entries = EntryTable(caller, keys)
        self._sets = SetTable(caller, keys)
        self._leases = Table(caller, keys, keys.leases)
        self._notes = Table(caller, keys, keys.notes)
        self._clock = ServerClock(self._wire, keys.leases, clock)
        self._binding = Binding(caller, self._wire, keys.meta, settings)

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(takewhile(entry.is_complete, (value or b"" for value in self._entries.get(keys))))

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return entry.complete_or_none(self._entries.get(keys))

    # --- records ---

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        return sum(self._publish(batch, into_unowned) for batch in batches(records))

    def _publish(self, records: Sequence[NewRecord], into_unowned: bool) -> int:
        added = self._add_members(records, into_unowned)
        taken = [(record, how) for record, how in zip(records, added, strict=True) if how != _REFUSED]
        changes = [(record.key, adding(record.location, record.whole)) for record, _ in taken]
        published = self._entries.change(changes, are_new=True)
        sets = {record.location.set_id for record, _ in taken}
        names = [self._keys.list_of(set_id) for set_id in sets]
        states = self._caller.run([Request(name, ("HGET", name, LIST_STATE)) for name in names])
        still = dict(zip(sets, states, strict=True))
        n_published = 0
        undo, unlisted = [], []
        for (record, how), is_published in zip(taken, published, strict=True):
            state = still[record.location.set_id]
            is_kept = is_published and (state == OPEN or (state == UNOWNED_LIST and into_unowned))
            n_published += is_kept
            if not is_kept and how == _ADDED:  # a record that was there before is not this call's to remove
                unlisted.append(record.location)
                if is_published:
                    undo.append((record.key, removing(entry.place(record.location))))
        self._entries.change(undo, are_new=False)
        self._remove_members(unlisted)
        return n_published

    def _add_members(self, records: Sequence[NewRecord], into_unowned: bool) -> list[int]:
        """Add records to their sets' lists. Return the answer of ADD_MEMBERS for each."""
        by_set: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            by_set.setdefault(record.location.set_id, []).append(place)
        requests = []
        for set_id, places in by_set.items():
            name = self._keys.list_of(set_id)
            arguments = [b"1" if into_unowned else b"0"]
            for place in places:
                arguments += [_field(records[place].location), records[place].key]
            requests.append(Request(name, ADD_MEMBERS.call([name], arguments)))
        answers = [_REFUSED] * len(records)
        for places, answer in zip(by_set.values(), self._caller.run(requests), strict=True):
            for place, how in zip(places, answer or (), strict=False):
                answers[place] = how
        return answers

    def _remove_members(self, locations: Sequence[Location]) -> None:
        names = [self._keys.list_of(location.set_id) for location in locations]
        self._caller.run([Request(name, ("HDEL", name, _field(at))) for name, at in zip(names, locations, strict=True)])

    def retract(self, key: bytes, location: Location) -> bool:
        (is_removed,) = self._entries.change([(key, removing(entry.place(location)))], are_new=False)
        if is_removed:
            self._remove_members([location])
        return is_removed

    # --- sets ---

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        name, state = self._keys.list_of(info.set_id), UNOWNED_LIST if info.owner == UNOWNED else OPEN
        if records and self._sets.is_free(info.set_id):  # first, because a set without records may be evicted
            self._caller.one(name, "HSET", name, LIST_STATE, state)
            self.publish(records, from_files=True, into_unowned=True)
        created_s, used_s = self._clock.past(info.created_s), self._clock.past(info.used_s)
        before = self._sets.add(replace(info, created_s=created_s, used_s=used_s))
        if not before:
            self._caller.one(name, "HSET", name, LIST_STATE, state)
        elif before[:1] != REMOVING:  # the shard of its list may have lost its memory
            is_owned = any(known.owner != UNOWNED for known in self._sets.get([info.set_id]))
            arguments = [OPEN if is_owned else UNOWNED_LIST]
            for record in records:
                arguments += [_field(record.location), record.key]
            self._caller.one(name, *RESTORE_LIST.call([name], arguments))
        return not before

    def take_over(self, set_id: int) -> None:
        name = self._keys.list_of(set_id)
        self._caller.run([Request(name, MARK_LIST.call([name], [UNOWNED_LIST]))])
        self._sets.change([set_id], lambda info: replace(info, owner=UNOWNED))

    def close_set(self, set_id: int, n_bytes: int) -> None:
        self._sets.change([set_id], lambda info: replace(info, is_open=False, n_bytes=n_bytes))

    def sets(self) -> list[SetInfo]:
        return self._local(self._sets.all())

    def some_sets(self, set_ids: Collection[int]) -> list[SetInfo]:
        return self._local(self._sets.get(set_ids))

    def _local(self, infos: Sequence[SetInfo]) -> list[SetInfo]:
        local = self._clock.local
        return [replace(info, created_s=local(info.created_s), used_s=local(info.used_s)) for info in infos]

    def members(self, set_id: int) -> list[tuple[bytes, Location]]:
        name = self._keys.list_of(set_id)
        listed: dict[bytes, bytes] = self._caller.one(name, "HGETALL", name)
        return [
            (key, location)
            for batch in batches(_members(set_id, listed))
            for (place, key), value in zip(batch, self._entries.get([key for _, key in batch]), strict=True)
            for location in entry.locations_of(value)
            if entry.place(location) == place
        ]

    def listed(self, set_id: int) -> set[tuple[int, int]]:
        name = self._keys.list_of(set_id)
        fields: list[bytes] = self._caller.one(name, "HKEYS", name)
        return {PLACE.unpack(field) for field in fields if field != LIST_STATE}

    def without_list(self, set_ids: Collection[int]) -> set[int]:
        names = {set_id: self._keys.list_of(set_id) for set_id in set_ids}
        found = self._caller.run([Request(name, ("EXISTS", name)) for name in names.values()])
        return {set_id for set_id, is_there in zip(names, found, strict=True) if not is_there}

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        name = self._keys.list_of(set_id)
        self._sets.begin_removal(set_id, token)
        (flat,) = self._caller.run([Request(name, MARK_LIST.call([name], [CLOSED]))])
        members, removed = _members(set_id, dict(zip(flat[::2], flat[1::2], strict=True))), 0
        for batch in batches(members):
            removed += sum(self._entries.change([(key, removing(place)) for place, key in batch], are_new=False))
        self._caller.one(name, "DEL", name)
        self._sets.end_removal(set_id, token)
        return removed

    def touch(self, used: Mapping[int, Use]) -> None:
        past = self._clock.past
        self._sets.touch({set_id: replace(use, at_s=past(use.at_s)) for set_id, use in used.items()})

    # --- times, leases and notes ---

    def shared_s(self, at_s: float) -> float:
        return self._clock.of(at_s)

    def local_s(self, at_s: float) -> float:
        return self._clock.local(at_s)

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        server_s = self._clock.of(now_s)

        def take(old: bytes) -> bytes:
            lease = Lease.unpack(old).acquired(owner, server_s, ttl_s)
            return old if lease is None else lease.pack()

        lease = Lease.unpack(self._leases.change_one(name.encode(), take)[1])
        return lease.token if lease.owner == owner else None

    def lease_owner(self, name: str, now_s: float) -> str | None:
        server_s = self._clock.of(now_s)
        return Lease.unpack(self._leases.get(name.encode())).owner_at(server_s)

    def release_lease(self, name: str, owner: str) -> None:
        self._leases.change_one(name.encode(), lambda old: old and Lease.unpack(old).released(owner).pack())

    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        packed = values.pack_note(value, None if expires_s is None else self._clock.of(expires_s))
        self._caller.one(self._notes.name, *PUT_NOTE.call([self._notes.name], [name.encode(), packed]))

    def notes(self, prefix: str, now_s: float) -> dict[str, bytes]:
        server_s, found = self._clock.of(now_s), self._notes.all()
        expired = [name for name, packed in found.items() if values.has_expired(packed, server_s) or _is_foreign(name)]
        if expired:  # except those that another engine has written again since
            self._notes.change(expired, lambda name, value: b"" if value == found[name] else value)
        names = sorted(found.keys() - set(expired))
        return {name.decode(): values.unpack_note(found[name])[0] for name in names if name.startswith(prefix.encode())}

    def drop_note(self, name: str) -> bool:
        return bool(self._caller.one(self._notes.name, "HDEL", self._notes.name, name.encode()))

    # --- the whole ---

    def counts(self) -> IndexCounts:
        chunks, records = self._entries.counts()
        return IndexCounts(chunks, records, *self._sets.counts())

    def mend_sum(self) -> int:
        return self._sets.mend_sum()

    def recount(self) -> Iterator[tuple[bytes, bytes]]:
        return self._entries.recount()

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        return self._entries.all()

    def loss(self) -> Loss | None:
        """Return the loss: a shard has no data of this index, or the index was not rebuilt yet."""
        meta = self._keys.meta
        mark_of_shard = {self._wire.shard_of(name): name for name in reversed(self._marks())}
        asking = [Request(name, ("HGET", name, MADE)) for name in mark_of_shard.values()]
        root_id, *marks = self._caller.run([Request(meta, ("HGET", meta, "root")), *asking])
        self._binding.check(root_id)
        if all(mark == DONE for mark in marks):
            return None
        self._binding.renew()
        mine, names = uuid.uuid4().bytes, self._marks()
        self._caller.run([Request(name, ("HSETNX", name, MADE, mine)) for name in names])
        return tuple(self._caller.run([Request(name, ("HGET", name, MADE)) for name in names]))

    def rebuilt(self, loss: Loss | None) -> None:
        marks = zip(self._marks(), loss or (), strict=False)
        self._caller.run([Request(name, MARK_MADE.call([name], [mark, DONE])) for name, mark in marks if mark])

    def doubt(self) -> None:
        self._caller.one(self._keys.meta, "HDEL", self._keys.meta, MADE)

    def _marks(self) -> list[bytes]:
        return [self._keys.meta, *(self._keys.counts(tag) for tag in range(self._keys.tags))]

    def clear(self) -> None:
        for pattern, kind in ((self._keys.entry_pattern, "string"), (self._keys.list_pattern, "hash")):
            for names in self._caller.scan(pattern, kind):
                self._caller.run([Request(name, ("UNLINK", name)) for name in names])
        counts = [self._keys.counts(tag) for tag in range(self._keys.tags)]
        self._caller.run([Request(name, ("HDEL", name, "c", "r")) for name in counts])
        self._caller.one(self._keys.sets, "DEL", self._keys.sets, self._keys.bytes)

    def bind(self, root_id: str) -> None:
        """Record the root of this index, now or, when Redis does not answer, before its first use.

        Raises ConfigError for permanent faults: another root's index, a wrong password, another kind of server.
        """
        self._binding.begin(root_id)

    def look(self, root_id: str | None = None) -> tuple[str, str]:
        """Return the state of the index, and the fault of the server. Writes nothing. See Binding.look."""
        return self._binding.look(root_id)

    def close(self) -> None:
        self._wire.close()


def _field(location: Location) -> bytes:
    """Return the name of a record's field in its set's list."""
    return PLACE.pack(location.rank, location.slot)


def _members(set_id: int, listed: Mapping[bytes, bytes]) -> list[tuple[entry.Place, bytes]]:
    """Return (place, chunk key) of the records in a set's list, by rank and slot."""
    return [((set_id, *PLACE.unpack(field)), key) for field, key in sorted(listed.items()) if field != LIST_STATE]


def _is_foreign(name: bytes) -> bool:
    return name.decode(errors="ignore").encode() != name  # notes' names are UTF-8
