"""CUDA stream order: when bytes may move, relative to the engine's launches on the GPU. On the CPU nothing is pending.

CUDA runs what a stream is given in order, and streams side by side unless one waits for an event of another. The
engine's work is on its own current stream:

- a gather is launched on that stream itself, so later forwards cannot overwrite blocks before they are gathered;
- a gathered slot is read, or given to another chunk, after a `mark` that was taken behind the gather is done;
- a scatter runs behind a mark taken when the load began: by then the engine has launched the zeroing of the blocks and
  everything that their previous owner did with them;
- the engine computes on loaded blocks only after it was told that the load ended, which is after the scatter has.
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

Mark = Any  # everything that was launched before some moment
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source) of copies


class Order(Protocol):
    """Thread-safe."""

    def mark(self) -> Mark:
        """Return a mark of all that the engine has launched so far; called on the engine's thread."""

    def wait(self, mark: Mark) -> None:
        """Returns when all that the mark stands for is done."""

    def is_done(self, mark: Mark) -> bool:
        """Return True if `wait` would return at once."""

    def launching(self) -> AbstractContextManager[None]:
        """A place for launches that are waited for by what they return."""

    def begin(self, work: Callable[[], None], *after: Mark) -> Mark:
        """Runs `work`, which launches, behind the marks; does not wait for what it launched."""

    def begin_copies(self, pairs: Pairs) -> Mark:
        """Start copies that no launch waits for, on any stream. The memory must stay until their mark is done."""

    def begin_copies_down(self, pairs: Pairs) -> Mark:
        """Start copies of saves into host memory; they run beside those of `begin_copies`."""


class HostOrder:
    """All work is done when its call returns."""

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def is_done(self, mark: Mark) -> bool:
        return True

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, work: Callable[[], None], *after: Mark) -> Mark:
        work()

    def begin_copies(self, pairs: Pairs) -> Mark:
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

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def wait(self, mark: Mark) -> None:
        self._enter()
        mark.synchronize()

    def is_done(self, mark: Mark) -> bool:
        self._enter()
        return bool(mark.query())

    @contextmanager
    def launching(self) -> Iterator[None]:
        with self._launching("summing"):
            yield

    def begin(self, work: Callable[[], None], *after: Mark) -> Mark:
        # Not the stream of `launching`: what is launched there, and waited for, would wait for these marks too.
        with self._launching("scattering", *after) as stream:
            work()
            return self._record(stream)

    def begin_copies(self, pairs: Pairs) -> Mark:
        return self._begin_copies("copying", pairs)

    def begin_copies_down(self, pairs: Pairs) -> Mark:
        return self._begin_copies("copying_down", pairs)

    def _begin_copies(self, stream: str, pairs: Pairs) -> Mark:
        with self._launching(stream) as launched:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._record(launched)

    @contextmanager
    def _launching(self, name: str, *after: Mark) -> Iterator[torch.cuda.Stream]:
        """This thread's stream of that name, the current one within: what is launched on it runs behind the marks."""
        self._enter()
        stream = self._stream(name)
        with torch.cuda.stream(stream):
            for mark in after:
                stream.wait_event(mark)
            try:
                yield stream
            except BaseException:
                stream.synchronize()  # part of it may be on its way
                raise

    def _enter(self) -> None:
        """A new thread's device is the first of the host, and to use that makes a context of half a GiB there. Asking
        for events would spoil a graph that the engine is recording, unless the thread is relaxed."""
        if hasattr(self._own, "entered"):
            return
        torch.cuda.set_device(self._device)
        if threading.get_ident() != self._engine_thread:
            try:
                cuda.relax_this_thread()
            except TierUnavailable as fault:
                log.warning("%s", fault)
            # Makes the device's context current, which older releases of torch do at a thread's first call to CUDA.
            self._record(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        self._own.entered = True

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Who waits sleeps: a waiting thread must not take the engine's core.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _stream(self, name: str) -> torch.cuda.Stream:
        known: torch.cuda.Stream | None = getattr(self._own, name, None)
        if known is None:
            # Sums and scatters are short and free slots, so the GPU schedules them before the model's kernels.
            priority = -1 if name in ("summing", "scattering") else 0
            known = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
            setattr(self._own, name, known)
        return known
