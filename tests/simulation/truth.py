"""What the KV of a chunk is: bytes that depend on the weights, the tenant's salt and every token up to the chunk's end,
and on nothing else. Two chunks that differ in any of these differ in every byte or so."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from kvtier.format.geometry import Extent, Geometry, RankShare
from kvtier.kernels.paged import PagedKV, PagedLayer

LAYERS, HEADS, VECTOR_BYTES = 2, 2, 16
BLOCK_TOKENS, CHUNK_BLOCKS = 4, 2
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
CANARY = 0xA5  # fills blocks that nobody may write into

SHAPE = Geometry(LAYERS, HEADS, VECTOR_BYTES, VECTOR_BYTES, "uint8", 1, "heads", CHUNK_TOKENS)
Bytes = npt.NDArray[np.uint8]
Identity = tuple[str, str, tuple[int, ...]]  # (weights, salt, all tokens up to the chunk's end)


def value_of(identity: Identity) -> Bytes:
    """(layers, K and V, blocks, tokens of a block, heads, bytes)"""
    shape = (LAYERS, 2, CHUNK_BLOCKS, BLOCK_TOKENS, HEADS, VECTOR_BYTES)
    noise = blake3(repr(identity).encode()).digest(length=int(np.prod(shape)))
    return np.frombuffer(noise, dtype=np.uint8).reshape(shape)


def slabs_of(value: Bytes, extent: Extent) -> list[bytes]:
    """What a raw record of `extent` holds of it, a head after the other, without padding."""
    part = value[extent.first_layer : extent.end_layer]
    return [part[..., head, :].tobytes() for head in range(extent.first_head, extent.end_head)]


@dataclass
class Truth:
    """Which chunk each key stands for, as far as engines asked for keys."""

    by_key: dict[bytes, Identity] = field(default_factory=dict)
    _values: dict[Identity, Bytes] = field(default_factory=dict)

    def of(self, identity: Identity) -> Bytes:
        known = self._values.get(identity)
        if known is None:
            known = self._values[identity] = value_of(identity)
        return known

    def learn(self, keys: Sequence[bytes], weights: str, salt: str, tokens: Sequence[int]) -> str | None:
        """Takes the keys of a prompt's chunks; what is wrong with them, if anything is."""
        for number, key in enumerate(keys):
            identity = (weights, salt, tuple(tokens[: (number + 1) * CHUNK_TOKENS]))
            if self.by_key.setdefault(key, identity) != identity:
                return f"one key stands for {identity} and for {self.by_key[key]} (I2)"
        return None


class Pages:
    """The paged KV of one rank, as bytes: (layers, K and V, blocks, tokens of a block, heads, bytes)."""

    def __init__(self, share: RankShare, n_blocks: int) -> None:
        self.held = share.reads
        shape = (self.held.n_layers, 2, n_blocks, BLOCK_TOKENS, self.held.n_heads, VECTOR_BYTES)
        self.content: Bytes = np.full(shape, CANARY, dtype=np.uint8)
        layers = tuple(PagedLayer(torch.from_numpy(k), torch.from_numpy(v)) for k, v in self.content)
        self.paged = PagedKV(layers, BLOCK_TOKENS)

    def put(self, blocks: Sequence[int], value: Bytes, first: int = 0) -> None:
        """Writes blocks of a chunk, from its number `first` on."""
        self.content[:, :, list(blocks)] = self._part(value)[:, :, first : first + len(blocks)]

    def holds(self, blocks: Sequence[int], value: Bytes, first: int = 0) -> bool:
        return np.array_equal(self.content[:, :, list(blocks)], self._part(value)[:, :, first : first + len(blocks)])

    def blank(self, blocks: Sequence[int]) -> None:
        self.content[:, :, list(blocks)] = CANARY

    def are_blank(self, blocks: Sequence[int]) -> bool:
        return bool((self.content[:, :, list(blocks)] == CANARY).all())

    def _part(self, value: Bytes) -> Bytes:
        held = self.held
        return value[held.first_layer : held.end_layer, ..., held.first_head : held.end_head, :]
