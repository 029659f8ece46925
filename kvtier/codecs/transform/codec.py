"""Codecs `tc4` and `tc3`: a transform calibrated for the model, 4 or 3 bits a component (reference.py defines them)."""

from functools import cache

import torch

from kvtier.codecs.base import BaseCodec, Mover
from kvtier.codecs.transform.reference import PlaneCoder, decode_layer, encode_layer, layer_bytes
from kvtier.codecs.transform.table import HEAD_SIZES, KEY, PRESET_BITS, PlaneTable, TransformTable
from kvtier.codecs.vectors import EncodedLayer, VectorPages, check_vectors
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.paged import PagedKV


class TransformCodec(BaseCodec):
    """The torch reference in host memory, with Triton kernels on CUDA: the same bytes."""

    def __init__(self, preset: str, table: TransformTable | None) -> None:
        """preset: of PRESET_BITS. table: None only to learn sizes."""
        super().__init__()
        self.version = 2  # 1 stored codes token by token
        self.name = f"{preset}+{table.hash}" if table else preset
        self._preset = preset
        self._table = table

    def check(self, geometry: Geometry) -> None:
        check_vectors(self._preset, geometry, HEAD_SIZES)
        if self._table:
            self._table.check_geometry(geometry)

    def check_weights(self, weights: str) -> None:
        """Raises ConfigError where the table was made with other weights. weights: their fingerprint."""
        if self._table:
            self._table.check_weights(weights)

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        """Without a table: as if all layers had as many bytes, which all of a model together have."""
        sizes = geometry.k_head_size, geometry.v_head_size
        rows = [PRESET_BITS[self._preset] * sum(sizes) // 8] * geometry.layers
        if self._table:
            rows = self._table.row_bytes[:, 0].tolist()
        return sum(layer_bytes(rows[layer], geometry.chunk_tokens, *sizes) for layer in layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        """Raises ConfigError without a table, and for pages that the kernels cannot take."""
        if self._table is None:
            raise ConfigError(KEY, None, f"codec {self._preset} needs one: kvtier calibrate MODEL --out FILE")
        coder = TransformCoder(self._table, held, geometry.chunk_tokens, torch.device("cpu"))
        try:
            self._movers[id(pages)] = _make_mover(pages, coder, held, self._table)
        except ValueError as fault:
            raise ConfigError("codec", self._preset, f"{fault}: set it to raw") from fault


class TransformCoder:
    """kvtier.codecs.vectors.LayerCoder for some layers and heads of a model."""

    def __init__(self, table: TransformTable, held: Extent, tokens: int, device: torch.device) -> None:
        self.tokens, self._held = tokens, held
        self._planes = [plane.of(held, device) for plane in (table.k, table.v)]
        self._levels = table.levels.to(device)
        self._frequencies = table.frequencies[held.first_layer : held.end_layer].to(device)
        sizes = [plane.mean.shape[-1] for plane in self._planes]
        self._layer_bytes = [layer_bytes(row, tokens, *sizes) for row in table.row_bytes[:, 0].tolist()]
        self._coders = cache(self._make_coders)

    def n_bytes(self, layers: range) -> int:
        return sum(self._layer_bytes[layers.start : layers.stop])

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent, position: int = 0) -> EncodedLayer:
        layer = cells.first_layer - self._held.first_layer
        return encode_layer(k, v, self._coders(cells), self._frequencies[layer], position)

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        layer = cells.first_layer - self._held.first_layer
        return decode_layer(data, self.tokens, self._coders(cells), self._frequencies[layer], dtype)

    def _make_coders(self, cells: Extent) -> tuple[PlaneCoder, ...]:
        layer, head = cells.first_layer - self._held.first_layer, cells.first_head - self._held.first_head
        heads = slice(head, head + cells.n_heads)
        parts = ([tensor[layer, heads] for tensor in plane] for plane in self._planes)
        return tuple(PlaneCoder.of(PlaneTable(*part), self._levels) for part in parts)


def _make_mover(pages: PagedKV, coder: TransformCoder, held: Extent, table: TransformTable) -> Mover:
    if pages.layers[0].k.device.type == "cpu":
        return VectorPages(pages, coder, held)
    from kvtier.codecs.transform.device import CudaTransform  # needs Triton, which hosts without a GPU may lack

    return CudaTransform(pages, coder, held, table)
