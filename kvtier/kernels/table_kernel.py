"""Table kernels: Triton kernels whose launch takes a table of numbers along, and may bring an answer back.

Table, kernel, answer and event are given to CUDA in one native call. Done with torch and Triton, a launch gave up the
interpreter lock about fifteen times, and each time got it back from the engine's thread, which launches a model: beside
16 loads a step of the model took 80 to 130 ms in which the GPU worked for 10 to 30 ms (H100).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.io import cuda
from kvtier.kernels.launch import TABLE_WORDS, TABLES_AHEAD, on_device, pin_tables, pinned

Words = npt.NDArray[np.int64]


class TableAt(NamedTuple):
    """Argument of a kernel: the address of a word of the launch's own table."""

    word: int


# A tensor must be the same in each launch, or one that is aligned like it, unless the kernel does not specialize on it.
Argument = int | torch.Tensor | TableAt | tuple[torch.Tensor, ...]


class Answer:
    """Last words of a table, on their way back from the device."""

    def __init__(self, words: Words, slot: _Slot | None = None, slots: _Slots | None = None) -> None:
        """words: where they arrive. slot: `wait` gives it back to `slots`; None: they have arrived."""
        self._words, self._slot, self._slots = words, slot, slots

    def wait(self) -> Words:
        """Return the words. Sleeps until the device is done, without the interpreter lock."""
        if self._slot is not None and self._slots is not None:
            self._slot.event.synchronize()
            self._words = self._words.copy()
            self._slots.put(self._slot)
            self._slot = None
        return self._words


class TableKernel:
    """A Triton kernel with its compile-time constants. Thread-safe.

    It must be declared with `do_not_specialize` for its integers, which are below 2^31.

    Args:
        constants: constexpr arguments and options, by name.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[torch.device, tuple[int, tuple[int, int]]] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Argument],
        table: Words,
        device: torch.device,
        n_answer: int = 0,
    ) -> Answer:
        """Launch on the current stream of `device`, which is current, without waiting for it.

        grid: with a 0 in it the kernel is compiled and loaded, and nothing runs. table: (n,); its last `n_answer` words
        are the answer. Tensors must stay until the kernel has run. Raises TierUnavailable.
        """
        if device.type == "cpu":
            return self._interpret(grid, arguments, table, n_answer)
        function, program = self._compiled.get(device) or self._compile(arguments, device)
        # torch.cuda.current_stream takes ten times as long.
        stream = torch._C._cuda_getCurrentRawStream(
            torch.cuda.current_device() if device.index is None else device.index
        )
        slots = _slots.get((device, stream)) or _slots.setdefault((device, stream), _Slots())
        slot = slots.take(len(table), device)
        slot.values[: len(table)] = table
        numbers = []
        for each in _flat(arguments):
            if isinstance(each, TableAt):
                numbers.append(slot.device_address + 8 * each.word)
            else:
                numbers.append(each.data_ptr() if isinstance(each, torch.Tensor) else each)
        first = len(table) - n_answer
        down = cuda.Copy(slot.address, slot.device_address, 8 * len(table))
        up = cuda.Copy(slot.address + 8 * first, slot.device_address + 8 * first, 8 * n_answer)
        cuda.launch(function, grid, program, numbers, stream, slot.event_handle, down, up)
        if n_answer:
            return Answer(slot.values[first : len(table)], slot, slots)
        slots.launched(slot)
        return Answer(slot.values[:0])

    def _compile(self, arguments: Sequence[Argument], device: torch.device) -> tuple[int, tuple[int, int]]:
        """Return the kernel's handle, and the threads and bytes of shared memory of a program."""
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        given = (nothing if isinstance(each, TableAt) else each for each in arguments)
        found = self._kernel[(0,)](*given, **self._constants)
        assert not getattr(found.metadata, "global_scratch_size", 0)
        compiled = found.function, (32 * found.metadata.num_warps, found.metadata.shared)
        self._compiled[device] = compiled
        return compiled

    def _interpret(
        self, grid: tuple[int, int, int], arguments: Sequence[Argument], table: Words, n_answer: int
    ) -> Answer:
        words = torch.from_numpy(table)
        given = (words[each.word :] if isinstance(each, TableAt) else each for each in arguments)
        self._kernel[grid](*given, **self._constants)
        return Answer(table[len(table) - n_answer :])


def _flat(arguments: Sequence[Argument]) -> Iterator[int | torch.Tensor | TableAt]:
    for each in arguments:
        if isinstance(each, tuple) and not isinstance(each, TableAt):
            yield from each
        else:
            yield each


class _Slot:
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


class _Slots:
    """Slots of one stream, each used again once its launch is done. Never freed, for a launch may be under way.

    To allocate pinned memory asks the driver about each piece in use, and I/O threads that copy contend for its locks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused = deque[_Slot]()
        self._launched = deque[_Slot]()  # in the order of the stream
        self._lent = set[_Slot]()

    def take(self, n_words: int, device: torch.device) -> _Slot:
        """Lend a slot for a launch. One that neither `launched` nor `put` gives back, after a failure, stays unused."""
        with self._lock:
            while self._launched and self._launched[0].event.query():  # type: ignore[no-untyped-call]
                self._keep(self._launched.popleft())
            slot = self._unused.popleft() if n_words <= TABLE_WORDS and self._unused else None
        if slot is None and n_words <= TABLE_WORDS:
            with suppress(IndexError):
                slot = _fresh[device].popleft()
        slot = slot or _Slot(max(n_words, TABLE_WORDS), device)
        self._lent.add(slot)
        return slot

    def launched(self, slot: _Slot) -> None:
        """Let a slot be used again once its event is done."""
        with self._lock:
            self._launched.append(slot)
            self._lent.discard(slot)

    def put(self, slot: _Slot) -> None:
        """Let a slot be used again at once. Called on any thread."""
        with self._lock:
            self._keep(slot)
            self._lent.discard(slot)

    def _keep(self, slot: _Slot) -> None:
        if slot.n_words == TABLE_WORDS:  # a larger one is rare
            self._unused.append(slot)


_slots: dict[tuple[torch.device, int], _Slots] = {}  # of each stream
_fresh: defaultdict[torch.device, deque[_Slot]] = defaultdict(deque)  # not used yet, of any stream


def prepare(device: torch.device) -> None:
    """Make tables for the next launches now: to allocate memory of the device may wait for it."""
    pin_tables(device)
    if device.type == "cuda":
        while len(_fresh[device]) < TABLES_AHEAD:
            _fresh[device].append(_Slot(TABLE_WORDS, device))
