"""Compare-and-swap of Redis values in batches, and the entries of all chunks. One round trip to all shards a batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from kvtier.errors import IndexUnavailable
from kvtier.format.geometry import Extent
from kvtier.index import entry
from kvtier.index.base import Location
from kvtier.index.redis.keys import ADD_ENTRIES, ADD_TO_COUNTS, REMOVE_ENTRIES, SCRIPTS, Keys, Script
from kvtier.index.redis.wire import SCAN_KEYS, Argument, Request, Wire, unavailable

T = TypeVar("T")

CONFLICTS_MAX = 64  # rounds in which other engines change the same values first; each round, one of them succeeds
BATCH_KEYS = 256  # keys of one script, which blocks the server for about half a millisecond

Change = Callable[[bytes], bytes | None]  # old entry (b"": absent) -> new one (b"": removed), None: refused
Swaps = Mapping[bytes, tuple[bytes, bytes]]  # name -> (expected value, new value); b"": absent


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items, BATCH_KEYS at a time."""
    return (items[first : first + BATCH_KEYS] for first in range(0, len(items), BATCH_KEYS))


class Caller:
    """Sends batches of commands: loads scripts that a server does not know, and raises errors.

    gate: called before the first batch; raises while nothing may be sent yet.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.gate: Callable[[], None] | None = None

    def run(self, requests: Sequence[Request]) -> list[Any]:
        if not requests:
            return []
        if self.gate is not None:
            self.gate()
        answers = self._wire.run(requests)
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = []
            for key, (_, sha, *others) in (requests[place] for place in unknown):
                again.append(Request(key, ("EVAL", SCRIPTS[str(sha)], *others)))
            for place, answer in zip(unknown, self._wire.run(again), strict=True):
                answers[place] = answer
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise unavailable(answer) from answer
        return answers

    def one(self, key: bytes, *command: Argument) -> Any:
        return self.run([Request(key, command)])[0]

    def scan(self, pattern: bytes, kind: str) -> Iterator[list[bytes]]:
        """Yield the names of all matching keys of a type (string, hash) on all shards, in batches; some may come twice.
        Visits every key of the servers."""
        names = self._wire.scan(pattern, kind)
        while batch := list(islice(names, SCAN_KEYS)):
            yield batch


def compare_and_swap(
    values: dict[bytes, bytes],
    change: Callable[[bytes, bytes], bytes],
    swap: Callable[[Swaps], Iterable[tuple[bytes, bytes | None]]],
    sends_unchanged: bool = False,
) -> dict[bytes, tuple[bytes, bytes]]:
    """Change values, each atomically. Return name -> (old value, new value).

    values: name -> last known value. change: (name, value) -> new value. swap: sends a batch, and returns for each name
    None where the value was changed, else the present value. Raises IndexUnavailable after CONFLICTS_MAX rounds.
    """
    done: dict[bytes, tuple[bytes, bytes]] = {}
    for _ in range(CONFLICTS_MAX):
        wanted = {name: (old, change(name, old)) for name, old in values.items()}
        if not sends_unchanged:
            done |= {name: pair for name, pair in wanted.items() if pair[0] == pair[1]}
            wanted = {name: pair for name, pair in wanted.items() if name not in done}
        if not wanted:
            return done
        values = {}
        for name, now in swap(wanted):
            if now is None or now == wanted[name][1]:  # the answer to an earlier try may have been lost
                done[name] = wanted[name]
            else:
                values[name] = now
        if not values:
            return done
    raise IndexUnavailable("Redis: other engines changed the same entries at each attempt")


class EntryTable:
    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._caller = caller
        self._keys = keys

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of `keys`, in one round trip."""
        if not keys:
            return []
        names = [self._keys.entry(key) for key in keys]
        if self._keys.tags == 1:
            found: list[bytes | None] = self._caller.one(names[0], "MGET", *names)
            return found
        return self._caller.run([Request(name, ("GET", name)) for name in names])

    def change(self, changes: Sequence[tuple[bytes, Change]], are_new: bool) -> list[bool]:
        """Change entries, each atomically. Return for each change whether it was accepted.

        changes: (key, change), several of one key in their order. are_new: records are added, and most keys have no
        entry yet, so entries are not read before. Else records are removed, which a full server permits.
        """
        results = [False] * len(changes)
        of_key: dict[bytes, list[int]] = {}
        for place, (key, _) in enumerate(changes):
            of_key.setdefault(key, []).append(place)

        def renewed(key: bytes, value: bytes) -> bytes:
            for place in of_key[key]:
                new = changes[place][1](value)
                results[place] = new is not None
                value = value if new is None else new
            return value

        values = dict.fromkeys(of_key, b"")
        if not are_new:
            values = dict(zip(of_key, (value or b"" for value in self.get(list(of_key))), strict=True))
        compare_and_swap(values, renewed, partial(self._swap, ADD_ENTRIES if are_new else REMOVE_ENTRIES))
        return results

    def _swap(self, script: Script, swaps: Swaps) -> Iterator[tuple[bytes, bytes | None]]:
        of_tag: dict[int, list[bytes]] = {}
        for key in swaps:
            of_tag.setdefault(self._keys.tag(key), []).append(key)
        sent, requests = list[Sequence[bytes]](), []
        for tag, keys in of_tag.items():
            counts = self._keys.counts(tag)
            for batch in batches(keys):
                arguments: list[bytes] = []
                for old, new in map(swaps.__getitem__, batch):
                    n_added = len(entry.locations_of(new)) - len(entry.locations_of(old))
                    arguments += [old, new, b"%d" % n_added]
                requests.append(Request(counts, script.call([counts, *map(self._keys.entry, batch)], arguments)))
                sent.append(batch)
        for batch, answer in zip(sent, self._caller.run(requests), strict=True):
            yield from zip(batch, answer, strict=True)

    def counts(self) -> tuple[int, int]:
        """Return (chunks, records)."""
        counts = self._counts()
        return sum(chunks for chunks, _ in counts), sum(records for _, records in counts)

    def _counts(self) -> list[tuple[int, int]]:
        """Return (chunks, records) of each tag."""
        names = [self._keys.counts(tag) for tag in range(self._keys.tags)]
        answers = self._caller.run([Request(name, ("HMGET", name, "c", "r")) for name in names])
        return [(int(chunks or 0), int(records or 0)) for chunks, records in answers]

    def recount(self) -> Iterator[tuple[bytes, bytes]]:
        """See Index.recount."""
        lacking = [[-chunks, -records] for chunks, records in self._counts()]
        seen: set[bytes] = set()
        for key, value in self.all():
            if key not in seen:
                seen.add(key)
                of_tag = lacking[self._keys.tag(key)]
                of_tag[0] += 1
                of_tag[1] += len(entry.locations_of(value))
                yield key, value
        calls = {self._keys.counts(tag): [b"%d" % n for n in added] for tag, added in enumerate(lacking) if any(added)}
        self._caller.run([Request(name, ADD_TO_COUNTS.call([name], added)) for name, added in calls.items()])

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, entry) of every chunk; some may come twice."""
        for names in self._caller.scan(self._keys.entry_pattern, "string"):
            keys = [name[-16:] for name in names]
            for key, value in zip(keys, self.get(keys), strict=True):
                if value is not None:
                    yield key, value


def adding(location: Location, whole: Extent) -> Change:
    return lambda old: entry.add(old or None, location, whole)


def removing(place: entry.Place) -> Change:
    return lambda old: entry.remove(old, place)
