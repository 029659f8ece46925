"""Every known shape of vLLM's KV tensors: what is put into a token's place is found there through the views."""

from dataclasses import replace

import pytest
import torch

from kvtier.connectors.vllm.kv_layout import CacheShape, EnginePages, engine_pages, in_layer_order, layer_number
from kvtier.errors import ConfigError
from kvtier.kernels.paged import Patch, gather
from tests.support.layouts import ORDERS

BLOCKS, TOKENS, HEADS, K_SIZE, LAYERS = 6, 32, 3, 8, 4


def names(count: int = LAYERS) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in range(count)]


def vectors(heads: int, size: int) -> torch.Tensor:
    """(layers, blocks, tokens, heads, size): every element is another number."""
    shape = (LAYERS, BLOCKS, TOKENS, heads, size)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def in_memory_order(logical: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same tensor, whose axes lie in memory in the given order."""
    inverse = sorted(range(len(order)), key=lambda axis: order[axis])
    return logical.permute(order).contiguous().permute(inverse)


def check(pages: EnginePages, k: torch.Tensor, v: torch.Tensor | None) -> None:
    """Compare k and v, (layers, blocks, tokens, heads, size), with the views and with what the raw codec gathers."""
    inner = pages.pages.block_tokens
    for layer in range(LAYERS):
        for plane, expected in zip(pages.pages.layers[layer].planes, (k, v), strict=False):
            assert torch.equal(plane.reshape(BLOCKS, TOKENS, *plane.shape[2:]), expected[layer])
    block = 4
    chosen = pages.expand([block])
    assert len(chosen) * inner == TOKENS
    heads = k.shape[3]
    slab_bytes = LAYERS * TOKENS * pages.pages.vector_bytes
    slabs = torch.zeros(heads, slab_bytes, dtype=torch.uint8)
    gather(pages.pages, Patch(0, 0, LAYERS, 0, heads), chosen, slabs)
    for head in range(heads):
        parts = []
        for layer in range(LAYERS):
            parts += [plane[layer, block, :, head].flatten() for plane in (k, v) if plane is not None]
        assert torch.equal(slabs[head].view(torch.float32), torch.cat(parts))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("v_size", [K_SIZE, 16])
def test_packed_vectors_in_every_order(order: str, v_size: int) -> None:
    """0.27 and 0.32: (B, H, N, K+V) per layer, strided views of one allocation."""
    k, v = vectors(HEADS, K_SIZE), -vectors(HEADS, v_size)
    cache = in_memory_order(torch.cat([k, v], dim=-1).permute(0, 1, 3, 2, 4), ORDERS[order])
    kv_caches = dict(zip(names(), cache.unbind(0), strict=True))
    pages = engine_pages(kv_caches, names(), CacheShape(BLOCKS, TOKENS, HEADS, K_SIZE, v_size))
    check(pages, k, v)
    storage = cache.untyped_storage().data_ptr()
    assert all(layer.k.untyped_storage().data_ptr() == storage for layer in pages.pages.layers), "views, never copies"


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_smaller_than_the_engines(order: str, ratio: int) -> None:
    """Each engine block is `ratio` consecutive kernel blocks."""
    k, v = vectors(HEADS, K_SIZE), -vectors(HEADS, K_SIZE)
    both = torch.cat([k, v], dim=-1).reshape(LAYERS, BLOCKS * ratio, TOKENS // ratio, HEADS, 2 * K_SIZE)
    cache = in_memory_order(both.permute(0, 1, 3, 2, 4), ORDERS[order])
    kv_caches = dict(zip(names(), cache.unbind(0), strict=True))
    pages = engine_pages(kv_caches, names(), CacheShape(BLOCKS, TOKENS, HEADS, K_SIZE, K_SIZE))
    assert pages.ratio == ratio
    assert pages.contract(pages.expand([1, 5])) == {1, 5}
    check(pages, k, v)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("kv_first", [False, True])
def test_025_flash_attention(heads_first: bool, kv_first: bool) -> None:
    """(B, 2, N, H, size) or (2, B, N, H, size), in NHD or HND strides."""
    k, v = vectors(HEADS, K_SIZE), -vectors(HEADS, K_SIZE)
    kv_caches = {}
    for number, name in enumerate(names()):
        logical = torch.stack([k[number], v[number]], dim=0 if kv_first else 1)
        kv_caches[name] = in_memory_order(logical, (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4))
    check(engine_pages(kv_caches, names(), CacheShape(BLOCKS, TOKENS, HEADS, K_SIZE, K_SIZE)), k, v)


def test_cpu_pages_are_halved() -> None:
    """(B, H, N, 2*size), where a page holds all its K and then all its V."""
    k, v = vectors(HEADS, K_SIZE), -vectors(HEADS, K_SIZE)
    kv_caches = {}
    for number, name in enumerate(names()):
        pages_of_heads = torch.cat([k[number], v[number]], dim=1).permute(0, 2, 1, 3).contiguous()  # (B, H, 2N, size)
        kv_caches[name] = pages_of_heads.view(BLOCKS, HEADS, TOKENS, 2 * K_SIZE)
    shape = CacheShape(BLOCKS, TOKENS, HEADS, K_SIZE, K_SIZE, is_halved=True)
    check(engine_pages(kv_caches, names(), shape), k, v)
    assert not engine_pages(kv_caches, names(), shape).pages.is_k_by_element, "K may be packed in another way"
    assert engine_pages(kv_caches, names(), replace(shape, is_k_by_element=True)).pages.is_k_by_element


@pytest.mark.parametrize("with_heads", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
def test_mla(with_heads: bool, ratio: int) -> None:
    """(B, N, size) before 0.32, (B, 1, N, size) since."""
    latent = vectors(1, K_SIZE)
    shape = (LAYERS, BLOCKS * ratio, TOKENS // ratio, K_SIZE)
    cache = latent.reshape(shape).unsqueeze(2) if with_heads else latent.reshape(shape)
    kv_caches = dict(zip(names(), cache.unbind(0), strict=True))
    check(engine_pages(kv_caches, names(), CacheShape(BLOCKS, TOKENS, 1, K_SIZE, 0)), latent, None)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, HEADS, TOKENS, 2 * K_SIZE + 1),
        torch.zeros(BLOCKS, TOKENS, HEADS, 2 * K_SIZE),
        torch.zeros(BLOCKS + 1, HEADS, TOKENS, 2 * K_SIZE),
        torch.zeros(BLOCKS, 2, HEADS, TOKENS, K_SIZE),
        torch.zeros(BLOCKS, 3, TOKENS, HEADS, K_SIZE),
        torch.zeros(BLOCKS, HEADS * TOKENS * 2 * K_SIZE),
        torch.zeros(BLOCKS, HEADS, 2 * K_SIZE, TOKENS).transpose(2, 3),
    ],
    ids=["content", "tokens before heads", "blocks", "HND shape", "three planes", "flat", "vectors not contiguous"],
)
def test_what_is_not_understood_is_refused(tensor: torch.Tensor) -> None:
    shape = CacheShape(BLOCKS, TOKENS, HEADS, K_SIZE, K_SIZE)
    with pytest.raises(ConfigError, match="kv_cache"):
        engine_pages({names()[0]: tensor}, names(1), shape)


WHOLE = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * K_SIZE)


@pytest.mark.parametrize(
    ("tensors", "n_blocks", "text"),
    [
        ([torch.zeros(2, 2, TOKENS, HEADS, K_SIZE)], 2, "several layouts"),  # (2, B, ...) and (B, 2, ...) look alike
        ([WHOLE, WHOLE], BLOCKS, "share"),
        ([WHOLE, None], BLOCKS, r"layers\.1"),
    ],
    ids=["two layouts", "layers that share a tensor", "a layer without one"],
)
def test_tensors_that_do_not_tell_their_layers_are_refused(
    tensors: list[torch.Tensor | None], n_blocks: int, text: str
) -> None:
    given = names(len(tensors))
    found = {name: tensor for name, tensor in zip(given, tensors, strict=True) if tensor is not None}
    with pytest.raises(ConfigError, match=text):
        engine_pages(found, given, CacheShape(n_blocks, TOKENS, HEADS, K_SIZE, K_SIZE))


def test_layers_are_ordered_by_number_not_by_name() -> None:
    given = ["model.layers.10.attn", "model.layers.2.attn", "model.layers.0.attn"]
    assert in_layer_order(given) == ["model.layers.0.attn", "model.layers.2.attn", "model.layers.10.attn"]
    assert layer_number("transformer.h.7.attn") == 7
    with pytest.raises(ConfigError, match="no number"):
        layer_number("attn")
    with pytest.raises(ConfigError, match="same number"):
        in_layer_order(["model.layers.1.attn", "model.layers.1.cross"])
