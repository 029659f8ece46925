"""The index: key -> where its records lie. A hint, never the truth (I5): losing it costs hits, not correctness.

Implementations are synchronous and safe to call from several threads; `kvtier.index.memory` is the model that the
others are tested against. Keys are 16 bytes and unique over namespaces (they chain from the namespace id).
Times are seconds since the epoch by the caller's clock, and passed in (I6). An index of many nodes keeps them by one
clock, its own, and turns them: clocks of nodes may differ by days. A time within a name, a file or a note's content is
kept by that clock too, with `shared_s` and `local_s`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.format.geometry import Extent

NOBODY = ""
"""Owner of a set that was read back from its files, or taken over from a writer that gave no sign of life."""
EVICT_LEASE = "evict"
"""Who holds it may remove sets to make room; its fencing token goes with each removal."""
Loss = tuple[bytes, ...]
"""Tells one loss of an index's content from the next: a mark for each part that may be lost by itself."""


def writer_lease(owner: str) -> str:
    """Return the name of the lease by which an engine keeps its open sets. Only its holder adds records to them."""
    return f"writer/{owner}"


class Location(NamedTuple):
    """Where one rank's record of a chunk lies: `<set>-<rank>.kvseg`, slot `slot`."""

    set_id: int
    rank: int
    slot: int
    slab_bytes: int
    extent: Extent
    checksums: tuple[int, ...]
    """One a head of `extent`, in head order."""


def slots_used(places: Iterable[Location]) -> dict[int, int]:
    """By rank: the slots of a set up to the last of `places`. What is behind them may be cut."""
    used: dict[int, int] = {}
    for place in places:
        used[place.rank] = max(used.get(place.rank, 0), place.slot + 1)
    return used


class NewRecord(NamedTuple):
    """A record that was written whole and may become visible (I1). `whole`: what makes its chunk complete."""

    key: bytes
    location: Location
    whole: Extent


@dataclass(frozen=True, slots=True)
class SetInfo:
    """A segment set: the segments that one engine's ranks fill together. The unit of eviction.

    n_bytes: what its files take on disk over all ranks (they are allocated whole).
    owner: the engine that fills it; NOBODY where only what its files hold may still become visible.
    is_open: its writer may still add records; it is not evicted while its writer lives.
    tenant: label of the tenant whose chunks lie in it; "": of everybody without a label.
    uses: how often hits fell on it, as booked by `touch`.
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


@dataclass(frozen=True, slots=True)
class Use:
    """Hits on a set since the last time that was booked: when the latest one was, and how many they are."""

    at_s: float
    count: int


@dataclass(frozen=True, slots=True)
class IndexCounts:
    chunks: int
    records: int
    sets: int
    n_bytes: int
    """Sum of the sets' n_bytes."""


@dataclass(frozen=True, slots=True)
class RemoteState:
    """State of a remote index before any engine uses it. url: without credentials. said: what is stored there, or why
    it does not answer. warning: a fault of the server and its fix; "" where none is known."""

    url: str
    does_answer: bool
    said: str
    warning: str = ""


class Index(Protocol):
    """Every method may raise IndexUnavailable. No method waits longer than the index's configured timeout (I10)."""

    def resolve(self, keys: Sequence[bytes]) -> list[bytes]:
        """Entries (kvtier.index.entry) of the longest prefix of `keys` that is complete: all layers, all heads.

        One round trip for all keys; writes nothing. Recency is reported apart, with `touch`.
        """
        ...

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The entry of each of `keys`, which need not be of one prompt; None where it is not complete. As `resolve`."""
        ...

    def publish(self, records: Sequence[NewRecord], from_files: bool = False) -> int:
        """Makes records visible, atomically for each key; returns how many were taken. One that is visible already
        counts.

        from_files: they were read from segments just now, by whoever looks after the root; else written, by the set's
        owner.

        Refused, and so not counted: a record of a set that is not registered (it was evicted while being written) or
        that is NOBODY's (its files may have been cut since the bytes were written) unless `from_files`, and one whose
        extent the entry already has from another location (the first writer wins).
        """
        ...

    def retract(self, key: bytes, location: Location) -> bool:
        """Takes `location` out of the key's entry if it is still there; True if it was. Never touches another."""
        ...

    def create_set(self, info: SetInfo, records: Sequence[NewRecord] = ()) -> bool:
        """Registers a set; False, and nothing is done, when its id is taken.

        records: of it, read from its files; published in the same step, for a set without records may be removed any
        moment.
        """
        ...

    def take_over(self, set_id: int) -> None:
        """The set is NOBODY's from now on: its writer, which may be alive after all, publishes nothing in it any more.
        Before its files are cut or removed. Unknown ids are ignored."""
        ...

    def close_set(self, set_id: int, n_bytes: int) -> None:
        """Its writer is done: no further records; its files now take `n_bytes`. Unknown ids are ignored."""
        ...

    def sets(self) -> list[SetInfo]:
        """All of them, by id."""
        ...

    def some_sets(self, set_ids: Collection[int]) -> list[SetInfo]:
        """Those of `set_ids` that are registered, by id; one round trip for all."""
        ...

    def members(self, set_id: int) -> list[tuple[bytes, Location]]:
        """The visible records that lie in a set."""
        ...

    def remove_set(self, set_id: int, token: int | None = None) -> int:
        """Takes the set and all its records out of the index; returns how many records. Idempotent.

        token: the caller's, of EVICT_LEASE. Raises StaleLease when another owner has taken that lease since; what was
        removed until then stays so.
        """
        ...

    def touch(self, used: Mapping[int, Use]) -> None:
        """Books hits on sets (by id): raises `used_s`, never lowers it, and adds to `uses`. Unknown ids are
        ignored."""
        ...

    def shared_s(self, at_s: float) -> float:
        """Return a time of the caller's clock by the index's."""
        ...

    def local_s(self, at_s: float) -> float:
        """Return a time of the index's clock by the caller's."""
        ...

    def acquire_lease(self, name: str, owner: str, now_s: float, ttl_s: float) -> int | None:
        """Takes or renews the lease `name`. Returns its fencing token, which grows with each new owner; None while
        another owner's lease has not run out."""
        ...

    def lease_owner(self, name: str, now_s: float) -> str | None:
        """Who holds the lease, if anybody does now."""
        ...

    def release_lease(self, name: str, owner: str) -> None: ...

    def put_note(self, name: str, value: bytes, expires_s: float | None) -> None:
        """Keeps a small document under `name` (at most 200 bytes of UTF-8) in place of what was there. None: it does
        not expire. A rebuild brings lost pins and quotas back (kvtier.eviction.pins_backup), and no others."""
        ...

    def notes(self, prefix: str, now_s: float) -> dict[str, bytes]:
        """The notes whose name starts so and that have not expired, sorted by name. Expired ones are forgotten, at
        the latest here."""
        ...

    def drop_note(self, name: str) -> bool:
        """False when there was none."""
        ...

    def counts(self) -> IndexCounts: ...

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """(key, entry) of every chunk, in no order; some may come twice. For checks: it reads the whole index."""
        ...

    def loss(self) -> Loss | None:
        """None as long as the index has its content. Else (another boot, a damaged file) it is to be rebuilt from
        segments."""
        ...

    @property
    def was_reset(self) -> bool:
        """Whether there is a loss."""
        ...

    def rebuilt(self, loss: Loss | None) -> None:
        """The content is whole again, unless it was lost once more since this loss was found."""
        ...

    def clear(self) -> None:
        """Forgets every set and record (leases and notes stay); before a rebuild."""
        ...

    def close(self) -> None: ...
