"""Copies: byte ranges of files and their places in tensors. Pure arithmetic, without torch and without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of bytes in a file, and their place in a target.

    Row r, `row_bytes` bytes at byte `offset + r * source_pitch` of file number `file`, goes to byte
    `target_offset + r * target_pitch` of target number `target`. A contiguous range is one row; its pitches are unused.
    Offsets in a target count from its first element.
    """

    file: int
    offset: int
    rows: int
    row_bytes: int
    source_pitch: int
    target: int
    target_offset: int
    target_pitch: int

    @property
    def n_bytes(self) -> int:
        return self.rows * self.row_bytes


FIELDS = tuple(field.name for field in fields(Copy))
FILE, OFFSET, ROWS, ROW_BYTES, SOURCE_PITCH, TARGET, TARGET_OFFSET, TARGET_PITCH = range(len(FIELDS))


def contiguous(file: int, offset: int, n_bytes: int, target: int, target_offset: int = 0) -> Copy:
    return Copy(file, offset, 1, n_bytes, n_bytes, target, target_offset, n_bytes)


def pack(copies: Sequence[Copy]) -> Table:
    """Return copies as an array, a row each, with the fields of `Copy` in order. Raises OverflowError beyond 2^63."""
    return np.array(list(map(attrgetter(*FIELDS), copies)), np.int64).reshape(-1, len(FIELDS))


def check(table: Table, n_files: int, target_bytes: npt.NDArray[np.int64]) -> None:
    """Raise ValueError with the first copy that has no bytes or rows that overlap, or does not fit its target.

    target_bytes: size of each target.
    """
    if not len(table):
        return
    column = table.T
    pitches = np.minimum(column[SOURCE_PITCH], column[TARGET_PITCH])
    bad = (column[ROWS] < 1) | (column[ROW_BYTES] < 1) | (column[OFFSET] < 0) | (column[TARGET_OFFSET] < 0)
    bad |= (column[ROWS] > 1) & (pitches < column[ROW_BYTES])
    bad |= (column[FILE] < 0) | (column[FILE] >= n_files)
    bad |= (column[TARGET] < 0) | (column[TARGET] >= len(target_bytes))
    if not bad.any():
        # In floats, as the products may overflow; sizes of tensors are exact in them.
        span = (column[ROWS] - 1) * column[TARGET_PITCH].astype(np.float64) + column[ROW_BYTES]
        bad = column[TARGET_OFFSET] + span > target_bytes[column[TARGET]]
    if bad.any():
        raise ValueError(
            f"a copy that is empty, overlaps itself or exceeds its target: {Copy(*table[bad][0].tolist())}"
        )


def extent_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to the end of its last. strides: in elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * itemsize
