"""One engine's process: the library's two halves, put together as `kvtier.build` does, on virtual threads and time,
over a disk and an index that fail. What the engine itself does is in `tests.simulation.serving`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvtier.arena.admission import Admission, Admissions
from kvtier.arena.arena import Arena
from kvtier.codecs.base import slab_bytes
from kvtier.codecs.raw import RawCodec
from kvtier.config.index import BreakerSettings
from kvtier.config.settings import Admit
from kvtier.connectors.bridge import AnswerPace, SchedulerBridge, WorkerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape
from kvtier.errors import ConfigError, KVTierError
from kvtier.eviction.evictor import Evictor
from kvtier.format.geometry import PAGE_BYTES, RankShare, share_of_rank
from kvtier.format.namespace import CodecId, Namespace
from kvtier.format.record import record_bytes
from kvtier.index.async_lookup import InBackground, Lookups
from kvtier.index.base import Index
from kvtier.index.circuit_breaker import Breaker
from kvtier.index.guard import GuardedIndex, QueueBounds
from kvtier.io.engines import Engines
from kvtier.io.ring import AlignedBuffer
from kvtier.kernels import host as host_kernels
from kvtier.maintenance.sweeper import Sweeper
from kvtier.runtime.metrics import Metrics
from kvtier.scheduler.background import Keeper, KeeperPlan
from kvtier.scheduler.engine_report import About
from kvtier.scheduler.load_threshold import FixedThreshold
from kvtier.scheduler.store import Store
from kvtier.storage.root import check_namespace, open_namespace
from kvtier.storage.segments import SegmentFolders, Sharing
from kvtier.worker.context import ChunkArena, Quarantine, WorkerContext, arena_slot_bytes
from kvtier.worker.cuda_events import HostOrder
from kvtier.worker.saving import SaveBounds
from kvtier.worker.transfer import Transfer, TransferJobs
from tests.simulation.index import SimIndex
from tests.simulation.place import Place
from tests.simulation.primitives import SimJobs
from tests.simulation.ring import SimRing
from tests.simulation.runtime import LOOP, Process
from tests.simulation.truth import BLOCK_TOKENS, CHUNK_TOKENS, LAYERS, SHAPE, Pages

TIMEOUT_S = 2.0
WRITER_LEASE_S = 6.0
N_BLOCKS = 40
SHARED_WAIT_S = 0.5
ANSWER_TIMEOUT_S = 1.0
JOBS_MAX = 16
CUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))  # (tensor-parallel size, pipeline stages)


@dataclass(frozen=True)
class Build:
    """How an engine is built. slots: of a segment. has_host: its arenas are two, as on a GPU."""

    weights: str
    cut: tuple[int, int]
    slots: int
    arena_slots: int
    has_host: bool
    admit: Admit
    threads: int
    skew_s: float = 0.0
    stripes: int = 1

    @classmethod
    def drawn(cls, rng: random.Random, weights: str) -> Build:
        return cls(
            weights,
            rng.choice(CUTS),
            rng.choice([2, 3, 4]),
            rng.choice([4, 6, 10]),
            rng.random() < 0.3,
            rng.choice(["always", "saved", "second_hit", "never"]),
            rng.choice([1, 2, 3]),
            stripes=rng.choice([1, 1, 2, 3]),
        )


def namespace_of(weights: str) -> Namespace:
    return Namespace("sim", weights, SHAPE, "uint8", "", "", "", CodecId("raw", 1, 0), "", "0")


def shares_of(cut: tuple[int, int]) -> list[RankShare]:
    tensor_size, n_stages = cut
    size = LAYERS // n_stages
    return [
        share_of_rank(SHAPE, rank, tensor_size, stage * tensor_size + rank, range(stage * size, (stage + 1) * size))
        for stage in range(n_stages)
        for rank in range(tensor_size)
    ]


class StrictFaults(Faults):
    """Whatever is no fault of the tier that it names itself is a bug (I9), and so is a setting that is found wrong
    while the engine serves (I8)."""

    def __init__(self, place: Place) -> None:
        super().__init__(lambda: place.runtime.now_s)
        self._place = place

    def note(self, doing: str, fault: Exception) -> None:
        if isinstance(fault, ConfigError):
            self._place.runtime.violate(f"{doing}: found wrong after start-up (I8): {fault}", fault)
        if not isinstance(fault, KVTierError | OSError):
            self._place.runtime.violate(f"{doing}: {type(fault).__name__}: {fault} (I9)", fault)
        super().note(doing, fault)


class EngineProcess:
    """Made by a task of its process: making it may wait."""

    def __init__(self, place: Place, process: Process, build: Build, rng: random.Random) -> None:
        self.place = place
        self.process = process
        self.build = build
        self.skew_s = build.skew_s
        self.namespace = namespace_of(build.weights)
        self.shares = shares_of(build.cut)
        self.store = self._open_store(rng)
        shape = BlockShape(CHUNK_TOKENS, BLOCK_TOKENS)
        faults = StrictFaults(place)
        self.scheduler = SchedulerBridge(
            self.store, shape, FixedThreshold(1), ANSWER_TIMEOUT_S, faults, self._monotonic
        )
        self.scheduler.active_loads.shared.wait_s = SHARED_WAIT_S
        self.pages = [Pages(share, N_BLOCKS) for share in self.shares]
        self.transfers = [self._open_transfer(n, rng) for n in range(len(self.shares))]
        self.ranks = [
            WorkerBridge(transfer, shape, StrictFaults(place), AnswerPace(0.1, self._monotonic))
            for transfer in self.transfers
        ]

    @property
    def workers(self) -> list[WorkerContext]:
        return [transfer._worker for transfer in self.transfers]

    @property
    def n_writers(self) -> int:
        return sum(share.writes is not None for share in self.shares)

    def clock(self) -> float:
        """What this node takes for the time of day."""
        return self.place.runtime.now_s + self.skew_s

    def flip_in_memory(self, rng: random.Random) -> bool:
        """Changes a bit of a cached chunk that nobody is reading."""
        worker = rng.choice(self.workers)
        arena = rng.choice([arena for arena in (worker.arena, worker.host) if arena is not None])
        idle = [cached for cached in arena._cached.values() if not cached.leases]
        if not idle:
            return False
        cached = rng.choice(idle)
        source = rng.choice(cached.content)
        at = source.cut.slot_offset - PAGE_BYTES + rng.randrange(source.cut.n_bytes)
        arena.record(cached.slot, arena.slot_bytes - PAGE_BYTES)[at] ^= 1 << rng.randrange(8)
        return True

    def close(self) -> None:
        """As an engine that is told to stop."""
        for rank in self.ranks:
            rank.close(drain_s=3.0)
        self.store.close()

    def _monotonic(self) -> float:
        return self.place.runtime.monotonic_s

    def _jobs(self, name: str, threads: int) -> SimJobs:
        return SimJobs(self.place.runtime, self.process, name, threads, JOBS_MAX)

    def _open_index(self, rng: random.Random, metrics: Metrics) -> Index:
        # On a shared disk each engine is on a node of its own, and the index has one clock for all nodes.
        ahead_s = (lambda: self.skew_s) if self.place.disk.is_shared else (lambda: 0.0)
        index: Index = SimIndex(self.place.index, self.process, ahead_s)  # type: ignore[assignment]
        if not self.place.index.is_remote:
            return index
        plan = BreakerSettings(failures=3, pause_first_ms=200, pause_max_ms=5000)
        breaker = Breaker(plan, random.Random(rng.getrandbits(32)))
        guard = GuardedIndex(index, breaker, QueueBounds(64, 1 << 20), metrics, self._monotonic)
        guard.start()
        return guard

    def _open_store(self, rng: random.Random) -> Store:
        place, build = self.place, self.build
        set_bytes = sum(
            build.stripes * PAGE_BYTES
            + build.slots * record_bytes(share.writes, slab_bytes(RawCodec(), SHAPE, share.writes))
            for share in self.shares
            if share.writes is not None
        )
        open_namespace(place.root, self.namespace)
        plan = KeeperPlan(
            self.process.name,
            build.slots,
            set_bytes,
            place.capacity_bytes,
            WRITER_LEASE_S,
            1.0,
            lambda space: open_namespace(place.root, space),
            About(len(self.shares)),
            stripes=build.stripes,
        )
        index = self._open_index(rng, Metrics())
        evictor = Evictor(index, place.root.folder, self.process.name, place.rules, self.clock)
        sweeper = Sweeper(index, place.root.folder, self.process.name, self.clock)
        keeper = Keeper(self.namespace, plan, index, sweeper, evictor, random.Random(rng.getrandbits(32)))
        keeper.start()
        return Store(self.namespace.id, CHUNK_TOKENS, self.n_writers, self._open_lookups(index), keeper, self.clock)

    def _open_lookups(self, index: Index) -> Lookups:
        if self.place.index.is_remote:
            return InBackground(index, self._jobs("lookup", 2), self._monotonic)
        return Lookups(index, self._monotonic)

    def _open_transfer(self, number: int, rng: random.Random) -> Transfer:
        place, build, share = self.place, self.build, self.shares[number]
        codec = RawCodec()
        codec.prepare(self.pages[number].paged, SHAPE, share.reads)
        slot_bytes = arena_slot_bytes(SHAPE, codec, share)
        ring = SimRing(place.disk, self.process)
        metrics = Metrics()
        worker = WorkerContext(
            SHAPE,
            share,
            codec,
            self.pages[number].paged,
            _arena(build.arena_slots, slot_bytes, rng),
            _arena(6, slot_bytes, rng) if build.has_host else None,
            HostOrder(),
            host_kernels.checksums,
            Engines(ring, ring),  # type: ignore[arg-type]
            self._open_index(rng, metrics),
            SegmentFolders(
                place.root.folder,
                False,
                lambda named: check_namespace(place.root, self.namespace, named),
                sharing=Sharing(place.disk.is_shared, place.disk.is_shared, place.disk.is_shared),
            ),
            Quarantine(),
            metrics,
            TIMEOUT_S,
            self._monotonic,
        )
        jobs = TransferJobs(
            self._jobs(LOOP, 1),
            self._jobs("load", build.threads),
            self._jobs("save", build.threads),
            self._jobs("tidy", 1),
        )
        host = Admission(build.admit)
        arena = Admission(rng.choice(["saved", "never"])) if build.has_host else host
        bounds = SaveBounds(build.arena_slots // 2, 2 if build.has_host else 0)
        transfer = Transfer(worker, jobs, Admissions(arena, host), bounds)
        transfer.start()
        return transfer


def _arena(n_slots: int, slot_bytes: int, rng: random.Random) -> ChunkArena:
    buffer = torch.frombuffer(AlignedBuffer(n_slots * slot_bytes).view, dtype=torch.uint8)
    noise = torch.Generator().manual_seed(rng.getrandbits(32))
    buffer.random_(0, 256, generator=noise)  # another's bytes lie there already
    return Arena(buffer, slot_bytes)
