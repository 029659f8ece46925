"""Save and load of plain tensors through a codec: for benchmarks of what the codecs lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kvtier.codecs.int8.codec import Int8Coder
from kvtier.codecs.transform.codec import TransformCoder
from kvtier.codecs.transform.reference import layer_bytes
from kvtier.codecs.transform.table import PRESET_BITS, PlaneTable, TransformTable, read_table
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.geometry import Extent


def round_trip(
    k: torch.Tensor,
    v: torch.Tensor,
    preset: str,
    rope_base: float = 0.0,
    chunk_tokens: int = 256,
    table: Path | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as they come back, of the same shapes and dtype.

    k, v: (layers, ..., heads, tokens, size), on any device, `...` several prompts or nothing; tokens a multiple of
    `chunk_tokens`. preset: "int8", of turboquant's PRESETS, or of transform's PRESET_BITS with the model's table.
    rope_base: of K's rotary embedding, for turboquant. `layers` are the model's first. Raises ValueError where a chunk
    is refused.
    """
    shapes = k.shape, v.shape
    n_chunks, rest = divmod(k.shape[-2], chunk_tokens)
    if rest:
        raise ValueError(f"{k.shape[-2]} tokens are not whole chunks of {chunk_tokens}")
    if table is not None:
        k, v = k.flatten(1, -3), v.flatten(1, -3)
    layers, heads = k.shape[0], k.shape[-3]
    held = Extent(0, layers, 0, heads)
    if table is not None:
        coder: LayerCoder = TransformCoder(_repeated(read_table(table, preset), heads), held, chunk_tokens, k.device)
    else:
        coder = make_coder(preset, (k.shape[-1], v.shape[-1]), held, chunk_tokens, rope_base, k.device)
    back_k, back_v = torch.empty_like(k), torch.empty_like(v)
    for chunk in range(n_chunks):
        part = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
        for layer in range(layers):
            cells = Extent(layer, 1, 0, heads)
            encoded = coder.encode(k[layer, ..., part, :], v[layer, ..., part, :], cells, part.start)
            if encoded.refused.any():
                raise ValueError(f"chunk {chunk}, layer {layer}: refused in heads {encoded.refused.nonzero().tolist()}")
            back_k[layer, ..., part, :], back_v[layer, ..., part, :] = coder.decode(encoded.data, cells, k.dtype)
    return back_k.view(shapes[0]), back_v.view(shapes[1])


def _repeated(table: TransformTable, heads: int) -> TransformTable:
    """Return the table with its heads repeated until they are `heads`: those of several prompts."""
    n = -(-heads // table.k.mean.shape[1])
    k, v = (PlaneTable(*(torch.cat([tensor] * n, 1) for tensor in plane)) for plane in (table.k, table.v))
    return replace(table, k=k, v=v)


def make_coder(
    preset: str, sizes: tuple[int, int], held: Extent, chunk_tokens: int, rope_base: float, device: torch.device
) -> LayerCoder:
    """Return the reference of a preset that needs no table. sizes: of heads, of K and of V."""
    if preset == "int8":
        return Int8Coder(chunk_tokens, *sizes)
    slab_format = SlabFormat(chunk_tokens, *sizes, PRESETS[preset], rope_base)
    return TurboquantCoder(slab_format, held, device)


def bits_of(preset: str, size: int, chunk_tokens: int = 256) -> float:
    """Return the bits that a preset stores for an element, all side information included. size: of a head."""
    if preset in PRESET_BITS:
        return 8 * layer_bytes(PRESET_BITS[preset] * size // 4, chunk_tokens, size, size) / (2 * size * chunk_tokens)
    coder = make_coder(preset, (size, size), Extent(0, 1, 0, 1), chunk_tokens, 0.0, torch.device("cpu"))
    return 8 * coder.n_bytes(range(1)) / (2 * size * chunk_tokens)
