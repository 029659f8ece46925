"""LMDB index, for all processes of one node. On a local disk only; discarded at every boot, then rebuilt (I5).

Named databases:

    entries   key                                           -> kvtier.index.entry
    sets      set id, u64 big-endian                        -> kvtier.index.values
    members   set id u64, rank u16, slot u32, big-endian    -> key
    leases    name, UTF-8                                   -> kvtier.index.values
    notes     name, UTF-8                                   -> kvtier.index.values
    meta      "rebuilt"                                     -> empty; absent: this index was not rebuilt yet
              "loss"                                        -> 16 bytes: mark of the process that first noticed that
              "root"                                        -> the folder whose segments this index describes

Every check and its change are in one write transaction.
"""

import os
import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvtier.errors import ConfigError, StaleLease
from kvtier.index import entry, values
from kvtier.index.base import EVICT_LEASE, UNOWNED, Index, IndexCounts, Location, Loss, NewRecord, SetInfo, Use
from kvtier.index.lmdb import environment
from kvtier.index.lmdb.environment import Reopen, View
from kvtier.index.values import Lease
from kvtier.storage.filesystem import file_system_of
from kvtier.storage.root_owner import BOOT_ID_FILE

_FORMAT_VERSION = 2
_DATABASES = ("entries", "sets", "members", "leases", "notes", "meta")
_REBUILT, _LOSS, _ROOT = b"rebuilt", b"loss", b"root"
_RECORDS_PER_TRANSACTION = 512  # so that other writers wait at most about 5 ms (2 cores of a 2.x GHz Xeon)

_SET_ID = struct.Struct(">Q")
_MEMBER = struct.Struct(">QHI")


class LmdbIndex(Index):
    """See `kvtier.index.base.Index`."""

    def __init__(
        self,
        path: str,
        map_bytes: int = 16 << 30,
        timeout_s: float = 2.0,
        *,
        reopen: Reopen | None = None,
        boot_id: str | None = None,
        mountinfo: str | None = None,
    ) -> None:
        """Open the index in the folder `path`, which is created (0700, files 0600) when missing.

        map_bytes: address space of the index; a full one is grown to 8 times this, then publishing fails.
        timeout_s: no method waits longer for other threads and processes (I10).
        reopen: checks and creates the root around the folder; see `environment.attach`.
        boot_id, mountinfo: read instead of /proc.

        Raises ConfigError when the path is on a network file system or cannot be written, IndexUnavailable when it
        does not open.
        """
        file_system = file_system_of(path, mountinfo)
        if file_system.is_network:
            fix = (
                f"it is on {file_system.kind} (mounted at {file_system.mount_point}), where processes do not share "
                "memory maps and locks as LMDB needs: name a folder on a local disk"
            )
            raise ConfigError("index.path", path, fix)
        self._shared = environment.attach(os.fspath(path), map_bytes, timeout_s, _stamp(boot_id), _DATABASES, reopen)
        self._path = os.fspath(path)
        self._is_closed = False

    def bind(self, folder: Path) -> None:
        """Record that this is the index of the segments in `folder`. Raises ConfigError when it is another root's: each
        root would remove the other's records as lost. An index inside its root is moved and copied with it."""
        mine = os.fsencode(folder.resolve())
        is_inside = Path(self._path).parent.resolve() == folder.resolve()

        def take(view: View) -> bytes:
            theirs = view.get("meta", _ROOT)
            if theirs is None or is_inside:
                view.put("meta", _ROOT, mine)
                return mine
            return theirs

        if self._shared.read(lambda view: view.get("meta", _ROOT)) == mine:
            return
        theirs = self._shared.write(take)
        if theirs != mine:
            fix = (
                f"it is the index of {os.fsdecode(theirs)}; give each root one of its own. If the root was moved here, "
                "remove that folder: a new index is built"
            )
            raise ConfigError("index.path", self._path, fix)

    def loss(self) -> Loss | None:
        def mark(view: View) -> Loss:
            found = view.get("meta", _LOSS)
            if found is None:
                found = uuid.uuid4().bytes
                view.put("meta", _LOSS, found)
            return (found,)

        return self._shared.write(mark) if self.was_reset else None

    @property
    def was_reset(self) -> bool:
        return self._shared.read(lambda view: view.get("meta", _REBUILT) is None)

    def rebuilt(self, loss: Loss | None) -> None:
        def end(view: View) -> None:
            if loss == (view.get("meta", _LOSS),):
                view.put("meta", _REBUILT, b"")

        self._shared.write(end)

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        # at_once: called on the engine's own thread.
        return self._shared.read(lambda view: view.leading("entries", keys, entry.is_complete), at_once=True)

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return entry.complete_or_none(self._shared.read(partial(View.values, database="entries", keys=keys)))

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        taken = 0
        for first in range(0, len(records), _RECORDS_PER_TRANSACTION):
            batch = records[first : first + _RECORDS_PER_TRANSACTION]
            taken += self._shared.write(partial(_publish, batch, into_unowned), adds=True)
        return taken

    def retract(self, key: bytes, location: Location) -> bool:
        return self._shared.write(lambda view: _retract(view, key, entry.place(location)))

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        def work(view: View) -> bool:
            is_new = _get_set(view, info.set_id) is None
            if is_new:
                _put_set(view, info)
                _publish(records, True, view)
            return is_new

        return self._shared.write(work, adds=True)

    def take_over(self, set_id: int) -> None:
        self._change_set(set_id, lambda info: replace(info, owner=UNOWNED))

    def close_set(self, set_id: int, n_bytes: int) -> None:
        self._change_set(set_id, lambda info: replace(info, is_open=False, n_bytes=n_bytes))

    def sets(self) -> list[SetInfo]:
        return _unpacked(self._shared.read(lambda view: view.scan("sets")))

    def some_sets(self, set_ids: Collection[int]) -> list[SetInfo]:
        wanted = sorted(set(set_ids))
        found = self._shared.read(lambda view: [_get_set(view, set_id) for set_id in wanted])
        return [info for info in found if info is not None]

    def members(self, set_id: int) -> list[tuple[bytes, Location]]:
        def work(view: View) -> list[tuple[entry.Place, bytes, bytes | None]]:
            return [(place, key, view.get("entries", key)) for place, key in _members(view, set_id)]

        # Unpacked outside of the transaction, which excludes lookups of this process.
        return [
            (key, location)
            for place, key, value in self._shared.read(work)
            for location in entry.locations_of(value)
            if entry.place(location) == place
        ]

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        def work(view: View) -> tuple[int, bool]:
            if token is not None and token != _get_lease(view, EVICT_LEASE).token:
                raise StaleLease(f"set {set_id:016x} is not removed: another engine holds the eviction lease")
            return _remove_some(view, set_id)

        removed, more = 0, True
        while more:
            n_removed, more = self._shared.write(work)
            removed += n_removed
        return removed

    def touch(self, used: Mapping[int, Use]) -> None:
        def work(view: View) -> None:
            for set_id, use in used.items():
                info = _get_set(view, set_id)
                if info is not None:
                    _put_set(view, info.with_use(use))

        if used:
            self._shared.write(work)

    def _change_set(self, set_id: int, change: Callable[[SetInfo], SetInfo]) -> None:
        def work(view: View) -> None:
            info = _get_set(view, set_id)
            if info is not None:
                _put_set(view, change(info))

        self._shared.write(work)

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        def work(view: View) -> int | None:
            lease = _get_lease(view, name).acquired(owner, now_s, ttl_s)
            if lease is None:
                return None
            view.put("leases", name.encode(), lease.pack())
            return lease.token

        return self._shared.write(work)

    def lease_owner(self, name: str, now_s: float) -> str | None:
        return self._shared.read(lambda view: _get_lease(view, name)).owner_at(now_s)

    def release_lease(self, name: str, owner: str) -> None:
        def work(view: View) -> None:
            view.put("leases", name.encode(), _get_lease(view, name).released(owner).pack())

        self._shared.write(work)

    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        packed = values.pack_note(value, expires_s)
        self._shared.write(lambda view: view.put("notes", name.encode(), packed))

    def notes(self, prefix: str, now_s: float) -> dict[str, bytes]:
        found = self._shared.read(lambda view: view.scan("notes", prefix.encode()))
        expired = [name for name, packed in found if values.has_expired(packed, now_s)]
        if expired:
            self._shared.write(lambda view: _drop_expired(view, expired, now_s))
        return {name.decode(): values.unpack_note(packed)[0] for name, packed in found if name not in expired}

    def drop_note(self, name: str) -> bool:
        def work(view: View) -> bool:
            is_there = view.get("notes", name.encode()) is not None
            view.delete("notes", name.encode())
            return is_there

        return self._shared.write(work)

    def counts(self) -> IndexCounts:
        def work(view: View) -> tuple[int, int, list[tuple[bytes, bytes]]]:
            return view.count("entries"), view.count("members"), view.scan("sets")

        n_entries, n_members, found = self._shared.read(work)
        return IndexCounts(n_entries, n_members, len(found), sum(info.n_bytes for info in _unpacked(found)))

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        for first in range(256):  # in 256 transactions: writers of this process wait for a reader
            yield from self._shared.read(partial(View.scan, database="entries", prefix=bytes([first])))

    def clear(self) -> None:
        def work(view: View) -> None:
            for name in ("entries", "members", "sets"):
                view.clear(name)

        self._shared.write(work)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            environment.detach(self._shared)


def is_of_this_boot(path: Path) -> bool:
    """Return whether `path` has an index that opening would not discard."""
    return environment.has_stamp(path, _stamp())


def _stamp(boot_id: str | None = None) -> str:
    if boot_id is None:
        boot_id = BOOT_ID_FILE.read_text(encoding="ascii").strip()
    return f"{_FORMAT_VERSION} {boot_id}\n"


def _publish(records: Sequence[NewRecord], into_unowned: bool, view: View) -> int:
    taken = 0
    is_open: dict[int, bool] = {}  # set id -> whether records may be added to the set
    places, keys = list[bytes](), list[bytes]()
    for key, location, _ in records:
        places.append(_MEMBER.pack(*location[:3]))
        keys.append(key)
    members = dict(zip(places, view.values("members", places), strict=True))
    entries = dict(zip(keys, view.values("entries", keys), strict=True))
    new_members, new_entries = dict[bytes, bytes](), dict[bytes, bytes]()
    for place, (key, location, whole) in zip(places, records, strict=True):
        set_id = location.set_id
        if set_id not in is_open:
            info = _get_set(view, set_id)
            is_open[set_id] = info is not None and (info.owner != UNOWNED or into_unowned)
        if not is_open[set_id] or members[place] not in (None, key):
            continue
        old = entries[key]
        new = entry.add(old, location, whole)
        if new is None:
            continue
        taken += 1
        if new != old:
            entries[key] = new_entries[key] = new
            members[place] = new_members[place] = key
    view.put_all("entries", new_entries)
    view.put_all("members", new_members)
    return taken


def _retract(view: View, key: bytes, place: entry.Place) -> bool:
    """Remove one record from its key's entry and from its set. Return whether the entry had it."""
    new = entry.remove(view.get("entries", key), place)
    if new is None:
        return False
    if new:
        view.put("entries", key, new)
    else:
        view.delete("entries", key)
    view.delete("members", _MEMBER.pack(*place))
    return True


def _remove_some(view: View, set_id: int) -> tuple[int, bool]:
    """Remove one transaction's records of a set, and the set with the last ones. Return (records, whether more follow).

    The set is removed in the transaction that finds it empty, so no entry ever points to a removed set.
    """
    members = _members(view, set_id, _RECORDS_PER_TRANSACTION)
    removed = 0
    for place, key in members:
        removed += _retract(view, key, place)
        view.delete("members", _MEMBER.pack(*place))
    more = len(members) == _RECORDS_PER_TRANSACTION
    if not more:
        view.delete("sets", _SET_ID.pack(set_id))
    return removed, more


def _members(view: View, set_id: int, limit: int | None = None) -> list[tuple[entry.Place, bytes]]:
    """Return (place, chunk key) of the records of a set, by rank and slot."""
    return [(_MEMBER.unpack(member), key) for member, key in view.scan("members", _SET_ID.pack(set_id), limit)]


def _unpacked(found: Sequence[tuple[bytes, bytes]]) -> list[SetInfo]:
    """Unpack sets. In the transaction this would hold up lookups of this process, with 20,000 sets for 0.1 s."""
    return [values.unpack_set(_SET_ID.unpack(set_id)[0], value) for set_id, value in found]


def _get_set(view: View, set_id: int) -> SetInfo | None:
    value = view.get("sets", _SET_ID.pack(set_id))
    return None if value is None else values.unpack_set(set_id, value)


def _put_set(view: View, info: SetInfo) -> None:
    view.put("sets", _SET_ID.pack(info.set_id), values.pack_set(info))


def _drop_expired(view: View, names: Sequence[bytes], now_s: float) -> None:
    """Remove those of `names` that are still expired: another process may have written them again."""
    for name in names:
        packed = view.get("notes", name)
        if packed is not None and values.has_expired(packed, now_s):
            view.delete("notes", name)


def _get_lease(view: View, name: str) -> Lease:
    return Lease.unpack(view.get("leases", name.encode()))
