"""State of one engine request: its chunk keys, its saved chunks, the hit it was offered. No engine, no I/O."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.format.namespace import chunk_keys
from kvtier.scheduler.store import WantedChunk

NO_END = sys.maxsize  # end_chunk of a request whose chunks may all be saved


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the engine describes it when it is first seen.

    tokens: all known token ids, generated ones included; a live view, without placeholders or unverified drafts.
    extras: chunk number -> inputs of the chunk's KV besides tokens (kvtier.format.namespace.join_extras).
    may_load, may_save: permissions of the request itself.
    tenant: its label; "" for none.
    """

    request_id: str
    tokens: Sequence[int] = ()
    extras: Mapping[int, bytes] = field(default_factory=dict)
    may_load: bool = False
    may_save: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A hit that was offered to the engine: `entries` of consecutive chunks from `first_chunk` on.

    computed_tokens: tokens that the engine had by itself; the load starts there, maybe in the middle of the first
    chunk.
    """

    computed_tokens: int
    first_chunk: int
    entries: tuple[bytes, ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """Entries of chunks [first_chunk, end_chunk), kept for a moment: the engine may ask repeatedly until it has blocks
    for the request."""

    first_chunk: int
    end_chunk: int
    entries: tuple[bytes, ...]
    at_s: float

    def covers(self, first: int, end: int) -> bool:
        return self.first_chunk <= first and self.end_chunk == end


@dataclass(frozen=True, slots=True)
class IndexQuestion:
    """A pending lookup of chunks [first_chunk, end_chunk) in a remote index. It stays the same until it is answered,
    though the engine's own hit may grow: a new one would not be answered sooner.

    since_s: start of the wait for an answer. at_s: time of the last poll.
    """

    first_chunk: int
    end_chunk: int
    since_s: float
    at_s: float


@dataclass(slots=True)
class SaveProgress:
    """Progress of saving the chunks of a request.

    planned_chunks: leading chunks that are stored or were planned to be saved; it goes back to a chunk that could not
    be saved, which is planned again. whole_chunks: leading chunks that were whole in an earlier step.
    end_chunk: a chunk that cannot be saved, so that none from there on is. failures: failed saves, by chunk.
    """

    planned_chunks: int = 0
    whole_chunks: int = 0
    end_chunk: int = NO_END
    failures: Counter[int] = field(default_factory=Counter)

    def plan_again(self, chunk: int) -> None:
        """Note a chunk that was not saved: it is taken again, and those behind it that are not known by then."""
        self.planned_chunks = min(self.planned_chunks, chunk)

    def give_up(self, chunk: int) -> None:
        """Note a chunk that cannot be saved."""
        self.end_chunk = min(self.end_chunk, chunk)


@dataclass(slots=True)
class TrackedRequest:
    """State of one request while the engine has it.

    arrival: number of the request, in the order in which requests came.
    keys: of its leading chunks, as far as they were needed, within `namespace`.
    load_blocks: all blocks of the request behind its local hit, while a load is under way; None without one.
    computed_tokens: tokens that the engine had by itself when it last asked for a hit.
    own_tokens: these, and those of the load that it then waited for.
    question: lookup pending in a remote index; answer: the last one received from any index.
    """

    view: RequestView
    namespace: bytes
    may_load: bool
    may_save: bool
    arrival: int = 0
    keys: list[bytes] = field(default_factory=list)
    progress: SaveProgress = field(default_factory=SaveProgress)
    offer: Offer | None = None
    load_blocks: Sequence[int] | None = None
    computed_tokens: int = 0
    own_tokens: int = 0
    question: IndexQuestion | None = None
    answer: IndexAnswer | None = None

    def keys_to(self, chunk: int, chunk_tokens: int) -> list[bytes]:
        """Return the keys of the whole chunks before number `chunk`; fewer when that many tokens are not known."""
        if len(self.keys) < chunk:
            self.keys += chunk_keys(
                self.namespace,
                self.view.tokens,
                chunk_tokens,
                self.view.extras,
                first=len(self.keys),
                parent=self.keys[-1] if self.keys else None,
            )
        return self.keys[:chunk]

    def take_wanted(
        self,
        frontier_tokens: int,
        block_ids: Sequence[int],
        shape: BlockShape,
        is_known: Callable[[bytes], bool],
        limit: int | None = None,
    ) -> list[WantedChunk]:
        """Return the chunks that are whole below `frontier_tokens`, were not taken before and are not known to be
        stored or being saved; the first `limit` of them."""
        progress = self.progress
        end = min(frontier_tokens // shape.chunk_tokens, len(block_ids) // shape.blocks, progress.end_chunk)
        if end <= progress.planned_chunks:
            return []
        keys = self.keys_to(end, shape.chunk_tokens)
        while progress.planned_chunks < len(keys) and is_known(keys[progress.planned_chunks]):
            progress.planned_chunks += 1
        first = progress.planned_chunks
        stop = len(keys) if limit is None else min(len(keys), first + limit)
        wanted = [self._wanted(chunk, block_ids, shape) for chunk in range(first, stop)]
        progress.planned_chunks = max(first, stop)
        progress.whole_chunks = max(progress.whole_chunks, len(keys))
        return wanted

    def unsaved(
        self, frontier_tokens: int, block_ids: Sequence[int], shape: BlockShape, is_stored: Callable[[bytes], bool]
    ) -> list[WantedChunk]:
        """Return the chunks that are whole below `frontier_tokens` and that could be saved, but are not stored."""
        end = min(frontier_tokens // shape.chunk_tokens, len(block_ids) // shape.blocks, self.progress.end_chunk)
        keys = self.keys_to(end, shape.chunk_tokens)
        return [self._wanted(chunk, block_ids, shape) for chunk, key in enumerate(keys) if not is_stored(key)]

    def _wanted(self, chunk: int, block_ids: Sequence[int], shape: BlockShape) -> WantedChunk:
        parent = self.keys[chunk - 1] if chunk else self.namespace
        blocks = shape.blocks_of(block_ids, chunk, chunk + 1)
        owner, tenant, is_late = self.view.request_id, self.view.tenant, chunk < self.progress.whole_chunks
        return WantedChunk(self.keys[chunk], parent, blocks, tenant, owner, chunk, is_late)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Chunk and block sizes in tokens; a chunk is a whole number of engine blocks."""

    chunk_tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Return the number of blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens

    def blocks_of(self, block_ids: Sequence[int], first_chunk: int, end_chunk: int) -> tuple[int, ...]:
        """Return the blocks of chunks [first_chunk, end_chunk), out of those of a whole request."""
        return tuple(block_ids[first_chunk * self.blocks : end_chunk * self.blocks])
