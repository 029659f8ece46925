"""Matrices and tables that the transform codec's kernels read. A cell is one head of one layer that the rank holds.

Components and elements have the order of the tensor cores' operands and results (`product_columns`): of every 8 rows
or columns a thread has 2. With this order the 8 that a thread has of every 32 are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvtier.codecs.transform.curve import CURVES
from kvtier.codecs.transform.reference import PlaneCoder, angles
from kvtier.codecs.transform.slab import TransformPlane
from kvtier.codecs.transform.table import GROUP
from kvtier.codecs.turboquant.tables import product_columns

_TWO23_BITS = 0x4B000000  # of fp32, 2^23
_WHOLE = 1.5 * 2**23  # kvtier.kernels.tiles.WHOLE


class KernelTables(NamedTuple):
    """A plane's tables for one kernel, (cells, ...). matrix: int8 or fp16. numbers: fp32. whole: int32."""

    matrix: torch.Tensor
    numbers: torch.Tensor
    whole: torch.Tensor

    def to(self, device: torch.device) -> KernelTables:
        return KernelTables(*(x.contiguous().to(device) for x in self))


def encode_tables(shape: TransformPlane, coder: PlaneCoder, before: torch.Tensor, tokens: int) -> KernelTables:
    """Return the tables for encoding. coder: of all cells. before: (cells, 1), bytes of a token's codes before the
    plane's. tokens: of a chunk.

    matrix: upper and lower bytes of `forward`, component after component. numbers: -mean * scale, then scales, of lower
    and upper elements of words, of one half and then the other; by component unit (0 if it is not coded), rate, c1, c3,
    c5 and half the number of codes; the gain's factor. whole: by component the factor that shifts its code within those
    of four; of each four the number that cancels _TWO23_BITS in their sum; `_group_words`.
    """
    bits = coder.bits
    rows = torch.arange(2 * shape.half).view(-1, 4, 2, 4).transpose(1, 2).flatten()
    columns = torch.from_numpy(product_columns(32, GROUP))
    columns = (torch.arange(0, shape.padded, 32).unsqueeze(1) + columns).flatten()
    forward = _padded(_padded_halves(coder.forward.to(torch.int32), shape, 1), shape.padded)[:, rows][..., columns].mT
    low = ((forward + 128) & 255) - 128
    limbs = torch.stack([(forward - low) >> 8, low], 1).to(torch.int8)
    numbers = [_in_words(_padded_halves(x, shape, 2)) for x in (-coder.mean * coder.scale, coder.scale)]
    curves = torch.tensor(CURVES, dtype=torch.float32)[bits.flatten(1)].movedim(-1, 0)
    by_component = [x.flatten(1) for x in (coder.unit * (bits > 0), *curves.unbind(0), (1 << bits) / 2)]
    numbers += [_padded(x.float(), shape.padded) for x in by_component]
    numbers.append(torch.nn.functional.pad(coder.counted.flatten(1), (0, 3)))
    numbers.append(torch.nn.functional.pad(torch.full_like(coder.counted.flatten(1), _WHOLE), (0, 3)))
    quads = bits.reshape(len(bits), -1, 4)
    weights = 1 << (quads.cumsum(-1) - quads)
    parts = [(weights.flatten(1), 1), (-_TWO23_BITS * weights.sum(-1), 4)]
    parts.append((_group_words(bits, before, tokens).flatten(1), 2))
    whole = torch.cat([_padded(x, shape.padded // each) for x, each in parts], -1) & 0xFFFFFFFF
    return KernelTables(limbs, torch.cat(numbers, -1), whole.to(torch.uint32).view(torch.int32))


def decode_tables(shape: TransformPlane, coder: PlaneCoder, before: torch.Tensor, tokens: int) -> KernelTables:
    """Return the tables for decoding. Arguments as in `encode_tables`.

    matrix: `inverse`. numbers: means, then units, of lower and upper elements of words, of one half and then the other.
    whole: eight words of each group: `_group_words`, then two of its first four components, then two of its last four.
    Of the two, the first has in a byte for each code the shift that moves it to the top of a word, the second 32 less
    the code's bits.
    """
    rows, columns = (torch.from_numpy(product_columns(n, GROUP)) for n in (shape.padded, shape.half))
    inverse = _padded(_padded_halves(coder.inverse.half(), shape, 2).mT, shape.padded).mT[:, rows]
    matrix = inverse.reshape(*inverse.shape[:2], 2, shape.half)[..., columns]
    numbers = [_in_words(_padded_halves(x, shape, 2)) for x in (coder.mean, coder.back)]
    quads = coder.bits.reshape(len(coder.bits), -1, 2, 4)
    of_quads = torch.stack([(32 - quads.cumsum(-1)) & 31, 32 - quads], -2)
    words = torch.cat(
        [_group_words(coder.bits, before, tokens), (of_quads << (8 * torch.arange(4))).sum(-1).flatten(2)], -1
    )
    whole = _padded(words.flatten(1), shape.padded).to(torch.uint32).view(torch.int32)
    return KernelTables(matrix, torch.cat(numbers, -1), whole)


def kernel_levels(coder: PlaneCoder) -> torch.Tensor:
    """(512,) fp16: code c of b bits is at 2^b + c. Other places have zeros."""
    return torch.nn.functional.pad(coder.levels[:-2], (2, 0)).half()


def kernel_angles(shape: TransformPlane, frequencies: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(layers, positions / 2, 2, 2, words / 16, 2, 16) fp32: for two positions the cosines, then the sines, of lower
    and of upper elements of words; 16 words of both positions are neighbours. frequencies: (layers, pairs)."""
    found = torch.stack([torch.stack(angles(each, positions), 1) for each in frequencies])
    found = _padded(found, shape.half).view(len(frequencies), len(positions) // 2, 2, 2, -1, 16, 2)
    return found.permute(0, 1, 3, 6, 4, 2, 5)


def _group_words(bits: torch.Tensor, before: torch.Tensor, tokens: int) -> torch.Tensor:
    """(cells, groups, 4): bytes of a token's number plus 16 times the bits of the first four components, and the places
    among a layer's codes where the parts of the number begin, as in `slab.byte_places`. bits: (cells, 1, size). Other
    arguments as in `encode_tables`."""
    groups = bits.view(len(bits), -1, GROUP)
    n_bytes = groups.sum(-1) // 8
    starts = n_bytes.cumsum(-1) - n_bytes + before
    firsts = starts, starts + 4 * (n_bytes >= 4), starts + (n_bytes & 6)
    return torch.stack([n_bytes + 16 * groups[..., :4].sum(-1), *(first * tokens for first in firsts)], -1)


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """(cells, size): the even and the odd elements of both halves of vectors (cells, 1, size)."""
    return x.view(len(x), 2, -1, 2).mT.flatten(1)


def _padded_halves(x: torch.Tensor, shape: TransformPlane, dim: int) -> torch.Tensor:
    """Pad both halves of a dimension with zeros."""
    x = x.movedim(dim, -1)
    x = _padded(x.reshape(*x.shape[:-1], 2, -1), shape.half).flatten(-2)
    return x.movedim(-1, dim)


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension with zeros."""
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
