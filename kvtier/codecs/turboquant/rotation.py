"""The rotation that makes a vector's elements alike: random signs, then a Hadamard matrix. y = H (s * x).

H has entries +-1 and H H^T = d I, so sums of whole numbers stay whole. Without the signs a vector with equal elements
(a common mean) would go into one element of y, where the quantizer has no room for it.

    d = 64, 128, 256   Sylvester's
    d = 96             Paley I with q = 11 (order 12), Kronecker product with Sylvester's of order 8
    d = 80             Paley I with q = 19 (order 20), Kronecker product with Sylvester's of order 4

    Paley I (Paley 1933): H = I + S; S[0][0] = 0, S[0][j] = 1, S[i][0] = -1, S[i][j] = chi(j - i) for i, j >= 1;
    chi: 1 for nonzero squares mod q, -1 for the rest, chi(0) = 0.

    s[j] = -1 where bit j of the stream is set: bit j % 8 of its byte j div 8, the stream being
    blake3("kvtier turboquant signs" || seed u64 || layer u32 || head u32 || plane u8), little-endian, extended;
    layer and head are numbers within the whole model, plane is 0 for K and 1 for V.

Test vectors: tests/codecs/test_codebooks.py.
"""

import struct
from functools import cache

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtier.format.geometry import Extent

HEAD_SIZES = (64, 80, 96, 128, 256)
K_PLANE, V_PLANE = 0, 1

_TAG = b"kvtier turboquant signs"
_PALEY = {80: (19, 4), 96: (11, 8)}

Signs = npt.NDArray[np.int8]


@cache
def hadamard(size: int) -> Signs:
    """(size, size) of +-1. Raises ValueError for a size that is not one of HEAD_SIZES."""
    if size not in HEAD_SIZES:
        raise ValueError(f"no Hadamard matrix of order {size} is known here; known are {HEAD_SIZES}")
    if size not in _PALEY:
        return _sylvester(size)
    prime, order = _PALEY[size]
    return np.kron(_paley(prime), _sylvester(order))


def signs(seed: int, extent: Extent, plane: int, size: int) -> Signs:
    """(layers, heads, size) of +-1, for the layers and heads of `extent`."""
    layers = range(extent.first_layer, extent.end_layer)
    heads = range(extent.first_head, extent.end_head)
    rows = [_row(seed, layer, head, plane, size) for layer in layers for head in heads]
    return np.stack(rows).reshape(extent.n_layers, extent.n_heads, size)


def _row(seed: int, layer: int, head: int, plane: int, size: int) -> Signs:
    stream = blake3(_TAG + struct.pack("<QIIB", seed, layer, head, plane)).digest(length=-(-size // 8))
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8), bitorder="little")[:size]
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


def _sylvester(order: int) -> Signs:
    matrix = np.ones((1, 1), dtype=np.int8)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley(prime: int) -> Signs:
    squares = {x * x % prime for x in range(1, prime)}
    chi = np.array([0, *(1 if x in squares else -1 for x in range(1, prime))], dtype=np.int8)
    number = np.arange(prime)
    matrix = np.ones((prime + 1, prime + 1), dtype=np.int8)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = chi[(number[None, :] - number[:, None]) % prime] + np.eye(prime, dtype=np.int8)
    return matrix
