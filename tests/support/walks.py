"""The two walks of a LazyEngine, a step at a time: a prompt is computed, saved and its blocks handed on at once; it is
loaded into blocks that were just zeroed, after their previous owner wrote into them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtier.plan import LoadDone, SaveDone, SavePlan
from tests.support.lazy import LazyEngine, Left
from tests.support.rig import BLOCK_TOKENS, BLOCKS, TARGET, TOKENS
from tests.waiting import wait_until


@contextmanager
def all_given_back() -> Iterator[list[LazyEngine]]:
    """Engines that lose no slot, whatever is done with them. A load that failed is answered before it lets go of what
    it had read ahead, some of which may still be read."""
    made: list[LazyEngine] = []
    yield made
    for engine in made:
        assert engine.order.strays == [], "the worker's threads use the engine's stream"
        for arena in (engine.staging, engine.host):
            arena.check()
            wait_until(partial(_has_all, engine, arena), "a slot was lost")
        engine.close()


def _has_all(engine: LazyEngine, arena: Any) -> bool:
    engine.worker.quarantine.sweep()
    return arena.available == arena.n_ready


def start(
    root: Path, made: list[LazyEngine], out: Left | None = None, codec: str = "raw", **options: object
) -> LazyEngine:
    engine = LazyEngine(root, changes={"codec": codec})
    engine.lay_over(out, **options)  # type: ignore[arg-type]
    made.append(engine)
    return engine


def plan_of(engine: LazyEngine, tokens: Sequence[int] = TOKENS) -> SavePlan:
    return engine.plan(tokens, range(len(tokens) // BLOCK_TOKENS))


def begin_save(engine: LazyEngine, tokens: Sequence[int] = TOKENS) -> None:
    """Computes, gathers, and hands the blocks on at once, as for a request that finished or was preempted."""
    engine.wait_for_set()
    blocks = range(len(tokens) // 16)
    engine.in_engine(lambda: engine.prefill(tokens, blocks))
    engine.transfers[0].save(plan_of(engine, tokens))
    engine.overwrite(blocks, 7)


def save(engine: LazyEngine, tokens: Sequence[int] = TOKENS) -> list[SaveDone]:
    """Begins a save, and has it done."""
    begin_save(engine, tokens)
    engine.run_all()
    done = engine.transfers[0].poll().saves
    engine.store.saved(done)
    return done


def begin_load(engine: LazyEngine, computed: int = 0, tokens: Sequence[int] = TOKENS) -> None:
    """Asks for a load into blocks that were just zeroed, after their previous owner wrote into them."""
    keys = engine.keys(tokens)[computed // 64 :]
    entries = engine.store.lookup(keys)
    assert len(entries) == len(keys)
    target = range(TARGET[0], TARGET[0] + len(tokens) // 16)
    blocks = target[computed // 64 * 4 :]
    fresh = target[computed // 16 :]
    engine.overwrite(fresh, 3)
    engine.overwrite(fresh, 0)
    engine.transfers[0].load(engine.store.plan_load("r", keys, entries, blocks, computed % 64))


def load(engine: LazyEngine, computed: int = 0, tokens: Sequence[int] = TOKENS) -> LoadDone:
    """Asks for the load, and has it done."""
    begin_load(engine, computed, tokens)
    engine.run_all()
    (done,) = engine.transfers[0].poll().loads
    engine.run_engine()  # what was launched before the load began runs before it at the latest
    return done


def expected(engine: LazyEngine) -> list[torch.Tensor]:
    """What the blocks of TARGET must hold: made in a copy of the engine's pages."""
    engine.run_engine()
    before = engine.blocks(BLOCKS)
    engine.prefill(TOKENS, BLOCKS)
    wanted = engine.blocks(BLOCKS)
    for number, plane in enumerate(plane for layer in engine.pages[0].layers for plane in layer.planes):
        plane[torch.tensor(BLOCKS)] = before[number]
    return wanted
