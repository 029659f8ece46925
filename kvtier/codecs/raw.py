"""Codec `raw`: the engine's own bytes. Slab = [layer][K, then V][token][element], then padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.geometry import Geometry
from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import PagedKV, Patch, gather, scatter


class RawCodec:
    """Moves bytes as they are: natively in host memory, with the torch reference elsewhere."""

    name = "raw"
    version = 1
    seed = 0

    def __init__(self) -> None:
        self._host: dict[int, HostPages] = {}

    def layer_bytes(self, geometry: Geometry) -> int:
        return geometry.chunk_tokens * geometry.vector_bytes

    def encode(self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], slabs: torch.Tensor) -> None:
        if slabs.device.type == "cpu":
            self._host_pages(pages).gather(patch, block_ids, slabs)
        else:
            gather(pages, patch, block_ids, slabs)

    def decode(
        self, pages: PagedKV, patch: Patch, block_ids: Sequence[int], first_block: int, slabs: torch.Tensor
    ) -> None:
        if slabs.device.type == "cpu":
            self._host_pages(pages).scatter(patch, block_ids, first_block, slabs)
        else:
            scatter(pages, patch, block_ids, first_block, slabs)

    def _host_pages(self, pages: PagedKV) -> HostPages:
        known = self._host.get(id(pages))  # a HostPages keeps its PagedKV, so the id is not another's
        if known is None:
            known = self._host[id(pages)] = HostPages(pages)
        return known
