"""Nothing lost, nothing wrong: 50,000 operations over 100 seeds, each run looked at after every step; what the
simulation is worth is seen in test_planted_bugs.

A failure names the one command that replays it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.simulation.__main__ import command, folder
from tests.simulation.recipes import NAMED, recipe_for
from tests.simulation.world import Violation, World, play

ROOT = Path(__file__).resolve().parents[2]
SEEDS, STEPS, GROUPS = 100, 500, 10
SOAK_SEEDS, SOAK_STEPS = 1000, 1000
HAPPENS = {
    "chunks loaded": 500, "chunks failed": 1, "finished": 500, "saved": 500, "present": 50, "failed": 1, "open": 5,
    "kill": 1, "evict": 1, "sweep": 1,
}  # fmt: skip
"""In every group of runs, so often at least."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What fails on purpose is logged, and nobody reads it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def played(seed: int, steps: int, recipe: str = "mixed") -> World:
    with folder() as place:
        try:
            return play(Path(place), seed, steps, recipe_for(recipe, seed))
        except Violation as fault:
            pytest.fail(f"{fault}\n  again: {command(seed, steps, recipe)}", pytrace=False)


def play_all(seeds: Iterable[int], steps: int) -> Counter[str]:
    told: Counter[str] = Counter()
    for seed in seeds:
        told.update(played(seed, steps).told)
    return told


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_is_lost_and_nothing_is_wrong(group: int) -> None:
    told = play_all(range(group, SEEDS, GROUPS), STEPS)
    calm = {name: told[name] for name, least in HAPPENS.items() if told[name] < least}
    assert not calm, f"too calm: {calm} of {told}"


def test_every_named_recipe_is_among_the_seeds() -> None:
    names = Counter(recipe_for("mixed", seed).name for seed in range(SEEDS))
    assert set(names) == {"random", *NAMED} and min(names.values()) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("group", range(20))
def test_one_million_operations(group: int) -> None:
    play_all(range(10_000 + group, 10_000 + SOAK_SEEDS, 20), SOAK_STEPS)


@pytest.mark.parametrize(
    ("seed", "recipe"), [(3, "random"), (4, "restart_in_mid_save"), (5, "lost_answers"), (323, "hung_calls")]
)
def test_one_seed_is_one_run_in_any_process(seed: int, recipe: str) -> None:
    """I6: else no failure could be replayed. What Python hashes by a secret of each process, or by where it lies in
    memory, decides nothing: a replay of seed 323 was another run, because a set said which late load is answered first.
    """
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
