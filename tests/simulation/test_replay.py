"""One seed is one run (I6), else no failure could be replayed: in any process, and whatever else that process does."""

import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from kvtier.arena.arena import SlotTable
from kvtier.storage import segments
from kvtier.storage.segments import SegmentFiles
from tests.simulation.__main__ import command, folder
from tests.simulation.entropy import watching_calls
from tests.simulation.recipes import recipe_for
from tests.simulation.world import World, play

ROOT = Path(__file__).resolve().parents[2]


def played(seed: int, recipe: str) -> World:
    with folder() as place:
        return play(Path(place), seed, 120, recipe_for(recipe, seed))


@contextmanager
def left_over(place: Path) -> Iterator[list[int]]:
    """What other tests leave behind in their process: a keeper or an evictor of theirs that nobody closed, which looks
    after its own folder. Yields how often it did."""
    looks, has_ended = [0], threading.Event()

    def look() -> None:
        while not has_ended.wait(0.0005):
            SegmentFiles(place, direct=False).ids()
            looks[0] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        has_ended.set()
        thread.join()


def test_threads_of_others_change_nothing(tmp_path: Path) -> None:
    """They drew from the seed: of two runs of one seed in one process, the second was another one."""
    alone = played(4, "restart_in_mid_save")
    with left_over(tmp_path) as looks:
        beside = played(4, "restart_in_mid_save")
    assert looks[0] > 20
    assert alone.trace.digest() == beside.trace.digest()
    assert alone.told == beside.told


@pytest.mark.parametrize(
    ("seed", "recipe"),
    [(1, "killed_evictors"), (4, "restart_in_mid_save"), (7, "power_loss"), (9, "random"), (8, "index_amnesia")],
)
def test_a_run_asks_nobody_for_what_differs(seed: int, recipe: str) -> None:
    """No clock, no randomness, no name of a machine or process, no order of a folder, but those of the seed. The last
    one has its index in LMDB."""
    with folder() as place, watching_calls() as found:
        play(Path(place), seed, 120, recipe_for(recipe, seed))
    assert found == set()


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (time.time, "time"),
        (time.monotonic, "monotonic"),
        (lambda: time.sleep(0), "sleep"),
        (lambda: os.urandom(8), "urandom"),
        (uuid.uuid4, "urandom"),
        (os.getpid, "getpid"),
        (random.random, "random"),
        (random.SystemRandom().random, "urandom"),
        (lambda: torch.rand(1), "torch.random"),
        (lambda: os.listdir("/"), "listdir"),
    ],
)
def test_what_differs_is_noticed(ask: Callable[[], object], told: str) -> None:
    reserve = SlotTable.reserve

    def asking(table: SlotTable[object]) -> int | None:
        ask()
        return reserve(table)

    with folder() as place, patch.object(SlotTable, "reserve", asking), watching_calls() as found:
        play(Path(place), 1, 40, recipe_for("calm", 1))
    assert {name for _, name in found} == {told}


def test_a_run_that_ends_early_leaves_no_task(tmp_path: Path) -> None:
    """One that waits would be unwound when it is collected, on another run's disk."""
    world = World(tmp_path, 2, recipe_for("killed_evictors", 2))
    for _ in range(10):
        world.step()
        world.sweep()
        world.nap()
    assert sum(bool(process.tasks) for process in world._processes) > 1
    world.close()
    assert not any(process.tasks for process in world._processes)
    assert not world.place.disk.descriptors


RUNS = [(3, "random"), (4, "restart_in_mid_save"), (5, "lost_answers"), (323, "hung_calls")]
PLAY = """if True:
    import sys
    from tests.simulation.__main__ import main
    for words in sys.argv[1:]:
        sys.argv = words.split()
        main()
"""


def test_one_seed_is_one_run_in_any_process() -> None:
    """What Python hashes by a secret of each process, or by where it lies in memory, decides nothing, nor does what ran
    before: a replay of seed 323 was another run, because a set said which late load is answered first."""
    traces = traces_of(RUNS, "1")
    assert traces == traces_of(RUNS[::-1], "2")[::-1]
    assert len(set(traces)) == len(RUNS)


def traces_of(runs: list[tuple[int, str]], secret: str) -> list[str]:
    """What each run printed of itself. secret: of Python's hashes."""
    asked = [sys.executable, "-c", PLAY, *(command(seed, 120, recipe).split(maxsplit=2)[2] for seed, recipe in runs)]
    env = {**os.environ, "PYTHONHASHSEED": secret}
    ran = subprocess.run(asked, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    traces = [line.split(" s, ")[1] for line in ran.stdout.splitlines()]
    assert all(traces)
    return traces


def test_later_tests_meet_no_segments_of_a_simulation(tmp_path: Path) -> None:
    """Its locks work only while it runs. `_folders` is what `close_in_process` goes through."""
    before = set(segments._folders)
    world = play(tmp_path, 3, 20, recipe_for("mixed", 3))
    assert world is not None and set(segments._folders) <= before
