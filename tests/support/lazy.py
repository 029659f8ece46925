"""A GPU's streams in host memory, as lazy as they may be: what is launched runs only when somebody waits for it.

Nothing runs early by luck, so an event that is left out shows every time. `LazyEngine` is a rig Engine whose workers
have a staging arena, a host arena below it and such an order between them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvtier.arena.admission import Admission, Admissions
from kvtier.arena.arena import Arena
from kvtier.codecs.base import Encoded, EncodeResult
from kvtier.config.settings import Admit
from kvtier.io.base import Reader, Reads
from kvtier.io.ring import AlignedBuffer, Batch, ReadOp, Ring
from kvtier.kernels import host as host_kernels
from kvtier.kernels.paged import Move, PagedKV, SlabRun
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker.saving import SaveBounds
from kvtier.worker.transfer import Transfer, TransferJobs
from tests.manual_jobs import ManualJobs
from tests.support.rig import Engine

Work = Callable[[], None]
# Operations of torch that launch nothing and wait for nothing, whatever device a tensor is on. (`numpy` refuses one on
# a GPU.)
FREE_OPERATIONS = frozenset({"__get__", "view", "numpy", "data_ptr", "numel", "is_contiguous", "stride", "size", "dim"})
_own = threading.local()  # n_running: streams that this thread runs now


class Strays(TorchFunctionMode):
    """Record of the torch operations that this thread calls on no stream of its own. On a GPU they would be launched on
    the default stream, which is the engine's, and to read a result would wait for all forwards in its queue."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        is_view = name == "__getitem__" and not isinstance(args[1], torch.Tensor)
        if not (getattr(_own, "n_running", 0) or is_view or name in FREE_OPERATIONS):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _running() -> Iterator[None]:
    _own.n_running = getattr(_own, "n_running", 0) + 1
    try:
        yield
    finally:
        _own.n_running -= 1


@dataclass(eq=False)
class Stream:
    work: list[Work] = field(default_factory=list)
    n_done: int = 0
    is_scatter: bool = False
    is_copy: bool = False

    def run_to(self, position: int) -> None:
        with _running():
            while self.n_done < position:
                self.work[self.n_done]()
                self.n_done += 1  # afterwards: other threads look at it


@dataclass(frozen=True)
class FakeEvent:
    stream: Stream
    position: int


@dataclass
class Left:
    """Which waits are left out, to show that a test would see it."""

    gathered: bool = False  # a save does not wait for its gather
    behind_engine: bool = False  # a scatter does not wait for the engine
    copied: bool = False  # nothing waits for a copy from the host arena
    scattered: bool = False  # a load does not wait for its scatters before it answers


class LazyOrder:
    """kvtier.worker.cuda_events.Order. The engine's stream is the default of every thread outside its own launches.

    strays: operations of torch on it, of the worker's threads.
    """

    def __init__(self, out: Left) -> None:
        self.engine = Stream()
        self.strays: list[str] = []
        self._out = out
        self._own = threading.local()
        self._lock = threading.RLock()

    def launch(self, work: Work) -> None:
        with self._lock:
            getattr(self._own, "stream", self.engine).work.append(work)

    def record(self) -> FakeEvent:
        return FakeEvent(self.engine, len(self.engine.work))

    def wait(self, event: FakeEvent) -> None:
        if self._is_left_out(event):
            return
        with self._lock:
            event.stream.run_to(event.position)

    def is_done(self, event: FakeEvent) -> bool:
        return event.stream.n_done >= event.position or self._is_left_out(event)

    def _is_left_out(self, event: FakeEvent) -> bool:
        stream = event.stream
        if stream is self.engine and self._out.gathered:
            return True
        return (stream.is_scatter and self._out.scattered) or (stream.is_copy and self._out.copied)

    @contextmanager
    def launching(self) -> Iterator[None]:
        stream = self._own.stream = Stream()
        try:
            yield
        finally:
            del self._own.stream
            with self._lock:
                stream.run_to(len(stream.work))

    def begin(self, work: Work, *after: FakeEvent) -> FakeEvent:
        stream = self._own.stream = self._behind(after)
        try:
            work()
        finally:
            del self._own.stream
        stream.is_scatter = True
        return FakeEvent(stream, len(stream.work))

    def _behind(self, events: Sequence[FakeEvent]) -> Stream:
        stream = Stream()
        for event in events:
            ignored = self._out.behind_engine if event.stream is self.engine else self._out.copied
            if not ignored:
                stream.work.append(lambda event=event: event.stream.run_to(event.position))  # type: ignore[misc]
        return stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: target.copy_(source))

    def begin_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> FakeEvent:
        event = self.begin_copies_down(pairs)
        event.stream.is_copy = True
        return event

    def begin_copies_down(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> FakeEvent:
        stream = self._own.stream = Stream()
        try:
            for target, source in pairs:
                self.copy(target, source)
        finally:
            del self._own.stream
        return FakeEvent(stream, len(stream.work))

    def sums(self, runs: Sequence[SlabRun]) -> list[tuple[int, ...]]:
        stream: Stream = self._own.stream
        with self._lock, _running():
            stream.run_to(len(stream.work))
            return host_kernels.checksums(runs)


class LazyEncoded:
    """kvtier.codecs.base.Encoded of an encoding that may not have run yet. The codec may refuse nothing."""

    def __init__(self, n_moves: int) -> None:
        self.inner: Encoded | None = None
        self._n_moves = n_moves

    def wait(self) -> list[EncodeResult]:
        return [EncodeResult(False, None)] * self._n_moves if self.inner is None else self.inner.wait()


class LazyCodec:
    """Launches what the codec does on the stream of the caller."""

    def __init__(self, inner: Any, order: LazyOrder) -> None:
        self._inner = inner
        self._order = order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> LazyEncoded:
        encoded = LazyEncoded(len(moves))
        self._order.launch(lambda: setattr(encoded, "inner", self._inner.encode(pages, moves)))
        return encoded

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._order.launch(lambda: self._inner.decode(pages, moves))


class DeviceReads(Reader):
    """The ring, taking reads for the device to where that is kept here."""

    def __init__(self, inner: Ring) -> None:
        self._inner = inner

    def submit(self, ops: Sequence[ReadOp]) -> Batch:
        return self.submit_each([ops])[0]

    def submit_each(self, batches: Sequence[Sequence[ReadOp]]) -> list[Batch]:
        return self._inner.submit_each([[op._replace(on_device=False) for op in ops] for ops in batches])

    def states(self, batches: Sequence[Batch]) -> bytes:
        return self._inner.states(batches)

    def close(self, timeout_s: float = 1.0) -> bool:
        return self._inner.close(timeout_s)


class LazyEngine(Engine):
    """One rank. Background jobs run when the test says so, in this thread."""

    def lay_over(
        self,
        out: Left | None = None,
        staging_slots: int = 12,
        admit: Admit = "saved",
        hbm_slots: int = 0,
        hbm_admit: Admit = "never",
    ) -> None:
        """Puts the staging arena above the host arena that the rig made, `hbm_slots` in it for chunks that stay. Call
        once, before anything is moved."""
        (transfer,) = self.transfers
        worker = transfer._worker
        slot_bytes = worker.arena.slot_bytes
        self.order = LazyOrder(out or Left())
        staging = torch.frombuffer(AlignedBuffer((staging_slots + hbm_slots) * slot_bytes).view, dtype=torch.uint8)
        self.staging: Arena[Any] = Arena(staging, slot_bytes)
        self.staging.is_device = True
        self.host = worker.arena
        self.worker = replace(
            worker,
            arena=self.staging,
            host=self.host,
            order=self.order,
            sums=self.order.sums,
            codec=LazyCodec(worker.codec, self.order),
            io=worker.io._replace(reader=DeviceReads(worker.io.ring)),
        )
        self.jobs: TransferJobs = TransferJobs(*(ManualJobs(64) for _ in TransferJobs._fields))
        self._admissions = Admissions(Admission(hbm_admit), Admission(admit))
        self._bounds = SaveBounds(staging_slots // 2, hbm_slots)
        self.transfers = [self._make_transfer()]
        transfer._tickers[0].close(1.0)
        for jobs in transfer._jobs:
            jobs.close()

    def on_threads(self) -> None:
        """Background jobs run on threads after all. Call before anything is moved."""
        self.jobs = TransferJobs(
            *(ThreadJobs(name, n, 64) for name, n in zip(TransferJobs._fields, (1, 2, 2, 1), strict=True))
        )
        self.transfers = [self._make_transfer()]

    def _make_transfer(self) -> Transfer:
        """Make a transfer whose loop does not pause while it polls for an event: it runs the event's stream itself."""
        transfer = Transfer(self.worker, self.jobs, self._admissions, self._bounds)
        loop, pause = transfer._loop, transfer._loop._pause

        def run_or_pause(io: Reads | None) -> None:
            events = [event for part in loop.parts for event, _, _ in part.events]
            if io is None and events:
                self.order.wait(events[0])
            else:
                pause(io)

        loop._pause = run_or_pause  # type: ignore[method-assign]
        return transfer

    def run_all(self) -> None:
        """Do what loads and saves can do now."""
        with Strays(self.order.strays):
            while any(jobs.pending() for jobs in self.jobs):
                for jobs in self.jobs:
                    jobs.drain(10)

    def in_engine(self, work: Work) -> None:
        """The engine launches something of its own."""
        self.order.engine.work.append(work)

    def overwrite(self, block_ids: Sequence[int], value: int) -> None:
        """The engine gives blocks to others, who write into them."""

        def write() -> None:
            for layer in self.pages[0].layers:
                for plane in layer.planes:
                    plane[torch.tensor(list(block_ids))] = value

        self.in_engine(write)

    def run_engine(self) -> None:
        self.order.engine.run_to(len(self.order.engine.work))
