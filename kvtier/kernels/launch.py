"""Small tables on their way to the device, and the right current device.

A launch happens on an engine's thread between two forwards, so nothing here may wait for a stream. A table goes to the
device from pinned memory: a copy from pageable memory would wait until the stream gets to it, which is a forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

# Words of a pinned table (64 KiB). All tables have one size, so that torch's allocator of pinned memory can reuse
# them: asking the driver for more pinned memory may wait for the device. A larger table works, but may wait.
TABLE_WORDS = 1 << 13
# Tables that are allocated ahead: 2 MiB of pinned memory, and as much on the device. Engines run a step or two ahead,
# and each running load sums some slabs.
TABLES_AHEAD = 32


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, on which Triton launches. In a new thread the current device is the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(words: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """(n,) int64 on `device`, copied on its current stream without waiting. words: (n,).

    The pinned memory is torch's, which gives it to no one else before the copy is done, though it is freed here.
    The memory on the device is the current stream's: what is freed is used again in the order of that stream.
    """
    if device.type == "cpu":
        return torch.from_numpy(words)
    table = pinned(len(words))
    table.numpy()[:] = words  # not by torch, which releases the interpreter lock for each operation
    return table.to(device, non_blocking=True)


def pinned(n_words: int) -> torch.Tensor:
    """(n_words,) int64 of pinned memory, as it happens to be."""
    with torch.inference_mode(False):  # an engine's thread may ask, and the loop's thread writes to it later
        return torch.empty(max(TABLE_WORDS, n_words), dtype=torch.int64, pin_memory=True)[:n_words]


def pin_tables(device: torch.device) -> None:
    """Has the memory of the next TABLES_AHEAD tables pinned now."""
    if device.type == "cuda":
        with on_device(device):
            _ = [pinned(TABLE_WORDS) for _ in range(TABLES_AHEAD)]
