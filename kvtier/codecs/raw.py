"""Codec `raw`: the engine's own bytes. Slab = [layer][K, then V][token][element], then padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.codecs.base import Encoded, Movers
from kvtier.geometry import Extent, Geometry
from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import Move, PagedKV


class _Copier(Protocol):
    """Gather and scatter over one engine's pages."""

    def gather(self, moves: Sequence[Move]) -> None: ...

    def scatter(self, moves: Sequence[Move]) -> None: ...


class RawCodec:
    """Moves bytes as they are: natively in host memory, with Triton kernels on CUDA."""

    name = "raw"
    version = 1
    seed = 0

    def __init__(self) -> None:
        self._movers = Movers()

    def check(self, geometry: Geometry) -> None:
        """All bytes are alike."""

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return len(layers) * geometry.chunk_tokens * geometry.vector_bytes

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        self._movers.add(pages, _RawMover(_make_copier(pages)))

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> Encoded | None:
        return self._movers.of(pages).encode(moves)

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._movers.of(pages).decode(moves)


class _RawMover:
    def __init__(self, copier: _Copier) -> None:
        self._copier = copier

    def encode(self, moves: Sequence[Move]) -> None:
        self._copier.gather(moves)

    def decode(self, moves: Sequence[Move]) -> None:
        self._copier.scatter(moves)


def _make_copier(pages: PagedKV) -> _Copier:
    if pages.layers[0].k.device.type == "cpu":
        return HostPages(pages)
    from kvtier.kernels.device import DevicePages  # needs Triton, which hosts without a GPU may lack

    return DevicePages(pages)
