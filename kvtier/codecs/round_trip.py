"""What a load brings back of what was saved, on plain tensors: for benchmarks of what the codecs cost."""

from __future__ import annotations

import torch

from kvtier.codecs.fp8.codec import Fp8Coder
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.vectors import LayerCoder
from kvtier.format.geometry import Extent


def round_trip(
    k: torch.Tensor, v: torch.Tensor, preset: str, seed: int = 0, first_layer: int = 0, chunk_tokens: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as they come back, of the same shapes and dtype.

    k, v: (layers, heads, tokens, size), on any device; tokens a multiple of `chunk_tokens`. preset: "fp8" or of
    PRESETS. first_layer: number within the model of the first of `layers`. Raises ValueError where a chunk is refused.
    """
    layers, heads, tokens, _ = k.shape
    n_chunks, rest = divmod(tokens, chunk_tokens)
    if rest:
        raise ValueError(f"{tokens} tokens are not whole chunks of {chunk_tokens}")
    coder = _coder(k, v, preset, seed, first_layer, chunk_tokens)
    back_k, back_v = torch.empty_like(k), torch.empty_like(v)
    for chunk in range(n_chunks):
        part = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
        for layer in range(layers):
            cells = Extent(first_layer + layer, 1, 0, heads)
            encoded = coder.encode(k[layer, :, part], v[layer, :, part], cells)
            if encoded.refused.any():
                raise ValueError(f"chunk {chunk}, layer {layer}: refused in heads {encoded.refused.nonzero().tolist()}")
            back_k[layer, :, part], back_v[layer, :, part] = coder.decode(encoded.data, cells, k.dtype)
    return back_k, back_v


def _coder(k: torch.Tensor, v: torch.Tensor, preset: str, seed: int, first_layer: int, chunk_tokens: int) -> LayerCoder:
    layers, heads, _, k_size = k.shape
    v_size = v.shape[-1]
    if preset == "fp8":
        return Fp8Coder(chunk_tokens, k_size, v_size)
    slab_format = SlabFormat(first_layer + layers, chunk_tokens, k_size, v_size, PRESETS[preset], seed=seed)
    return TurboquantCoder(slab_format, Extent(first_layer, layers, 0, heads), k.device)
