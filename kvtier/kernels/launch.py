"""Kernel launches: small tables to the device, answers back, and the right current device.

A launch happens on an engine's thread between two forwards, so nothing here may wait for a stream. A table goes to the
device from pinned memory: a copy from pageable memory would wait until the stream gets to it, which is a forward.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

# Words of a pinned table (128 KiB). All tables have one size, so that torch's allocator of pinned memory can reuse
# them: asking the driver for more pinned memory may wait for the device. A larger table works, but may wait.
TABLE_WORDS = 1 << 14
# Tables in use at once before more memory is pinned, 4 MiB in all: engines run a step or two ahead, and each running
# load sums some slabs.
TABLES_AHEAD = 16


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current: Triton launches on the current one, which in a new thread is the first of the host."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(words: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """(n,) int64 on `device`, copied on its current stream without waiting. words: (n,).

    The pinned memory is torch's, which gives it to no one else before the copy is done, though it is freed here.
    The memory on the device is the current stream's: what is freed is used again in the order of that stream.
    """
    if device.type == "cpu":
        return torch.from_numpy(words)
    ring = _tables.of_device.get(device)
    if ring is None:
        ring = _tables.of_device[device] = _TableRing()
    return ring.to_device(words, device)


class _TableRing:
    """Pinned tables of one thread for one device, used in turns, each again once it was copied.

    To allocate pinned memory asks the driver about each piece in use, and I/O threads that copy contend for its locks.
    """

    def __init__(self) -> None:
        self._next = 0
        self._tables: list[tuple[torch.Tensor, npt.NDArray[np.int64], torch.cuda.Event]] = []

    def to_device(self, words: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        if len(words) > TABLE_WORDS or self._is_in_use():
            table = pinned(len(words))
            table.numpy()[:] = words  # not by torch, which releases the interpreter lock for each operation
            return table.to(device, non_blocking=True)
        if len(self._tables) < TABLES_AHEAD:
            table = pinned(TABLE_WORDS)
            self._tables.append((table, table.numpy(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
            table, values, copied = self._tables[-1]
        else:
            self._next = (self._next + 1) % TABLES_AHEAD
            table, values, copied = self._tables[self._next]
        values[: len(words)] = words
        on_its_way = table[: len(words)].to(device, non_blocking=True)
        copied.record(torch.cuda.current_stream(device))
        return on_its_way

    def _is_in_use(self) -> bool:
        """Return True if the next table has not been copied yet: who launches does not wait for it."""
        if len(self._tables) < TABLES_AHEAD:
            return False
        return not self._tables[(self._next + 1) % TABLES_AHEAD][2].query()  # type: ignore[no-untyped-call]


class _ThreadTables(threading.local):
    def __init__(self) -> None:
        self.of_device: dict[torch.device, _TableRing] = {}


_tables = _ThreadTables()
_Answer = tuple[torch.Tensor, torch.cuda.Event]
_answers: defaultdict[torch.device, deque[_Answer]] = defaultdict(deque)  # pinned memory and an event, not in use


class ToHost:
    """Numbers that launches write, on their way to the host: copied on the device's current stream without waiting."""

    def __init__(self, values: Sequence[torch.Tensor], device: torch.device) -> None:
        """values: int64, contiguous, on `device`."""
        self._values = values
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._lent: torch.Tensor | None = None
        if device.type == "cuda":
            n_words = sum(each.numel() for each in values)
            unused = _answers[device]
            if n_words <= TABLE_WORDS and unused:
                self._lent, self._event = unused.popleft()
            else:
                self._lent = pinned(max(TABLE_WORDS, n_words))
                self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._values, first = [], 0
            for each in values:
                target = self._lent[first : first + each.numel()].view(each.shape)
                self._values.append(target.copy_(each, non_blocking=True))
                first += each.numel()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[npt.NDArray[np.uint64]]:
        """All of them, in their shapes. Sleeps until they are there, without the interpreter lock."""
        if self._event is None or self._lent is None:
            return [each.numpy().view(np.uint64) for each in self._values]
        self._event.synchronize()
        found = [each.numpy().view(np.uint64).copy() for each in self._values]
        if self._lent.numel() >= TABLE_WORDS:
            _answers[self._device].append((self._lent, self._event))
        self._lent, self._values = None, [torch.from_numpy(each.view(np.int64)) for each in found]
        return found


def pinned(n_words: int) -> torch.Tensor:
    """(n_words,) int64 of pinned memory, as it happens to be."""
    with torch.inference_mode(False):  # an engine's thread may ask, and the loop's thread writes to it later
        return torch.empty(max(TABLE_WORDS, n_words), dtype=torch.int64, pin_memory=True)[:n_words]


def pin_tables(device: torch.device) -> None:
    """Has the memory of the next TABLES_AHEAD tables pinned now."""
    if device.type == "cuda":
        with on_device(device):
            _ = [pinned(TABLE_WORDS) for _ in range(TABLES_AHEAD)]
