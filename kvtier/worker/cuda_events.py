"""CUDA stream order: when bytes may move, relative to the engine's launches on the GPU. On the CPU nothing is pending.

CUDA runs what a stream is given in order, and streams side by side unless one waits for an event of another. The
engine's work is on its own current stream:

- a gather is launched on that stream itself, so later forwards cannot overwrite blocks before they are gathered;
- a gathered slot is read, or given to another chunk, once the event that was recorded behind the gather is done;
- a scatter runs behind an event that was recorded when the load began: by then the engine has launched the zeroing of
  the blocks and everything that their previous owner did with them;
- the engine computes on loaded blocks only after the answer that the load ended, which comes after the scatter's end.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from kvtier.errors import TierUnavailable
from kvtier.io import cuda

log = logging.getLogger("kvtier")

CudaEvent = Any  # done once all that was launched on its stream before it is done; None on the CPU
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source) of copies


class Order(Protocol):
    """Order of copies and kernels against the engine's work. Thread-safe."""

    def record(self) -> CudaEvent:
        """Record an event behind all that the engine has launched so far. Called on the engine's thread."""

    def wait(self, event: CudaEvent) -> None:
        """Return once the event is done."""

    def is_done(self, event: CudaEvent) -> bool:
        """Return True if `wait` would return at once."""

    def launching(self) -> AbstractContextManager[object]:
        """Enter the stream for launches whose results the caller waits for."""

    def begin(self, work: Callable[[], None], *after: CudaEvent) -> CudaEvent:
        """Call `work`, whose launches run behind the events. Return an event behind them, without waiting for it."""

    def begin_copies(self, pairs: Pairs) -> CudaEvent:
        """Start copies, and return their event. No launch waits for them. The memory must stay until they are done."""

    def begin_copies_down(self, pairs: Pairs) -> CudaEvent:
        """Start copies of saves into host memory; they run beside those of `begin_copies`."""


class HostOrder:
    """All work is done when its call returns."""

    def record(self) -> CudaEvent:
        return None

    def wait(self, event: CudaEvent) -> None:
        pass

    def is_done(self, event: CudaEvent) -> bool:
        return True

    def launching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, work: Callable[[], None], *after: CudaEvent) -> CudaEvent:
        work()

    def begin_copies(self, pairs: Pairs) -> CudaEvent:
        for target, source in pairs:
            target.copy_(source)

    begin_copies_down = begin_copies


class CudaOrder:
    """Streams that do not wait for the legacy default stream, four a thread: for launches that are waited for, for
    scatters, for copies ahead, and for copies of saves into host memory.

    Made on the engine's thread.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._engine_thread = threading.get_ident()
        self._own = threading.local()

    def record(self) -> CudaEvent:
        return self._record(torch.cuda.current_stream(self._device))

    def wait(self, event: CudaEvent) -> None:
        self._enter()
        event.synchronize()

    def is_done(self, event: CudaEvent) -> bool:
        self._enter()
        return bool(event.query())

    def launching(self) -> AbstractContextManager[object]:
        return self._launching("summing")

    def begin(self, work: Callable[[], None], *after: CudaEvent) -> CudaEvent:
        # Not the stream of `launching`: the caller that waits for its launches there would wait for these events too.
        with self._launching("scattering", *after) as stream:
            work()
            return self._record(stream)

    def begin_copies(self, pairs: Pairs) -> CudaEvent:
        return self._begin_copies("copying", pairs)

    def begin_copies_down(self, pairs: Pairs) -> CudaEvent:
        return self._begin_copies("copying_down", pairs)

    def _begin_copies(self, stream: str, pairs: Pairs) -> CudaEvent:
        with self._launching(stream) as launched:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._record(launched)

    @contextmanager
    def _launching(self, name: str, *after: CudaEvent) -> Iterator[torch.cuda.Stream]:
        """Make this thread's stream of that name the current one. Launches on it run behind the events."""
        self._enter()
        stream = self._stream(name)
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)
            try:
                yield stream
            except BaseException:
                stream.synchronize()  # some launches may have begun
                raise

    def _enter(self) -> None:
        """Prepare the thread at its first call."""
        # A new thread's device is number 0; its first use would create a context of half a GiB there.
        if hasattr(self._own, "entered"):
            return
        torch.cuda.set_device(self._device)
        if threading.get_ident() != self._engine_thread:
            try:
                cuda.relax_this_thread()  # else a query of an event would spoil a graph that the engine is recording
            except TierUnavailable as fault:
                log.warning("%s", fault)
            # Makes the device's context current, which older releases of torch do at a thread's first call to CUDA.
            self._record(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        self._own.entered = True

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # `blocking`: a thread that waits for the event sleeps, and leaves its core to the engine.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _stream(self, name: str) -> torch.cuda.Stream:
        known: torch.cuda.Stream | None = getattr(self._own, name, None)
        if known is None:
            # Checksums and scatters are short and free slots, so the GPU schedules them before the model's kernels.
            priority = -1 if name in ("summing", "scattering") else 0
            known = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
            setattr(self._own, name, known)
        return known
