"""The hashes that all engines share in Redis: registered sets, leases, notes. Small, and changed field by field.

Fields that are none of ours are passed over: one of them, damaged or a stranger's, must not cost all engines the tier.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtier.errors import Corrupt, IndexUnavailable, StaleLease
from kvtier.index import values
from kvtier.index.base import SetInfo, Use
from kvtier.index.redis.entries import CONFLICTS_MAX, Caller
from kvtier.index.redis.keys import (
    ADD_TO_TABLE,
    CHANGE_TABLE,
    GOING,
    HELD,
    LEASE,
    PUT_NOTE,
    SET_ID,
    TOKEN,
    Keys,
    Script,
)
from kvtier.index.redis.wire import Request

Change = Callable[[bytes], bytes]
"""From what a field is (b"": absent) to what it becomes (b"": it goes); the same: it stays."""
Size = Callable[[bytes], int]


class Fence(NamedTuple):
    """A change is refused when the lease has another token than this."""

    lease: str
    token: int


class Table:
    """One hash. Each field changes atomically, by comparing it with what it was."""

    def __init__(self, caller: Caller, keys: Keys, name: bytes, size: Size = lambda value: 0) -> None:
        self._caller = caller
        self._keys = keys
        self.name = name
        self._size = size

    def get(self, field: bytes) -> bytes:
        found: bytes | None = self._caller.one(self.name, "HGET", self.name, field)
        return found or b""

    def all(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self._caller.one(self.name, "HGETALL", self.name)
        return found

    def change(
        self,
        fields: Sequence[bytes],
        change: Callable[[bytes, bytes], bytes],
        fence: Fence | None = None,
        script: Script = CHANGE_TABLE,
    ) -> dict[bytes, tuple[bytes, bytes]]:
        """Changes fields by (field, what it is) -> what it becomes; what each was, and became.

        script: ADD_TO_TABLE where a full server is to refuse it.
        Raises StaleLease when the fence's lease has another token; nothing more is changed then.
        """
        done: dict[bytes, tuple[bytes, bytes]] = {}
        if not fields:
            return done
        values: Sequence[bytes | None] = self._caller.one(self.name, "HMGET", self.name, *fields)
        waiting = {field: value or b"" for field, value in zip(fields, values, strict=True)}
        for _ in range(CONFLICTS_MAX):
            wanted = {field: (old, change(field, old)) for field, old in waiting.items()}
            same = {field: pair for field, pair in wanted.items() if pair[0] == pair[1]}
            done |= same if fence is None else {}
            asked = wanted if fence is not None else {f: pair for f, pair in wanted.items() if f not in same}
            if not asked:
                return done
            waiting = {}
            for field, now in self._swap(script, asked, fence):
                if now is None or now == asked[field][1]:  # the answer to an earlier try may have been lost
                    done[field] = asked[field]
                else:
                    waiting[field] = now
            if not waiting:
                return done
        raise IndexUnavailable("others change the same fields all the time")

    def change_one(
        self, field: bytes, change: Change, fence: Fence | None = None, script: Script = CHANGE_TABLE
    ) -> tuple[bytes, bytes]:
        return self.change([field], lambda _, value: change(value), fence, script)[field]

    def _swap(
        self, script: Script, asked: Mapping[bytes, tuple[bytes, bytes]], fence: Fence | None
    ) -> list[tuple[bytes, bytes | None]]:
        arguments = [b"", b""] if fence is None else [fence.lease.encode(), TOKEN.pack(fence.token)]
        for field, (old, new) in asked.items():
            arguments += [field, old, new, b"%d" % (self._size(new) - self._size(old))]
        call = script.call([self.name, self._keys.bytes, self._keys.leases], arguments)
        answer: list[bytes | None] | None = self._caller.run([Request(self.name, call)])[0]
        if answer is None:
            raise StaleLease("what was to be removed is left to who evicts now")
        return list(zip(asked, answer, strict=True))


class SetTable:
    """The registered sets."""

    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._caller = caller
        self._keys = keys
        self._table = Table(caller, keys, keys.sets, _n_bytes)

    def get(self, set_ids: Collection[int]) -> list[SetInfo]:
        wanted = sorted(set(set_ids))
        if not wanted:
            return []
        name = self._table.name
        values = self._caller.one(name, "HMGET", name, *(SET_ID.pack(set_id) for set_id in wanted))
        return _infos([(SET_ID.pack(id_), value) for id_, value in zip(wanted, values, strict=True) if value])

    def all(self) -> list[SetInfo]:
        return _infos(sorted(self._table.all().items()))

    def counts(self) -> tuple[int, int]:
        """(sets, sum of their n_bytes)"""
        name = self._table.name
        n_sets, n_bytes = self._caller.run([Request(name, ("HLEN", name)), Request(name, ("GET", self._keys.bytes))])
        try:
            return int(n_sets), int(n_bytes or 0)
        except ValueError:
            raise IndexUnavailable(f"Redis: {self._keys.bytes!r} is no number; remove it and rebuild") from None

    def add(self, info: SetInfo) -> bytes:
        """Registers a set, unless its id is taken; what stood there (b"": nothing)."""
        new = HELD + values.pack_set(info)
        return self._table.change_one(SET_ID.pack(info.set_id), lambda old: old or new, script=ADD_TO_TABLE)[0]

    def is_free(self, set_id: int) -> bool:
        return not self._table.get(SET_ID.pack(set_id))

    def change(self, set_id: int, change: Callable[[SetInfo], SetInfo]) -> None:
        self.change_some([set_id], change)

    def touch(self, used: Mapping[int, Use]) -> None:
        def change(info: SetInfo) -> SetInfo:
            use = used[info.set_id]
            return replace(info, used_s=max(info.used_s, use.at_s), uses=info.uses + use.count)

        self.change_some(list(used), change)

    def change_some(self, set_ids: Sequence[int], change: Callable[[SetInfo], SetInfo]) -> None:
        """Those of them that are registered."""

        def renewed(field: bytes, old: bytes) -> bytes:
            infos = _infos([(field, old)])
            return old[:1] + values.pack_set(change(infos[0])) if infos else old

        self._table.change([SET_ID.pack(set_id) for set_id in set_ids], renewed)

    def begin_removal(self, set_id: int, fence: Fence | None) -> None:
        self._table.change_one(SET_ID.pack(set_id), lambda old: old and GOING + old[1:], fence)

    def end_removal(self, set_id: int, fence: Fence | None) -> None:
        self._table.change_one(SET_ID.pack(set_id), lambda old: b"" if is_going(old) else old, fence)


def is_going(value: bytes) -> bool:
    return value[:1] == GOING


def _infos(fields: Sequence[tuple[bytes, bytes]]) -> list[SetInfo]:
    found = []
    for field, value in fields:
        try:
            found.append(values.unpack_set(SET_ID.unpack(field)[0], value[1:]))
        except (Corrupt, struct.error):
            continue
    return found


def _n_bytes(value: bytes) -> int:
    return sum(info.n_bytes for info in _infos([(SET_ID.pack(0), value)]))


class LeaseTable:
    """See `Index.acquire_lease`."""

    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._table = Table(caller, keys, keys.leases)

    def acquire(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        def take(old: bytes) -> bytes:
            token, expires_s, holder = _lease(old)
            if holder == owner:
                return _packed(token, now_s + ttl_s, owner)
            if holder and now_s < expires_s:
                return old
            return _packed(token + 1, now_s + ttl_s, owner)

        token, _, holder = _lease(self._table.change_one(name.encode(), take)[1])
        return token if holder == owner else None

    def owner(self, name: str, now_s: float) -> str | None:
        _, expires_s, holder = _lease(self._table.get(name.encode()))
        return holder if holder and now_s < expires_s else None

    def release(self, name: str, owner: str) -> None:
        def leave(old: bytes) -> bytes:
            token, _, holder = _lease(old)
            return _packed(token, 0.0, "") if holder == owner else old  # the next owner's token is to be larger

        self._table.change_one(name.encode(), leave)


def _lease(value: bytes) -> tuple[int, float, str]:
    """(token, expires, owner); the owner is "" when nobody has it."""
    try:
        token, expires_s = LEASE.unpack_from(value)
        return token, expires_s, value[LEASE.size :].decode()
    except (struct.error, UnicodeDecodeError):
        return 0, 0.0, ""


def _packed(token: int, expires_s: float, owner: str) -> bytes:
    return LEASE.pack(token, expires_s) + owner.encode()


class NoteTable:
    """See `Index.put_note`."""

    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._caller = caller
        self._table = Table(caller, keys, keys.notes)

    def put(self, name: str, value: bytes, expires_s: float | None) -> None:
        call = PUT_NOTE.call([self._table.name], [name.encode(), values.pack_note(value, expires_s)])
        self._caller.run([Request(self._table.name, call)])

    def find(self, prefix: str, now_s: float) -> dict[str, bytes]:
        found = self._table.all()
        expired = [name for name, packed in found.items() if not _is_name(name) or values.has_expired(packed, now_s)]
        if expired:  # of those, what others have put anew meanwhile stays
            self._table.change(expired, lambda name, value: b"" if value == found[name] else value)
        names = sorted(found.keys() - set(expired))
        return {name.decode(): values.unpack_note(found[name])[0] for name in names if name.startswith(prefix.encode())}

    def drop(self, name: str) -> bool:
        return bool(self._caller.one(self._table.name, "HDEL", self._table.name, name.encode()))


def _is_name(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
