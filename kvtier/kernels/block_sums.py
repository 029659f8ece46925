"""Checksums of blocks that are scattered over a device's memory in pieces: launches of `device_block_sums`."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from kvtier.errors import Corrupt
from kvtier.format.checksum import PAIRS_PER_PAGE
from kvtier.io import cuda
from kvtier.io.cuda import KernelHandle
from kvtier.kernels.device_code import load, unpack
from kvtier.kernels.launch import on_device
from kvtier.storage.cache_folder import CacheFolder

PIECE_FIELDS = 4  # of the table: address (a multiple of 8), first pair in the block, pairs, number of the block
PAGES = 16  # of a program
SOURCES = ("block_sums.py", "device_block_sums.py", "device_checksum.py", "device_code.py")


_loaded: dict[torch.device, KernelHandle] = {}  # by device; the driver keeps a module that it has loaded
_loading = threading.Lock()


def is_compiled(device: torch.device, stored: CacheFolder) -> bool:
    """Return whether the kernel is among those stored for a CUDA device."""
    return device.type == "cuda" and stored.get(_key(_capability(device))) is not None


def load_kernel(capability: int, stored: CacheFolder | None) -> KernelHandle:
    """Load the kernel into the current device's context: the stored one, else one that is compiled, and stored.

    capability: of the device, such as 90. What Triton raises where it has no compiler is passed on. Raises as
    `load`, where the driver refuses new code too.
    """
    key = _key(capability)
    if stored is not None and (body := stored.get(key)) is not None:
        try:
            return load(unpack(body))
        except (Corrupt, RuntimeError) as error:
            stored.remove(key, error)
    from kvtier.kernels.device_block_sums import compiled  # Triton takes 0.4 s to import

    code = compiled(capability)
    kernel = load(code)
    if stored is not None:
        stored.put(key, code.pack())
    return kernel


def kernel_on(device: torch.device, stored: CacheFolder | None) -> KernelHandle:
    """Return the kernel on a CUDA device, which is loaded once a process. Raises as `load_kernel`."""
    with _loading, on_device(device):
        if device not in _loaded:
            _loaded[device] = load_kernel(_capability(device), stored)
        return _loaded[device]


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _key(capability: int) -> str:
    hashed = blake3(f"{capability} {PAIRS_PER_PAGE}".encode())
    for name in SOURCES:
        hashed.update(Path(__file__).with_name(name).read_bytes())
    return hashed.hexdigest()


class BlockSums:
    """A launch that is prepared: the table is on the device, and the kernel is loaded."""

    def __init__(
        self,
        pieces: npt.NDArray[np.int64],
        n_blocks: int,
        seed: int,
        device: torch.device,
        stored: CacheFolder | None = None,
    ) -> None:
        """Prepare to sum pieces. Takes seconds where the kernel has to be compiled.

        pieces: (n, PIECE_FIELDS), in the order of their blocks. seed: of all blocks. stored: compiled kernels of this
        user. On the CPU Triton's interpreter does it, for tests. What Triton raises where it has no compiler is passed
        on. Raises RuntimeError when CUDA fails.
        """
        self._device = device
        self._blocks, self._n_summed = pieces[:, 3].copy(), 0
        self._table = torch.from_numpy(np.ascontiguousarray(pieces)).to(device)
        self._sums = torch.zeros(n_blocks, dtype=torch.int64, device=device)
        self._seed = seed
        self._parts = -(-int(pieces[:, 2].max(initial=0)) // (PAGES * PAIRS_PER_PAGE))
        self._kernel: KernelHandle | None = None
        if device.type == "cuda":
            self._kernel = kernel_on(device, stored)
            with on_device(device):
                torch.cuda.current_stream(device).synchronize()  # another thread launches, maybe on another stream

    def _launch(self, stop: int) -> None:
        grid = stop - self._n_summed, self._parts
        table = self._table[self._n_summed :]
        if self._kernel is None:
            from kvtier.kernels.device_block_sums import interpret

            interpret(grid, table, self._sums, self._seed - (self._seed >> 63 << 64))
            return
        with on_device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            arguments = (table.data_ptr(), self._sums.data_ptr(), self._seed)
            cuda.launch(self._kernel, (*grid, 1), arguments, (stream, cuda.NO_EVENT))

    def sum_until(self, block: int) -> None:
        """Begin to sum blocks before `block` that were not summed so far: their bytes are there."""
        stop = int(np.searchsorted(self._blocks, block))
        if stop > self._n_summed:
            self._launch(stop)
            self._n_summed = stop

    def sums(self) -> npt.NDArray[np.uint64]:
        """Sum the blocks that are left. Return the sums of all, (n_blocks,); 0 for blocks without pieces."""
        self.sum_until(len(self._sums))
        return self._sums.cpu().numpy().view(np.uint64)
