"""Layout of a turboquant slab, format version 3.

A slab is the record's layers one after the other, then padding to a page. A layer of T tokens, head sizes dk and dv,
bk and bv bits:

    bytes                content
    T * dk * bk / 8      codes of K, plane after plane
    T * dv * bv / 8      codes of V, likewise
    T * 2                scales of K, fp16, one a token
    T * 2                scales of V
    dk * 2               mean of K, bf16
    RAW_TOKENS * dk * 2  K of the chunk's first tokens in the engine's dtype, bf16 where that is fp32
    RAW_TOKENS * dv * 2  V of them

A code is the number of a bucket, 0 the most negative. Codes are cut into planes of 4, 2 and 1 bits, so that none
crosses a byte: the first plane has their low bits, the second those above. A plane of width w is
[token][d * w / 8 bytes]; byte j of a token holds the elements j + i * (d * w / 8), i = 0 ... 8/w - 1, element i in bits
[i * w, (i + 1) * w). So a byte's elements are far apart, and a kernel has each in a register of its own.

    bits       2     3      4     5      6
    planes     2     2, 1   4     4, 1   4, 2

k4v4, d = 128, T = 256: 34,560 bytes a layer; 32 layers are 270 pages.
"""

from dataclasses import dataclass
from typing import NamedTuple

PLANE_WIDTHS = {4: (4,), 5: (4, 1), 6: (4, 2)}

SCALE_BYTES = MEAN_BYTES = RAW_BYTES = 2
RAW_TOKENS = 1  # tokens at the start of a chunk that are stored as they are


class Bits(NamedTuple):
    """Bits of a code of K and of V."""

    k: int
    v: int


PRESETS = {"k6v5": Bits(6, 5), "k4v4": Bits(4, 4)}


@dataclass(frozen=True, slots=True)
class SlabFormat:
    """Parameters that fix all bytes that a model's KV is encoded to. Offsets count bytes from a layer's start.

    tokens: of a chunk, a multiple of 16. rope_base: base of the rotary embedding that is taken off K (turns.py), 0
    where K stays as it is.
    """

    tokens: int
    k_size: int
    v_size: int
    bits: Bits
    rope_base: float = 0.0
    seed: int = 0

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
    def raw(self) -> int:
        return self.k_mean + self.k_size * MEAN_BYTES

    @property
    def layer_bytes(self) -> int:
        return self.raw + RAW_TOKENS * (self.k_size + self.v_size) * RAW_BYTES

    def n_bytes(self, layers: range) -> int:
        """Bytes of these layers of one head."""
        return len(layers) * self.layer_bytes
