"""Chunk loader: the states of chunks that are being loaded, and the steps from one state to the next.

    OPENING -> READING -> ARRIVED -> VERIFIED -> (a scatter for each load that waits for the chunk) -> ENDED

    found in the host arena     COPYING instead of OPENING and READING
    found in the arena          starts as ARRIVED
    signed                      read into the host arena, then JUDGING, then COPYING
    SUSPECT                     its read failed or its checksums differ; it waits until all chunks before it in the
                                prompt are scattered, then it is JUDGING: a pool thread decides whether to read it again
    DROPPED                     no load waits for it any more, but a task of the pool still has it

A step takes all chunks that are ready for it. All steps run on the loop's thread, except tasks of the pool.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.arena.admission import Admissions
from kvtier.errors import Corrupt
from kvtier.io.ring import CLEAN
from kvtier.kernels.paged import Move, SlabRun
from kvtier.plan import LoadChunk, LoadPlan
from kvtier.runtime import metrics as names
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.worker.context import ChunkArena, WorkerContext
from kvtier.worker.cuda_events import CudaEvent
from kvtier.worker.loop import TaskPool, TransferLoop
from kvtier.worker.read_plan import Source, slabs_bytes
from kvtier.worker.record_reader import FetchFailed, FileReads, HeldSegments, RecordReader

if TYPE_CHECKING:
    from kvtier.worker.loads import Loader

# Limits of the chunks of a load that are taken together: for one submission of reads, one task that opens segments, or
# one event behind copies. Within these limits, as many as make up OPENED_BYTES.
OPENED_MIN, OPENED_MAX, OPENED_BYTES = 8, 32, 512 << 20
_batch_of = attrgetter("reads.batch")
# Limits, in chunks and bytes, of copies of loaded chunks into the host arena at a time; one chunk is always allowed.
# Chunks beyond the limits are not copied. The checksums of the next chunks cross PCIe after these copies: with 256 MiB
# of copies a turn waited 5 ms for checksums, and loads ran at 0.78 of the rate of pinned copies; without copies they
# ran at 0.92 (H200, 16 loads of 47 chunks of 32 MiB).
HOST_COPIES_MAX, HOST_COPIES_BYTES = 8, 64 << 20


class State(Enum):
    OPENING = auto()
    READING = auto()
    JUDGING = auto()
    SUSPECT = auto()
    COPYING = auto()
    ARRIVED = auto()
    VERIFIED = auto()
    DROPPED = auto()
    ENDED = auto()


TURN_STATES = (State.READING, State.ARRIVED, State.VERIFIED, State.SUSPECT)


class Origin(Enum):
    """Source of a chunk's bytes. It decides whether the chunk's slot is released or discarded."""

    ARENA = auto()  # cached in the slot, which is leased: other loads may use it too
    HOST = auto()  # copied into a reserved slot, from a leased slot of the host arena
    FILES = auto()  # read into a reserved slot, from open segments


class Waiter(NamedTuple):
    """Load that waits for chunk `number` of its plan."""

    load: Load
    number: int

    @property
    def chunk(self) -> LoadChunk:
        return self.load.plan.chunks[self.number]


@dataclass(eq=False, slots=True)
class Load:
    """Load under way. after: event behind the engine's work that must precede a scatter, such as zeroing the blocks.

    waiting: numbers of the chunks without a fetch. n_scattered: chunks whose scatter was launched, in the order of the
    prompt; n_landed: those of them that are in the engine's blocks. end: number of the first chunk that was given up.
    n_pending: chunks that neither landed nor were given up; at 0 the load is answered. progress_s: time at which the
    load began or a chunk of it was last scattered.
    """

    plan: LoadPlan
    after: CudaEvent
    asked_s: float
    deadline_s: float
    turn_s: float  # loads are served in the order of this time
    waiting: list[int]  # descending: the next one is the last
    end: int
    n_pending: int
    progress_s: float = 0.0
    n_scattered: int = 0
    n_landed: int = 0
    n_bytes: int = 0
    begun_s: float = 0.0
    is_free: bool = False  # `after` is done, so the blocks may be written
    failure: Exception | None = None

    def wait_again(self, number: int) -> None:
        self.waiting.append(number)
        self.waiting.sort(reverse=True)


@dataclass(eq=False, slots=True)
class Fetch:
    """Fetch of one chunk, shared by all loads that need it at the same time.

    chunk: as the load that began the fetch names it. waiters: those whose scatter was not launched yet. n_scattering:
    scatters under way. n_loads: loads that have waited for the chunk so far. slot: in the arena. host_slot: slot of the
    host arena, reserved for a read of signed bytes or leased for a copy into the arena; -1: none. held: open segments,
    until the bytes are verified.
    """

    namespace: bytes
    chunk: LoadChunk
    waiters: list[Waiter]
    state: State = State.OPENING
    origin: Origin = Origin.FILES
    slot: int = -1
    host_slot: int = -1
    sources: tuple[Source, ...] = ()
    reads: FileReads | None = None
    held: HeldSegments | None = None
    copied: CudaEvent = None
    n_scattering: int = 0
    n_loads: int = 1
    was_reread: bool = False
    bad: tuple[Source, ...] = ()  # sources whose checksums do not match

    def has_waiter_of(self, load: Load) -> bool:
        return any(waiter.load is load for waiter in self.waiters)


class ChunkLoader:
    """Steps of a worker's chunks. Not thread-safe: called on the loop's thread.

    in_state: the chunks in each state of TURN_STATES, in the order in which they reached it. scattering: lock that is
    held while a scatter is launched (on the CPU: until it is done). is_stopped: no scatter may begin. It is read under
    the lock: a thread that sets it and then takes the lock knows that no scatter is being launched.
    """

    def __init__(
        self, worker: WorkerContext, admit: Admissions, loader: Loader, loop: TransferLoop, pool: TaskPool
    ) -> None:
        self.reader = RecordReader(worker)
        self.in_state: dict[State, dict[Fetch, None]] = {state: {} for state in TURN_STATES}
        self._worker = worker
        self._admit = admit
        self._loader = loader
        self._loop = loop
        self._pool = pool
        self._log = RepeatedLog(worker.clock)
        self._landing = None if self.reader.arena is worker.arena else self.reader.arena
        self._n_host_copies = 0  # under way
        self._host_copies_max = min(HOST_COPIES_MAX, max(1, HOST_COPIES_BYTES // worker.arena.slot_bytes))
        opened_together = max(OPENED_MIN, min(OPENED_MAX, OPENED_BYTES // worker.arena.slot_bytes))
        self.begun_together = opened_together if self._landing is None else 1
        self.scattering = threading.Lock()
        self.is_stopped = False

    def set_state(self, fetches: Iterable[Fetch], state: State) -> None:
        entered = self.in_state.get(state)
        for fetch in fetches:
            if (left := self.in_state.get(fetch.state)) is not None:
                left.pop(fetch, None)
            fetch.state = state
            if entered is not None:
                entered[fetch] = None

    def begin(self, fetches: Sequence[Fetch]) -> int:
        """Claim slots for new chunks, at most `begun_together`, in order until no slot is free, and start to fill them.
        Return the number of chunks begun."""
        worker = self._worker
        claimed = worker.arena.claim([fetch.chunk.key for fetch in fetches])
        cached, below = list[Fetch](), list[Fetch]()
        for fetch, (slot, sources) in zip(fetches, claimed, strict=False):
            fetch.slot = slot
            if sources is None:
                below.append(fetch)
            else:
                fetch.sources, fetch.origin = sources, Origin.ARENA
                cached.append(fetch)
        if cached:
            worker.metrics.add(names.ARENA_HIT_CHUNKS, len(cached))
            self.set_state(cached, State.ARRIVED)
        found: list[tuple[Fetch, int, tuple[Source, ...]]] = []
        if below and worker.host is not None:
            leases = list(zip(below, worker.host.lease_each([fetch.chunk.key for fetch in below]), strict=True))
            found = [(fetch, *leased) for fetch, leased in leases if leased is not None]
            below = [fetch for fetch, leased in leases if leased is None]
        if below and self._landing is not None:  # after `lease_each`, because `reserve` may evict the chunk there
            (fetch,) = below
            landing = self._landing.reserve()
            if landing is None:
                worker.arena.discard(fetch.slot)
                return 0
            fetch.host_slot = landing
        if below:
            self._open(below)
        if found and worker.host is not None:
            worker.metrics.add(names.HOST_HIT_CHUNKS, len(found))
            self._copy_up(worker.host, found)
        return len(claimed)

    def take_reads(self) -> bool:
        """Take the chunks whose reads have all ended, well or not. Return False if there are none."""
        reading = list(self.in_state[State.READING])
        states = self.reader.engine.states(list(map(_batch_of, reading)))
        clean, doubtful = list[Fetch](), list[Fetch]()
        for fetch, state in zip(reading, states, strict=True):
            if state:
                (clean if state == CLEAN else doubtful).append(fetch)
        if self.reader.signs:
            for fetch in clean + doubtful:
                self.judge(fetch)
        else:
            if clean:
                self.arrived(clean)
            if doubtful:
                self.set_state(doubtful, State.SUSPECT)
        return bool(clean or doubtful)

    def judge(self, fetch: Fetch) -> None:
        """Decide on bytes that are not good: read them again, or give the chunk up."""
        if fetch.bad:
            bad, fetch.bad = fetch.bad, ()
            self._reject(fetch, bad)
            return
        assert fetch.reads is not None
        self._judge_in_pool(fetch, partial(self.reader.judge, fetch.reads), partial(self._judged, fetch))

    def _judge_in_pool(self, fetch: Fetch, work: Callable[[], object], then: Callable[[object], None]) -> None:
        self.set_state([fetch], State.JUDGING)
        self._pool.add(work, then)

    def verify(self, fetches: Sequence[Fetch]) -> None:
        """Compare the checksums of chunks that have arrived, in one launch (I2)."""
        runs, slabs_at = [], self._worker.arena.slabs
        for fetch in fetches:
            for location, (wanted, _, slab_bytes, _, offset, _), _ in fetch.sources:
                slabs = slabs_at(fetch.slot, offset, wanted.n_heads, slab_bytes)
                runs.append(SlabRun(slabs, fetch.chunk.key, wanted.first_head, location.extent.first_layer))
        with self._worker.order.launching():
            found = iter(self._worker.sums(runs))
        good, suspect = list[Fetch](), list[Fetch]()
        for fetch in fetches:
            for source in fetch.sources:
                if next(found) != source.checksums:
                    fetch.bad += (source,)
            (suspect if fetch.bad else good).append(fetch)
        self.set_state(good, State.VERIFIED)
        self.set_state(suspect, State.SUSPECT)

    def scatter(self, waiters: Sequence[tuple[Fetch, Waiter]], after: Sequence[CudaEvent]) -> CudaEvent:
        """Launch the scatter of verified chunks into the loads' blocks, behind the events `after`. Return its event."""
        moves = [self._move(fetch, source, waiter) for fetch, waiter in waiters for source in fetch.sources]
        worker = self._worker
        return worker.order.begin(partial(worker.codec.decode, worker.pages, moves), *after)

    def leave(self, fetches: Sequence[Fetch]) -> None:
        """End chunks that have landed for all loads: cache them in the arenas, or free their slots."""
        self.set_state(fetches, State.ENDED)
        self._release(fetches)
        arena, admit, has_host = self._worker.arena, self._admit, self._worker.host is not None
        released, unused, for_arena = list[tuple[int, bytes]](), list[int](), list[tuple[Fetch, int, bool]]()
        for_host = list[tuple[Fetch, int, bool]]()
        for fetch in fetches:
            key, slot, fetch.slot, n_loads = fetch.chunk.key, fetch.slot, -1, fetch.n_loads
            if fetch.origin is Origin.ARENA:
                released.append((slot, key))
                continue
            is_for_arena = any(map(admit.arena.keeps_loaded, itertools.repeat(key, n_loads)))
            is_from_files = has_host and fetch.origin is Origin.FILES
            is_for_host = is_from_files and any(map(admit.host.keeps_loaded, itertools.repeat(key, n_loads)))
            if is_for_arena:
                for_arena.append((fetch, slot, is_for_host))
            elif is_for_host:
                for_host.append((fetch, slot, False))
            else:
                unused.append(slot)
        are_new = arena.commit([(slot, fetch.chunk.key, fetch.sources) for fetch, slot, _ in for_arena])
        for (fetch, _, is_for_host), is_new in zip(for_arena, are_new, strict=True):
            cached = arena.lease(fetch.chunk.key) if is_new and is_for_host else None
            if cached is not None:  # None: it has been evicted already
                for_host.append((fetch, cached[0], True))
        if released:
            arena.release_each(released)
        if unused:
            arena.discard(*unused)
        if for_host:
            self._copy_to_host(for_host)

    def abandon(self, fetch: Fetch) -> None:
        """Free the slots and segments of a chunk for which no load waits. Reads under way keep their slots until the
        kernel returns them."""
        self.set_state([fetch], State.ENDED)
        slot, fetch.slot, key = fetch.slot, -1, fetch.chunk.key
        if slot < 0:
            return
        arena, reads = self._worker.arena, fetch.reads
        if fetch.origin is Origin.ARENA:
            arena.release(slot, key)
            return
        slots = ExitStack()
        slots.callback(arena.discard, slot)
        if self._landing is not None and fetch.origin is Origin.FILES and fetch.host_slot >= 0:
            slots.callback(self._landing.discard, fetch.host_slot)
        if reads is not None and not reads.batch.wait(0):
            held, fetch.held = fetch.held, None
            assert held is not None
            slots.callback(held.release)
            self._worker.quarantine.add(reads.batch, slots.close)
        elif fetch.copied is not None and not self._worker.order.is_done(fetch.copied):
            slots.callback(self._release, [fetch])
            self._loop.when_done(self._loader, fetch.copied, ExitStack.close, slots)
        else:
            slots.close()
            self._release([fetch])

    def _open(self, fetches: Sequence[Fetch]) -> None:
        """Submit the reads of chunks of one load and one set, in order. Unless their segments are open, the pool opens
        them first."""
        self.set_state(fetches, State.OPENING)
        held = HeldSegments(fetches[0].namespace, len(fetches), is_anew=fetches[0].was_reread)
        for fetch in fetches:
            fetch.held = held
        targets = [(fetch.chunk, fetch.slot if self._landing is None else fetch.host_slot) for fetch in fetches]
        reads = self.reader.begin_at_once(targets, held)
        if reads is None:
            self._pool.add(partial(self.reader.begin, targets, held), partial(self._opened, fetches))
        else:
            self._opened(fetches, reads)

    def _open_again(self, fetch: Fetch) -> None:
        self._release([fetch])
        fetch.reads, fetch.origin, fetch.copied = None, Origin.FILES, None
        if self._landing is not None and fetch.host_slot < 0:
            landing = self._landing.reserve()
            if landing is None:
                self._loader.failed(fetch, FetchFailed("no slot in the host arena is free"))
                return
            fetch.host_slot = landing
        self._open([fetch])

    def _opened(self, fetches: Sequence[Fetch], results: Any) -> None:
        """Take a result for each chunk, up to the first that failed; the others are opened again."""
        if isinstance(results, Exception):  # of the task, or the pool refused it
            results = [results] * len(fetches)
        begun, again = list[Fetch](), list[Fetch]()
        for fetch, result in zip(fetches, results, strict=False):
            if isinstance(result, FileReads):
                fetch.reads = result
                if fetch.state is State.OPENING:
                    fetch.sources = result.sources
                    begun.append(fetch)
        self.set_state(begun, State.READING)
        for fetch, result in itertools.zip_longest(fetches, results):
            if isinstance(result, Exception):
                self._end_in_pool(fetch, result)
            elif fetch.state is State.DROPPED:
                self.abandon(fetch)
            elif result is None:
                again.append(fetch)
        if again:
            self._release(again)
            self._open(again)

    def _judged(self, fetch: Fetch, result: object) -> None:
        if fetch.state is State.DROPPED:
            self.abandon(fetch)
        elif result is True:
            self.arrived([fetch])
        elif result is False:  # the bytes may be stale
            self._read_anew(fetch)
        else:
            self._end_in_pool(fetch, result)

    def _end_in_pool(self, fetch: Fetch, result: object) -> None:
        assert isinstance(result, Exception)
        self._loader.failed(fetch, FetchFailed(str(result)) if isinstance(result, Corrupt) else result)

    def _read_anew(self, fetch: Fetch) -> None:
        self._worker.metrics.add(names.REREAD_CHUNKS)
        fetch.was_reread = True
        self._open_again(fetch)

    def arrived(self, fetches: Sequence[Fetch]) -> None:
        """Take chunks whose bytes were all read. On the CPU the I/O threads have verified them."""
        worker, n_bytes = self._worker, 0
        self.reader.stuck.answered()
        for fetch in fetches:
            fetch.reads = None
            for source in fetch.sources:
                n_bytes += source.cut.n_bytes
        worker.metrics.add(names.FILE_READ_BYTES, n_bytes)
        if self._landing is not None:
            self._copy_up_signed(self._landing, fetches)
            return
        self.set_state(fetches, State.ARRIVED if worker.arena.is_device else State.VERIFIED)
        if worker.io.reader is not worker.io.ring:
            worker.metrics.add(names.KVIKIO_READ_BYTES, n_bytes)

    def _copy_up_signed(self, landing: ChunkArena, fetches: Sequence[Fetch]) -> None:
        """Copy signed chunks that were read into the host arena and verified there. Keep those that the host arena
        admits."""
        risen = []
        self._release(fetches)
        for fetch in fetches:
            key = fetch.chunk.key
            is_new, leased, sources = landing.commit_leased(fetch.host_slot, key, fetch.sources)
            risen.append((fetch, leased, sources))
            if is_new and not self._admit.host.keeps_loaded(key):
                landing.drop(key)
        self._copy_up(landing, risen)

    def _copy_up(self, host: ChunkArena, leased: Sequence[tuple[Fetch, int, tuple[Source, ...]]]) -> None:
        """Start to copy chunks out of leased slots of the host arena."""
        arena, fetches, pairs = self._worker.arena, [fetch for fetch, _, _ in leased], []
        for fetch, host_slot, sources in leased:
            fetch.sources, fetch.origin, fetch.host_slot = sources, Origin.HOST, host_slot
            n_bytes = slabs_bytes(sources)
            pairs.append((arena.record(fetch.slot, n_bytes), host.record(host_slot, n_bytes)))
        self.set_state(fetches, State.COPYING)
        event = self._worker.order.begin_copies(pairs)
        for fetch in fetches:
            fetch.copied = event
        self._loop.when_done(self._loader, event, self._copied_up, (fetches, event))

    def _copied_up(self, copied: tuple[Sequence[Fetch], CudaEvent]) -> None:
        fetches, event = copied
        still = [fetch for fetch in fetches if fetch.state is State.COPYING and fetch.copied is event]
        self.set_state(still, State.ARRIVED)

    def _reject(self, fetch: Fetch, bad: Sequence[Source]) -> None:
        """Reject bytes whose checksums do not match. Drop a bad copy from its arena and fetch the chunk again; retract
        a bad record from the index."""
        key, locations = fetch.chunk.key, [source.location for source in bad]
        if fetch.origin is Origin.FILES:
            if self.reader.may_be_stale() and not fetch.was_reread:
                self._read_anew(fetch)
            else:
                work = partial(self.reader.reject, fetch.namespace, key, locations)
                self._judge_in_pool(fetch, work, partial(self._end_in_pool, fetch))
            return
        self._worker.metrics.add(names.CHECKSUM_FAILURES)
        self._log.line(logging.ERROR, "bad", "chunk %s went bad in memory; it is read again", key.hex())
        if fetch.origin is Origin.ARENA:
            self._worker.arena.drop(key)
            self._loader.begin_again(fetch)
            return
        assert self._worker.host is not None
        self._worker.host.drop(key)
        self._open_again(fetch)

    def _copy_to_host(self, landed: Sequence[tuple[Fetch, int, bool]]) -> None:
        """Copy verified chunks into the host arena, then free their slots. Copy nothing while the host arena is full,
        or while the loop itself limits the loads.

        landed: (fetch, slot, whether the slot is leased).
        """
        host, arena, order = self._worker.host, self._worker.arena, self._worker.order
        assert host is not None
        copied, pairs = list[tuple[Fetch, int]](), []
        room = self._host_copies_max - self._n_host_copies if self._loader.waits_for_storage() else 0
        for fetch, slot, _ in landed[: max(0, room)]:
            host_slot = host.reserve()
            if host_slot is None:
                break
            n_bytes = slabs_bytes(fetch.sources)
            copied.append((fetch, host_slot))
            pairs.append((host.record(host_slot, n_bytes), arena.record(slot, n_bytes)))

        def give_back(slots: Sequence[tuple[Fetch, int, bool]]) -> None:
            arena.release_each([(slot, fetch.chunk.key) for fetch, slot, is_leased in slots if is_leased])
            arena.discard(*[slot for _, slot, is_leased in slots if not is_leased])

        def end(_: object) -> None:
            self._n_host_copies -= len(copied)
            host.commit([(host_slot, fetch.chunk.key, fetch.sources) for fetch, host_slot in copied])
            give_back(landed[: len(copied)])

        give_back(landed[len(copied) :])
        if copied:
            with ExitStack() as refused:
                refused.callback(give_back, landed[: len(copied)])
                refused.callback(host.discard, *[host_slot for _, host_slot in copied])
                event = order.begin_copies(pairs)
                refused.pop_all()
            self._n_host_copies += len(copied)
            self._loop.when_done(self._loader, event, end, None)

    def _release(self, fetches: Sequence[Fetch]) -> None:
        """Release the fetches' leases of host slots and their open segments."""
        leases = list[tuple[int, bytes]]()
        held = Counter[HeldSegments]()
        for fetch in fetches:
            if fetch.held is not None:
                held[fetch.held] += 1
                fetch.held = None
            if fetch.origin is Origin.HOST and fetch.host_slot >= 0:
                leases.append((fetch.host_slot, fetch.chunk.key))
                fetch.host_slot = -1
        for segments, n_chunks in held.items():
            segments.release(n_chunks)
        if leases and self._worker.host is not None:
            self._worker.host.release_each(leases)

    def _move(self, fetch: Fetch, source: Source, waiter: Waiter) -> Move:
        _, (wanted, _, slab_bytes, _, slot_offset, patch), _ = source
        slabs = self._worker.arena.slabs(fetch.slot, slot_offset, wanted.n_heads, slab_bytes)
        chunk = waiter.load.plan.chunks[waiter.number]
        return Move(patch, chunk.block_ids, slabs, self.first_block(chunk) if chunk.first_token else 0)

    def first_block(self, chunk: LoadChunk) -> int:
        """Return how many of the chunk's first blocks the engine computed itself. The load does not write these."""
        blocks, rest = divmod(chunk.first_token, self._worker.pages.block_tokens)
        assert rest == 0, "local hits end at a block"
        return blocks
