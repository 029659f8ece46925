"""What is remembered of one request of an engine: its chunk keys, how far it is saved, what it was offered.

Pure state; no engine, no I/O. Unit of work: one request, seen at one scheduler step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.format.namespace import chunk_keys
from kvtier.scheduler.store import WantedChunk


@dataclass(frozen=True, slots=True)
class RequestView:
    """What an engine says of a request when it is first seen.

    tokens: all known token ids, the generated ones too; a live view, without placeholders or unverified drafts.
    prompt_tokens: how many of them are the prompt.
    extras: chunk number -> what the chunk's KV depends on besides tokens (kvtier.format.namespace.join_extras).
    may_load, may_save: what the request itself allows.
    tenant: whose it is; "" for nobody in particular.
    """

    request_id: str
    tokens: Sequence[int]
    prompt_tokens: int
    extras: Mapping[int, bytes]
    may_load: bool
    may_save: bool
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A hit that the engine was told of: `entries` of consecutive chunks from `first_chunk` on.

    computed_tokens: what the engine had by itself; the load starts there, maybe in the middle of the first chunk.
    """

    computed_tokens: int
    first_chunk: int
    entries: tuple[bytes, ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a remote index said of chunks [first_chunk, end_chunk), for a moment: the engine may ask again and again
    until it has blocks for the request."""

    first_chunk: int
    end_chunk: int
    entries: tuple[bytes, ...]
    at_s: float

    def tells_of(self, first: int, end: int) -> bool:
        return self.first_chunk <= first and self.end_chunk == end


@dataclass(frozen=True, slots=True)
class Question:
    """What a remote index is asked, of chunks [first_chunk, end_chunk). It stays the same until it is answered, though
    the engine's own hit may grow meanwhile: another one would not be answered yet, either.

    since_s: the answer is waited for. at_s: when it was looked for last.
    """

    first_chunk: int
    end_chunk: int
    since_s: float
    at_s: float


@dataclass(slots=True)
class TrackedRequest:
    """State of one request while the engine has it.

    keys: of its leading chunks, as far as they were needed, within `namespace`.
    saved_chunks: leading chunks that were saved, or found saved, or given up: never wanted again.
    load_blocks: blocks of the load that is on its way; None when there is none.
    computed_tokens: what the engine had by itself when it last asked for a hit.
    own_tokens: that, and what it was then to wait for from us.
    question: to a remote index, while its answer is waited for; answer: the last one that was.
    """

    view: RequestView
    namespace: bytes
    may_load: bool
    may_save: bool
    keys: list[bytes] = field(default_factory=list)
    saved_chunks: int = 0
    offer: Offer | None = None
    load_blocks: frozenset[int] | None = None
    computed_tokens: int = 0
    own_tokens: int = 0
    question: Question | None = None
    answer: Answer | None = None

    def keys_to(self, chunk: int, chunk_tokens: int) -> list[bytes]:
        """Keys of the whole chunks before number `chunk`; fewer when that many tokens are not known."""
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

    def take_wanted(self, frontier_tokens: int, block_ids: Sequence[int], shape: ChunkShape) -> list[WantedChunk]:
        """Chunks that are whole below `frontier_tokens` and were not taken before."""
        end = min(frontier_tokens // shape.chunk_tokens, len(block_ids) // shape.blocks)
        if end <= self.saved_chunks:
            return []
        keys = self.keys_to(end, shape.chunk_tokens)
        wanted = []
        for chunk in range(self.saved_chunks, len(keys)):
            parent = keys[chunk - 1] if chunk else self.namespace
            blocks = shape.blocks_of(block_ids, chunk, chunk + 1)
            wanted.append(WantedChunk(keys[chunk], parent, blocks, self.view.tenant))
        self.saved_chunks = len(keys)
        return wanted


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """How chunks lie in the engine's blocks."""

    chunk_tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens

    def blocks_of(self, block_ids: Sequence[int], first_chunk: int, end_chunk: int) -> tuple[int, ...]:
        """The blocks of chunks [first_chunk, end_chunk), out of those of a whole request."""
        return tuple(block_ids[first_chunk * self.blocks : end_chunk * self.blocks])
