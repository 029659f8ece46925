"""Geometry of a model's KV and the share of each rank. Pure arithmetic; no torch, no I/O.

A chunk's KV is a rectangle of layers x KV heads. Records, reads and presence are rectangles too (`Extent`), so tensor
and pipeline parallelism are divisions of one rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

PAGE_BYTES = 4096  # unit of direct I/O: offsets, lengths and addresses of all transfers are multiples of it, bytes

AttentionKind = Literal["heads", "mla"]


def padded(n_bytes: int) -> int:
    """Round `n_bytes` up to whole pages."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class Extent(NamedTuple):
    """Rectangle: layers [first_layer, first_layer + n_layers) x heads [first_head, first_head + n_heads)."""

    first_layer: int
    n_layers: int
    first_head: int
    n_heads: int

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.n_layers

    @property
    def end_head(self) -> int:
        return self.first_head + self.n_heads

    @property
    def cells(self) -> int:
        return self.n_layers * self.n_heads

    def intersect(self, other: Extent) -> Extent | None:
        """Return the common rectangle, or None when there is none."""
        first_layer = max(self.first_layer, other.first_layer)
        first_head = max(self.first_head, other.first_head)
        n_layers = min(self.end_layer, other.end_layer) - first_layer
        n_heads = min(self.end_head, other.end_head) - first_head
        if n_layers <= 0 or n_heads <= 0:
            return None
        return Extent(first_layer, n_layers, first_head, n_heads)

    def minus(self, other: Extent) -> list[Extent]:
        """Return the part of this rectangle outside `other`, as disjoint rectangles."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces = []
        for first, end in ((self.first_layer, common.first_layer), (common.end_layer, self.end_layer)):
            if end > first:
                pieces.append(Extent(first, end - first, self.first_head, self.n_heads))
        for first, end in ((self.first_head, common.first_head), (common.end_head, self.end_head)):
            if end > first:
                pieces.append(Extent(common.first_layer, common.n_layers, first, end - first))
        return pieces

    def contains(self, other: Extent) -> bool:
        return self.intersect(other) == other


def covers(parts: Iterable[Extent], whole: Extent) -> bool:
    """Return whether every layer and head of `whole` is in at least one of `parts`, which may overlap."""
    remaining = [whole]
    for part in parts:
        if part == whole:  # the usual case: one rank wrote all
            return True
        remaining = [piece for hole in remaining for piece in hole.minus(part)]
        if not remaining:
            return True
    return not remaining


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Format of one token's KV of one head in one layer. Sizes and dtype as in Geometry."""

    k_head_size: int
    v_head_size: int
    dtype: str
    element_bytes: int

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of K and V of one token and head."""
        return (self.k_head_size + self.v_head_size) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape and element type of one model's chunk.

    `k_head_size` and `v_head_size` count elements of one head's vector. `v_head_size` is 0 if one vector holds K and V:
    MLA's latent head, and engines that pack both into a slot of opaque bytes. `dtype` is the KV cache's element type by
    its torch name, or the engine's name for the format of such slots.

    plain_layers: numbers of the layers, ascending, that an engine does not quantize; their form is `plain`. Empty, and
    None, if all layers have the same form.
    """

    layers: int
    kv_heads: int
    k_head_size: int
    v_head_size: int
    dtype: str
    element_bytes: int
    attention: AttentionKind
    chunk_tokens: int
    plain_layers: tuple[int, ...] = ()
    plain: LayerForm | None = None

    def __post_init__(self) -> None:
        if bool(self.plain_layers) != (self.plain is not None):
            raise ValueError("plain_layers and plain must both be given, or neither")

    @property
    def form(self) -> LayerForm:
        """Return the form of the layers that are not plain."""
        return LayerForm(self.k_head_size, self.v_head_size, self.dtype, self.element_bytes)

    def form_of(self, layer: int) -> LayerForm:
        """Return the form of a layer, by its number within the model."""
        return self.plain if self.plain is not None and layer in self.plain_layers else self.form

    @property
    def whole(self) -> Extent:
        return Extent(0, self.layers, 0, self.kv_heads)

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of K and V of one token and head in a layer that is not plain, as the engine stores them."""
        return self.form.vector_bytes

    def vectors_bytes(self, layers: range) -> int:
        """Return the bytes of K and V of one token and head over these layers, as the engine stores them."""
        if self.plain is None:
            return len(layers) * self.vector_bytes
        n_plain = sum(number in layers for number in self.plain_layers)
        return (len(layers) - n_plain) * self.vector_bytes + n_plain * self.plain.vector_bytes

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's KV over all layers and heads, as the engine stores them."""
        return self.vectors_bytes(range(self.layers)) * self.kv_heads


@dataclass(frozen=True, slots=True)
class RankShare:
    """Share of one rank: `reads` is in its cache; `writes` is the part that it stores (None: another rank does)."""

    rank: int
    reads: Extent
    writes: Extent | None


def share_of_rank(geometry: Geometry, tensor_rank: int, tensor_size: int, rank: int, stage: range) -> RankShare:
    """Return the share of one rank. Raises ValueError when heads do not divide over the ranks.

    Args:
        tensor_rank, tensor_size: position in and size of the tensor-parallel group.
        rank: number of the rank within the engine (tensor x pipeline), part of its segment files' names.
        stage: global numbers of this pipeline stage's layers, contiguous.

    With more ranks than KV heads, heads are duplicated and the lowest rank of each writes. MLA has one head in every
    rank: when writing, the ranks of a stage divide its layers; each reads all of them.
    """
    if geometry.attention == "mla" or geometry.kv_heads == 1:
        reads = Extent(stage.start, len(stage), 0, 1)
        first = stage.start + len(stage) * tensor_rank // tensor_size
        end = stage.start + len(stage) * (tensor_rank + 1) // tensor_size
        return RankShare(rank, reads, Extent(first, end - first, 0, 1) if end > first else None)
    if tensor_size <= geometry.kv_heads:
        if geometry.kv_heads % tensor_size:
            raise ValueError(f"{geometry.kv_heads} KV heads do not divide over {tensor_size} ranks")
        n_heads = geometry.kv_heads // tensor_size
        extent = Extent(stage.start, len(stage), tensor_rank * n_heads, n_heads)
        return RankShare(rank, extent, extent)
    if tensor_size % geometry.kv_heads:
        raise ValueError(f"{tensor_size} ranks do not divide over {geometry.kv_heads} KV heads")
    copies = tensor_size // geometry.kv_heads
    extent = Extent(stage.start, len(stage), tensor_rank // copies, 1)
    return RankShare(rank, extent, extent if tensor_rank % copies == 0 else None)
