"""Hashes of the Redis index that all engines share: registered sets, leases, notes. Each field changes by itself."""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from kvtier.errors import Corrupt, IndexUnavailable, StaleLease
from kvtier.index import values
from kvtier.index.base import EVICT_LEASE, SetInfo, Use
from kvtier.index.redis.entries import Caller, Swaps, compare_and_swap
from kvtier.index.redis.keys import (
    ADD_TO_SUM,
    ADD_TO_TABLE,
    CHANGE_TABLE,
    REGISTERED,
    REMOVING,
    SET_ID,
    SUM_AND_SETS,
    TOKEN,
    Keys,
    Script,
)
from kvtier.index.redis.wire import Request


class Table:
    """One hash. Each field changes atomically, by compare-and-swap. size: bytes that a field adds to the sum."""

    def __init__(self, caller: Caller, keys: Keys, name: bytes, size: Callable[[bytes], int] = lambda value: 0) -> None:
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
        token: int | None = None,
        script: Script = CHANGE_TABLE,
    ) -> dict[bytes, tuple[bytes, bytes]]:
        """Change fields. Return field -> (old value, new value); b"" is an absent field.

        change: (field, value) -> new value. script: ADD_TO_TABLE where a full server has to refuse the change.
        token: fields are changed only while EVICT_LEASE has this token. Raises StaleLease once it has another one; the
        remaining fields stay as they are.
        """
        if not fields:
            return {}
        found: Sequence[bytes | None] = self._caller.one(self.name, "HMGET", self.name, *fields)
        old = {field: value or b"" for field, value in zip(fields, found, strict=True)}
        return compare_and_swap(old, change, partial(self._swap, script, token), sends_unchanged=token is not None)

    def change_one(
        self, field: bytes, change: Callable[[bytes], bytes], token: int | None = None, script: Script = CHANGE_TABLE
    ) -> tuple[bytes, bytes]:
        return self.change([field], lambda _, value: change(value), token, script)[field]

    def _swap(self, script: Script, token: int | None, swaps: Swaps) -> list[tuple[bytes, bytes | None]]:
        arguments = [b"", b""] if token is None else [EVICT_LEASE.encode(), TOKEN.pack(token)]
        for field, (old, new) in swaps.items():
            arguments += [field, old, new, b"%d" % (self._size(new) - self._size(old))]
        call = script.call([self.name, self._keys.bytes, self._keys.leases], arguments)
        answer: list[bytes | None] | None = self._caller.one(self.name, *call)
        if answer is None:
            raise StaleLease("sets are not removed: another engine holds the eviction lease")
        return list(zip(swaps, answer, strict=True))


class SetTable:
    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._caller = caller
        self._keys = keys
        self._table = Table(caller, keys, keys.sets, _n_bytes)

    def get(self, set_ids: Collection[int]) -> list[SetInfo]:
        fields = [SET_ID.pack(set_id) for set_id in sorted(set(set_ids))]
        if not fields:
            return []
        found = self._caller.one(self._table.name, "HMGET", self._table.name, *fields)
        return _infos([(field, value) for field, value in zip(fields, found, strict=True) if value])

    def all(self) -> list[SetInfo]:
        return _infos(sorted(self._table.all().items()))

    def counts(self) -> tuple[int, int]:
        """Return (sets, sum of their n_bytes)."""
        name = self._table.name
        n_sets, n_bytes = self._caller.run([Request(name, ("HLEN", name)), Request(name, ("GET", self._keys.bytes))])
        return int(n_sets), self._sum(n_bytes)

    def _sum(self, n_bytes: bytes | None) -> int:
        try:
            return int(n_bytes or 0)
        except ValueError:
            raise IndexUnavailable(f"Redis: {self._keys.bytes!r} is no number; remove it and rebuild") from None

    def mend_sum(self) -> int:
        """See Index.mend_sum. All changes of the sum are increments, so one in between is not lost."""
        name = self._table.name
        n_bytes, packed = self._caller.one(name, *SUM_AND_SETS.call([name, self._keys.bytes], []))
        lacking = sum(map(_n_bytes, packed)) - self._sum(n_bytes)
        if lacking:
            self._caller.one(name, *ADD_TO_SUM.call([self._keys.bytes], [b"%d" % lacking]))
        return lacking

    def add(self, info: SetInfo) -> bytes:
        """Register a set, unless its id is taken. Return the value before (b"": none)."""
        new = REGISTERED + values.pack_set(info)
        return self._table.change_one(SET_ID.pack(info.set_id), lambda old: old or new, script=ADD_TO_TABLE)[0]

    def is_free(self, set_id: int) -> bool:
        return not self._table.get(SET_ID.pack(set_id))

    def touch(self, used: Mapping[int, Use]) -> None:
        self.change(list(used), lambda info: info.with_use(used[info.set_id]))

    def change(self, set_ids: Sequence[int], change: Callable[[SetInfo], SetInfo]) -> None:
        """Change those of the sets that are registered."""

        def renewed(field: bytes, old: bytes) -> bytes:
            infos = _infos([(field, old)])
            return old[:1] + values.pack_set(change(infos[0])) if infos else old

        self._table.change([SET_ID.pack(set_id) for set_id in set_ids], renewed)

    def begin_removal(self, set_id: int, token: int | None) -> None:
        self._table.change_one(SET_ID.pack(set_id), lambda old: old and REMOVING + old[1:], token)

    def end_removal(self, set_id: int, token: int | None) -> None:
        self._table.change_one(SET_ID.pack(set_id), lambda old: b"" if old[:1] == REMOVING else old, token)


def _infos(fields: Sequence[tuple[bytes, bytes]]) -> list[SetInfo]:
    """Return the sets of well-formed fields. One damaged or foreign field must not cost all engines the index."""
    found = []
    for field, value in fields:
        try:
            found.append(values.unpack_set(SET_ID.unpack(field)[0], value[1:]))
        except (Corrupt, struct.error):
            continue
    return found


def _n_bytes(value: bytes) -> int:
    return sum(info.n_bytes for info in _infos([(SET_ID.pack(0), value)]))
