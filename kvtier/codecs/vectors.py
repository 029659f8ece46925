"""Codecs that look at KV as vectors, in torch operations on any device: a layer of a chunk at a time.

The reference of fused kernels, and what runs on the CPU. On a GPU it is right but slow: dozens of launches a layer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvtier.codecs.base import EncodeResult
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent, Geometry
from kvtier.kernels.launch import to_device
from kvtier.kernels.paged import Move, PagedKV, Patch

DTYPES = ("bfloat16", "float16", "float32")  # of engines whose KV can be encoded: in the others it is encoded already
# Heads of a layer of a chunk that are encoded together on the CPU, so that all that is made of them stays in the cache.
# (k4v4 is encoded at 45 MB/s of bf16 a core instead of 36 with 8.)
HEADS_TOGETHER = 2


class EncodedLayer(NamedTuple):
    """data: (..., bytes of a layer) uint8. refused: (...) bool, where `data` means nothing."""

    data: torch.Tensor
    refused: torch.Tensor


class LayerCoder(Protocol):
    """Coder of the vectors of one layer of a chunk. `cells`: the layer and the heads, numbers within the model.

    tokens: tokens of a chunk.
    """

    tokens: int

    def n_bytes(self, layers: range) -> int:
        """Return the bytes of these layers of one head: also the place of layer `layers.stop` in a slab that begins
        at `layers.start`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor, cells: Extent, position: int = 0) -> EncodedLayer:
        """k, v: (heads, tokens, size) in the engine's dtype. position: of the first token in the prompt."""

    def decode(self, data: torch.Tensor, cells: Extent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, (heads, tokens, size) in `dtype`. data: (heads, bytes of the layer)."""


class Flags:
    """kvtier.codecs.base.Encoded without sums."""

    def __init__(self, refused: torch.Tensor) -> None:
        """refused: (moves,) bool, on any device."""
        # On the launches' own stream: the waiting thread's current stream may be the engine's, with forwards queued.
        self._refused = refused.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(refused.device).record_event() if refused.is_cuda else None

    def wait(self) -> list[EncodeResult]:
        if self._copied is not None:
            self._copied.synchronize()
        return [EncodeResult(flag, None) for flag in self._refused.numpy().tolist()]


class VectorPages:
    """kvtier.codecs.base.Mover over one engine's pages. Keeps the tensors alive. held: the part of the model."""

    def __init__(self, pages: PagedKV, coder: LayerCoder, held: Extent) -> None:
        self._pages = pages
        self.coder = coder
        self.held = held

    def encode(self, moves: Sequence[Move]) -> Flags:
        return Flags(torch.stack([self._encode(move) for move in moves]))

    def decode(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._decode(move)

    def _encode(self, move: Move) -> torch.Tensor:
        """Encode a move. Return whether anything of it is refused, () bool."""
        blocks = self.blocks(move)
        refused = torch.zeros((), dtype=torch.bool, device=blocks.device)
        for cells, data in self.parts(move):
            k, v = self.vectors(cells, blocks)
            encoded = self.coder.encode(k, v, cells, move.position)
            data.copy_(encoded.data)
            refused |= encoded.refused.any()
        return refused

    def _decode(self, move: Move) -> None:
        blocks, first = self.blocks(move), move.first_block
        for cells, data in self.parts(move):
            planes = self._planes(cells)
            for plane, values in zip(planes, self.coder.decode(data, cells, planes[0].dtype), strict=True):
                heads, _, size = values.shape
                in_blocks = values.view(heads, len(move.block_ids), self._pages.block_tokens, size)
                plane[blocks[first:]] = in_blocks[:, first:].permute(1, 2, 0, 3)

    def parts(self, move: Move, heads_together: int = 0) -> list[tuple[Extent, torch.Tensor]]:
        """Divide a move into parts of one layer. Return the cells of each, and a view of their bytes in the slabs:
        (heads, bytes of the layer).

        heads_together: most heads of a part; 0: as many as are encoded together.
        """
        patch, held = move.patch, self.held
        step = heads_together or (HEADS_TOGETHER if move.slabs.device.type == "cpu" else patch.n_heads)
        first = held.first_layer + patch.page_layer
        begin = first - patch.slab_layer
        parts = []
        for number in range(first, first + patch.n_layers):
            start, end = (self.coder.n_bytes(range(begin, stop)) for stop in (number, number + 1))
            for head in range(0, patch.n_heads, step):
                data = move.slabs[head : head + step, start:end]
                parts.append((Extent(number, 1, held.first_head + patch.page_head + head, len(data)), data))
        if end > move.slabs.shape[1] or patch.n_heads != move.slabs.shape[0]:
            raise ValueError(f"{patch} is out of range of slabs {tuple(move.slabs.shape)}")
        return parts

    def vectors(self, cells: Extent, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of one layer in these blocks: (heads, tokens, size)."""
        k, v = (plane[blocks].permute(2, 0, 1, 3).flatten(1, 2) for plane in self._planes(cells))
        return k, v

    def blank_move(self) -> Move:
        """Return a move of the first layer with slabs of zeros, whose comparison loads the kernels."""
        held, block = self.held, self._pages.block_tokens
        n_bytes = self.coder.n_bytes(range(held.first_layer, held.first_layer + 1))
        slabs = torch.zeros(held.n_heads, n_bytes, dtype=torch.uint8, device=self._pages.layers[0].k.device)
        return Move(Patch(0, 0, 1, 0, held.n_heads), (0,) * (self.coder.tokens // block), slabs)

    def _planes(self, cells: Extent) -> tuple[torch.Tensor, ...]:
        """K and V of one layer: (n_blocks, block_tokens, heads, size), views."""
        heads = slice(cells.first_head - self.held.first_head, cells.end_head - self.held.first_head)
        planes = self._pages.vectors(cells.first_layer - self.held.first_layer)
        return tuple(plane[:, :, heads] for plane in planes)

    def blocks(self, move: Move) -> torch.Tensor:
        """Return the ids of a move's blocks, on the pages' device. Raises ValueError for blocks out of range."""
        k = self._pages.layers[0].k
        if min(move.block_ids) < 0 or max(move.block_ids) >= k.shape[0]:
            raise ValueError(f"blocks {min(move.block_ids)}-{max(move.block_ids)} are out of range of {k.shape[0]}")
        return to_device(np.array(move.block_ids, dtype=np.int64), k.device)  # waits for no stream


def check_vectors(codec: str, geometry: Geometry, head_sizes: Sequence[int] = ()) -> None:
    """Raises ConfigError unless the KV is vectors of plain numbers, a K and a V for each head. codec: as it is set.

    head_sizes: of heads that the codec takes; empty: it takes all.
    """
    if geometry.attention == "mla":
        fix = "a latent vector of MLA stands for K and V of all heads, and part of it holds positions: set it to raw"
        raise ConfigError("codec", codec, fix)
    if geometry.dtype not in DTYPES:
        fix = f"the engine's KV is {geometry.dtype}, which is encoded already: set it to raw, which moves KV as it is"
        raise ConfigError("codec", codec, f"{fix}, or the engine's kv_cache_dtype to auto")
    for size in (geometry.k_head_size, geometry.v_head_size):
        if head_sizes and size not in head_sizes:
            fix = f"it takes heads of {', '.join(map(str, head_sizes))} elements, this model's have {size}"
            raise ConfigError("codec", codec, f"{fix}: set it to int8 or raw")


def raw_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the first tokens of an engine's KV are stored as they are."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a dtype, within its finite values."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def octets(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the last dimension's values."""
    return x.contiguous().view(torch.uint8)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Return the root of fp32, rounded to nearest even. torch's own may be MKL's, which is not on all processors."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else torch.sqrt(x)
