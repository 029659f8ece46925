"""Table kernels: Triton kernels whose launch takes a table of numbers along, and may bring an answer back.

One native call passes the table, the kernel, its answer and an event to CUDA. With torch and Triton a launch released
the interpreter lock about fifteen times, and waited each time for the engine's thread to release it. Beside 16 loads a
step of the model then took 80 to 190 ms, in which the GPU worked for 10 to 30 ms (profiles on H100).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.io import cuda
from kvtier.kernels.launch import TABLE_WORDS, TABLES_AHEAD, on_device, pin_tables, pinned

Words = npt.NDArray[np.int64]
INT_MAX = 2**31 - 1


class TableAt(NamedTuple):
    """Argument of a kernel: the address of a word of the launch's own table."""

    word: int


# Later launches must pass tensors of the same dtype and alignment: the first launch compiles the kernel for them.
Argument = int | torch.Tensor | TableAt | tuple[torch.Tensor, ...]


class TableAnswer:
    """Last words of a table, on their way back from the device."""

    def __init__(self, words: Words, lent: tuple[_LaunchBuffers, _LaunchBuffer] | None = None) -> None:
        """words: where they arrive. lent: the buffer that `wait` gives back; None: they have arrived."""
        self._words, self._lent = words, lent

    def wait(self) -> Words:
        """Return the words. Sleeps until the device is done, without the interpreter lock. Call it on one thread."""
        lent, self._lent = self._lent, None
        if lent is not None:
            buffers, buffer = lent
            buffer.event.synchronize()
            self._words = self._words.copy()
            buffers.put(buffer)
        return self._words


class TableKernel:
    """A Triton kernel with its compile-time constants. Thread-safe.

    It must be declared with `do_not_specialize` for its integers, which are below 2^31.

    Args:
        constants: constexpr arguments and options, by name.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[torch.device, cuda.KernelHandle] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Argument],
        table: Words,
        device: torch.device,
        n_answer: int = 0,
    ) -> TableAnswer:
        """Launch on the current stream of `device`, which is current, without waiting for it.

        grid: with a 0 in it the kernel is compiled and loaded, and nothing runs. table: (n,); its last `n_answer` words
        are the answer. Tensors must stay until the kernel has run. Raises TierUnavailable, and
        ValueError for an integer above INT_MAX.
        """
        if device.type == "cpu":
            return self._interpret(grid, arguments, table, n_answer)
        compiled = self._compiled.get(device) or self._compile(arguments, device)
        flat = list(_flattened(arguments))
        if any(isinstance(each, int) and each > INT_MAX for each in flat):
            raise ValueError(f"integers of a kernel must be at most {INT_MAX}")  # it was compiled for 32 bits
        # torch.cuda.current_stream takes ten times as long.
        stream = torch._C._cuda_getCurrentRawStream(
            torch.cuda.current_device() if device.index is None else device.index
        )
        buffers = _buffers.get((device, stream)) or _buffers.setdefault((device, stream), _LaunchBuffers())
        buffer = buffers.take(len(table), device)
        buffer.values[: len(table)] = table
        numbers = []
        for each in flat:
            if isinstance(each, TableAt):
                numbers.append(buffer.device_address + 8 * each.word)
            else:
                numbers.append(each.data_ptr() if isinstance(each, torch.Tensor) else each)
        first = len(table) - n_answer
        table_copy = cuda.PinnedCopy(buffer.address, buffer.device_address, 8 * len(table))
        answer_copy = cuda.PinnedCopy(buffer.address + 8 * first, buffer.device_address + 8 * first, 8 * n_answer)
        cuda.launch(compiled, grid, numbers, (stream, buffer.event_handle), table_copy, answer_copy)
        if n_answer:
            return TableAnswer(buffer.values[first : len(table)], (buffers, buffer))
        buffers.launched(buffer)
        return TableAnswer(buffer.values[:0])

    def _compile(self, arguments: Sequence[Argument], device: torch.device) -> cuda.KernelHandle:
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        given = (nothing if isinstance(each, TableAt) else each for each in arguments)
        found = self._kernel[(0,)](*given, **self._constants)
        compiled = cuda.KernelHandle(found.function, 32 * found.metadata.num_warps, found.metadata.shared)
        self._compiled[device] = compiled
        return compiled

    def _interpret(
        self, grid: tuple[int, int, int], arguments: Sequence[Argument], table: Words, n_answer: int
    ) -> TableAnswer:
        words = torch.from_numpy(table)
        given = (words[each.word :] if isinstance(each, TableAt) else each for each in arguments)
        self._kernel[grid](*given, **self._constants)
        return TableAnswer(table[len(table) - n_answer :])


def _flattened(arguments: Sequence[Argument]) -> Iterator[int | torch.Tensor | TableAt]:
    for each in arguments:
        if isinstance(each, tuple) and not isinstance(each, TableAt):
            yield from each
        else:
            yield each


class _LaunchBuffer:
    """Memory for one table, pinned and on the device, and an event that is recorded behind its launch."""

    def __init__(self, n_words: int, device: torch.device) -> None:
        self.n_words = n_words
        with on_device(device):
            self._pinned = pinned(n_words)
            self._on_device = torch.empty(n_words, dtype=torch.int64, device=device)
            self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))  # makes the handle
        self.values: Words = self._pinned.numpy()
        self.address, self.device_address = self._pinned.data_ptr(), self._on_device.data_ptr()
        self.event_handle = int(self.event.cuda_event)


class _LaunchBuffers:
    """Buffers of one stream, each used again once its launch is done. None is freed before.

    To allocate pinned memory asks the driver about each piece in use, and I/O threads that copy contend for its locks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused = deque[_LaunchBuffer]()
        self._launched = deque[_LaunchBuffer]()  # in the order of the stream
        self._lent = set[_LaunchBuffer]()

    def take(self, n_words: int, device: torch.device) -> _LaunchBuffer:
        """Lend a buffer for a launch. It is not used again before `launched` or `put`, so not after a failure, nor if
        no thread waits for its answer."""
        with self._lock:
            while self._launched and self._launched[0].event.query():  # type: ignore[no-untyped-call]
                self._keep(self._launched.popleft())
            buffer = self._unused.popleft() if n_words <= TABLE_WORDS and self._unused else None
        if buffer is None and n_words <= TABLE_WORDS:
            with suppress(IndexError):
                buffer = _preallocated[device].popleft()
        buffer = buffer or _LaunchBuffer(max(n_words, TABLE_WORDS), device)
        self._lent.add(buffer)
        return buffer

    def launched(self, buffer: _LaunchBuffer) -> None:
        """Let a buffer be used again once its event is done."""
        with self._lock:
            self._launched.append(buffer)
            self._lent.discard(buffer)

    def put(self, buffer: _LaunchBuffer) -> None:
        """Let a buffer be used again at once. Called on any thread."""
        with self._lock:
            self._keep(buffer)
            self._lent.discard(buffer)

    def _keep(self, buffer: _LaunchBuffer) -> None:
        if buffer.n_words == TABLE_WORDS:  # a larger one is rare
            self._unused.append(buffer)


_buffers: dict[tuple[torch.device, int], _LaunchBuffers] = {}  # of each stream
_preallocated: defaultdict[torch.device, deque[_LaunchBuffer]] = defaultdict(deque)  # not used yet, of any stream


def prepare(device: torch.device) -> None:
    """Allocate memory for the next launches now: to allocate memory of the device may wait for the device."""
    if device.type == "cuda":
        while len(_preallocated[device]) < TABLES_AHEAD:
            buffer = _LaunchBuffer(TABLE_WORDS, device)
            buffer.event.synchronize()  # its memory may have been another tensor's on this stream; others will use it
            _preallocated[device].append(buffer)
    pin_tables(device)  # after the buffers, which else would take them
