"""Python calls that one chunk costs on its way, on all threads of a worker: what was reached is not lost again.

A single chunk pays for whole turns of the loop, as many as its I/O takes: the least of some tries counts. The calls in
which the test itself waits for the end are not counted: their number depends on the machine's load.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import kvtier
from kvtier.plan import LoadPlan, SaveOutcome, SavePlan
from tests.support.lazy import LazyEngine
from tests.support.rig import Engine

ROOT = str(Path(kvtier.__file__).parent)
THREADS = ("kvtier-loop", "kvtier-load", "kvtier-save", "MainThread")
TEST_WAITS = ("Transfer.drain", "TransferLoop.drain", "TransferLoop.wait_until")  # no engine calls them for a chunk
FILES_MAX = 23
CHANGES: dict[str, object] = {
    "host": {"arena_bytes": 64 << 20},
    "capacity_bytes": 256 << 20,
    "segment_bytes": 64 << 20,
    "io": {"threads": 4, "timeout_s": 10.0, "stripes": 1},
}


class Count(NamedTuple):
    calls: int
    files: int


class Counted:
    """Calls of functions of kvtier by their file, while `is_on`."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self.is_on = False

    def look(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.is_on or event != "call" or threading.current_thread().name not in THREADS:
            return
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and not code.co_qualname.startswith(TEST_WAITS):
            self.by_file[code.co_filename] += 1

    def of(self, walk: Callable[[], None]) -> Count:
        self.by_file.clear()
        sys.setprofile(self.look)
        self.is_on = True
        try:
            walk()
        finally:
            self.is_on = False
            sys.setprofile(None)
        return Count(sum(self.by_file.values()), len(self.by_file))


@pytest.fixture
def counted() -> Iterator[Counted]:
    """Counts on threads that are started from now on, and on this one within `of`."""
    found = Counted()
    threading.setprofile(found.look)
    yield found
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_chunks", "tries", "saved_max", "loaded_max"), [(1, 30, 120, 100), (64, 2, 13, 22)], ids=["one", "batch"]
)
def test_calls_of_a_chunk(
    tmp_path: Path, counted: Counted, n_chunks: int, tries: int, saved_max: int, loaded_max: int
) -> None:
    prompts = [list(range(start, start + 64 * n_chunks)) for start in range(0, 10_000 * (tries + 1), 10_000)]
    blocks = list(range(4 * n_chunks))
    engine = Engine(tmp_path, changes=CHANGES, n_blocks=4 * n_chunks)
    engine.save(prompts[0], blocks)
    least = min(counted.of(partial(save, engine, plan_of(engine, tokens))) for tokens in prompts[1:])
    engine.close()
    assert least.calls / n_chunks <= saved_max and least.files <= FILES_MAX

    engine = Engine(tmp_path, changes=CHANGES, n_blocks=4 * n_chunks)
    engine.load(prompts[0], blocks)
    plans = [engine.plan_load("r", tokens, blocks) for tokens in prompts[1:]]
    least = min(counted.of(partial(load, engine, plan)) for plan in plans)
    engine.close()
    assert least.calls / n_chunks <= loaded_max and least.files <= FILES_MAX


def test_calls_of_a_chunk_that_is_loaded_over_a_device(tmp_path: Path, counted: Counted) -> None:
    """The chunk passes through a staging slot, where it is verified."""
    n_chunks, tries = 64, 3
    prompts = [list(range(start, start + 64 * n_chunks)) for start in range(0, 10_000 * tries, 10_000)]
    blocks = list(range(4 * n_chunks))
    engine = LazyEngine(tmp_path, changes=CHANGES, n_blocks=4 * n_chunks)
    for tokens in prompts:
        engine.save(tokens, blocks)
    engine.close()
    engine = LazyEngine(tmp_path, changes=CHANGES, n_blocks=4 * n_chunks)
    engine.lay_over(staging_slots=n_chunks, admit="never")
    engine.on_threads()
    counts = []
    for tokens in prompts:
        plan = engine.plan_load("r", tokens, blocks)
        counts.append(counted.of(partial(load, engine, plan)).calls / n_chunks)
    engine.close()
    assert min(counts) <= 31, counts


def save(engine: Engine, plan: SavePlan) -> None:
    (transfer,) = engine.transfers
    transfer.save(plan)
    assert transfer.drain(20)
    assert {done.outcome for done in transfer.poll().saves} == {SaveOutcome.SAVED}


def load(engine: Engine, plan: LoadPlan | None) -> None:
    (transfer,) = engine.transfers
    assert plan is not None
    transfer.load(plan)
    assert transfer.drain(20)
    assert [done.failed_blocks for done in transfer.poll().loads] == [frozenset()]


def plan_of(engine: Engine, tokens: list[int]) -> SavePlan:
    engine.wait_for_set()
    blocks = range(len(tokens) // 16)
    engine.prefill(tokens, blocks)
    plan = engine.plan(tokens, blocks)
    assert len(plan.chunks) == len(tokens) // 64
    return plan
