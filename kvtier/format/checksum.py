"""Seeded checksum of a slab: its definition and the numpy reference that all fast versions are tested against.

NH of UMAC (RFC 4418, section 5.2.2) over little-endian u32 pairs. Its key stream is the xor of two mixed counters, one
over the pairs of a page and one over the pages: fast versions keep the first in a table (CPU) or in registers (GPU) and
mix only once a page:

    sum over i of ((w[2i] + k0(i)) mod 2^32) * ((w[2i+1] + k1(i)) mod 2^32)        mod 2^64

    l = i mod 512, j = i div 512                        (a page of 4096 bytes has 512 pairs)
    k0(i) = a0 xor p0,  k1(i) = a1 xor p1
    a0 = mix32((l + low32(seed)) mod 2^32)              a1 = fold(a0 xor high32(seed))
    p0 = mix32((j * 0x9E3779B9 + high32(seed)) mod 2^32)    p1 = fold(p0 xor low32(seed))
    fold(x): t = x * 0x9E3779B9 mod 2^32; t xor (t >> 15)

`i` counts pairs (8 bytes) from the start of the slab. The sum has no order, so a slab may be summed in pieces, each
with the index of its first pair. The seed depends on the chunk's key, the head and the record's first layer, so a
slab that is zeroed, stale, torn or misplaced fails. Two different slabs collide with a probability of about 2^-32
(RFC 4418: NH is 2^-32-almost-universal). The checksum detects faults; it is no signature.

    mix32(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16        (mod 2^32)
    mix64(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
                                                                                                (mod 2^64)
    seed = mix64(mix64(key[0:8] + G * (head + 1)) xor key[8:16] xor (G * (first_layer + 1)))    (mod 2^64)
    G = 0x9E3779B97F4A7C15; key halves little-endian

Test vectors: `VECTORS`, used by the tests of the numpy, C++ and Triton versions alike.
"""

import numpy as np
import numpy.typing as npt

PAIRS_PER_PAGE = 512  # 8-byte pairs of a page

VECTORS: tuple[tuple[bytes, int, int, bytes, int, int], ...] = (
    # key, head, first layer, slab, seed, checksum
    (bytes(16), 0, 0, bytes(4096), 0x0397AB29740681D9, 0x86409BE459CF1478),
    (bytes(range(16)), 3, 5, bytes(i % 251 for i in range(8192)), 0xF7BCC62A7F7C25C0, 0x9FF9BD6B9EC2C266),
    (b"\xff" * 16, 7, 0, b"\xff" * 4096, 0x880D4A8B4F8B32DD, 0x9A501AD93AABFC6E),
)

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = np.uint32(0x9E3779B9)


def slab_seed(key: bytes, head: int, first_layer: int) -> int:
    """Return the 64-bit seed of the slab of `head` in a record of chunk `key` (16 bytes) from `first_layer` on."""
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    inner = _mix64((low + _GOLDEN64 * (head + 1)) & _MASK64)
    return _mix64(inner ^ high ^ (_GOLDEN64 * (first_layer + 1) & _MASK64))


def slab_checksum(slab: npt.NDArray[np.uint8], seed: int, first_pair: int = 0) -> int:
    """Sum `slab`, uint8 (n,), n a multiple of 8. With `first_pair`, the result is the summand of one piece of a slab.

    Slow reference; kvtier uses `kvtier.io.native.checksum`.
    """
    words = np.ascontiguousarray(slab).view("<u4")
    pairs = np.arange(first_pair, first_pair + words.size // 2, dtype=np.uint64)
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    a0 = _mix32((pairs % PAIRS_PER_PAGE).astype(np.uint32) + low)
    p0 = _mix32((pairs // PAIRS_PER_PAGE).astype(np.uint32) * _GOLDEN32 + high)
    k0 = a0 ^ p0
    k1 = _fold(a0 ^ high) ^ _fold(p0 ^ low)
    products = (words[0::2] + k0).astype(np.uint64) * (words[1::2] + k1).astype(np.uint64)
    return int(np.add.reduce(products, dtype=np.uint64)) if products.size else 0


def _fold(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = x * _GOLDEN32
    return x ^ (x >> np.uint32(15))


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _mix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
