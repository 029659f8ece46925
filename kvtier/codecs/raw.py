"""Codec `raw`: the engine's own bytes. Slab = [layer][K, then V][token][element], then padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.geometry import Geometry
from kvtier.kernels.paged import PagedKV, Patch, gather, scatter


class RawCodec:
    name = "raw"
    version = 1
    seed = 0

    def layer_bytes(self, geometry: Geometry) -> int:
        return geometry.chunk_tokens * geometry.vector_bytes

    def encode(self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], slabs: torch.Tensor) -> None:
        gather(pages, patch, block_ids, slabs)

    def decode(
        self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], first_block: int, slabs: torch.Tensor
    ) -> None:
        scatter(pages, patch, block_ids, first_block, slabs)
