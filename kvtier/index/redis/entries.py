"""Entries in Redis: whole batches, a round trip to all shards at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from kvtier.errors import Corrupt, IndexUnavailable
from kvtier.format.geometry import Extent
from kvtier.index import entry
from kvtier.index.base import Location
from kvtier.index.redis.keys import PUT_IN, SCRIPTS, TAKE_OUT, Keys, Script
from kvtier.index.redis.wire import SCAN_KEYS, Argument, Command, Request, Wire, unavailable

CONFLICTS_MAX = 64
"""Rounds in which others change the same entry first; each round, at least one of them gets on."""
BATCH_KEYS = 256
"""Keys of one script: others wait for it, about half a millisecond."""

Change = Callable[[bytes], bytes | None]
"""From what an entry is (b"": absent) to what it becomes (b"": it goes), or None: it stays."""


class Caller:
    """Runs batches on a wire: scripts that a server does not know are sent to it, and errors are raised."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.gate: Callable[[], None] | None = None
        """Called before the first batch; it raises while nothing may be sent yet."""

    def run(self, requests: Sequence[Request]) -> list[Any]:
        if not requests:
            return []
        if self.gate is not None:
            self.gate()
        answers = self._wire.run(requests)
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = [Request(requests[place].key, _with_text(requests[place].command)) for place in unknown]
            for place, answer in zip(unknown, self._wire.run(again), strict=True):
                answers[place] = answer
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise unavailable(answer) from answer
        return answers

    def one(self, key: bytes, *command: Argument) -> Any:
        return self.run([Request(key, command)])[0]

    def scan(self, pattern: bytes, kind: str) -> Iterator[list[bytes]]:
        """Yield the names of all keys of a kind (string, hash) that match, on all shards, in batches; some may come
        twice. Looks at every key of the servers."""
        names = self._wire.scan(pattern, kind)
        while batch := list(islice(names, SCAN_KEYS)):
            yield batch


class EntryTable:
    """The entries of all chunks."""

    def __init__(self, caller: Caller, keys: Keys) -> None:
        self._caller = caller
        self._keys = keys

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The entries of `keys`, in one round trip."""
        if not keys:
            return []
        names = [self._keys.entry(key) for key in keys]
        if self._keys.tags == 1:
            found: list[bytes | None] = self._caller.one(names[0], "MGET", *names)
            return found
        return self._caller.run([Request(name, ("GET", name)) for name in names])

    def change(self, changes: Sequence[tuple[bytes, Change]], are_new: bool) -> list[bool]:
        """Changes entries, each as an atomic step; whether the change was not refused, for each.

        changes: (key, change), several of one key in their order. are_new: records are put in, and most
            have no entry yet: it is not read before. Else they are only taken out, which a full server lets through.
        """
        results = [False] * len(changes)
        last = dict.fromkeys((key for key, _ in changes), b"")
        if not are_new:
            keys = list(last)
            last.update(zip(keys, (value or b"" for value in self.get(keys)), strict=True))
        waiting = list(range(len(changes)))
        script = PUT_IN if are_new else TAKE_OUT
        for _ in range(CONFLICTS_MAX + len(changes)):
            if not waiting:
                return results
            waiting = self._round(script, changes, waiting, last, results)
        raise IndexUnavailable("others change the same entries all the time")

    def _round(
        self,
        script: Script,
        changes: Sequence[tuple[bytes, Change]],
        waiting: Sequence[int],
        last: dict[bytes, bytes],
        results: list[bool],
    ) -> list[int]:
        """One change for each key at most; those that are still to be made."""
        later: list[int] = []
        asked: dict[bytes, tuple[int, bytes, bytes]] = {}
        for place in waiting:
            key, change = changes[place]
            if key in asked:
                later.append(place)
                continue
            new = change(last[key])
            results[place] = new is not None
            if new is not None and new != last[key]:
                asked[key] = (place, last[key], new)
        for key, (place, _, new), now in self._swap(script, asked):
            if now is None or now == new:  # the answer to an earlier try may have been lost
                last[key] = new
            else:
                last[key] = now
                later.append(place)
        return sorted(later)

    def _swap(
        self, script: Script, asked: Mapping[bytes, tuple[int, bytes, bytes]]
    ) -> Iterator[tuple[bytes, tuple[int, bytes, bytes], bytes | None]]:
        batches: dict[int, list[list[bytes]]] = {}
        for key in asked:
            of_tag = batches.setdefault(self._keys.tag(key), [[]])
            if len(of_tag[-1]) == BATCH_KEYS:
                of_tag.append([])
            of_tag[-1].append(key)
        calls = [(tag, batch) for tag, of_tag in batches.items() for batch in of_tag]
        requests = []
        for tag, batch in calls:
            counts = self._keys.counts(tag)
            arguments: list[bytes] = []
            for key in batch:
                _, old, new = asked[key]
                arguments += [old, new, b"%d" % _records_more(old, new)]
            names = [counts, *(self._keys.entry(key) for key in batch)]
            requests.append(Request(counts, script.call(names, arguments)))
        for (_, batch), answer in zip(calls, self._caller.run(requests), strict=True):
            for key, now in zip(batch, answer, strict=True):
                yield key, asked[key], now

    def counts(self) -> tuple[int, int]:
        """(chunks, records)"""
        names = [self._keys.counts(tag) for tag in range(self._keys.tags)]
        answers = self._caller.run([Request(name, ("HMGET", name, "c", "r")) for name in names])
        return sum(int(answer[0] or 0) for answer in answers), sum(int(answer[1] or 0) for answer in answers)

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        """(key, entry) of every chunk; some may come twice. For checks: it reads the whole index."""
        for names in self._caller.scan(self._keys.entry_pattern, "string"):
            keys = [name[-16:] for name in names]
            for key, value in zip(keys, self.get(keys), strict=True):
                if value is not None:
                    yield key, value


def adding(location: Location, whole: Extent) -> Change:
    """A change that adds a record to an entry. A damaged one gives way to it: nobody can load from that."""

    def change(old: bytes) -> bytes | None:
        try:
            return entry.add(old or None, location, whole)
        except Corrupt:
            return entry.add(None, location, whole)

    return change


def taking_out(place: entry.Place) -> Change:
    """A change that takes a record out of an entry. A damaged one goes."""

    def change(old: bytes) -> bytes | None:
        if not old:
            return None
        try:
            return entry.remove(old, place)
        except Corrupt:
            return b""

    return change


def _records_more(old: bytes, new: bytes) -> int:
    return 1 if not old else len(entry.locations_of(new)) - len(entry.locations_of(old))


def _with_text(command: Command) -> Command:
    return ("EVAL", SCRIPTS[str(command[1])], *command[2:])
