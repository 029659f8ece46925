"""LateSaves: chunks of ended requests that workers refused, or may still refuse. Imports no engine.

After a request has ended, the engine gives its blocks to other requests, longest-free blocks first. Until then the
blocks keep their content. So if a refusal arrives after the end, the chunk is planned again while its blocks have the
same content.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from kvtier.scheduler.store import WantedChunk

KEPT_MAX = 4096  # limit of the chunks that are noted (I4)
# Steps after which a chunk is given up. An engine without other work makes a step every 10 ms (bridge.IDLE_WAIT_S).
STEPS_MAX = 1000
# Steps in a row without a stored chunk after which all chunks are given up: 6 s of steps without other work, because
# storage may hang for seconds. No more, because vLLM's pause waits for all these steps, and with data parallelism the
# other ranks wait for each of them.
STALLED_STEPS_MAX = 600
ANSWER_STEPS = 8  # steps after which workers have refused the chunks that do not fit; vLLM plans fewer steps ahead

# Returns an object for each block that stands for the block's content. As soon as the engine gives the block to a
# request that will write to it, the object is another one. None: the content is not known.
ContentsOf = Callable[[Sequence[int]], Sequence[object | None]]


def no_contents(block_ids: Sequence[int]) -> Sequence[object | None]:
    """Return None for each block: their contents are not known."""
    return [None] * len(block_ids)


class _LateChunk(NamedTuple):
    """Note of one chunk.

    contents: those of its blocks when its request ended. step: the step in which the request ended. arrival: number of
    the request. planned: the step in which LateSaves last returned the chunk; `step` if it has not.
    """

    chunk: WantedChunk
    contents: Sequence[object | None]
    step: int
    arrival: int
    planned: int


class Due(NamedTuple):
    """Due chunks of one ended request.

    chunks: to be planned now. lost: the first chunk whose blocks have other content now, and all due chunks behind it.
    """

    chunks: list[WantedChunk]
    lost: list[WantedChunk]


class LateSaves:
    """Called from the engine's scheduler thread only."""

    def __init__(self) -> None:
        self.contents_of: ContentsOf = no_contents
        self._kept: dict[bytes, _LateChunk] = {}
        self._refused: dict[bytes, None] = {}  # by one rank or more; others may not have answered yet
        self._due: dict[bytes, None] = {}
        self._step = 0
        self._stalled_steps = 0  # steps with waiting chunks since the last chunk was stored

    @property
    def are_waiting(self) -> bool:
        """Return True while chunks wait for a step: to be planned, or for the answers of other ranks."""
        return bool(self._due or self._refused)

    def keep(self, arrival: int, chunks: Sequence[WantedChunk]) -> None:
        """Note those chunks of an ending request that are not stored yet.

        Beyond KEPT_MAX, drop the notes of chunks that workers must have taken, then those of this request's tail.
        """
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
        """Drop the note of a chunk that is stored, or that will not be."""
        for chunks in (self._kept, self._refused, self._due):
            chunks.pop(key, None)

    def stored(self, key: bytes) -> None:
        """Drop the note of a chunk that is stored now. The storage answers, so stalled steps count from 0."""
        self._stalled_steps = 0
        self.forget(key)

    def clear(self) -> None:
        """Drop all notes."""
        for chunks in (self._kept, self._refused, self._due):
            chunks.clear()

    def refused(self, key: bytes) -> None:
        """Note that one rank refused the chunk. Even without other work the engine must now make steps, because it
        receives the other ranks' answers in steps."""
        if key in self._kept:
            self._refused[key] = None

    def plan_again(self, key: bytes) -> bool:
        """Note that not all ranks took the chunk and that all have answered. Return True if it is due again."""
        kept = self._kept.get(key)
        if kept is None or not self._is_alive(kept):
            return False
        self._refused.pop(key, None)
        self._due[key] = None
        return True

    def take(self, limit: int | None) -> dict[int, Due]:
        """Return the chunks that are due in this step, by the arrival of their request.

        Due chunks of requests that ended since the last step are all returned, and count towards `limit`. Others are
        returned only up to `limit`; None: no limit. Call once a step, after the engine gave blocks to its requests.
        """
        taken: dict[int, Due] = {}
        self._stalled_steps += self.are_waiting
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
        for key in [key for key in self._refused if self._is_over(self._kept[key])]:
            del self._refused[key]
        return taken

    def _is_taken(self, key: bytes, kept: _LateChunk) -> bool:
        """Return True if workers must have taken the chunk: no refusal came in the steps in which it would have."""
        is_answered = self._step - kept.planned > ANSWER_STEPS
        return is_answered and key not in self._due and key not in self._refused

    def _is_over(self, kept: _LateChunk) -> bool:
        return self._step - kept.step > STEPS_MAX or self._stalled_steps > STALLED_STEPS_MAX

    def _is_alive(self, kept: _LateChunk) -> bool:
        """Return True if the blocks still hold the chunk before the next forward.

        In the step in which the request ended they do, even if their contents are not known: the engine gives blocks
        to other requests only when it plans the next step.
        """
        if kept.step == self._step:
            return True
        if self._is_over(kept):
            return False
        now = self.contents_of(kept.chunk.block_ids)
        return all(then is not None and then is at for then, at in zip(kept.contents, now, strict=True))
