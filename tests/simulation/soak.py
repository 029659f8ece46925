"""Many runs, added up: of each kind of fault, how often it was tried and what came of it."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.measured import about
from tests.simulation.recipes import Recipe
from tests.simulation.world import Violation, World

LOST, FAILED_REQUESTS, WRONG = "lost", "failed_requests", "wrong"


def kind_of(violation: str) -> str:
    """What of it a user would have seen. Whatever else must not be may end in wrong bytes."""
    if "are lost" in violation:
        return LOST
    return FAILED_REQUESTS if "(I9)" in violation or "did not answer its load" in violation else WRONG


@dataclass
class Tally:
    """violations: (recipe, seed, what was seen). came_of: by fault and kind, violations in runs that had the fault."""

    operations: int = 0
    seeds: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    by_recipe: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[tuple[str, int, str]] = field(default_factory=list)
    came_of: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, place: Path, seed: int, steps: int, recipe: Recipe) -> World:
        """One more run, in an empty folder. Raises Violation; such a run counts as all others."""
        world = World(place, seed, recipe)
        try:
            world.run(steps)
        except Violation as fault:
            self.violations.append((recipe.name, seed, str(fault)))
            self.came_of.update((name, kind_of(str(fault))) for name in +world.tried)
            raise
        finally:
            world.close()
            self.seeds += 1
            self.operations += world.operations
            self.tried += world.tried
            of_recipe = self.by_recipe.setdefault(recipe.name, Counter())
            of_recipe.update({"runs": 1, "operations": world.operations}, **+world.tried)
        return world

    def result(self, command: str) -> dict[str, Any]:
        """As benchmarks/results/faults_simulation.json has it. A violation counts against every fault of its run."""
        faults = [
            {"fault": fault, "tried": tried}
            | {kind: self.came_of[fault, kind] for kind in (WRONG, FAILED_REQUESTS, LOST)}
            for fault, tried in sorted(self.tried.items())
        ]
        return about(command) | {"operations": self.operations, "seeds": self.seeds, "faults": faults}

    def write(self, path: Path, command: str) -> None:
        path.write_text(json.dumps(self.result(command), indent=1) + "\n")

    def told(self) -> Iterable[str]:
        """Lines for people: each recipe with its faults, then the sum."""
        for name, counts in sorted(self.by_recipe.items()):
            rest = ", ".join(f"{fault}: {n:,}" for fault, n in sorted(counts.items()) if fault != "runs")
            yield f"{name}: {counts['runs']} runs; {rest}"
        yield f"all: {', '.join(f'{fault}: {n:,}' for fault, n in sorted(self.tried.items()))}"
        yield f"{self.operations:,} operations over {self.seeds:,} seeds, {len(self.violations)} violations"


def with_progress(tally: Tally, total: int, tell: Callable[[str], None], every: int = 25) -> Callable[[], None]:
    """Called after each run; says now and then how far it is."""
    started_s = time.monotonic()

    def count() -> None:
        if tally.seeds % every == 0 or tally.seeds == total:
            minutes = (time.monotonic() - started_s) / 60
            tell(
                f"{minutes:6.1f} min: {tally.operations:,} operations over {tally.seeds} of {total} seeds, "
                f"{sum(tally.tried.values()):,} faults, {len(tally.violations)} violations"
            )

    return count
