"""LateSaves: chunks of ended requests that workers refused, or may still refuse. Imports no engine.

After a request's end the engine gives its blocks to others, those that were free for longest first. Until then they
hold what they held, so a chunk whose refusal arrives after the end is planned again as long as its blocks have the same
content.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from kvtier.scheduler.store import WantedChunk

KEPT_MAX = 4096  # chunks of ended requests that may still be refused (I4)
# Steps after which a chunk is given up: an engine without other work makes them 10 ms apart (bridge.IDLE_WAIT_S).
STEPS_MAX = 1000
ANSWER_STEPS = 8  # steps after which workers have refused what they have no room for; vLLM plans fewer ahead

# Returns an object for each block, which stands for its content: another one from the moment on at which the block is
# given to a request that will write to it. None: not known.
ContentsOf = Callable[[Sequence[int]], Sequence[object | None]]


def no_contents(block_ids: Sequence[int]) -> Sequence[object | None]:
    return [None] * len(block_ids)


class _LateChunk(NamedTuple):
    """contents: of its blocks when its request ended, in step `step`. arrival: number of the request. planned: step in
    which it was planned last, as far as is known here."""

    chunk: WantedChunk
    contents: Sequence[object | None]
    step: int
    arrival: int
    planned: int


class Due(NamedTuple):
    """Chunks to plan now, of one ended request. lost: those whose blocks have other content by now, and all behind."""

    chunks: list[WantedChunk]
    lost: list[WantedChunk]


class LateSaves:
    """Called from the engine's scheduler thread only."""

    def __init__(self) -> None:
        self.contents_of: ContentsOf = no_contents
        self._kept: dict[bytes, _LateChunk] = {}
        self._refused: dict[bytes, None] = {}  # by all ranks, or by one while the others answer yet
        self._due: dict[bytes, None] = {}
        self._step = 0

    @property
    def are_waiting(self) -> bool:
        """Return True while chunks wait for a step: to be planned, or for the answers of other ranks."""
        return bool(self._due or self._refused)

    def keep(self, arrival: int, chunks: Sequence[WantedChunk]) -> None:
        """Note the chunks of a request that ends which are not stored by now. Without room for all, those that workers
        must have taken make room, and else the tail of this request is not noted."""
        for chunk in chunks:
            contents = self.contents_of(chunk.block_ids)
            self._kept.pop(chunk.key, None)
            self._kept[chunk.key] = _LateChunk(chunk, contents, self._step, arrival, self._step)
        too_many = len(self._kept) - KEPT_MAX
        if too_many > 0:
            taken = (key for key, kept in self._kept.items() if self._is_taken(key, kept))
            tail = (chunk.key for chunk in reversed(chunks))
            for key in list(islice(chain(taken, tail), too_many)):
                self.forget(key)

    def forget(self, key: bytes) -> None:
        """Note that a chunk is stored, or will not be."""
        for chunks in (self._kept, self._refused, self._due):
            chunks.pop(key, None)

    def clear(self) -> None:
        for chunks in (self._kept, self._refused, self._due):
            chunks.clear()

    def refused(self, key: bytes) -> None:
        """Note that one rank refused the chunk: the engine must make steps, if it has none, to hear of the others."""
        if key in self._kept:
            self._refused[key] = None

    def plan_again(self, key: bytes) -> bool:
        """Note that all ranks have answered, and not all took the chunk. Return True if it is planned again."""
        kept = self._kept.get(key)
        if kept is None or not self._is_alive(kept):
            return False
        self._refused.pop(key, None)
        self._due[key] = None
        return True

    def take(self, limit: int | None) -> dict[int, Due]:
        """Return what is due in this step, by the arrival of the request: of those that ended since the last step all,
        else at most `limit` chunks. Call once a step, after the engine gave blocks to its requests."""
        taken: dict[int, Due] = {}
        n_left = len(self._due) if limit is None else limit
        for kept in sorted((self._kept[key] for key in self._due), key=lambda kept: (kept.arrival, kept.chunk.number)):
            if n_left <= 0 and kept.step != self._step:
                continue
            due = taken.setdefault(kept.arrival, Due([], []))
            if due.lost or not self._is_alive(kept):
                due.lost.append(kept.chunk)
                self.forget(kept.chunk.key)
            else:
                n_left -= 1
                due.chunks.append(kept.chunk)
                del self._due[kept.chunk.key]
                self._kept[kept.chunk.key] = kept._replace(planned=self._step)
        self._step += 1
        for key in [key for key in self._refused if self._step - self._kept[key].step > STEPS_MAX]:
            del self._refused[key]
        return taken

    def _is_taken(self, key: bytes, kept: _LateChunk) -> bool:
        is_answered = self._step - kept.planned > ANSWER_STEPS
        return is_answered and key not in self._due and key not in self._refused

    def _is_alive(self, kept: _LateChunk) -> bool:
        """Return True if the blocks hold the chunk before the next forward. Without knowledge of their contents they do
        until then, because blocks are handed on with a step."""
        if kept.step == self._step:
            return True
        if self._step - kept.step > STEPS_MAX:
            return False
        now = self.contents_of(kept.chunk.block_ids)
        return all(then is not None and then is at for then, at in zip(kept.contents, now, strict=True))
