"""Codec `raw`: the engine's own bytes. Slab = [layer][K, then V][token][element], then padding."""

from collections.abc import Sequence

from kvtier.codecs.bands import BandedPages, Copier
from kvtier.codecs.base import BaseCodec
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.host import HostPages
from kvtier.kernels.paged import Move, PagedKV


class RawCodec(BaseCodec):
    """Moves bytes as they are: natively in host memory, with Triton kernels on CUDA."""

    name = "raw"

    def __init__(self) -> None:
        super().__init__()
        self._copiers: dict[int, Copier] = {}  # of each PagedKV, which the copier holds, by the object's id

    def check(self, geometry: Geometry) -> None:
        """All bytes are alike."""

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return geometry.chunk_tokens * geometry.vectors_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        # Pages that are alike are not enough: records of other cuts may begin with layers that are not.
        is_alike = geometry.plain is None
        copier = _make_copier(pages) if is_alike else BandedPages(pages, geometry, held, _make_copier)
        self._copiers[id(pages)] = copier

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._copiers[id(pages)].gather(moves)

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._copiers[id(pages)].scatter(moves)


def _make_copier(pages: PagedKV) -> Copier:
    if pages.layers[0].k.device.type == "cpu":
        return HostPages(pages)
    from kvtier.kernels.device import DevicePages  # needs Triton, which hosts without a GPU may lack

    return DevicePages(pages)
