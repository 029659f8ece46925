"""Reader: moves byte ranges of files into tensors on host or device."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import TierUnavailable, WeightsUnreadable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import ranges
from kvtier.io.ranges import RangeFailure, RangeReader
from kvtier.weights.copies import FIELDS, Copy, Table, check, pack

BUFFERED_SHARE = 0.8  # of a file in the page cache, from which on it is read through it
STALL_S = 120.0  # longest time without any new byte, seconds

_CANNOT_READ = "it cannot be read: {}"


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Outcome of a read: bytes that landed in targets, bytes that were read for them, time, files read directly."""

    bytes_landed: int
    bytes_read: int
    seconds: float
    direct_files: int


class WeightReader:
    """Reads ranges of files into tensors on the CPU and on one CUDA device. Keeps threads' buffers between reads.

    At most 128 MiB of host memory beside the targets; pinned where a target is on a device. Not thread-safe.
    """

    def __init__(self, *, stall_s: float = STALL_S, progress: Callable[[int], object] | None = None) -> None:
        """Set the deadline and the observer of all reads.

        stall_s: longest time without any new byte, seconds. progress: is called about 20 times a second with the
        bytes that have landed.
        """
        self._stall_s, self._progress = stall_s, progress
        self._ranges: RangeReader | None = None

    def read(
        self,
        files: Sequence[Path],
        copies: Sequence[Copy] | Table,
        targets: Sequence[torch.Tensor],
        sums: Mapping[Path, npt.NDArray[np.uint64]] | None = None,
    ) -> ReadReport:
        """Return when the last byte has landed.

        A target is a tensor of any dtype and any strides; copies address its bytes from its first element on. Copies
        that touch the same byte of a target land in any order.

        sums: checksums of a file's blocks of `ranges.BLOCK_BYTES`, replaced by those of the blocks that were read.
        These are then read as a whole.

        Raises WeightsUnreadable with file and offset when a file cannot be read, ends early or changed during the read:
        targets then hold any bytes. Raises ValueError for copies that do not fit their targets, TierUnavailable where
        threads, memory or the device are missing.
        """
        start_s = time.monotonic()
        table = copies if isinstance(copies, np.ndarray) else pack(copies)
        check(table, len(files), np.array([extent(target) for target in targets], np.int64))
        table = np.ascontiguousarray(table[:, : len(FIELDS)])
        places = np.array([(target.data_ptr(), target.is_cuda) for target in targets], ranges.TARGET)
        reader = self._reader_for(targets)
        with ExitStack() as stack:
            opened = [_open(path, stack) for path in files]
            before = [_identity(descriptor) for descriptor, _ in opened]
            rows = [
                (descriptor, identity[2], _address(sums, path))
                for path, (descriptor, _), identity in zip(files, opened, before, strict=True)
            ]
            result = reader.read(
                np.array(rows, ranges.FILE), table, places, stall_s=self._stall_s, progress=self._progress
            )
            for path, (descriptor, _), identity in zip(files, opened, before, strict=True):
                if _identity(descriptor) != identity or _identity_of(path) != identity:
                    raise WeightsUnreadable(path, None, "the file was changed while it was read; load again")
        if result.failure is not None:
            raise self._error(files, result.failure)
        n_direct = sum(is_direct for _, is_direct in opened)
        return ReadReport(result.bytes_landed, result.bytes_read, time.monotonic() - start_s, n_direct)

    def _error(self, files: Sequence[Path], failure: RangeFailure) -> WeightsUnreadable | TierUnavailable:
        if failure.error in (errno.EREMOTEIO, errno.ENOMEM):
            return TierUnavailable(f"weights cannot be moved: {failure.message}")
        if failure.error == errno.ETIMEDOUT:
            return WeightsUnreadable(files[0].parent, None, f"no byte came for {self._stall_s:g} s; check the storage")
        reason = "the file ends here, too early" if failure.error == errno.ENODATA else os.strerror(failure.error)
        return WeightsUnreadable(files[failure.file], failure.offset, _CANNOT_READ.format(reason))

    def _reader_for(self, targets: Sequence[torch.Tensor]) -> RangeReader:
        devices = {target.device for target in targets}
        ordinals = {device.index for device in devices if device.type == "cuda"}
        if len(ordinals) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
            raise ValueError(f"targets on {sorted(map(str, devices))}: the CPU and one CUDA device are possible")
        ordinal = ordinals.pop() if ordinals else None
        if ordinal is not None:
            # Kernels that still write to the targets' memory, as those that fill new parameters.
            torch.cuda.synchronize(ordinal)
        if self._ranges is not None and ordinal not in (None, self._ranges.device_ordinal):
            self.close()
        if self._ranges is None:
            self._ranges = RangeReader(ordinal)
        return self._ranges

    def close(self) -> None:
        """Free the buffers; the next read makes new ones."""
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _open(path: Path, stack: ExitStack) -> tuple[int, bool]:
    """Return a descriptor, and whether it reads directly: unless most of the file is in the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        resident = ranges.resident_share(descriptor, os.fstat(descriptor).st_size)
        if resident is not None and resident >= BUFFERED_SHARE:
            return descriptor, False
        direct = _open_direct(path)
    except OSError as error:
        raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
    if direct is None:
        return descriptor, False
    stack.callback(os.close, direct)
    return direct, True


def _open_direct(path: Path) -> int | None:
    """Return None where the file system refuses O_DIRECT; some only do when they read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(descriptor, [page], 0)
            return descriptor
        except OSError:
            os.close(descriptor)
            return None


def _address(sums: Mapping[Path, npt.NDArray[np.uint64]] | None, path: Path) -> int:
    found = None if sums is None else sums.get(path)
    return 0 if found is None else found.ctypes.data


def _identity(where: int | Path) -> tuple[int, ...]:
    status = os.stat(where)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity_of(path: Path) -> tuple[int, ...] | None:
    try:
        return _identity(path)
    except OSError:
        return None
