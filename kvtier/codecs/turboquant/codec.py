"""Codec `turboquant`: 4 to 6 bits an element and a scale a vector (the settings k6v5 and k4v4)."""

import torch

from kvtier.codecs.base import BaseCodec, Mover
from kvtier.codecs.error_watch import WatchedMover
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.turboquant.reference import Signs, decode_layer, encode_layer, signs_of
from kvtier.codecs.turboquant.rotation import HEAD_SIZES
from kvtier.codecs.vectors import EncodedLayer, VectorPages, check_vectors
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import PagedKV

ROPE_MARK = "+rope"  # before the base in a codec's name


class Turboquant(BaseCodec):
    """The torch reference in host memory, with Triton kernels on CUDA: the same bytes."""

    version = 3

    def __init__(self, preset: str, rope_base: float = 0.0) -> None:
        """preset: of PRESETS. rope_base: of the rotary embedding of K, which is taken off; 0: K stays as it is."""
        super().__init__()
        self.name = f"turboquant-{preset}" + (f"{ROPE_MARK}{rope_base!r}" if rope_base else "")
        self._preset = preset
        self._rope_base = rope_base

    def check(self, geometry: Geometry) -> None:
        check_vectors(self._preset, geometry, HEAD_SIZES)

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return self._format(geometry).n_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        """Raises ConfigError for pages that the kernels cannot take."""
        coder = TurboquantCoder(self._format(geometry), held, pages.layers[0].k.device)
        try:
            mover = _make_mover(pages, coder, held)
        except ValueError as fault:
            raise ConfigError("codec", self._preset, f"{fault}: set it to raw") from fault
        self._movers[id(pages)] = WatchedMover(mover, self._preset, VectorPages(pages, coder, held), self._rope_base)

    def _format(self, geometry: Geometry) -> SlabFormat:
        sizes = (geometry.chunk_tokens, geometry.k_head_size, geometry.v_head_size)
        return SlabFormat(*sizes, PRESETS[self._preset], self._rope_base, self.seed)


def rope_base_of(codec_name: str) -> float:
    """Return the base in the name of a namespace's codec, 0 if it has none."""
    _, mark, base = codec_name.partition(ROPE_MARK)
    return float(base) if mark else 0.0


class TurboquantCoder:
    """kvtier.codecs.vectors.LayerCoder for some layers and heads of a model."""

    def __init__(self, slab_format: SlabFormat, held: Extent, device: torch.device) -> None:
        self.format, self.tokens, self.n_bytes = slab_format, slab_format.tokens, slab_format.n_bytes
        self._held = held
        self._signs = signs_of(slab_format, held, device)

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent, position: int = 0) -> EncodedLayer:
        return encode_layer(k, v, self.format, self._signs_of(cells))

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_layer(data, self.format, self._signs_of(cells), dtype)

    def _signs_of(self, cells: Extent) -> Signs:
        """(heads, size) each, of one layer."""
        layer, head = cells.first_layer - self._held.first_layer, cells.first_head - self._held.first_head
        k, v = (plane[layer, head : head + cells.n_heads] for plane in self._signs)
        return Signs(k, v)


def _make_mover(pages: PagedKV, coder: TurboquantCoder, held: Extent) -> Mover:
    if pages.layers[0].k.device.type == "cpu":
        return VectorPages(pages, coder, held)
    from kvtier.codecs.turboquant.device import CudaTurboquant  # needs Triton, which hosts without a GPU may lack

    return CudaTurboquant(pages, coder, held)
