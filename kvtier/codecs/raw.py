"""Codec `raw`: the engine's own bytes. Slab = [layer][K, then V][token][element], then padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.geometry import Geometry
from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import Move, PagedKV


class Mover(Protocol):
    """Gather and scatter over one engine's pages."""

    def gather(self, moves: Sequence[Move]) -> None: ...

    def scatter(self, moves: Sequence[Move]) -> None: ...


class RawCodec:
    """Moves bytes as they are: natively in host memory, with Triton kernels on CUDA."""

    name = "raw"
    version = 1
    seed = 0

    def __init__(self) -> None:
        self._movers: dict[int, Mover] = {}

    def layer_bytes(self, geometry: Geometry) -> int:
        return geometry.chunk_tokens * geometry.vector_bytes

    def prepare(self, pages: PagedKV) -> None:
        self._mover(pages)

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._mover(pages).gather(moves)

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._mover(pages).scatter(moves)

    def _mover(self, pages: PagedKV) -> Mover:
        known = self._movers.get(id(pages))  # a mover keeps its PagedKV, so the id is not another's
        if known is None:
            known = self._movers[id(pages)] = _make_mover(pages)
        return known


def _make_mover(pages: PagedKV) -> Mover:
    if pages.layers[0].k.device.type == "cpu":
        return HostPages(pages)
    from kvtier.kernels.device import DevicePages  # needs Triton, which hosts without a GPU may lack

    return DevicePages(pages)
