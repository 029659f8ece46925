"""Copies: byte ranges of files and their places in tensors. Pure arithmetic, without torch and without I/O."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Return the bytes that land."""
        return self.rows * self.row_bytes

    @property
    def source_end(self) -> int:
        """Return the offset in the file behind the last row's last byte."""
        return _end(self.offset, self.rows, self.row_bytes, self.source_pitch)

    @property
    def target_end(self) -> int:
        """Return the offset in the target behind the last row's last byte."""
        return _end(self.target_offset, self.rows, self.row_bytes, self.target_pitch)

    def check(self, target_bytes: int) -> None:
        """Raise ValueError for a copy without bytes, with overlapping rows or past a target of `target_bytes`."""
        if self.rows < 1 or self.row_bytes < 1 or min(self.offset, self.target_offset) < 0:
            raise ValueError(f"a copy without bytes or before the beginning: {self}")
        if self.rows > 1 and min(self.source_pitch, self.target_pitch) < self.row_bytes:
            raise ValueError(f"a copy whose rows overlap: {self}")
        if self.target_end > target_bytes:
            raise ValueError(f"a copy past the end of its target of {target_bytes} bytes: {self}")


def contiguous(file: int, offset: int, n_bytes: int, target: int, target_offset: int = 0) -> Copy:
    """Return the copy of one range."""
    return Copy(file, offset, 1, n_bytes, n_bytes, target, target_offset, n_bytes)


def _end(offset: int, rows: int, row_bytes: int, pitch: int) -> int:
    return offset + (rows - 1) * pitch + row_bytes
