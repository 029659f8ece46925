"""Reader: moves byte ranges of files into tensors on host or device."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.errors import WeightsUnreadable
from kvtier.weights.copies import Copy

PIECE_BYTES = 4 << 20  # bytes of a file that are read at once


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Outcome of a read: bytes that landed in targets, bytes that were read for them, and the time, seconds."""

    bytes_landed: int
    bytes_read: int
    seconds: float


class WeightReader:
    """Reads ranges of files into tensors, also rows with a pitch, also onto CUDA devices."""

    def __init__(self) -> None:
        self._landed = 0

    @property
    def bytes_landed(self) -> int:
        """Return the bytes of the current or last `read` that have landed, for a progress bar on another thread."""
        return self._landed

    def read(self, files: Sequence[Path], copies: Sequence[Copy], targets: Sequence[torch.Tensor]) -> ReadReport:
        """Return when the last byte has landed.

        A target is a tensor of any dtype and any strides; copies address its bytes from its first element on. Copies
        that touch the same byte of a target land in any order.

        Raises WeightsUnreadable with file and offset when a file cannot be read, ends early or changed during the read:
        targets then hold any bytes. Raises ValueError for copies that do not fit their targets.
        """
        start_s = time.monotonic()
        self._landed = 0
        for copy in copies:
            copy.check(extent(targets[copy.target]))
        with ExitStack() as stack:
            opened = [_open(path, stack) for path in files]
            before = [_identity(descriptor) for descriptor in opened]
            for copy in copies:
                self._land(files[copy.file], opened[copy.file], copy, targets[copy.target])
            for path, descriptor, identity in zip(files, opened, before, strict=True):
                if _identity(descriptor) != identity or _identity_of(path) != identity:
                    raise WeightsUnreadable(path, None, "the file was changed while it was read; load again")
        return ReadReport(self._landed, self._landed, time.monotonic() - start_s)

    def _land(self, path: Path, descriptor: int, copy: Copy, target: torch.Tensor) -> None:
        for first in range(0, copy.rows, max(1, PIECE_BYTES // copy.row_bytes)):
            rows = min(copy.rows - first, max(1, PIECE_BYTES // copy.row_bytes))
            buffer = torch.empty(rows, copy.row_bytes, dtype=torch.uint8)
            for row in range(rows):
                offset = copy.offset + (first + row) * copy.source_pitch
                _read(path, descriptor, buffer[row].numpy().data, offset)
            at = target.storage_offset() * target.element_size() + copy.target_offset + first * copy.target_pitch
            view = torch.empty(0, dtype=torch.uint8, device=target.device)
            view.set_(target.untyped_storage(), at, (rows, copy.row_bytes), (max(copy.target_pitch, 1), 1))
            view.copy_(buffer)
            self._landed += buffer.numel()


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _open(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _read(path: Path, descriptor: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        try:
            n = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise WeightsUnreadable(path, offset + done, os.strerror(error.errno or errno.EIO)) from error
        if n == 0:
            raise WeightsUnreadable(path, offset + done, f"the file ends {len(buffer) - done} bytes early")
        done += n


def _identity(where: int | Path) -> tuple[int, ...]:
    status = os.stat(where)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity_of(path: Path) -> tuple[int, ...] | None:
    try:
        return _identity(path)
    except OSError:
        return None
