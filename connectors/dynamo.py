"""KV events of the tier for Dynamo's KV router: credit for prompts that a worker can load instead of computing them.

    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:20080"}'

turns them on, with those of vLLM's own cache: vLLM publishes the events that its connector's `take_events` returns
after a step. Each worker announces the chunks that it saved or found: the tier is shared, but the router knows prompts
only from the events of each worker. Dynamo 1.6.1 reads an event so:

- Medium STORAGE is its tier Disk: a block there counts 0.25 of one in the GPU (`--router-disk-cache-hit-weight`).
- It places blocks by `block_hashes` and `parent_block_hash`, and finds a prompt's by its own hash of `token_ids` and
  `extra_keys`, block by block. So events have the hashes and the block size of vLLM's own cache.
- It drops events without token_ids, and those of media FS, OBJ and SHARED_STORAGE or locality REMOTE.

An idle engine publishes nothing: evictions are published with its next step.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from kvtier.connectors.kv_events import Added, Announcements, Change, ChunkBlocks, Removed
from kvtier.connectors.tracked_request import BlockShape

log = logging.getLogger("kvtier")

MEDIUM = "STORAGE"
GROUP = 0  # kvtier stores models with one KV-cache group
CHANGES_AT_ONCE = 256  # chunks announced in one step, the rest in later ones: of 256 tokens each, a message of 0.5 MB
NEEDED_FIELDS = ("block_hashes", "token_ids", "extra_keys", "group_idx", "kv_cache_spec_kind", "medium")


def wants_events(vllm_config: Any) -> bool:
    """Return True if vLLM publishes KV events and can carry the tier's."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return False
    lacking = [name for name in NEEDED_FIELDS if name not in BlockStored.__struct_fields__]
    if lacking:
        log.warning("the tier sends no KV events, because those of vLLM lack %s; use 0.27.1 or later", lacking[0])
    return not lacking


class TierEvents:
    """The tier's changes as vLLM's events. spec: vLLM's, of the layers of the only KV-cache group."""

    def __init__(self, announcements: Announcements, spec: Any) -> None:
        self.announcements = announcements
        self._block_tokens = int(spec.block_size)
        self._kind = _kind_of(spec)

    @property
    def has_waiting(self) -> bool:
        return self.announcements.has_waiting

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last take, in order."""
        if not self.announcements.has_waiting:
            return []
        return events_of(self.announcements.take(CHANGES_AT_ONCE), self._block_tokens, self._kind)


def chunk_blocks(request: Any, chunk: int, shape: BlockShape, hash_tokens: int) -> ChunkBlocks | None:
    """Return a chunk of a vLLM Request as vLLM's prefix cache names its blocks; None if vLLM has not hashed them all.

    hash_tokens: tokens of one of the request's own hashes; vLLM may make them finer than blocks.
    """
    hashes = request.block_hashes
    if hash_tokens != shape.block_tokens:
        hashes = kv_cache_utils.resolve_block_hashes(hashes, hash_tokens, shape.block_tokens)
    first = chunk * shape.blocks
    own = tuple(hashes[first : first + shape.blocks])
    if len(own) < shape.blocks:
        return None
    lora = request.lora_request
    return ChunkBlocks(
        hashes=own,
        parent=hashes[first - 1] if first else None,
        tokens=tuple(request.all_token_ids[chunk * shape.chunk_tokens : (chunk + 1) * shape.chunk_tokens]),
        extras=tuple(_extras(request, first, shape)),
        lora=None if lora is None else (lora.adapter_id, lora.name),
    )


def events_of(changes: Sequence[Change], block_tokens: int, kind: str | None) -> list[KVCacheEvent]:
    """Return events in the order of the changes; consecutive chunks of a prompt, and consecutive removals, are one
    event."""
    events: list[KVCacheEvent] = []
    name = _naming()
    for change in changes:
        last = events[-1] if events else None
        if isinstance(change, Removed):
            hashes = [name(each) for each in change.hashes]
            if isinstance(last, BlockRemoved):
                last.block_hashes += hashes
            else:
                events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=GROUP))
            continue
        stored = _stored(change, name, block_tokens, kind)
        # Extra keys need no comparison: hashes that chain are of one prompt.
        if isinstance(last, BlockStored) and last.block_hashes[-1] == stored.parent_block_hash:
            last.block_hashes += stored.block_hashes
            last.token_ids += stored.token_ids
            last.extra_keys += stored.extra_keys
        else:
            events.append(stored)
    return events


def _naming() -> Callable[[bytes], bytes | int]:
    """Return a function that publishes a hash as vLLM does: whole, or its last 64 bits as a number. vLLM's own function
    reads an environment variable each time, which took 8 us a block."""
    if isinstance(kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(bytes(8))), int):
        return lambda own: int.from_bytes(own[-8:], "big")
    return lambda own: own


def _stored(change: Added, name: Callable[[bytes], bytes | int], block_tokens: int, kind: str | None) -> BlockStored:
    blocks = change.blocks
    lora_number, lora_name = blocks.lora or (None, None)
    return BlockStored(
        block_hashes=[name(own) for own in blocks.hashes],
        parent_block_hash=None if blocks.parent is None else name(blocks.parent),
        token_ids=list(blocks.tokens),
        block_size=block_tokens,
        lora_id=lora_number,
        medium=MEDIUM,
        lora_name=lora_name,
        extra_keys=_published(blocks.extras),
        group_idx=GROUP,
        kv_cache_spec_kind=kind,
    )


def _extras(request: Any, first_block: int, shape: BlockShape) -> list[tuple[Any, ...] | None]:
    """Return for each block of a chunk the further inputs of its hash, as vLLM defines them. Most requests have none,
    which one call for the whole request shows."""
    ask = kv_cache_utils.generate_block_hash_extra_keys
    if ask(request, 0, len(request.all_token_ids), 0)[0] is None:
        return [None] * shape.blocks
    starts = range(
        first_block * shape.block_tokens, (first_block + shape.blocks) * shape.block_tokens, shape.block_tokens
    )
    return [ask(request, start, start + shape.block_tokens, 0)[0] for start in starts]


def _published(extras: Sequence[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None]:
    """Return extra keys as vLLM publishes them: since 0.32 it hashes them with a tag before each."""
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return list(extras) if untagged is None else list(untagged(extras))


def _kind_of(spec: Any) -> str | None:
    try:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
    except ImportError:
        return None
    return str(get_kv_cache_spec_kind(spec).value)
