"""`make soak`: one million operations over 1,000 seeds.

With SIMULATION_RESULT=FILE, the count and the outcome of each fault so far are written to that file, as
benchmarks/results/faults_simulation.json has it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.simulation import world
from tests.simulation.__main__ import command, folder
from tests.simulation.recipes import recipe_for
from tests.simulation.soak import Tally, kind_of, with_progress
from tests.simulation.world import Violation

FIRST, SEEDS, STEPS = 10_000, 1_000, 1_000


@pytest.mark.soak
def test_one_million_operations(capsys: pytest.CaptureFixture[str]) -> None:
    tally, result = Tally(), os.environ.get("SIMULATION_RESULT")

    def tell(line: str) -> None:
        print(line, flush=True)
        if result:  # what a soak that is stopped has done by then, too
            tally.write(Path(result), "make soak (tests/simulation/test_soak.py)")

    with capsys.disabled():
        count = with_progress(tally, SEEDS, tell)
        for seed in range(FIRST, FIRST + SEEDS):
            recipe = recipe_for("mixed", seed)
            with folder() as place:
                try:
                    tally.add(Path(place), seed, STEPS, recipe)
                except Violation as fault:
                    print(f"VIOLATION: {fault}\n  again: {command(seed, STEPS, recipe.name)}", flush=True)
            count()
        print(*tally.told(), sep="\n", flush=True)
    assert not tally.violations
    assert tally.operations == SEEDS * STEPS


def test_the_sums_are_those_of_the_runs(tmp_path: Path) -> None:
    tally, told = Tally(), list[str]()
    count = with_progress(tally, 2, told.append)
    for seed in (1, 2):
        with folder() as place:
            tally.add(Path(place), seed, 60, recipe_for("damage", seed))
        count()
    tally.write(tmp_path / "result.json", "a test")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["operations"], result["seeds"], result["command"]) == (120, 2, "a test")
    assert {fault["fault"]: fault["tried"] for fault in result["faults"]} == dict(tally.tried)
    assert all(fault["tried"] > 0 for fault in result["faults"]) and len(result["faults"]) > 5
    assert all(fault["wrong"] == fault["failed_requests"] == fault["lost"] == 0 for fault in result["faults"])
    assert "120 operations over 2 of 2 seeds" in told[-1]
    assert "120 operations over 2 seeds, 0 violations" in list(tally.told())[-1]


def test_a_violation_counts_against_all_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(checks: object) -> None:
        raise Violation("1 of 13 chunks that were saved are lost; one was in sets 1")

    monkeypatch.setattr(world.Checks, "look_at_claims", lose)
    tally = Tally()
    with folder() as place, pytest.raises(Violation):
        tally.add(Path(place), 1, 60, recipe_for("damage", 1))
    assert all((fault["lost"], fault["wrong"]) == (1, 0) for fault in tally.result("a test")["faults"])
    assert [(recipe, seed) for recipe, seed, _ in tally.violations] == [("damage", 1)]


@pytest.mark.parametrize(
    ("violation", "kind"),
    [
        ("engine-1-4: chunk 2 is not what was computed or loaded (I2, I10)", "wrong"),
        ("a load: KeyError: no such location (I9) (fetch.py:12)", "failed_requests"),
        ("engine-1: when all had ended, 2 requests had not (I9)", "failed_requests"),
        ("3 of 40 chunks that were saved are lost; one was in sets 12", "lost"),
        ("engine-1: a slot is in no state, or in two (I3)", "wrong"),
    ],
)
def test_what_a_violation_is_to_a_user(violation: str, kind: str) -> None:
    assert kind_of(violation) == kind
