"""Reader: moves byte ranges of files into tensors on host or device."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import Corrupt, TierUnavailable, WeightsDamaged, WeightsUnreadable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import ranges
from kvtier.io.ranges import RangeFailure, RangeProgress, RangeReader
from kvtier.model.safetensors import header_size, read_header
from kvtier.runtime.file_descriptors import close_file
from kvtier.weights.copies import Copy, Table, check, contiguous, extent_bytes, pack
from kvtier.weights.device_sums import DeviceSums, begin_sums

Sums = npt.NDArray[np.uint64]  # of a file, one a block of ranges.BLOCK_BYTES

BUFFERED_SHARE = 0.8  # of a file in the page cache, from which on it is read through it
STALL_S = 120.0  # longest time without any new byte, seconds

CHANGED = "the file was changed while it was read; load again"


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Outcome of a read: bytes that landed in targets, bytes that were read for them, files read directly."""

    bytes_landed: int
    bytes_read: int
    direct_files: int


class WeightReader:
    """Reads ranges of files into tensors on the CPU and on one CUDA device. Keeps threads' buffers between reads.

    At most 96 MiB of host memory beside the targets; pinned where a target is on a device. Not thread-safe.
    """

    def __init__(self, *, progress: Callable[[int], object] | None = None, readers: int = 1) -> None:
        """progress: is called about 20 times a second with the bytes that have landed. readers: number of processes on
        this host that read at the same time, this one included."""
        self._progress = progress
        self._sizes = {} if readers == 1 else ranges.shared_sizes(readers)
        self._ranges: RangeReader | None = None

    def read(
        self,
        files: Sequence[Path],
        copies: Sequence[Copy] | Table,
        targets: Sequence[torch.Tensor],
        expected: Mapping[Path, Sums] | None = None,
    ) -> ReadReport:
        """Return when the last byte has landed.

        A target is a tensor of any dtype and any strides; copies address its bytes from its first element on. Copies
        that touch the same byte of a target land in any order. Files are read in the order given.

        expected: checksums of all blocks of a file, as `sums` gives them. Blocks that a copy touches are then read as a
        whole and compared: on the device if they land there whole, else in the buffers. So are those of the header.

        Raises WeightsUnreadable with file and offset when a file cannot be read, ends early or changed during the read,
        WeightsDamaged with file, offset and tensors when a checksum differs: targets then hold any bytes. Raises
        ValueError for copies that do not fit their targets, TierUnavailable where threads, memory or the device are
        missing.
        """
        table = copies if isinstance(copies, np.ndarray) else pack(copies)
        check(table, len(files), np.array([extent(target) for target in targets], np.int64))
        places = np.array([(target.data_ptr(), target.is_cuda) for target in targets], ranges.TARGET)
        # Blocks that are not read keep the checksum expected of them.
        found = {path: expected[path].copy() for path in files if path in expected} if expected else {}
        headers = _header_blocks(files, found, len(places))
        table = np.concatenate([table, pack(headers)])
        places = np.append(places, np.zeros(1, ranges.TARGET))
        report = self._run_summed(files, table, places, targets, found)
        landed = report.bytes_landed - sum(copy.n_bytes for copy in headers)
        for path, sums in found.items():
            if expected is not None and not np.array_equal(sums, expected[path]):
                raise damage(path, int(np.flatnonzero(sums != expected[path])[0]))
        return replace(report, bytes_landed=landed)

    def _run_summed(
        self,
        files: Sequence[Path],
        table: Table,
        places: npt.NDArray[np.void],
        targets: Sequence[torch.Tensor],
        sums: Mapping[Path, Sums],
    ) -> ReadReport:
        reader = self._reader_for(targets)
        device = next((target.device for target in targets if target.is_cuda), None)
        sizes = [_identity_of(path)[2] if path in sums else 0 for path in files]
        on_device = begin_sums(table, places, sizes, device) if sums and device is not None else None
        if on_device is None:
            return self._run(files, table, places, reader, sums)
        report = self._run(files, table, places, reader, sums, on_device)
        found = on_device.sums()
        if found is None:
            return self._run(files, table, places, reader, sums)
        for path, is_whole, of_file in zip(files, on_device.blocks.by_file, found, strict=True):
            if path in sums:
                sums[path][is_whole] = of_file[is_whole]
        return report

    def sums(self, files: Sequence[Path]) -> dict[Path, Sums]:
        """Read files whole and return the checksum of each block of `ranges.BLOCK_BYTES`: uint64, one a block.

        Raises as `read`.
        """
        sizes = [_identity_of(path)[2] for path in files]
        found = {path: np.zeros(n_blocks(size), np.uint64) for path, size in zip(files, sizes, strict=True)}
        copies = [contiguous(number, 0, size, 0) for number, size in enumerate(sizes) if size]
        nowhere = np.zeros(1, ranges.TARGET)
        self._run(files, pack(copies), nowhere, self._reader_for(()), found)
        return found

    def _run(
        self,
        files: Sequence[Path],
        table: Table,
        places: npt.NDArray[np.void],
        reader: RangeReader,
        sums: Mapping[Path, Sums],
        on_device: DeviceSums | None = None,
    ) -> ReadReport:
        not_summed = on_device.blocks.by_file if on_device is not None else []

        def observe(done: RangeProgress) -> None:
            if on_device is not None:
                on_device.sum_landed(done)
            if self._progress is not None:
                self._progress(done.bytes_landed)

        with unchanged(files) as identities, ExitStack() as stack:
            opened = [open_file(path, stack) for path in files]
            rows = []
            for number, (path, identity) in enumerate(zip(files, identities, strict=True)):
                file = opened[number]
                if _identity(file.descriptor) != identity:
                    raise WeightsUnreadable(path, None, CHANGED)
                size = identity[2]
                if path in sums and len(sums[path]) != n_blocks(size):
                    raise WeightsUnreadable(path, None, f"it has {size} bytes, which is not the size in the manifest")
                if path in sums and not_summed and len(not_summed[number]) != n_blocks(size):
                    raise WeightsUnreadable(path, None, CHANGED)
                skipped = not_summed[number].ctypes.data if not_summed else 0
                found = sums[path].ctypes.data if path in sums else 0
                rows.append((file.descriptor, size, found, skipped, file.is_cached))
            described = np.array(rows, ranges.FILE)
            result = reader.read(described, table, places, stall_s=STALL_S, progress=observe)
        if result.failure is not None:
            raise self._error(files, result.failure)
        return ReadReport(result.bytes_landed, result.bytes_read, sum(file.is_direct for file in opened))

    def _error(self, files: Sequence[Path], failure: RangeFailure) -> WeightsUnreadable | TierUnavailable:
        if failure.error in (errno.EREMOTEIO, errno.ENOMEM):
            return TierUnavailable(f"weights cannot be moved: {failure.message}")
        if failure.error == errno.ETIMEDOUT:
            return WeightsUnreadable(files[0].parent, None, f"no byte came for {STALL_S:g} s; check the storage")
        reason = "the file ends here, too early" if failure.error == errno.ENODATA else os.strerror(failure.error)
        return WeightsUnreadable(files[failure.file], failure.offset, f"it cannot be read: {reason}")

    def prepare(self, device: torch.device) -> None:
        """Begin to pin the buffers for a CUDA device, while headers are read or a model is built. Raises as `read`."""
        if device.type == "cuda":
            self._open(device.index if device.index is not None else torch.cuda.current_device()).prepare()

    def _reader_for(self, targets: Sequence[torch.Tensor]) -> RangeReader:
        devices = {target.device for target in targets}
        ordinals = {device.index for device in devices if device.type == "cuda"}
        if len(ordinals) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
            raise ValueError(f"targets on {sorted(map(str, devices))}: the CPU and one CUDA device are possible")
        if not ordinals:
            return self._ranges or self._open(None)
        ordinal = ordinals.pop()
        # Kernels that still write to the targets' memory, as those that fill new parameters.
        torch.cuda.synchronize(ordinal)
        return self._open(ordinal)

    def _open(self, ordinal: int | None) -> RangeReader:
        if self._ranges is None or self._ranges.device_ordinal != ordinal:
            self.close()
            self._ranges = RangeReader(ordinal, **self._sizes)
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
    return extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())


class OpenWeightFile(NamedTuple):
    """Weight file that is open for reads. is_cached: most of it is in the page cache, and reads go through it."""

    descriptor: int
    is_direct: bool
    is_cached: bool


def open_file(path: Path, stack: ExitStack) -> OpenWeightFile:
    """Open a file for direct reads, unless most of it is in the page cache or its file system refuses them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(close_file, descriptor)
        resident = ranges.resident_share(descriptor, os.fstat(descriptor).st_size)
        if resident is not None and resident >= BUFFERED_SHARE:
            return OpenWeightFile(descriptor, False, True)
        direct = _open_direct(path)
    except OSError as error:
        raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
    if direct is None:
        return OpenWeightFile(descriptor, False, False)
    stack.callback(close_file, direct)
    return OpenWeightFile(direct, True, False)


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


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[list[tuple[int, ...]]]:
    """Raise WeightsUnreadable at the end if a file was changed or replaced. Yield device, inode, size, mtime_ns."""
    before = [_identity_of(path) for path in files]
    yield before
    for path, identity in zip(files, before, strict=True):
        if _identity_of(path) != identity:
            raise WeightsUnreadable(path, None, CHANGED)


def _header_blocks(files: Sequence[Path], sums: Mapping[Path, Sums], nowhere: int) -> list[Copy]:
    """Return copies of a byte of each block of the headers of files with checksums, to target number `nowhere`.

    A damaged header may be readable, and name other tensors or places.
    """
    copies = []
    for number, path in enumerate(files):
        if path not in sums or not len(sums[path]):
            continue
        n_bytes = 1
        with suppress(Corrupt, OSError), path.open("rb") as file:
            n_bytes = 8 + header_size(file.read(8), os.fstat(file.fileno()).st_size)
        copies.append(Copy(number, 0, n_blocks(n_bytes), 1, ranges.BLOCK_BYTES, nowhere, 0, 1))
    return copies


def n_blocks(file_bytes: int) -> int:
    """Return the number of checksums of a file."""
    return -(-file_bytes // ranges.BLOCK_BYTES)


def damage(path: Path, block: int) -> WeightsDamaged:
    """Return the error for a block of a file."""
    start = block * ranges.BLOCK_BYTES
    names: list[str] = []
    with suppress(Corrupt, OSError):  # the header may be what is damaged
        tensors = read_header(path, is_whole=False).tensors
        names = [name for name, x in tensors.items() if x.start < start + ranges.BLOCK_BYTES and x.stop > start]
    return WeightsDamaged(path, start, names)


def _identity(where: int | Path) -> tuple[int, ...]:
    status = os.stat(where)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity_of(path: Path) -> tuple[int, ...]:
    try:
        return _identity(path)
    except OSError as error:
        raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
