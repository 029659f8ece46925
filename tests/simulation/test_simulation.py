"""Nothing lost, nothing wrong: 50,000 operations over 100 seeds, each run checked after every step; a million are
test_soak's. What the simulation is worth is seen in test_planted_bugs.

A failure names the one command that replays it.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulation.__main__ import command, folder
from tests.simulation.recipes import NAMED, recipe_for
from tests.simulation.world import Violation, World, play

SEEDS, STEPS, GROUPS = 100, 500, 10
HAPPENS = {
    "chunks loaded": 500,
    "finished": 500,
    "saved": 500,
    "present": 20,
    "failed": 1,
    "open": 5,
    "kill": 1,
    "evict": 1,
    "sweep": 1,
}
"""In every group of runs, so often at least."""


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


def test_chunks_that_were_damaged_are_seen_to_fail() -> None:
    """Not in every group of the runs above: most chunks that fail at first are read once more, and then load."""
    assert sum(played(seed, STEPS, "damage").told["chunks failed"] for seed in range(3)) > 0


def test_every_named_recipe_is_among_the_seeds() -> None:
    names = Counter(recipe_for("mixed", seed).name for seed in range(SEEDS))
    assert set(names) == {"random", *NAMED} and min(names.values()) >= 3
