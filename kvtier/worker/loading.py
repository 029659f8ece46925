"""One chunk on its way into the engine's blocks: its states, and the steps from one state to the next.

    QUEUED -> OPENING -> READING -> ARRIVED -> VERIFIED -> (a scatter for each load that wants it) -> ENDED

A chunk of the host arena is COPYING instead of OPENING and READING; one of the staging arena starts as ARRIVED. What
is read in a signed namespace lands in the host arena first, is judged there, and then is COPYING. SUSPECT: the bytes
are not good, and wait until all chunks before them were scattered; then JUDGING: a thread of the pool looks whether
they are to be read again. All steps but those of the pool run on the loop's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, Protocol

from kvtier.arena.admission import Admissions
from kvtier.errors import Corrupt, KVTierError
from kvtier.format.geometry import PAGE_BYTES
from kvtier.kernels.paged import Move, SlabRun
from kvtier.plan import LoadChunk, LoadPlan
from kvtier.runtime import metrics as names
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import Mark
from kvtier.worker.read_plan import Source, end_of
from kvtier.worker.record_reader import FetchFailed, FileReads, RecordReader

OPENED_TOGETHER = 8  # chunks of a load whose segments one task of the pool opens
KEPT_AT_ONCE_MAX = 8  # loaded chunks whose copies into the host arena are under way; more are not kept


class State(Enum):
    QUEUED = auto()
    OPENING = auto()
    READING = auto()
    JUDGING = auto()
    SUSPECT = auto()
    COPYING = auto()
    ARRIVED = auto()
    VERIFIED = auto()
    ENDED = auto()


class Origin(Enum):
    """Source of the bytes in a slot. It decides how the slot is given back."""

    ARENA = auto()  # the slot is leased: others may use it too
    HOST = auto()  # the slot is reserved; copied from a leased slot of the host arena
    FILES = auto()  # the slot is reserved; read from open segments


class Part(NamedTuple):
    """Chunk `number` of a load's plan."""

    load: Load
    number: int

    @property
    def chunk(self) -> LoadChunk:
        return self.load.plan.chunks[self.number]


@dataclass(eq=False, slots=True)
class Load:
    """One plan on its way. after: the engine's work that a scatter must not overtake, such as zeroing these blocks.

    moved_s: when it was begun, or a chunk of it was scattered last. waiting: numbers of chunks that are in no fetch.
    n_scattered: chunks whose scatter was launched, in the order of the prompt; n_landed: of them, those in the engine's
    blocks. end: number of the first chunk that is given up. n_pending: chunks that are neither landed nor given up; the
    load is answered when there are none.
    """

    plan: LoadPlan
    after: Mark
    asked_s: float
    deadline_s: float
    turn_s: float  # loads are served in the order of this time
    waiting: list[int]  # descending: the next one is the last
    end: int
    n_pending: int
    moved_s: float = 0.0
    n_scattered: int = 0
    n_landed: int = 0
    n_bytes: int = 0
    begun_s: float = 0.0
    failure: Exception | None = None

    def wait_again(self, number: int) -> None:
        self.waiting.append(number)
        self.waiting.sort(reverse=True)


@dataclass(eq=False, slots=True)
class Fetch:
    """One chunk, brought once for all loads that want it now.

    chunk: as the load that began the fetch has it. wanted_by: parts that were not scattered yet. n_moving: scatters
    that have not landed. n_loads: loads that ever wanted it. landing: slot of the host arena that signed bytes are read
    into; -1: none. held: what must stay until the bytes were verified: open segments, or the lease of a host slot.
    """

    namespace: bytes
    chunk: LoadChunk
    wanted_by: list[Part]
    state: State = State.QUEUED
    origin: Origin = Origin.FILES
    slot: int = -1
    landing: int = -1
    sources: tuple[Source, ...] = ()
    reads: FileReads | None = None
    held: ExitStack = field(default_factory=ExitStack)
    copied: Mark = None
    n_moving: int = 0
    n_loads: int = 1
    was_reread: bool = False
    bad: tuple[Source, ...] = ()  # those whose checksums do not match

    def is_wanted_by(self, load: Load) -> bool:
        return any(part.load is load for part in self.wanted_by)


class Background(Protocol):
    """Services of the loop that the steps call."""

    def in_pool(self, work: Callable[[], object], then: Callable[[object], None]) -> None:
        """Run `work` on a thread of the pool, and `then` with its result or its exception on the loop's thread."""
        ...

    def when_done(self, mark: Mark, then: Callable[[], None]) -> None:
        """Run `then` on the loop's thread once the mark is done."""
        ...

    def failed(self, fetch: Fetch, failure: Exception) -> None:
        """The chunk can't be had; its slot is given back."""
        ...

    def waits_for_storage(self) -> bool:
        """Return True if the loop has time for more than the loads."""
        ...

    def begin_again(self, fetch: Fetch) -> None:
        """The fetch is given up; those that want the chunk begin anew."""
        ...


class ChunkLoader:
    """Steps of the chunks of a worker. Not thread-safe: called on the loop's thread."""

    def __init__(self, worker: WorkerContext, admit: Admissions, loop: Background) -> None:
        self.reader = RecordReader(worker)
        self._worker = worker
        self._admit = admit
        self._loop = loop
        self._log = RepeatedLog(worker.clock)
        self._landing = None if self.reader.arena is worker.arena else self.reader.arena
        self._n_kept_now = 0
        self._to_close: list[ExitStack] = []
        self._to_open: list[Fetch] = []

    def begin(self, fetch: Fetch) -> bool:
        """Give the chunk a slot and start to fill it. Return False if no slot is free."""
        key = fetch.chunk.key
        cached = self._worker.arena.lease(key)
        if cached is not None:
            self._worker.metrics.add(names.ARENA_HIT_CHUNKS)
            (fetch.slot, fetch.sources), fetch.origin = cached, Origin.ARENA
            fetch.state = State.ARRIVED
            return True
        slot = self._worker.arena.reserve()
        if slot is None:
            return False
        host = self._worker.host
        in_host = None if host is None else host.lease(key)  # first: a slot to land in might be taken from this chunk
        if in_host is None and self._landing is not None:
            landing = self._landing.reserve()
            if landing is None:
                self._worker.arena.discard(slot)
                return False
            fetch.landing = landing
        fetch.slot = slot
        if host is None or in_host is None:
            self._open(fetch)
            return True
        self._worker.metrics.add(names.HOST_HIT_CHUNKS)
        self._copy_up(host, fetch, *in_host)
        return True

    def read_ended(self, fetch: Fetch) -> None:
        """All of the chunk's reads have ended, well or not."""
        assert fetch.reads is not None
        if self.reader.is_clean(fetch.reads):
            self._arrived(fetch)
        elif self.reader.signs:
            self.judge(fetch)
        else:
            fetch.state = State.SUSPECT

    def judge(self, fetch: Fetch) -> None:
        """Find out about bytes that are not good, and read them again or give the chunk up."""
        if fetch.bad:
            bad, fetch.bad = fetch.bad, ()
            self._reject(fetch, bad)
            return
        assert fetch.reads is not None
        fetch.state = State.JUDGING
        self._loop.in_pool(partial(self.reader.judge, fetch.reads), partial(self._judged, fetch))

    def verify(self, fetches: Sequence[Fetch]) -> None:
        """Compare the checksums of chunks that have arrived, in one launch (I2)."""
        runs = [self._slab_run(fetch, source) for fetch in fetches for source in fetch.sources]
        with self._worker.order.launching():
            found = iter(self._worker.sums(runs))
        for fetch in fetches:
            fetch.bad = tuple(source for source in fetch.sources if next(found) != source.checksums)
            fetch.state = State.SUSPECT if fetch.bad else State.VERIFIED

    def scatter(self, parts: Sequence[tuple[Fetch, Part]], after: Sequence[Mark]) -> Mark:
        """Launch the scatter of verified chunks into the blocks of the loads, behind `after`; return its mark."""
        moves = [self._move(fetch, source, part) for fetch, part in parts for source in fetch.sources]
        worker = self._worker
        return worker.order.begin(partial(worker.codec.decode, worker.pages, moves), *after)

    def leave(self, fetch: Fetch) -> None:
        """The chunk has landed wherever it is wanted: its slot is free, or caches it for others."""
        key, slot, fetch.slot, fetch.state = fetch.chunk.key, fetch.slot, -1, State.ENDED
        arena = self._worker.arena
        self._close(fetch)
        if fetch.origin is Origin.ARENA:
            arena.release(slot, key)
            return
        stays = any(self._admit.arena.keeps_loaded(key) for _ in range(fetch.n_loads))
        is_for_host = self._worker.host is not None and fetch.origin is Origin.FILES
        goes_down = is_for_host and any(self._admit.host.keeps_loaded(key) for _ in range(fetch.n_loads))
        if stays:
            is_new = arena.commit(slot, key, fetch.sources)
            cached = arena.lease(key) if goes_down and is_new else None
            if cached is not None:  # else it was pushed out already
                self._keep_below(cached[0], fetch, partial(arena.release, cached[0], key))
        elif goes_down:
            self._keep_below(slot, fetch, partial(arena.discard, slot))
        else:
            arena.discard(slot)

    def abandon(self, fetch: Fetch) -> None:
        """Give back what a chunk holds that no load waits for. Reads under way keep their slots until they return."""
        slot, fetch.slot, fetch.state = fetch.slot, -1, State.ENDED
        if slot < 0:
            return
        arena = self._worker.arena
        if fetch.origin is Origin.ARENA:
            arena.release(slot, fetch.chunk.key)
            return
        slots = ExitStack()
        slots.callback(arena.discard, slot)
        landing, fetch.landing = fetch.landing, -1
        if self._landing is not None and landing >= 0:
            slots.callback(self._landing.discard, landing)
        if fetch.reads is not None and not fetch.reads.batch.wait(0):
            slots.push(fetch.held.pop_all())
            self._worker.quarantine.add(fetch.reads.batch, slots.close)
        elif fetch.copied is not None and not self._worker.order.is_done(fetch.copied):
            slots.push(fetch.held.pop_all())
            self._loop.when_done(fetch.copied, slots.close)
        else:
            slots.close()
            self._close(fetch)

    @property
    def has_to_close(self) -> bool:
        """Return True if segments wait to be released."""
        return bool(self._to_close)

    def close_segments(self, at_least: int = 1) -> None:
        """Have the pool release the segments of chunks that are done, which may close files and take long."""
        if len(self._to_close) >= at_least:
            held, self._to_close = self._to_close, []
            self._loop.in_pool(partial(_close_all, held), lambda result: None)

    def open_segments(self) -> None:
        """Have the pool open the segments of what was begun and submit the reads, each load's in its order."""
        to_open, self._to_open = self._to_open, []
        for _, of_load in itertools.groupby(to_open, key=_first_load):
            for fetches in _batches(of_load, OPENED_TOGETHER):
                self._loop.in_pool(partial(self._submit_reads, fetches), partial(self._opened, fetches))

    def _open(self, fetch: Fetch) -> None:
        fetch.state, fetch.origin, fetch.copied = State.OPENING, Origin.FILES, None
        if self._landing is not None and fetch.landing < 0:  # it is read again
            landing = self._landing.reserve()
            if landing is None:
                self._loop.failed(fetch, FetchFailed("no slot in the host arena is free"))
                return
            fetch.landing = landing
        self._to_open.append(fetch)

    def _submit_reads(self, fetches: Sequence[Fetch]) -> list[FileReads | Exception | None]:
        """On a thread of the pool: return what became of each; None after the first one that failed, for most often the
        others fail like it, and their load ends there."""
        results: list[FileReads | Exception | None] = []
        for fetch in fetches:
            slot = fetch.slot if self._landing is None else fetch.landing
            anew = fetch.was_reread
            try:
                fetch.reads = self.reader.begin(fetch.namespace, fetch.chunk, slot, fetch.held, anew=anew)
                results.append(fetch.reads)  # `abandon` knows of them even if a later chunk's fault is unexpected
            except (FetchFailed, KVTierError, OSError) as failure:
                results.append(failure)
                break
        return results + [None] * (len(fetches) - len(results))

    def _opened(self, fetches: Sequence[Fetch], results: object) -> None:
        if isinstance(results, Exception):  # the pool is closed
            results = [results] * len(fetches)
        assert isinstance(results, list)
        for fetch, result in zip(fetches, results, strict=True):
            if isinstance(result, Exception):
                self._end_in_pool(fetch, result)
                continue
            if result is not None:
                fetch.sources, fetch.state = result.sources, State.READING
            if not fetch.wanted_by:  # all loads gave it up
                self.abandon(fetch)
            elif result is None:
                self._to_open.append(fetch)

    def _judged(self, fetch: Fetch, result: object) -> None:
        if not fetch.wanted_by:
            self.abandon(fetch)
        elif result is True:
            self._arrived(fetch)
        elif result is False:  # what came may be stale
            self._read_anew(fetch)
        else:
            self._end_in_pool(fetch, result)

    def _end_in_pool(self, fetch: Fetch, result: object) -> None:
        assert isinstance(result, Exception)
        self._loop.failed(fetch, FetchFailed(str(result)) if isinstance(result, Corrupt) else result)

    def _read_anew(self, fetch: Fetch) -> None:
        self._worker.metrics.add(names.REREAD_CHUNKS)
        fetch.was_reread, fetch.reads = True, None
        self._open(fetch)

    def _arrived(self, fetch: Fetch) -> None:
        """All bytes were read. On the CPU the I/O threads have verified them."""
        self.reader.stuck.answered()
        fetch.reads, fetch.state = None, State.ARRIVED if self._worker.arena.is_device else State.VERIFIED
        n_bytes = sum(source.n_bytes for source in fetch.sources)
        self._worker.metrics.add(names.FILE_READ_BYTES, n_bytes)
        if self._landing is not None:
            self._rise(self._landing, fetch)
        elif self._worker.io.reader is not self._worker.io.ring:
            self._worker.metrics.add(names.KVIKIO_READ_BYTES, n_bytes)

    def _rise(self, landing: ChunkArena, fetch: Fetch) -> None:
        """Copy up what was read into the host arena and found good. It stays there only if it is wanted."""
        key, slot, fetch.landing = fetch.chunk.key, fetch.landing, -1
        self._close(fetch)
        is_new, leased, sources = landing.commit_leased(slot, key, fetch.sources)
        self._copy_up(landing, fetch, leased, sources)
        if is_new and not self._admit.host.keeps_loaded(key):
            landing.drop(key)

    def _copy_up(self, host: ChunkArena, fetch: Fetch, host_slot: int, sources: tuple[Source, ...]) -> None:
        fetch.sources, fetch.origin, fetch.state = sources, Origin.HOST, State.COPYING
        fetch.held.callback(host.release, host_slot, fetch.chunk.key)
        n_bytes = end_of(sources) - PAGE_BYTES
        target, source = self._worker.arena.record(fetch.slot, n_bytes), host.record(host_slot, n_bytes)
        fetch.copied = self._worker.order.begin_copy(target, source)
        self._loop.when_done(fetch.copied, partial(self._copied_up, fetch, fetch.copied))

    def _copied_up(self, fetch: Fetch, mark: Mark) -> None:
        if fetch.state is State.COPYING and fetch.copied is mark:
            fetch.state = State.ARRIVED

    def _reject(self, fetch: Fetch, bad: Sequence[Source]) -> None:
        """The bytes are not those that were saved: a copy is forgotten and read again; a record is offered no more."""
        key = fetch.chunk.key
        if fetch.origin is Origin.FILES and self.reader.may_be_stale():
            if fetch.was_reread:
                fetch.state = State.JUDGING
                work = partial(self.reader.doubt, fetch.namespace, key, [source.location for source in bad])
                self._loop.in_pool(work, partial(self._end_in_pool, fetch))
            else:
                self._read_anew(fetch)
            return
        self._worker.metrics.add(names.CHECKSUM_FAILURES)
        if fetch.origin is Origin.FILES:
            fetch.state = State.JUDGING
            work = partial(self.reader.condemn, key, [source.location for source in bad])
            self._loop.in_pool(work, partial(self._end_in_pool, fetch))
            return
        self._log.line(logging.ERROR, "bad", "chunk %s went bad in memory; it is read again", key.hex())
        if fetch.origin is Origin.ARENA:
            self._worker.arena.drop(key)
            self._loop.begin_again(fetch)
            return
        assert self._worker.host is not None
        self._worker.host.drop(key)
        fetch.held.close()
        self._open(fetch)

    def _keep_below(self, slot: int, fetch: Fetch, give_back: Callable[[], None]) -> None:
        """Copy a verified chunk down into the host arena, then give its slot back. Nothing is kept in a full arena, nor
        while the loop itself limits the loads."""
        host, order = self._worker.host, self._worker.order
        has_time = self._n_kept_now < KEPT_AT_ONCE_MAX and self._loop.waits_for_storage()
        host_slot = host.reserve() if host is not None and has_time else None
        if host is None or host_slot is None:
            give_back()
            return
        n_bytes = end_of(fetch.sources) - PAGE_BYTES
        mark = order.begin_copy(host.record(host_slot, n_bytes), self._worker.arena.record(slot, n_bytes))
        self._n_kept_now += 1

        def end() -> None:
            self._n_kept_now -= 1
            host.commit(host_slot, fetch.chunk.key, fetch.sources)
            give_back()

        self._loop.when_done(mark, end)

    def _close(self, fetch: Fetch) -> None:
        """Release what is held: open segments with the next `close_segments`."""
        held = fetch.held.pop_all()
        if fetch.origin is Origin.FILES:
            self._to_close.append(held)
        else:
            held.close()

    def _slab_run(self, fetch: Fetch, source: Source) -> SlabRun:
        slabs = self._worker.arena.slabs(fetch.slot, source.slot_offset, source.wanted.n_heads, source.slab_bytes)
        return SlabRun(slabs, fetch.chunk.key, source.wanted.first_head, source.location.extent.first_layer)

    def _move(self, fetch: Fetch, source: Source, part: Part) -> Move:
        patch = source.patch(self._worker.share.reads)
        chunk = part.chunk
        return Move(patch, chunk.block_ids, self._slab_run(fetch, source).slabs, self.first_block(chunk))

    def first_block(self, chunk: LoadChunk) -> int:
        """Return how many of the chunk's blocks the engine has computed itself: they are not written."""
        blocks, rest = divmod(chunk.first_token, self._worker.pages.block_tokens)
        assert rest == 0, "local hits end at a block"
        return blocks


def _batches(fetches: Iterable[Fetch], size: int) -> Iterator[list[Fetch]]:
    rest = iter(fetches)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _first_load(fetch: Fetch) -> Load | None:
    return fetch.wanted_by[0].load if fetch.wanted_by else None


def _close_all(held: Sequence[ExitStack]) -> None:
    with ExitStack() as all_of_them:  # each is closed, also if another one's close raises
        for stack in held:
            all_of_them.callback(stack.close)
