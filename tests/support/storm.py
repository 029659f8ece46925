"""Several engines on one root: the main loop does random things one after the other while their threads load and save,
and after each step every block that a load has answered for is looked at.

The engines' clock, threads and files are real; what is done, and to what, is drawn from a seed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.engines import Engines
from kvtier.plan import LoadDone
from kvtier.scheduler.store import WantedChunk
from tests.support.lazy import LazyEngine
from tests.support.rig import BLOCK_TOKENS, Engine
from tests.support.storm_faults import (
    StormyReader,
    Vandal,
    flip_entry,
    flip_in_memory,
    hang_in_open,
    lose_answers,
    watch_copies,
)
from tests.support.storm_sides import CHUNK_BLOCKS, CHUNKS_MAX, SHAPE, Asked, Side, Truth
from tests.waiting import for_so_long

SLOT_BYTES = PAGE_BYTES + 2 * 2 * 2 * 32 * 16 * 4  # of an engine of one rank
QUEUED_LOADS_MAX = 6
TIMEOUT_S = 0.5
ANSWER_SLACK_S = 10.0
"""Beyond its deadline, for a machine that is busy with other things; what hangs for good takes longer."""
END_S = 30.0


class Storm:
    """See the module. `run` raises AssertionError; `told` counts what happened, so that a test sees it was no calm."""

    def __init__(self, root: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._root = root
        self._truth = Truth(self._rng)
        self._vandal = Vandal(root, self._rng)
        self._n_fills = 0
        self._n_asked = 0
        self.told: Counter[str] = Counter()
        self.sides = [self._on_the_host(1), self._on_the_host(2), self._over_a_device()]
        for side in self.sides:
            self._disturb(side)
            for start in range(0, side.engine.n_blocks, CHUNKS_MAX * CHUNK_BLOCKS):
                blocks = range(start, start + CHUNKS_MAX * CHUNK_BLOCKS)
                side.free.append((blocks, self._refill(side, blocks)))

    def run(self, seconds: float, is_enough: Callable[[Storm], bool] = lambda storm: True) -> None:
        """Storms, then waits until all is calm again and looks whether everything was given back. On a busy machine it
        goes on until that is enough, but not for ever."""
        for _ in for_so_long(seconds, lambda: is_enough(self)):
            self._step()
        self._calm_down()
        self._load_everything()

    def close(self) -> None:
        for side in self.sides:
            side.engine.close()

    # --- the engines ---

    def _changes(self, slots: int) -> dict[str, object]:
        return {
            "segment_bytes": PAGE_BYTES + 8 * SLOT_BYTES,
            "capacity_bytes": 12 * (PAGE_BYTES + 8 * SLOT_BYTES),
            "host": {"arena_bytes": slots * SLOT_BYTES, "admit": self._rng.choice(["always", "second_hit"])},
            "io": {"threads": 2, "timeout_s": TIMEOUT_S},
            "queues": {"load_threads": 4, "load_requests_max": QUEUED_LOADS_MAX},
        }

    def _on_the_host(self, tensor_size: int) -> Side:
        slots = self._rng.choice([5, 6, 12, 40])
        engine = Engine(self._root, SHAPE, tensor_size, n_blocks=160, changes=self._changes(slots))
        return Side(engine)

    def _over_a_device(self) -> Side:
        engine = LazyEngine(self._root, SHAPE, n_blocks=160, changes=self._changes(24))
        engine.lay_over(staging_slots=10, admit="second_hit", hbm_slots=6, hbm_admit="second_hit")
        return Side(engine)

    def _disturb(self, side: Side) -> None:
        for transfer in side.engine.transfers:
            worker = transfer._worker
            reader = StormyReader(worker.io.reader, random.Random(self._rng.random()), TIMEOUT_S)
            hang_in_open(worker.files(side.engine.store.namespace_id), reader)
            object.__setattr__(worker, "io", Engines(reader, worker.io.ring))
            transfer._loader._chunks.reader.engine = reader
            watch_copies(worker, reader)
            lose_answers(worker.index, reader)
        lose_answers(side.engine.store._keeper._index, reader)
        if isinstance(side.engine, LazyEngine):
            side.engine.on_threads()

    # --- steps ---

    def _step(self) -> None:
        acts = {
            self._ask: 50,
            self._save: 20,
            self._flip: 3,
            self._strike: 3,
            self._tidy: 4,
            self._nap: 10,
        }
        (act,) = self._rng.choices(list(acts), list(acts.values()))
        act(self._rng.choice(self.sides))
        for each in self.sides:
            self._look(each)

    def _ask(self, side: Side) -> None:
        """Loads a prompt, or what was found of one a while ago."""
        if side.stale and self._rng.random() < 0.2:
            keys, entries = self._rng.choice(side.stale)
            self._load(side, keys, flip_entry(entries, self._rng) if self._rng.random() < 0.3 else entries)
        else:
            self._ask_for(side, self._rng.choice(self._truth.prompts))

    def _ask_for(self, side: Side, tokens: Sequence[int]) -> None:
        keys = side.engine.keys(tokens)
        entries = side.engine.store.lookup(keys)
        if entries and self._rng.random() < 0.2:
            side.stale = [*side.stale[-9:], (keys[: len(entries)], entries)]
        self._load(side, keys[: len(entries)], entries)

    def _load(self, side: Side, keys: list[bytes], entries: list[bytes]) -> None:
        if not keys or not side.free:
            return
        blocks, filled_with = side.free.pop(self._rng.randrange(len(side.free)))
        first_block = self._rng.choice([0, 0, 1])
        self._n_asked += 1
        name = f"r{self._n_asked}"
        ids = blocks[: len(keys) * CHUNK_BLOCKS]
        ranks = set(range(len(side.workers)))
        side.loads[name] = Asked(keys, blocks, first_block, filled_with, time.monotonic(), ranks)
        plan = side.engine.store.plan_load(name, keys, entries, ids, first_block * BLOCK_TOKENS)
        for transfer in side.engine.transfers:
            transfer.load(plan)

    def _save(self, side: Side) -> None:
        """Computes a prompt, saves it, and gives its blocks to others at once."""
        if not side.free:
            return
        tokens = self._rng.choice(self._truth.prompts)
        keys = side.engine.keys(tokens)
        blocks, _ = side.free.pop()
        places = [blocks[CHUNK_BLOCKS * i : CHUNK_BLOCKS * (i + 1)] for i in range(len(keys))]
        for rank in range(len(side.workers)):
            for key, place in zip(keys, places, strict=True):
                side.write(rank, place, self._truth.of(key, side.engine, rank))
        parents = [side.engine.store.namespace_id, *keys]
        wanted = [WantedChunk(key, parents[i], tuple(places[i])) for i, key in enumerate(keys)]
        plan = side.engine.store.plan_save(wanted)
        if plan is not None:
            side.n_saving += len(plan.chunks) * len(side.workers)
            for transfer in side.engine.transfers:
                transfer.save(plan)
        side.free.append((blocks, self._refill(side, blocks)))

    def _flip(self, side: Side) -> None:
        worker = self._rng.choice(side.workers)
        arena = self._rng.choice([worker.arena, worker.host or worker.arena])
        self.told["flipped in memory"] += flip_in_memory(arena, self._rng)

    def _strike(self, side: Side) -> None:
        self._vandal.strike()

    def _tidy(self, side: Side) -> None:
        for transfer in side.engine.transfers:
            transfer.tidy()

    def _nap(self, side: Side) -> None:
        time.sleep(self._rng.random() * 0.01)

    # --- what must hold ---

    def _look(self, side: Side) -> None:
        """Takes what has ended, and looks at the blocks of it."""
        for rank, transfer in enumerate(side.engine.transfers):
            progress = transfer.poll()
            side.n_saving -= len(progress.saves)
            self.told["saved"] += sum(done.outcome.value == "saved" for done in progress.saves)
            side.engine.store.saved(progress.saves)
            if progress.loads:
                side.run()
            for done in progress.loads:
                self._judge(side, rank, done)
            transfer._worker.arena.check()
        assert [fault for reader in self._readers(side) for fault in reader.broken] == []
        now = time.monotonic()
        for name, asked in side.loads.items():
            assert now - asked.asked_s < TIMEOUT_S + ANSWER_SLACK_S, f"{name} was not answered"

    def _judge(self, side: Side, rank: int, done: LoadDone) -> None:
        asked = side.loads[done.request_id]
        assert rank in asked.unanswered, "a load was answered twice"
        asked.unanswered.remove(rank)
        has_failed = False
        for number, key in enumerate(asked.keys):
            skipped = asked.first_block if number == 0 else 0
            whole = asked.blocks[number * CHUNK_BLOCKS : (number + 1) * CHUNK_BLOCKS]
            own, asked_for = whole[:skipped], whole[skipped:]
            before = [asked.filled_with] * len(side.planes(rank))
            truth = [plane[skipped:] for plane in self._truth.of(key, side.engine, rank)]
            failed = done.failed_blocks & set(asked_for)
            assert side.holds(rank, own, before), "a block that the engine had was written"
            assert failed in (set(), set(asked_for)) and (failed or not has_failed), "no prefix was loaded"
            has_failed = bool(failed)
            is_loaded = side.holds(rank, asked_for, truth)
            assert is_loaded or failed, f"chunk {number} of {done.request_id}: loaded, and not what was saved"
            assert is_loaded or side.holds(rank, asked_for, before), "neither loaded nor left alone"
            self.told["failed" if failed else "loaded"] += 1
        if not asked.unanswered:
            del side.loads[done.request_id]
            side.free.append((asked.blocks, self._refill(side, asked.blocks)))

    def _refill(self, side: Side, blocks: range) -> float:
        """Others have the blocks now, and write into them."""
        self._n_fills += 1
        side.fill(blocks, float(-self._n_fills))
        return float(-self._n_fills)

    def _calm_down(self) -> None:
        """No further faults; all that is on its way ends, and every slot, claim and descriptor comes back."""
        ends_s = time.monotonic() + END_S
        for side in self.sides:
            for reader in self._readers(side):
                reader.is_calm = True
        for side in self.sides:
            while list(self._left_over(side)):
                self._look(side)
                self._tidy(side)
                assert time.monotonic() < ends_s, list(self._left_over(side))
                time.sleep(0.005)
            side.run()
            for blocks, filled_with in side.free:
                for rank in range(len(side.workers)):
                    assert side.holds(rank, blocks, [filled_with] * len(side.planes(rank))), "written after its answer"
            for reader in self._readers(side):
                self.told["hung"] += reader.n_hung
                self.told["EIO"] += reader.n_failed
        self.told["kinds of damage"] = len(self._vandal.done)

    def _left_over(self, side: Side) -> Iterator[str]:
        if side.loads or side.n_saving:
            yield f"{len(side.loads)} loads and {side.n_saving} saves have no answer"
        for transfer in side.engine.transfers:
            worker, loader = transfer._worker, transfer._loader
            if not transfer.drain(0.0) or loader.work:
                yield "jobs are under way"
            if loader._fetches or loader.events:
                yield "a chunk was left"
            for arena in {id(a): a for a in (worker.arena, worker.host) if a is not None}.values():
                arena.check()
                if arena.available != arena.n_slots:
                    yield f"{arena.n_slots - arena.available} slots were lost"
            for files in worker.files._known.values():
                if any(segment.users for segment in files._open.values()):
                    yield "a segment is still in use"

    def _load_everything(self) -> None:
        """Once it is calm all that is offered loads, as soon as each damaged record was met once. Then many prompts at
        a time, in arenas that hold fewer chunks: none waits for another to the end of its time (I10)."""
        time.sleep(2 * TIMEOUT_S)  # storage that did not answer lately is left alone for a while
        for side in self.sides:
            ends_s = time.monotonic() + END_S
            side.stale.clear()
            for worker in side.workers:
                object.__setattr__(worker, "timeout_s", ANSWER_SLACK_S / 2)
            n_failed = -1
            while n_failed != self.told["failed"]:
                assert time.monotonic() < ends_s, "what is damaged is offered again and again"
                n_failed = self.told["failed"]
                self._load_from_files(side)
            for _ in range(5):
                for _ in range(QUEUED_LOADS_MAX):
                    self._ask_for(side, self._rng.choice(self._truth.prompts))
                self._await_loads(side)
            assert n_failed == self.told["failed"], "loads waited for each other"

    def _load_from_files(self, side: Side) -> None:
        """One prompt after the other, each of its records."""
        for tokens in self._truth.prompts:
            for worker in side.workers:
                for key in side.engine.keys(tokens):
                    worker.arena.drop(key)
                    (worker.host or worker.arena).drop(key)
            self._ask_for(side, tokens)
            self._await_loads(side)

    def _await_loads(self, side: Side) -> None:
        while side.loads:
            self._look(side)
            time.sleep(0.001)

    def _readers(self, side: Side) -> list[StormyReader]:
        return [worker.io.reader for worker in side.workers if isinstance(worker.io.reader, StormyReader)]


def totals(storm: Storm) -> Counter[str]:
    """The counters of all workers together."""
    found: Counter[str] = Counter()
    for side in storm.sides:
        for worker in side.workers:
            found.update({name: int(value) for name, value in worker.metrics.total().items()})
    return found
