"""What the simulation is worth: the library with a bug planted in it does not get through, whichever bug."""

import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import command, folder, main
from tests.simulation.bugs import BUGS
from tests.simulation.recipes import recipe_for
from tests.simulation.world import Violation, play

SEEDS_MAX, STEPS = 30, 300


def caught(name: str) -> str | None:
    """What was seen of the bug in the first run that showed it."""
    bug = BUGS[name]
    for seed in range(bug.first_seed, bug.first_seed + SEEDS_MAX):
        with folder() as place, bug.plant():
            try:
                play(Path(place), seed, STEPS, recipe_for(bug.recipe, seed))
            except Violation as violation:
                return f"{violation}; again: {command(seed, STEPS, bug.recipe, name)}"
    return None


def test_there_are_bugs_enough() -> None:
    assert len(BUGS) >= 12


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    seen = caught(name)
    assert seen is not None, f"{name} got through {SEEDS_MAX} runs of {BUGS[name].recipe}"
    print(seen)


def test_a_failure_tells_how_to_replay_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seed, name = 1, "padding_is_not_blanked"
    asked = command(seed, STEPS, BUGS[name].recipe, name)
    monkeypatch.setattr(sys, "argv", asked.split()[2:])
    assert main() == 1
    assert f"again: {asked}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tests.simulation", "--seed", str(seed), "--steps", "50", "--recipe", "calm"])
    assert main() == 0
