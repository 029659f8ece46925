"""KV events: announcements to others, such as a router, of the chunks that this engine can load. Imports no engine.

A chunk is announced once, when this engine saved it or found it in a lookup, and once more when it is gone from the
tier. Any engine may evict a segment set, so a thread asks the index every CHECK_INTERVAL_S for a rotating sample of the
announced sets, in one round trip, and for single chunks in doubt: missed by a lookup, or saved first by another engine.
A late event costs its reader a wrong guess: no KV depends on it.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier.errors import Corrupt, KVTierError
from kvtier.index.base import Index
from kvtier.index.entry import first_set
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.runtime.threads import Ticker

CHECK_INTERVAL_S = 2.0  # between two checks, seconds
SETS_AT_ONCE = 256  # sets per check: a root of 2,560 sets takes 20 s, at 128 index keys a second
DOUBTS_AT_ONCE = 256  # chunks in doubt per check
CLOSE_TIMEOUT_S = 2.0  # wait for the checking thread, seconds


class ChunkBlocks(NamedTuple):
    """A chunk in the engine's own blocks, as readers of events know them.

    hashes: of its blocks, in order; parent: hash of the block before them, None at a prompt's start.
    tokens: all of the chunk. extras: for each block the further inputs of its hash, or None.
    lora: (number, name) of the adapter.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    extras: tuple[tuple[Any, ...] | None, ...]
    lora: tuple[int, str] | None = None


class Added(NamedTuple):
    blocks: ChunkBlocks


class Removed(NamedTuple):
    hashes: tuple[bytes, ...]


Change = Added | Removed
# (request, chunk number) -> the chunk, as long as the engine has the request. Does not raise.
Describe = Callable[[str, int], ChunkBlocks | None]


class Watcher:
    """Observer of chunks, called on the engine's scheduler thread. This one does nothing."""

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None:
        """Note a lookup of `keys`, a request's chunks from `first_chunk` on: the first len(entries) of them are stored,
        and the next one is not (unless the index is failing)."""

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None:
        """Note chunks of a request, from `first_chunk` on, that are to be saved unless they are stored already."""

    def saved(self, done: Sequence[SaveDone]) -> None: ...

    def forget(self) -> None:
        """Note that no stored chunk can be loaded any more."""


class Bounds(NamedTuple):
    """Limits in chunks (I4).

    announced: announced chunks that are remembered, at 0.8 KiB each; beyond, the one not found for longest is revoked.
    waiting: changes not taken yet; beyond, no chunk is announced until it is found again.
    expected: chunks that are being saved, or that may be saved again after a failure; beyond, the one whose last
    plan or answer is oldest is forgotten. doubted: chunks to look up.
    """

    announced: int = 32_768
    waiting: int = 4_096
    expected: int = 4_096
    doubted: int = 1_024


class _Announced(NamedTuple):
    hashes: bytes  # of all blocks, joined: a tuple of them takes twice the memory
    set_id: int


@dataclass(slots=True)
class _Expected:
    """missing: ranks that have not answered for `place` (set, slot); is_ours: each that did wrote it there."""

    blocks: ChunkBlocks
    place: tuple[int, int] | None = None
    missing: int = 0
    is_ours: bool = True


class Announcements(Watcher):
    """Watcher that queues changes for others.

    blocks: engine blocks of a chunk; writers: ranks that write a part of each chunk. `check` is called on any thread,
    the rest on the engine's scheduler thread, which waits for no I/O here.
    """

    def __init__(
        self, describe: Describe, index: Index, blocks: int, writers: int, bounds: Bounds | None = None
    ) -> None:
        self._describe = describe
        self._index = index
        self._blocks = blocks
        self._writers = writers
        self._bounds = bounds or Bounds()
        self._lock = threading.Lock()
        self._announced: OrderedDict[bytes, _Announced] = OrderedDict()
        self._of_set: dict[int, set[bytes]] = {}
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()
        self._doubted: OrderedDict[bytes, ChunkBlocks | None] = OrderedDict()
        self._waiting: deque[Change] = deque()
        self._checked_to = 0
        self._epoch = 0
        self._ticker: Ticker | None = None

    def start(self) -> None:
        """Check on a thread until `close`; tests call `check` instead."""
        self._ticker = Ticker("announcements", CHECK_INTERVAL_S, self.check)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.close(CLOSE_TIMEOUT_S)

    # --- Watcher ---

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None:
        with self._lock:
            for chunk, (key, entry) in enumerate(zip(keys, entries, strict=False), first_chunk):
                try:
                    set_id = first_set(entry)
                except Corrupt:  # its load will fail
                    continue
                if key in self._announced:
                    self._move(key, set_id)
                elif (blocks := self._describe(request_id, chunk)) is not None:
                    self._announce(key, blocks, set_id)
            for key in keys[len(entries) : len(entries) + 1]:
                if key in self._announced:
                    self._doubt(key, None)

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            for chunk, key in enumerate(keys, first_chunk):
                if key in self._expected:
                    self._expected.move_to_end(key)
                elif key not in self._announced and (blocks := self._describe(request_id, chunk)) is not None:
                    self._expected[key] = _Expected(blocks)
            while len(self._expected) > self._bounds.expected:
                self._expected.popitem(last=False)

    def saved(self, done: Sequence[SaveDone]) -> None:
        with self._lock:
            for answer in done:
                expected = self._expected.get(answer.key)
                if expected is None:
                    self._saved_again(answer)
                    continue
                self._expected.move_to_end(answer.key)
                # A chunk that was not saved may be planned again, even if its request has ended.
                if answer.outcome not in (SaveOutcome.SAVED, SaveOutcome.PRESENT):
                    continue
                place = (answer.set_id, answer.slot)
                if expected.place != place:
                    expected.place, expected.missing, expected.is_ours = place, self._writers, True
                expected.missing -= 1
                expected.is_ours &= answer.outcome is SaveOutcome.SAVED
                if expected.missing == 0:
                    del self._expected[answer.key]
                    if expected.is_ours:
                        self._announce(answer.key, expected.blocks, answer.set_id)
                    else:  # only the index knows its set
                        self._doubt(answer.key, expected.blocks)

    def forget(self) -> None:
        with self._lock:
            self._epoch += 1
            for key in list(self._announced):
                self._revoke(key)
            self._expected.clear()
            self._doubted.clear()

    # --- for readers ---

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, changes_max: int) -> list[Change]:
        """Return the oldest changes not taken yet, in order: the addition of a chunk before its removal, and earlier
        chunks of a prompt before later ones."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(changes_max, len(self._waiting)))]

    # --- comparison with the index ---

    def check(self) -> None:
        """Ask the index for some of the announced sets and for the chunks in doubt. If it does not answer, nothing
        changes; a chunk that was in doubt is so again when a lookup misses it."""
        with self._lock:
            epoch, asked = self._epoch, self._some_sets()
            doubts = [self._doubted.popitem(last=False) for _ in range(min(DOUBTS_AT_ONCE, len(self._doubted)))]
        try:
            there = {info.set_id for info in self._index.some_sets(asked)} if asked else set()
            entries = self._index.find([key for key, _ in doubts]) if doubts else []
            places = [None if entry is None else first_set(entry) for entry in entries]
        except KVTierError:
            return
        with self._lock:
            if epoch != self._epoch:
                return
            for (key, blocks), place in zip(doubts, places, strict=True):
                self._settle(key, blocks, place)
            for set_id in asked:
                if set_id not in there:
                    for key in list(self._of_set.get(set_id, ())):
                        self._revoke(key)

    def _some_sets(self) -> list[int]:
        """Return the next announced sets, in turn."""
        set_ids = sorted(self._of_set)
        start = bisect_right(set_ids, self._checked_to)
        part = (set_ids[start:] + set_ids[:start])[:SETS_AT_ONCE]
        if part:
            self._checked_to = part[-1]
        return part

    def _settle(self, key: bytes, blocks: ChunkBlocks | None, set_id: int | None) -> None:
        if key in self._announced:
            if set_id is None:
                self._revoke(key)
            else:
                self._move(key, set_id)
        elif blocks is not None and set_id is not None:
            self._announce(key, blocks, set_id)

    # --- under the lock ---

    def _announce(self, key: bytes, blocks: ChunkBlocks, set_id: int) -> None:
        if key in self._announced or len(self._waiting) >= self._bounds.waiting:
            return
        self._waiting.append(Added(blocks))
        self._announced[key] = _Announced(b"".join(blocks.hashes), set_id)
        self._of_set.setdefault(set_id, set()).add(key)
        if len(self._announced) > self._bounds.announced:
            self._revoke(next(iter(self._announced)))

    def _saved_again(self, answer: SaveDone) -> None:
        """Note a save of a chunk that is announced still: its set was evicted, and the index was not asked about it
        since."""
        if answer.key in self._announced:
            if answer.outcome is SaveOutcome.SAVED:
                self._move(answer.key, answer.set_id)
            elif answer.outcome is SaveOutcome.PRESENT:  # only the index knows its set
                self._doubt(answer.key, None)

    def _revoke(self, key: bytes) -> None:
        announced = self._announced.pop(key)
        self._leave_set(key, announced.set_id)
        size = len(announced.hashes) // self._blocks
        hashes = (announced.hashes[at : at + size] for at in range(0, len(announced.hashes), size))
        self._waiting.append(Removed(tuple(hashes)))

    def _move(self, key: bytes, set_id: int) -> None:
        """Note that the chunk was found or saved just now, in this set."""
        announced = self._announced[key]
        self._announced.move_to_end(key)
        if announced.set_id != set_id:
            self._leave_set(key, announced.set_id)
            self._announced[key] = announced._replace(set_id=set_id)
            self._of_set.setdefault(set_id, set()).add(key)

    def _leave_set(self, key: bytes, set_id: int) -> None:
        keys = self._of_set[set_id]
        keys.discard(key)
        if not keys:
            del self._of_set[set_id]

    def _doubt(self, key: bytes, blocks: ChunkBlocks | None) -> None:
        if blocks is not None or key not in self._doubted:
            self._doubted[key] = blocks
        if len(self._doubted) > self._bounds.doubted:
            self._doubted.popitem(last=False)
