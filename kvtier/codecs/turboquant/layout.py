"""Where the bytes of a turboquant slab lie, format version 2.

A slab is the record's layers one after the other, then padding to a page. A layer of T tokens, head sizes dk and dv,
bk and bv bits:

    bytes                what
    T * dk * bk / 8      codes of K, plane after plane
    T * dv * bv / 8      codes of V, likewise
    T * 2                scales of K, fp16, one a token
    T * 2                scales of V
    dk * 2               mean of K, bf16; zeros where none was taken off

A code is the number of a bucket, 0 the most negative. Codes are cut into planes of 4, 2 and 1 bits, so that none
crosses a byte: the first plane has their low bits, the second those above. A plane of width w is
[token][d * w / 8 bytes]; byte j of a token holds the elements j + i * (d * w / 8), i = 0 ... 8/w - 1, element i in bits
[i * w, (i + 1) * w). So a byte's elements lie far apart, and a kernel has each in a register of its own.

    bits       2     3      4     5      6
    planes     2     2, 1   4     4, 1   4, 2

k4v4, d = 128, T = 256: 34,048 bytes a layer; 32 layers are 266 pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PLANE_WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}

SCALE_BYTES = MEAN_BYTES = 2


class Bits(NamedTuple):
    """Of a code of K and of V."""

    k: int
    v: int


PRESETS = {
    "k6v4": Bits(6, 4),
    "k5v3": Bits(5, 3),
    "k4v4": Bits(4, 4),
    "k4v3": Bits(4, 3),
    "k3v3": Bits(3, 3),
    "k4v2": Bits(4, 2),
    "k2v2": Bits(2, 2),
}
"""The last is a control of benchmarks, which must fail: no setting names it."""

BOUNDARY = PRESETS["k6v4"]
"""Of the first and last layers, where settings ask for it."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer of one head of one chunk. tokens: a multiple of 16. Offsets count bytes from the layer's start."""

    tokens: int
    k_size: int
    v_size: int
    bits: Bits

    @property
    def v_codes(self) -> int:
        return self.tokens * self.k_size * self.bits.k // 8

    @property
    def k_scales(self) -> int:
        return self.v_codes + self.tokens * self.v_size * self.bits.v // 8

    @property
    def v_scales(self) -> int:
        return self.k_scales + self.tokens * SCALE_BYTES

    @property
    def k_mean(self) -> int:
        return self.v_scales + self.tokens * SCALE_BYTES

    @property
    def n_bytes(self) -> int:
        return self.k_mean + self.k_size * MEAN_BYTES


@dataclass(frozen=True, slots=True)
class SlabFormat:
    """What fixes all bytes that a model's KV is encoded to.

    layers: of the whole model; the first and the last `boundary_layers` of them have the bits of BOUNDARY.
    """

    layers: int
    tokens: int
    k_size: int
    v_size: int
    bits: Bits
    boundary_layers: int = 0
    seed: int = 0

    def layer(self, number: int) -> LayerLayout:
        """Of a layer, by its number within the model."""
        is_inner = self.boundary_layers <= number < self.layers - self.boundary_layers
        return self._layout(self.bits if is_inner else BOUNDARY)

    def n_bytes(self, layers: range) -> int:
        """Of these layers of one head: also where layer `layers.stop` lies in a slab that begins at `layers.start`."""
        inner = range(max(layers.start, self.boundary_layers), min(layers.stop, self.layers - self.boundary_layers))
        n_outer = len(layers) - len(inner)
        return len(inner) * self._layout(self.bits).n_bytes + n_outer * self._layout(BOUNDARY).n_bytes

    def _layout(self, bits: Bits) -> LayerLayout:
        return LayerLayout(self.tokens, self.k_size, self.v_size, bits)
