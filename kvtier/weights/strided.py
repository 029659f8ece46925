"""Strided views as copies: an assignment between two views of equal shape, as rows of bytes."""

import itertools
import math
from collections.abc import Iterator, Sequence

from kvtier.weights.copies import Copy

COPIES_MAX = 4096  # copies that one assignment may become
ELEMENT_ROWS_MAX = 4096  # rows of one element that a copy may have; more are converted in memory instead
SHORT_ROW_BYTES = 32  # rows below this are as costly as single elements, bytes


def copies_between(
    shape: Sequence[int], source: tuple[int, int, Sequence[int]], target: tuple[int, int, Sequence[int]], itemsize: int
) -> list[Copy] | None:
    """Return the copies of `target[...] = source[...]`, or None where they would be too many or too small.

    source, target: number of the file or tensor, byte offset of the first element, stride of each dimension in bytes.
    """
    (file, offset, source_strides), (number, target_offset, target_strides) = source, target
    if 0 in shape:
        return []
    dims = _merged(shape, source_strides, target_strides)
    row_bytes = itemsize
    if dims and dims[0][:2] == (itemsize, itemsize):
        row_bytes *= dims.pop(0)[2]
    if any(min(there, here) < row_bytes for there, here, _ in dims):  # the source is expanded or overlaps itself
        return None
    rows_of = max(dims, key=lambda dim: dim[2], default=None)
    rows, target_pitch, source_pitch = 1, row_bytes, row_bytes
    if rows_of is not None:
        dims.remove(rows_of)
        target_pitch, source_pitch, rows = rows_of
    n_copies = math.prod(size for _, _, size in dims)
    if n_copies > COPIES_MAX or (row_bytes < SHORT_ROW_BYTES and n_copies * rows > ELEMENT_ROWS_MAX):
        return None
    return [
        Copy(file, offset + here, rows, row_bytes, source_pitch, number, target_offset + there, target_pitch)
        for here, there in _steps(dims)
    ]


def _merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (target stride, source stride, size) of each dimension, innermost first, with adjacent ones joined."""
    dims = sorted((there, here, size) for size, here, there in zip(shape, source, target, strict=True) if size != 1)
    found: list[tuple[int, int, int]] = []
    for there, here, size in dims:
        if found and (there, here) == (found[-1][0] * found[-1][2], found[-1][1] * found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] * size)
        else:
            found.append((there, here, size))
    return found


def _steps(dims: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the offsets, in the source and in the target, of all steps through `dims`."""
    for index in itertools.product(*(range(size) for _, _, size in dims)):
        pairs = list(zip(index, dims, strict=True))
        yield sum(i * here for i, (_, here, _) in pairs), sum(i * there for i, (there, _, _) in pairs)


def overlapping(copies: Sequence[Copy]) -> bool:
    """Return whether two of the copies, all of one target, may write the same byte. Unclear cases count as yes."""
    ordered = sorted(copies, key=lambda copy: copy.target_offset)
    cluster: list[Copy] = []
    end = 0
    for copy in ordered:
        if copy.target_offset >= end:
            cluster = []
        if any(_touch(copy, other) for other in cluster):
            return True
        cluster.append(copy)
        end = max(end, _target_end(copy))
    return False


def _touch(one: Copy, other: Copy) -> bool:
    if one.target_offset >= _target_end(other) or other.target_offset >= _target_end(one):
        return False
    pitch = one.target_pitch if one.rows > 1 else other.target_pitch
    if other.rows > 1 and other.target_pitch != pitch:
        return True
    columns = [copy.target_offset % pitch for copy in (one, other)]
    ends = [begin + copy.row_bytes for begin, copy in zip(columns, (one, other), strict=True)]
    return max(ends) > pitch or (columns[0] < ends[1] and columns[1] < ends[0])


def _target_end(copy: Copy) -> int:
    return copy.target_offset + (copy.rows - 1) * copy.target_pitch + copy.row_bytes
