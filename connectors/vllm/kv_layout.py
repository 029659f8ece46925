"""vLLM's KV tensors as PagedKV views, identified by their shapes. No copies and no guesses.

Known shapes of one layer's tensor. B is the number of kernel blocks: the engine's blocks, each cut into `ratio` equal
pieces if the attention kernel needs smaller ones; N is the tokens of a kernel block.

    (B, H, N, K+V)      vLLM 0.27 and later: each vector is K, then V; any strides
    (B, H, N, 2*size)   vLLM on the CPU: a page (block, head) is all its K, then all its V. Within a page K is packed
                        as the CPU's kernels need it: opaque here, and so part of the namespace (platform)
    (B, 2, N, H, size)  vLLM 0.25, FlashAttention and FlashInfer; any strides, so NHD and HND alike
    (2, B, N, H, size)  older backends: all of K, then all of V
    (B, N, size)        MLA before 0.32: one latent vector a token
    (B, 1, N, size)     MLA since 0.32
    (B, H, N, slot)     turboquant_* since 0.27: K and V of a token and head are one slot of bytes; any strides
    (B, N, H, slot)     turboquant_* in 0.25

A tensor that fits none of them, or more than one, is refused with a ConfigError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvtier.errors import ConfigError
from kvtier.kernels.paged import PagedKV, PagedLayer

_ADVICE = "this KV cache layout is not known; start vLLM without the kvtier connector, and please report the shape"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One rank's KV cache as the engine describes it.

    n_blocks, block_tokens: of the engine's own blocks. heads: on this rank. v_head_size: 0 for MLA and for slots.
    is_halved: K and V are the two halves of a page, as on the CPU, not of each vector. is_k_by_element: see PagedKV.
    is_slots: K is slots of opaque bytes with all of K and V. element_bytes: None if any will do.
    """

    n_blocks: int
    block_tokens: int
    heads: int
    k_head_size: int
    v_head_size: int
    is_halved: bool = False
    is_k_by_element: bool = False
    is_slots: bool = False
    element_bytes: int | None = None

    @property
    def is_mla(self) -> bool:
        return self.v_head_size == 0 and not self.is_slots


@dataclass(frozen=True, slots=True)
class EnginePages:
    """The engine's KV cache as the library sees it; one engine block is `ratio` consecutive blocks of `pages`."""

    pages: PagedKV
    ratio: int

    def expand(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Convert engine block ids to ids of `pages`."""
        if self.ratio == 1:
            return tuple(block_ids)
        return tuple(block * self.ratio + piece for block in block_ids for piece in range(self.ratio))

    def contract(self, block_ids: Iterable[int]) -> set[int]:
        """Return the engine blocks that hold any of these blocks of `pages`."""
        return {block // self.ratio for block in block_ids}


def engine_pages(
    kv_caches: Mapping[str, torch.Tensor],
    layer_names: Sequence[str],
    shape: CacheShape,
    others: Mapping[str, CacheShape] = MappingProxyType({}),
) -> EnginePages:
    """Return views of the layers in the given order. Raises ConfigError for an unknown layout.

    others: shapes of layers that differ from `shape`, with the same blocks.
    """
    missing = [name for name in layer_names if name not in kv_caches]
    if missing:
        raise ConfigError("kv_cache", missing[0], "vLLM registered no tensor for this layer; " + _ADVICE)
    ratios = set()
    layers = []
    for name in layer_names:
        layer, ratio = _layer(name, kv_caches[name], others.get(name, shape))
        layers.append(layer)
        ratios.add(ratio)
    if len(ratios) != 1:
        raise ConfigError("kv_cache", sorted(ratios), "layers with different kernel block sizes are not supported")
    places = {plane.data_ptr() for layer in layers for plane in layer.planes}
    if len(places) != sum(len(layer.planes) for layer in layers):
        raise ConfigError("kv_cache", "shared", "layers that share one KV cache are not supported by kvtier")
    ratio = ratios.pop()
    return EnginePages(PagedKV(tuple(layers), shape.block_tokens // ratio, shape.is_k_by_element), ratio)


def layer_number(name: str) -> int:
    """Return the position of a layer in the model, from its name ("model.layers.7.self_attn.attn"). Raises
    ConfigError."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise ConfigError("kv_cache", name, "the layer's name has no number, so its place is not known; " + _ADVICE)
    return numbers[0]


def in_layer_order(names: Sequence[str]) -> list[str]:
    """Sort layer names by their number. Raises ConfigError if two have the same."""
    by_number = {layer_number(name): name for name in names}
    if len(by_number) != len(names):
        raise ConfigError("kv_cache", sorted(names)[:4], "several attention layers have the same number; " + _ADVICE)
    return [by_number[number] for number in sorted(by_number)]


def _layer(name: str, tensor: torch.Tensor, shape: CacheShape) -> tuple[PagedLayer, int]:
    readings = [reading for reading in _readings(tensor, shape) if reading is not None]
    if len(readings) != 1:
        value = f"{name}: {tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}, for {shape}"
        raise ConfigError(
            "kv_cache", value, ("fits no layout; " if not readings else "fits several layouts; ") + _ADVICE
        )
    layer = readings[0]
    for plane in layer.planes:
        if plane.stride(-1) != 1:
            raise ConfigError(
                "kv_cache", f"{name}: strides {tensor.stride()}", "vectors are not contiguous; " + _ADVICE
            )
    return layer, layer.k.shape[0] // shape.n_blocks


def _readings(tensor: torch.Tensor, shape: CacheShape) -> list[PagedLayer | None]:
    """Return the tensor under each known layout, None if it does not fit."""
    k_size, v_size = shape.k_head_size, shape.v_head_size
    if shape.is_mla:
        if tensor.dim() == 3:
            return [_checked(tensor.unsqueeze(2), None, shape)]
        return [_checked(tensor.permute(0, 2, 1, 3), None, shape)] if tensor.dim() == 4 else []
    if shape.is_slots:
        both_orders = (tensor.permute(0, 2, 1, 3), tensor) if tensor.dim() == 4 else ()
        return [_checked(slots, None, shape) for slots in both_orders]
    if shape.is_halved:
        return [_halves(tensor, shape)]
    if tensor.dim() == 4 and tensor.shape[3] == k_size + v_size:
        tokens_first = tensor.permute(0, 2, 1, 3)
        return [_checked(tokens_first[..., :k_size], tokens_first[..., k_size:], shape)]
    if tensor.dim() == 5:
        both = []
        if tensor.shape[1] == 2:
            both.append(_checked(tensor[:, 0], tensor[:, 1], shape))
        if tensor.shape[0] == 2:
            both.append(_checked(tensor[0], tensor[1], shape))
        return both
    return []


def _halves(tensor: torch.Tensor, shape: CacheShape) -> PagedLayer | None:
    """Return a CPU page, (N, 2 * size) without holes, as N rows of K and then N rows of V."""
    size = shape.k_head_size
    if tensor.dim() != 4 or shape.v_head_size != size or tensor.shape[3] != 2 * size:
        return None
    if tensor.stride()[2:] != (2 * size, 1):
        return None
    n_blocks, heads, tokens, _ = tensor.shape
    strides = (*tensor.stride()[:2], size, 1)
    rows = tensor.as_strided((n_blocks, heads, 2 * tokens, size), strides).permute(0, 2, 1, 3)
    return _checked(rows[:, :tokens], rows[:, tokens:], shape)


def _checked(k: torch.Tensor, v: torch.Tensor | None, shape: CacheShape) -> PagedLayer | None:
    """Return the layer, if K and V are (n_blocks * ratio, block_tokens / ratio, heads, head size) for a whole ratio."""
    ratio, rest = divmod(k.shape[0], shape.n_blocks)
    if ratio < 1 or rest or shape.block_tokens % ratio:
        return None
    if shape.element_bytes not in (None, k.element_size()):
        return None
    blocks = (k.shape[0], shape.block_tokens // ratio, shape.heads)
    if k.shape != (*blocks, shape.k_head_size):
        return None
    if v is not None and v.shape != (*blocks, shape.v_head_size):
        return None
    return PagedLayer(k, v)
