"""The codec: how KV is laid out in a slab. Fixed-rate, and fixed for a namespace.

A slab is one KV head of a record's layers, encoded, padded to whole pages. Encoding is fused with the gather from
the engine's blocks and decoding with the scatter into them, because on a GPU either is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.geometry import Geometry, padded
from kvtier.kernels.paged import Move, PagedKV


class Codec(Protocol):
    name: str
    version: int
    seed: int

    def layer_bytes(self, geometry: Geometry) -> int:
        """Encoded bytes of one layer of one head of one chunk; a slab is these for each layer, then padding."""
        ...

    def prepare(self, pages: PagedKV) -> None:
        """Once, before anything is moved: tables of these pages, and whatever else must not be made in a step."""
        ...

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        """Blocks -> slabs; padding is left as it is. On CUDA: launched on the current stream."""
        ...

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        """Slabs -> blocks, but for those before each move's `first_block`."""
        ...


def slab_bytes(codec: Codec, geometry: Geometry, n_layers: int) -> int:
    """Bytes of a slab of `n_layers` layers."""
    return padded(n_layers * codec.layer_bytes(geometry))
