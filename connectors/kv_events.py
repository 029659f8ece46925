"""Which chunks of the tier this engine has told others of, such as a router that sends prompts to where their KV is.

A chunk is told of once: when this engine saved it, or found it as it looked a prompt up; and once more when it is gone
from the tier. Segment sets are what is evicted, by any engine, so it is sets that are asked for, a rotating sample
every CHECK_INTERVAL_S in one round trip, on a thread of its own. Single chunks (one that a lookup missed, one that
another engine was quicker to save) are asked for there as well. What is told may be late, and costs its reader a wrong
guess: no KV depends on it. Knows no engine, and no reader.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvtier.errors import Corrupt, KVTierError
from kvtier.index.base import Index
from kvtier.index.entry import first_set
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.runtime.threads import Ticker

CHECK_INTERVAL_S = 2.0
SETS_AT_ONCE = 256
"""Sets asked for in one check. A root of 2,560 sets is gone through in 20 s, at 128 keys of the index a second."""
DOUBTS_AT_ONCE = 256
CLOSE_TIMEOUT_S = 2.0


class ChunkBlocks(NamedTuple):
    """A chunk in the engine's own blocks, as its readers know them.

    hashes: of its blocks, in order; parent: that of the block before them, None at a prompt's start.
    tokens: all of the chunk. extras: for each block what its hash depends on besides, or None.
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
Describe = Callable[[str, int], ChunkBlocks | None]
"""(request, number of a chunk) -> the chunk, as long as the engine has the request. Does not raise."""


class Watcher(Protocol):
    """Who is told what becomes of chunks, on the engine's scheduler thread. Does not raise."""

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None:
        """A lookup of `keys`, a request's chunks from `first_chunk` on, found the first len(entries) of them, and not
        the next one (unless the index is in trouble)."""
        ...

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None:
        """These chunks of a request, from `first_chunk` on, are to be saved, unless they are already."""
        ...

    def saved(self, done: Sequence[SaveDone]) -> None: ...

    def forget(self) -> None:
        """None of what was stored can be loaded any more."""
        ...


class Unwatched:
    """Nobody wants to know."""

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None: ...

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None: ...

    def saved(self, done: Sequence[SaveDone]) -> None: ...

    def forget(self) -> None: ...


class Bounds(NamedTuple):
    """In chunks (I4). told: that are remembered, at 0.8 KiB each; beyond, the one that was not found for longest is
    taken back. waiting: that were not taken yet; beyond, none is told of until it is found another time. expected: that
    are on their way to the tier; doubted: that are to be asked for."""

    told: int = 32_768
    waiting: int = 4_096
    expected: int = 4_096
    doubted: int = 1_024


class _Told(NamedTuple):
    hashes: bytes
    """Of all blocks, joined: a tuple of them takes twice the memory."""
    set_id: int


@dataclass(slots=True)
class _Expected:
    """missing: ranks that have not answered for `place` (set, slot); is_ours: all that did wrote it there."""

    blocks: ChunkBlocks
    place: tuple[int, int] | None = None
    missing: int = 0
    is_ours: bool = True


class Announcements:
    """A Watcher that others take changes from.

    blocks: of the engine in a chunk; writers: ranks that have something of each chunk to write.
    `check` is called on any thread, the rest on the engine's scheduler thread, which waits for no I/O here.
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
        self._told: OrderedDict[bytes, _Told] = OrderedDict()
        self._of_set: dict[int, set[bytes]] = {}
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()
        self._doubted: OrderedDict[bytes, ChunkBlocks | None] = OrderedDict()
        self._waiting: deque[Change] = deque()
        self._checked_to = 0
        self._epoch = 0
        self._ticker: Ticker | None = None

    def start(self) -> None:
        """Checks on a thread of its own until `close`; without it the caller checks (tests)."""
        self._ticker = Ticker("announcements", CHECK_INTERVAL_S, self.check)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.close(CLOSE_TIMEOUT_S)

    # --- what the bridge tells ---

    def found(self, request_id: str, first_chunk: int, keys: Sequence[bytes], entries: Sequence[bytes]) -> None:
        with self._lock:
            for chunk, (key, entry) in enumerate(zip(keys, entries, strict=False), first_chunk):
                try:
                    set_id = first_set(entry)
                except Corrupt:  # its load will fail
                    continue
                if key in self._told:
                    self._move(key, set_id)
                elif (blocks := self._describe(request_id, chunk)) is not None:
                    self._tell(key, blocks, set_id)
            for key in keys[len(entries) : len(entries) + 1]:
                if key in self._told:
                    self._doubt(key, None)

    def wanted(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            for chunk, key in enumerate(keys, first_chunk):
                if key in self._told or key in self._expected:
                    continue
                blocks = self._describe(request_id, chunk)
                if blocks is not None:
                    self._expected[key] = _Expected(blocks)
            while len(self._expected) > self._bounds.expected:
                self._expected.popitem(last=False)

    def saved(self, done: Sequence[SaveDone]) -> None:
        with self._lock:
            for answer in done:
                expected = self._expected.get(answer.key)
                if expected is None:
                    continue
                if answer.outcome not in (SaveOutcome.SAVED, SaveOutcome.PRESENT):
                    del self._expected[answer.key]
                    continue
                place = (answer.set_id, answer.slot)
                if expected.place != place:
                    expected.place, expected.missing, expected.is_ours = place, self._writers, True
                expected.missing -= 1
                expected.is_ours &= answer.outcome is SaveOutcome.SAVED
                if expected.missing == 0:
                    del self._expected[answer.key]
                    if expected.is_ours:
                        self._tell(answer.key, expected.blocks, answer.set_id)
                    else:  # it lies in a set that only the index knows
                        self._doubt(answer.key, expected.blocks)

    def forget(self) -> None:
        with self._lock:
            self._epoch += 1
            for key in list(self._told):
                self._take_back(key)
            self._expected.clear()
            self._doubted.clear()

    # --- what others take ---

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, changes_max: int) -> list[Change]:
        """The oldest changes that were not taken yet, in order: of one chunk, what was added goes before what is
        removed; of a prompt, earlier chunks before later ones."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(changes_max, len(self._waiting)))]

    # --- what the index says ---

    def check(self) -> None:
        """Asks the index for some of the sets that are told of, and for what is in doubt. An index that does not
        answer changes nothing; what was in doubt then is so again when a lookup misses it."""
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
            for set_id in asked:
                if set_id not in there:
                    for key in list(self._of_set.get(set_id, ())):
                        self._take_back(key)
            for (key, blocks), place in zip(doubts, places, strict=True):
                self._settle(key, blocks, place)

    def _some_sets(self) -> list[int]:
        """The next ones in turn."""
        set_ids = sorted(self._of_set)
        start = bisect_right(set_ids, self._checked_to)
        part = (set_ids[start:] + set_ids[:start])[:SETS_AT_ONCE]
        if part:
            self._checked_to = part[-1]
        return part

    def _settle(self, key: bytes, blocks: ChunkBlocks | None, set_id: int | None) -> None:
        if key in self._told:
            if set_id is None:
                self._take_back(key)
            else:
                self._move(key, set_id)
        elif blocks is not None and set_id is not None:
            self._tell(key, blocks, set_id)

    # --- under the lock ---

    def _tell(self, key: bytes, blocks: ChunkBlocks, set_id: int) -> None:
        if key in self._told or len(self._waiting) >= self._bounds.waiting:
            return
        self._waiting.append(Added(blocks))
        self._told[key] = _Told(b"".join(blocks.hashes), set_id)
        self._of_set.setdefault(set_id, set()).add(key)
        if len(self._told) > self._bounds.told:
            self._take_back(next(iter(self._told)))

    def _take_back(self, key: bytes) -> None:
        told = self._told.pop(key)
        self._leave_set(key, told.set_id)
        size = len(told.hashes) // self._blocks
        hashes = (told.hashes[at : at + size] for at in range(0, len(told.hashes), size))
        self._waiting.append(Removed(tuple(hashes)))

    def _move(self, key: bytes, set_id: int) -> None:
        """It was found just now, in this set."""
        told = self._told[key]
        self._told.move_to_end(key)
        if told.set_id != set_id:
            self._leave_set(key, told.set_id)
            self._told[key] = told._replace(set_id=set_id)
            self._of_set.setdefault(set_id, set()).add(key)

    def _leave_set(self, key: bytes, set_id: int) -> None:
        keys = self._of_set[set_id]
        keys.discard(key)
        if not keys:
            del self._of_set[set_id]

    def _doubt(self, key: bytes, blocks: ChunkBlocks | None) -> None:
        self._doubted.setdefault(key, blocks)
        if len(self._doubted) > self._bounds.doubted:
            self._doubted.popitem(last=False)
