"""KV caches in every layout that vLLM has, made over a given buffer of bytes, so that tests can compare all of it."""

from dataclasses import dataclass

import torch

from kvtier.connectors.vllm.kv_layout import CacheShape, engine_pages
from kvtier.kernels.paged import PagedKV
from tests.kernels.device_rig import DEVICE
from tests.support.layouts import ORDERS

GUARD = 256
FLASH = {  # the same axes, of which each token's content is one of K and V
    "B2NHD": (0, 1, 5, 3, 2, 4),
    "B2HND": (0, 1, 5, 2, 3, 4),
    "2BNHD": (0, 5, 1, 3, 2, 4),
    "2BHND": (0, 5, 1, 2, 3, 4),
}
LAYOUTS = (*ORDERS, *FLASH)  # of models whose K and V are alike. MLA's are "mla3" and "mla4".


@dataclass(frozen=True)
class Cache:
    """A KV cache: its layout, one of those above, and its sizes. v_size: 0 for MLA. shift: bytes that it is off."""

    layout: str
    dtype: torch.dtype = torch.bfloat16
    k_size: int = 64
    v_size: int = 64
    heads: int = 2
    layers: int = 3
    blocks: int = 8
    tokens: int = 16
    shift: int = 0

    @property
    def n_bytes(self) -> int:
        """Of the buffer: the cache, and what lies around it."""
        return 2 * GUARD + self.shift + self.kv_bytes

    @property
    def kv_bytes(self) -> int:
        vectors = self.layers * self.blocks * self.tokens * self.heads
        return vectors * (self.k_size + self.v_size) * self.dtype.itemsize

    @property
    def shape(self) -> CacheShape:
        return CacheShape(self.blocks, self.tokens, self.heads, self.k_size, self.v_size)

    def pages(self, buffer: torch.Tensor) -> PagedKV:
        """Views into `buffer`, (n_bytes,) uint8, as the connector makes them of the engine's tensors."""
        values = buffer[GUARD + self.shift :][: self.kv_bytes].view(self.dtype)
        names = [f"layers.{number}" for number in range(self.layers)]
        tensors = dict(zip(names, self._tensors(values), strict=True))
        return engine_pages(tensors, names, self.shape).pages

    def _tensors(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = (self.layers, self.blocks, self.heads, self.tokens)
        if self.layout in ("mla3", "mla4"):
            whole = values.view(self.layers, self.blocks, self.tokens, self.k_size)
            return (whole if self.layout == "mla3" else whole.unsqueeze(2)).unbind(0)
        if self.layout in ORDERS:
            return _logical(values, ORDERS[self.layout], (*sizes, self.k_size + self.v_size)).unbind(0)
        logical = _logical(values, FLASH[self.layout], (*sizes, self.k_size, 2))  # L, B, H, N, D, 2
        vllm_order = (0, 1, 5, 3, 2, 4) if self.layout[0] == "B" else (0, 5, 1, 3, 2, 4)
        return logical.permute(vllm_order).unbind(0)


def _logical(values: torch.Tensor, order: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these sizes whose axes lie in memory in the given order."""
    return values.view([sizes[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def noise(n_bytes: int, seed: int) -> torch.Tensor:
    """(n_bytes,) uint8 on the device of the tests."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8).to(DEVICE)
