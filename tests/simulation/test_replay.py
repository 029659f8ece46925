"""One seed is one run (I6), else no failure could be replayed: in any process, and whatever else that process does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.tiers.segments import SegmentFiles
from tests.simulation.__main__ import command, folder
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
    ("seed", "recipe"), [(3, "random"), (4, "restart_in_mid_save"), (5, "lost_answers"), (323, "hung_calls")]
)
def test_one_seed_is_one_run_in_any_process(seed: int, recipe: str) -> None:
    """What Python hashes by a secret of each process, or by where it lies in memory, decides nothing: a replay of seed
    323 was another run, because a set said which late load is answered first."""
    runs = [trace_of(seed, recipe, secret) for secret in ("1", "2")]
    assert runs[0] == runs[1] != trace_of(seed + 1, recipe, "1")


def trace_of(seed: int, recipe: str, secret: str) -> str:
    """What a run printed of itself. secret: of Python's hashes."""
    asked = [sys.executable, *command(seed, 120, recipe).split()[1:]]
    env = {**os.environ, "PYTHONHASHSEED": secret}
    ran = subprocess.run(asked, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    trace = ran.stdout.split(" s, ")[1]
    assert trace
    return trace
