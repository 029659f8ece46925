"""One load on its way: its chunks wait; many ahead, they are `coming` into arena slots; in the prompt's order they are
verified and scattered, `moving` into the engine's blocks; and when they have landed, their slots are free."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.kernels.paged import Move
from kvtier.plan import LoadChunk, LoadPlan
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.fetch import Fetch, Fetcher, Origin
from kvtier.worker.fetch_files import FetchFailed
from kvtier.worker.read_plan import Source

TOGETHER = 2
"""Half of what may be coming is scattered together: a launch a chunk takes longer than reading it, and after all of
it storage would idle. When nothing waits to be read any more, all that is here."""
TOGETHER_MAX = 64
"""In one launch with those from the arena, which free no slot that storage waits for."""


class Moving(NamedTuple):
    """Chunks whose scatter was launched; they are in the engine's blocks when `mark` is done."""

    fetches: tuple[Fetch, ...]
    mark: Mark


class LoadWalk:
    """Made on the engine's thread, walked on one thread, ended by that one or another.

    The lock is held while a scatter is launched and while the load ends, which is not before all of `moving` has
    arrived: afterwards the blocks are the engine's again, and nothing late writes into them.

    Args:
        window: how many chunks may be coming at a time.
    """

    def __init__(
        self, worker: WorkerContext, fetcher: Fetcher, plan: LoadPlan, deadline_s: float, window: Callable[[], int]
    ) -> None:
        self.plan = plan
        self.deadline_s = deadline_s
        self.moved_s = deadline_s  # when a chunk was begun, came or landed last; later than any, before it walks
        self.n_chunks = 0  # that have landed
        self.n_bytes = 0  # of them
        self.moving: deque[Moving] = deque()
        self._worker = worker
        self._fetcher = fetcher
        self._window = window
        # The engine's work that a scatter must not overtake, such as zeroing these very blocks.
        self._after = worker.order.mark()
        self._waiting: deque[LoadChunk] = deque(plan.chunks)
        self._coming: deque[Fetch] = deque()
        # Why a chunk ahead could not be begun: it and those behind it wait no more, and those before it are loaded.
        self._cut_short: FetchFailed | TierUnavailable | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def n_tokens(self) -> int:
        """Of the chunks that have landed, those that the engine did not have."""
        return sum(self._worker.geometry.chunk_tokens - c.first_token for c in self.plan.chunks[: self.n_chunks])

    def walk(self) -> None:
        """Keeps chunks coming while it scatters those that are here, in order. Raises FetchFailed, TierUnavailable.

        Whatever it raises: `land`, `end` and `let_go` are still to be called.
        """
        while self._waiting or self._coming:
            self.moved_s = self._worker.clock()
            if self.moved_s >= self.deadline_s:
                raise FetchFailed("its time is over")
            self.land(waits=not self._coming)
            self._read_ahead()
            self._complete(self._coming[0])
            here = self._here()
            n_good = self._fetcher.check(here)
            if n_good == 0:
                self._fetcher.reject(self.plan.namespace, here[0])
                continue
            self._scatter(here[:n_good])
        if self._cut_short is not None:
            raise self._cut_short

    def land(self, *, waits: bool = True) -> None:
        """Frees the slots of chunks that have arrived in the engine's blocks; with `waits`, of all that are moving."""
        order = self._worker.order
        while self.moving and (waits or order.is_done(self.moving[0].mark)):
            fetches, mark = self.moving[0]
            order.wait(mark)
            with self._lock:
                self.moving.popleft()
                self.n_chunks += len(fetches)
                self.n_bytes += sum(source.n_bytes for f in fetches for source in f.sources)
            for fetch in fetches:
                self._fetcher.keep_or_free(fetch)

    def end(self, *, is_overdue: bool = False) -> frozenset[int] | None:
        """Ends the load, for good: the blocks that did not come. None: it has ended before.

        is_overdue: this is not the thread that walks. None then also means: not now, for that one is just launching,
        or chunks are still moving.
        """
        if not self._lock.acquire(blocking=not is_overdue):
            return None
        try:
            if self._has_ended or (is_overdue and not self._is_still()):
                return None
            missing = self.plan.chunks[self.n_chunks :]
            blocks = frozenset(block for chunk in missing for block in chunk.block_ids[self._first_block(chunk) :])
            self._has_ended = True
            return blocks
        finally:
            self._lock.release()

    def let_go(self, n_kept: int = 0) -> None:
        """Abandons what is read ahead, but for the first `n_kept`; it is begun again when its turn comes."""
        while len(self._coming) > n_kept:
            fetch = self._coming.pop()
            self._waiting.appendleft(fetch.chunk)
            self._fetcher.abandon(fetch)

    def _is_still(self) -> bool:
        return all(self._worker.order.is_done(moving.mark) for moving in self.moving)

    def _read_ahead(self) -> None:
        while self._waiting and len(self._coming) < self._window():
            # With nothing coming that would free a slot, one is waited for.
            slot_timeout_s = 0.0 if self._coming else self.deadline_s - self._worker.clock()
            try:
                fetch = self._fetcher.begin(self.plan.namespace, self._waiting[0], slot_timeout_s)
            except (FetchFailed, TierUnavailable) as failure:
                if not self._coming:
                    raise
                self._cut_short = failure
                self._waiting.clear()
                return
            if fetch is None:
                break
            self._coming.append(fetch)
            self._waiting.popleft()
        if not self._coming:
            raise FetchFailed("no slot in the arena came free in time")

    def _complete(self, fetch: Fetch) -> None:
        """Two loads never wait for each other: who waits for a slot holds none, and reads of others that are waited
        for have theirs. (A key has one place in all prompts that share it, so these waits have an order, as long as
        who waits for another's read holds no chunk before it: those that are moving are landed.)"""
        if self._fetcher.is_here(fetch):
            return
        namespace, deadline_s = self.plan.namespace, self.deadline_s
        self.land()
        if self._fetcher.complete(namespace, fetch, deadline_s, slot_timeout_s=0.0):
            return
        self.let_go(1)
        if not self._fetcher.complete(namespace, fetch, deadline_s, max(0.0, deadline_s - self._worker.clock())):
            raise FetchFailed("no slot in the arena came free in time")

    def _here(self) -> list[Fetch]:
        """The first chunk, which is complete, and on a device those behind it that are too: moved in one launch. (On
        the CPU one launch is no gain, and nobody could answer late while a slow codec decodes them all.)"""
        here = [self._coming[0]]
        n_brought = int(here[0].origin is not Origin.ARENA)
        n_brought_max = max(1, self._window() // TOGETHER) if self._waiting else TOGETHER_MAX
        for fetch in itertools.islice(self._coming, 1, TOGETHER_MAX if self._worker.arena.is_device else 1):
            n_brought += fetch.origin is not Origin.ARENA
            if n_brought > n_brought_max or not self._fetcher.is_here(fetch):
                break
            here.append(fetch)
        return here

    def _scatter(self, fetches: Sequence[Fetch]) -> None:
        """Launches the scatter of the first chunks that were coming, without waiting for it."""
        worker = self._worker
        moves = [self._move(fetch, source) for fetch in fetches for source in fetch.sources]
        with self._lock:
            if self._has_ended:
                raise FetchFailed("it was answered as late meanwhile")
            mark = worker.order.begin(partial(worker.codec.decode, worker.pages, moves), self._after)
            self.moving.append(Moving(tuple(fetches), mark))
            for _ in fetches:
                self._coming.popleft()

    def _move(self, fetch: Fetch, source: Source) -> Move:
        patch = source.patch(self._worker.share.reads)
        slabs = self._fetcher.slab_run(fetch, source).slabs
        return Move(patch, fetch.chunk.block_ids, slabs, self._first_block(fetch.chunk))

    def _first_block(self, chunk: LoadChunk) -> int:
        blocks, rest = divmod(chunk.first_token, self._worker.pages.block_tokens)
        assert rest == 0, "local hits end at a block"
        return blocks
