"""Interface of the index: chunk key -> location of its records.

The index is a hint (I5): losing it costs hits, not correctness. Implementations are synchronous and thread-safe;
`kvtier.index.memory` is the model that the others are tested against. A key has 16 bytes and is unique over namespaces.

Times are seconds since the epoch by the caller's clock, and are passed in (I6). An index shared by nodes, whose clocks
may differ by days, converts them to its server's clock. Times inside names, files and notes are kept by that clock too;
`shared_s` and `local_s` convert them.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from kvtier.format.geometry import Extent
from kvtier.format.record import part_of

UNOWNED = ""  # owner of a set that was rebuilt from its files, or taken over from a writer whose lease expired
EVICT_LEASE = "evict"  # lease of the engine that may evict sets; its fencing token is passed with each removal
Loss = tuple[bytes, ...]  # identifies one loss of an index's content: a mark for each part that can be lost by itself


def new_owner(prefix: str = "") -> str:
    """Return a name for this process as an owner of leases, unique among all that share the root."""
    return f"{prefix}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def writer_lease(owner: str) -> str:
    """Return the name of the lease that an engine holds on its open sets. Only its holder adds records to them."""
    return f"writer/{owner}"


class Location(NamedTuple):
    """Location of one rank's record of a chunk: a slot of a segment set."""

    set_id: int
    rank: int
    slot: int
    slab_bytes: int
    extent: Extent
    checksums: tuple[int, ...]  # one for each head of `extent`, in head order

    @property
    def part(self) -> int:
        """Return the file of the set that has the record (kvtier.format.record.part_of)."""
        return part_of(self.set_id, self.rank, self.slot)


def slots_used(locations: Iterable[Location]) -> dict[int, int]:
    """Return part -> number of the set's slots up to the last used one. The file may be truncated behind them."""
    used: dict[int, int] = {}
    for location in locations:
        used[location.part] = max(used.get(location.part, 0), location.slot + 1)
    return used


class NewRecord(NamedTuple):
    """Record that was written completely and may become visible (I1). whole: the extent that completes its chunk."""

    key: bytes
    location: Location
    whole: Extent


@dataclass(frozen=True, slots=True)
class Use:
    """Hits on a set since the last `touch`. at_s: time of the latest hit or save."""

    at_s: float
    count: int


@dataclass(frozen=True, slots=True)
class SetInfo:
    """Segment set: the segments that one engine's ranks fill together. The unit of eviction.

    owner: the engine that fills it; UNOWNED where only records read from its files may still become visible.
    n_bytes: disk space of its files over all ranks (they are preallocated).
    is_open: its writer may still add records; it is not evicted while its writer lives.
    tenant: label of the tenant whose chunks it stores; "": shared by all without a label.
    used_s: time of the latest hit or save.
    uses: number of hits reported with `touch`.
    """

    set_id: int
    namespace: bytes
    owner: str
    n_bytes: int
    created_s: float
    used_s: float
    is_open: bool = True
    tenant: str = ""
    uses: int = 0

    def with_use(self, use: Use) -> SetInfo:
        """Return the set with more uses. `used_s` never decreases."""
        return replace(self, used_s=max(self.used_s, use.at_s), uses=self.uses + use.count)


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """Totals of an index. n_bytes: sum of the sets' n_bytes."""

    chunks: int
    records: int
    sets: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteState:
    """State of a remote index before an engine uses it. url: without credentials. said: content of the index, or the
    reason why the server does not answer. warning: a fault of a server that answers, and its fix. fix: what to do
    about a server that does not answer. Both are "" if nothing is known."""

    url: str
    does_answer: bool
    said: str
    warning: str = ""
    fix: str = ""


class Index(Protocol):
    """Every method may raise IndexUnavailable. No method blocks longer than the index's configured timeout (I10). The
    defaults of `shared_s` and `local_s` are those of an index of one node."""

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the entries (kvtier.index.entry) of the longest prefix of `keys` whose chunks are complete.

        One round trip for all keys. Writes nothing: recency is reported with `touch`.
        """

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the entry of each of `keys`, None where its chunk is not complete. Else as `resolve`."""

    def publish(self, records: Sequence[NewRecord], from_files: bool = False, into_unowned: bool = False) -> int:
        """Make records visible, atomically for each key. Return how many were accepted or visible already.

        from_files: the records were just read from segments by a rebuild; else the set's owner has written them.
        into_unowned: the caller knows that their sets are UNOWNED, and that their files are not truncated before the
            end of these records.

        Rejected: a record of a set that is not registered (it was evicted meantime); of an UNOWNED set, unless
        `into_unowned` (its files may have been truncated since, also where a network delivers the command late); and
        one whose extent the entry already has from another location (the first writer wins).
        """

    def retract(self, key: bytes, location: Location) -> bool:
        """Remove `location`, and no other, from the key's entry. Return whether it was there."""

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        """Register a set. Return False, without any change, when its id is taken.

        records: read from its files; published in the same step, because an empty set may be evicted at any time.
        """

    def take_over(self, set_id: int) -> None:
        """Make the set UNOWNED, so that its writer, which may be alive, publishes nothing more in it.

        Called before its files are truncated or removed. Unknown ids are ignored.
        """

    def close_set(self, set_id: int, n_bytes: int) -> None:
        """Mark the set as complete; its files now take `n_bytes`. Unknown ids are ignored."""

    def sets(self) -> list[SetInfo]:
        """Return all sets, by id."""

    def some_sets(self, set_ids: Collection[int]) -> list[SetInfo]:
        """Return those of `set_ids` that are registered, by id, in one round trip."""

    def members(self, set_id: int) -> list[tuple[bytes, Location]]:
        """Return (key, location) of each visible record of a set."""

    def listed(self, set_id: int) -> set[tuple[int, int]]:
        """Return (rank, slot) of the records in the set's list; more than `members` has where their entries were lost
        with a part of the index."""
        return {(location.rank, location.slot) for _, location in self.members(set_id)}

    def without_list(self, set_ids: Collection[int]) -> set[int]:
        """Return those of these registered sets whose list of records was lost, alone or with a part of the index: they
        accept no records, and `members` finds none."""
        return set()

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        """Remove the set and its records from the index. Return the number of records. Idempotent.

        token: the caller's token of EVICT_LEASE. Raises StaleLease when another owner has taken that lease since; what
        was removed until then stays removed.
        """

    def touch(self, used: Mapping[int, Use]) -> None:
        """Add hits to sets (set id -> use). Unknown ids are ignored."""

    def shared_s(self, at_s: float) -> float:
        """Convert a time of the caller's clock to the index's."""
        return at_s

    def local_s(self, at_s: float) -> float:
        """Convert a time of the index's clock to the caller's."""
        return at_s

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        """Take or renew the lease `name`. Return its fencing token, which grows with each new owner, or None while
        another owner's lease has not expired."""

    def lease_owner(self, name: str, now_s: float) -> str | None:
        """Return the owner of an unexpired lease."""

    def release_lease(self, name: str, owner: str) -> None: ...

    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        """Store a small document under `name` (at most 200 bytes of UTF-8), replacing an older one. expires_s: None for
        never. A rebuild restores pins and quotas only (kvtier.eviction.pins_backup)."""

    def notes(self, prefix: str, now_s: float) -> dict[str, bytes]:
        """Return the unexpired notes whose name begins with `prefix`, sorted by name. Removes expired ones."""

    def drop_note(self, name: str) -> bool:
        """Return False when there was none."""

    def counts(self) -> IndexCounts: ...

    def mend_sum(self) -> int:
        """Make `counts().n_bytes` the sum of the sets again, where the index lost one without the other. Return by how
        much it grew, bytes. The caller holds the lease of the sweep. Nothing to do for an index that keeps no sum."""
        return 0

    def recount(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield what `entries` yields. After the last one make `counts().chunks` and `records` those of the entries
        again, where entries or their counts were lost. An entry that changes while the whole index is read may count
        wrongly. Nothing to do for an index that counts what it has."""
        return self.entries()

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, entry) of every chunk, in no order; some may come twice. For checks: reads the whole index."""

    def loss(self) -> Loss | None:
        """Return the loss (another boot, a damaged file) after which the index was not rebuilt yet, if there is one."""

    @property
    def was_reset(self) -> bool:
        return self.loss() is not None

    def rebuilt(self, loss: Loss | None) -> None:
        """Record that the index was rebuilt after `loss`. A later loss stays."""

    def doubt(self) -> None:
        """Note a loss: the index went back to an earlier state. Nothing to do for an index that cannot."""
        return None

    def clear(self) -> None:
        """Remove every set and record before a rebuild. Leases and notes stay."""

    def close(self) -> None: ...
