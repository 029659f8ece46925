"""Several engines on one root that save, end and are killed, while others sweep, evict and rebuild: each chunk that all
ranks of an engine answered "saved" or "present" is noted, and a new engine must be able to load it, bit for bit.

The engines' clock, threads and files are real; what is done, and when what is slow, is drawn from a seed.
"""

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.round_trip import round_trip
from kvtier.errors import KVTierError
from kvtier.format.geometry import PAGE_BYTES
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.io.engines import Engines
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.scheduler.store import WantedChunk
from kvtier.worker.context import WorkerContext
from tests.support.lazy import LazyEngine
from tests.support.rig import BLOCK_TOKENS, Engine, geometry
from tests.support.saving_faults import Evictions, SlowIndex, StormyRing, cut_off, refuse_files
from tests.waiting import for_so_long, wait_until

CHUNK_BLOCKS = 2
CHUNKS_MAX = 8
N_BLOCKS = 128
LEASE_S = 0.4
TIMEOUT_S = 0.5
END_S = 20.0
SHAPES = {
    "raw": geometry(layers=2, k_head_size=16, v_head_size=16, chunk_tokens=CHUNK_BLOCKS * BLOCK_TOKENS),
    "k4v4": geometry(layers=2, k_head_size=64, v_head_size=64, chunk_tokens=CHUNK_BLOCKS * BLOCK_TOKENS),
}
RECORD_BYTES = {"raw": PAGE_BYTES + 4 * 8192, "k4v4": PAGE_BYTES + 4 * 12288}
"""Of an engine of one rank; k4v4: 4736 bytes a layer."""

Key = bytes


class Truth:
    """What the KV of a chunk is, the same on every engine: (layers, K and V, heads, tokens, size)."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._shape = SHAPES[codec]

    def of(self, key: Key) -> torch.Tensor:
        shape = self._shape
        noise = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
        size = (shape.layers, 2, shape.kv_heads, shape.chunk_tokens, shape.k_head_size)
        return torch.randn(size, generator=noise)

    def loaded(self, key: Key) -> torch.Tensor:
        """What comes back of it."""
        saved = self.of(key)
        if self._codec == "raw":
            return saved
        k, v = round_trip(saved[:, 0], saved[:, 1], self._codec, chunk_tokens=self._shape.chunk_tokens)
        return torch.stack((k, v), dim=1)


def put(engine: Engine, block: int, value: torch.Tensor) -> None:
    """Writes a chunk into the blocks of every rank from `block` on."""

    def work() -> None:
        for plane, part in _parts(engine, value):
            plane[block : block + CHUNK_BLOCKS] = part

    if isinstance(engine, LazyEngine):
        engine.in_engine(work)
    else:
        work()


def holds(engine: Engine, block: int, value: torch.Tensor) -> bool:
    return all(torch.equal(plane[block : block + CHUNK_BLOCKS], part) for plane, part in _parts(engine, value))


def _parts(engine: Engine, value: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each plane of each rank, and what of a chunk belongs there: (blocks, tokens, heads, size)."""
    for share, pages in zip(engine.shares, engine.pages, strict=True):
        held = share.reads
        for number, layer in enumerate(pages.layers):
            for which, plane in enumerate(layer.planes):
                part = value[held.first_layer + number, which, held.first_head : held.end_head]
                yield plane, part.transpose(0, 1).reshape(CHUNK_BLOCKS, BLOCK_TOKENS, *plane.shape[2:])


@dataclass(eq=False)
class Side:
    """One engine. answers: so far, to chunks that were planned; planned_s: when; is_dead: nothing more of it counts."""

    engine: Engine
    answers: dict[tuple[Key, int, int], list[SaveOutcome]] = field(default_factory=dict)
    planned_s: dict[tuple[Key, int, int], float] = field(default_factory=dict)
    is_dead: threading.Event = field(default_factory=threading.Event)

    @property
    def workers(self) -> list[WorkerContext]:
        return [transfer._worker for transfer in self.engine.transfers]

    @property
    def n_writers(self) -> int:
        return sum(share.writes is not None for share in self.engine.shares)


class SavingStorm:
    """See the module. `run` raises AssertionError; `told` counts what happened, so that a test sees it was no calm."""

    def __init__(self, root: Path, seed: int, codec: str = "raw", sets_max: int = 40) -> None:
        self._rng = random.Random(seed)
        self._root = root
        self._codec = codec
        self._sets_max = sets_max
        self._truth = Truth(codec)
        self._stems = [[1000 * n + t for t in range(CHUNKS_MAX * CHUNK_BLOCKS * BLOCK_TOKENS)] for n in range(1, 4)]
        self._n_prompts = 0
        self._prompts: list[list[int]] = []
        self._claims: dict[Key, float] = {}
        self._homes: dict[Key, set[int]] = {}
        self._stop = threading.Event()
        self._stack = ExitStack()
        self._evictions = self._stack.enter_context(Evictions())
        self._disk = self._stack.enter_context(refuse_files(random.Random(seed)))
        self.told: Counter[str] = Counter()
        self.sides = [self._open() for _ in range(3)]

    def run(self, seconds: float, saved_min: int = 0, claims_min: int = 0) -> None:
        """Storm for `seconds`. On a busy machine the storm goes on, but not for ever, until `saved_min` chunks were
        saved and the sets of `claims_min` of them are not evicted."""
        sweeping = threading.Thread(target=self._sweep_all_along, args=(self._rng.getrandbits(32),), daemon=True)
        sweeping.start()
        try:
            for _ in for_so_long(seconds, lambda: self._is_enough(saved_min, claims_min)):
                self._step()
            while self.sides:
                self._close(self.sides.pop())
        finally:
            self._stop.set()
            sweeping.join(END_S)
        self.told["swept and rebuilt"] += self._n_swept
        self.told["evicted sets"] += len(self._evictions.ended_s)
        self._load_all_claims()
        self._lose_the_index()

    def close(self) -> None:
        while self.sides:
            self._kill(self.sides.pop())
        self._stack.close()

    # --- the engines ---

    def _open(self, timeout_s: float = TIMEOUT_S) -> Side:
        slots = self._rng.choice([2, 3, 5])
        tensor_size, stages = self._rng.choice([(1, None), (2, None), (4, None), (1, 2), (2, 2)])
        segment = PAGE_BYTES + slots * RECORD_BYTES[self._codec] // tensor_size
        changes: dict[str, object] = {
            "segment_bytes": segment,
            "capacity_bytes": self._sets_max * 5 * RECORD_BYTES[self._codec],
            "host": {"arena_bytes": 4 << 20},
            "io": {"threads": 2, "timeout_s": timeout_s},
            "writer_lease_s": LEASE_S,
            "queues": {"save_threads": self._rng.choice([1, 3])},
            "codec": self._codec,
        }
        shape, ranges = SHAPES[self._codec], None if stages is None else [range(1), range(1, 2)]
        if self._codec == "raw" and self._rng.random() < 0.25:
            changes["segment_bytes"] = PAGE_BYTES + slots * RECORD_BYTES[self._codec]
            lazy = LazyEngine(self._root, shape, n_blocks=N_BLOCKS, weights=self._codec, changes=changes)
            lazy.lay_over(hbm_slots=4, hbm_admit="saved")
            lazy.on_threads()
            side = Side(lazy)
            self.told["engines over a device"] += 1
        else:
            side = Side(Engine(self._root, shape, tensor_size, ranges, N_BLOCKS, self._codec, changes))
        for transfer in side.engine.transfers:
            saver, worker = transfer._saver, self._disturbed(transfer._worker, side)
            transfer._worker = saver._worker = saver.writer._worker = worker
        self.told["engines"] += 1
        return side

    def _disturbed(self, worker: WorkerContext, side: Side) -> WorkerContext:
        """Its writes are slow, late or refused; it may be killed between a write and its publishing."""
        ring = StormyRing(worker.io.ring, random.Random(self._rng.getrandbits(32)), TIMEOUT_S)
        index = SlowIndex(worker.index, random.Random(self._rng.getrandbits(32)), side.is_dead)
        return replace(worker, io=Engines(worker.io.reader, ring), index=index)  # type: ignore[arg-type]

    def _kill(self, side: Side) -> None:
        """As SIGKILL does: nothing is finished, nothing is told to anybody."""
        side.is_dead.set()
        cut_off(side.engine)

    def _close(self, side: Side) -> None:
        for transfer in side.engine.transfers:
            transfer.drain(5.0)
        self._take_answers(side)
        side.engine.close()
        self.told["closed"] += 1

    # --- steps ---

    def _step(self) -> None:
        acts = {self._save: 60, self._nap: 25, self._end_one: 3, self._lapse: 3, self._reset: 0.3, self._fill_disk: 0.5}
        (act,) = self._rng.choices(list(acts), list(acts.values()))
        act(self._rng.choice(self.sides))
        for side in self.sides:
            self._take_answers(side)

    def _save(self, side: Side) -> None:
        """Computes a prompt, has it saved, and gives its blocks to others at once."""
        tokens = self._a_prompt()
        keys = side.engine.keys(tokens)
        parents = [side.engine.store.namespace_id, *keys]
        first = self._rng.randrange(N_BLOCKS // CHUNK_BLOCKS - len(keys)) * CHUNK_BLOCKS
        blocks = [first + CHUNK_BLOCKS * number for number in range(len(keys))]
        for key, block in zip(keys, blocks, strict=True):
            put(side.engine, block, self._truth.of(key) * self._spoiled(key))
        wanted = [WantedChunk(key, parents[i], (blocks[i], blocks[i] + 1)) for i, key in enumerate(keys)]
        plan = side.engine.store.plan_save(wanted)
        if plan is None:
            self.told["no plan"] += 1
            return
        now = time.monotonic()
        for chunk in plan.chunks:
            self._homes.setdefault(chunk.key, set()).add(chunk.set_id)
            side.planned_s[chunk.key, chunk.set_id, chunk.slot] = now
        for transfer in side.engine.transfers:
            transfer.save(plan)
        for block in blocks:
            put(side.engine, block, torch.full_like(self._truth.of(keys[0]), -1.0))

    def _spoiled(self, key: Key) -> float:
        """Some chunks hold what a codec refuses; which, their keys tell."""
        return float("nan") if self._codec != "raw" and key[-1] < 8 else 1.0

    def _a_prompt(self) -> Sequence[int]:
        """New, or one that some engine has saved already; they share their beginnings."""
        if self._prompts and self._rng.random() < 0.4:
            return self._rng.choice(self._prompts[-30:])
        self._n_prompts += 1
        size = CHUNK_BLOCKS * BLOCK_TOKENS
        stem = self._rng.choice(self._stems)[: size * self._rng.randrange(CHUNKS_MAX)]
        n_more = self._rng.randint(1, CHUNKS_MAX - len(stem) // size)
        self._prompts.append(stem + [100_000 * self._n_prompts + t for t in range(size * n_more)])
        return self._prompts[-1]

    def _nap(self, side: Side) -> None:
        for transfer in side.engine.transfers:
            transfer.tidy()
        time.sleep(self._rng.random() * 0.02)

    def _end_one(self, side: Side) -> None:
        self.sides.remove(side)
        if self._rng.random() < 0.4:
            self._kill(side)
            self.told["killed"] += 1
        else:
            self._close(side)
        self.sides.append(self._open())

    def _lapse(self, side: Side) -> None:
        """Its keeper hangs for longer than others believe that it lives."""
        keeper = side.engine.store._keeper
        keeper._due.renew_s = time.time() + self._rng.uniform(1.0, 3.0) * LEASE_S
        self.told["lapsed"] += 1

    def _reset(self, side: Side) -> None:
        side.engine.store.reset()
        self.told["resets"] += 1

    def _fill_disk(self, side: Side) -> None:
        self._disk.refuse_for(0.3)
        self.told["full disks"] += 1

    def _sweep_all_along(self, seed: int) -> None:
        """Another engine's sweeper, and now and then somebody who types kvtier index rebuild."""
        rng = random.Random(seed)
        self._n_swept = 0
        index = LmdbIndex(str(self._root / "v2" / "index"))
        slow = SlowIndex(index, rng, threading.Event())
        sweeper = Sweeper(slow, self._root / "v2", "sweeper")  # type: ignore[arg-type]
        while not self._stop.is_set():
            try:
                sweeper.rebuild() if rng.random() < 0.1 else sweeper.sweep()
                self._n_swept += 1
            except (KVTierError, OSError):
                self.told["housekeeping put off"] += 1
            time.sleep(rng.random() * 0.1)
        index.close()

    # --- what must hold ---

    def _take_answers(self, side: Side) -> None:
        for transfer in side.engine.transfers:
            saves = transfer.poll().saves
            for done in saves:
                self._note(side, done)
            side.engine.store.saved(saves)

    def _note(self, side: Side, done: SaveDone) -> None:
        place = done.key, done.set_id, done.slot
        answers = side.answers.setdefault(place, [])
        answers.append(done.outcome)
        self.told[done.outcome.value] += 1
        if len(answers) < side.n_writers:
            return
        assert len(answers) == side.n_writers, "a chunk was answered twice"
        planned_s = side.planned_s.pop(place)
        del side.answers[place]
        if not set(answers) <= {SaveOutcome.SAVED, SaveOutcome.PRESENT}:
            return
        if not side.engine.store._keeper._index.resolve([done.key]):
            why = f"chunk {done.key.hex()} of set {done.set_id:016x} slot {done.slot}, answered {answers}"
            assert self._may_be_gone(done.key, planned_s) or self._is_private(side), f"{why}: it is not offered"
        if not self._is_private(side):
            self._claims[done.key] = planned_s

    def _is_private(self, side: Side) -> bool:
        """What it saves is gone with it. (Answers to what was planned before that are not looked at.)"""
        return side.engine.store.namespace_id != side.engine.namespace.id

    def _may_be_gone(self, key: Key, since_s: float) -> bool:
        return any(self._evictions.ended_s.get(home, 0.0) >= since_s for home in self._homes[key])

    def _is_enough(self, saved_min: int, claims_min: int) -> bool:
        if self.told["saved"] < saved_min:
            return False
        return sum(not self._may_be_gone(key, since_s) for key, since_s in self._claims.items()) >= claims_min

    def _load_all_claims(self) -> None:
        """By an engine of another shape than most that saved."""
        reader = self._open(END_S)
        for key, since_s in self._claims.items():
            if self._may_be_gone(key, since_s):
                self.told["claims evicted"] += 1
                continue
            self._load(reader.engine, key)
            self.told["claims loaded"] += 1
        self._close(reader)

    def _load(self, engine: Engine, key: Key) -> None:
        homes = ", ".join(f"{home:016x}" for home in self._homes[key])
        entries = engine.store.lookup([key])
        assert entries, f"chunk {key.hex()} was answered saved, and is not offered (sets {homes})"
        put(engine, 0, torch.zeros_like(self._truth.of(key)))
        plan = engine.store.plan_load(key.hex(), [key], entries, range(CHUNK_BLOCKS), 0)
        for transfer in engine.transfers:
            transfer.load(plan)
            assert transfer.drain(END_S)
            assert [done.failed_blocks for done in transfer.poll().loads] == [frozenset()], f"{key.hex()} ({homes})"
        if isinstance(engine, LazyEngine):
            engine.run_engine()
        assert holds(engine, 0, self._truth.loaded(key)), f"{key.hex()} ({homes}) is not what was saved"

    def _lose_the_index(self) -> None:
        """What it said before is found again in the files."""
        before = LmdbIndex(str(self._root / "v2" / "index"))
        keys = [key for info in before.sets() for key, _ in before.members(info.set_id) if before.resolve([key])]
        before.close()
        shutil.rmtree(self._root / "v2" / "index")
        reader = self._open()
        index = reader.engine.store._keeper._index
        wait_until(lambda: not index.was_reset, "the index is rebuilt", END_S)
        lost = [key.hex() for key in set(keys) if not index.resolve([key])]
        assert not lost, f"{len(lost)} of {len(keys)} chunks were not found again: {lost[:3]}"
        self.told["found again"] += len(set(keys))
        self._close(reader)
