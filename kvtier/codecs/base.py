"""The codec: how KV is laid out in a slab. Fixed-rate, and fixed for a namespace.

A slab is one KV head of a record's layers, encoded, padded to whole pages. Encoding is fused with the gather from
the engine's blocks and decoding with the scatter into them, because on a GPU either is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvtier.geometry import Geometry, padded
from kvtier.kernels.paged import PagedKV, Patch


class Codec(Protocol):
    name: str
    version: int
    seed: int

    def layer_bytes(self, geometry: Geometry) -> int:
        """Encoded bytes of one layer of one head of one chunk; a slab is these for each layer, then padding."""
        ...

    def encode(self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], slabs: torch.Tensor) -> None:
        """Blocks of one chunk -> slabs, (n_heads, slab_bytes) uint8; padding is left as it is."""
        ...

    def decode(
        self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], first_block: int, slabs: torch.Tensor
    ) -> None:
        """Slabs -> the blocks of one chunk, but for the first `first_block` of them."""
        ...


def slab_bytes(codec: Codec, geometry: Geometry, n_layers: int) -> int:
    """Bytes of a slab of `n_layers` layers."""
    return padded(n_layers * codec.layer_bytes(geometry))
