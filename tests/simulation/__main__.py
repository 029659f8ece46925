"""One run again, or many: `python -m tests.simulation --seed N --steps M [--recipe X] [--bug B]`."""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from tests.simulation.bugs import BUGS
from tests.simulation.recipes import NAMED, recipe_for
from tests.simulation.soak import Tally
from tests.simulation.world import Violation

MEMORY = Path("/dev/shm")


def command(seed: int, steps: int, recipe: str, bug: str | None = None) -> str:
    """What replays a run."""
    planted = f" --bug {bug}" if bug else ""
    return f"python -m tests.simulation --seed {seed} --steps {steps} --recipe {recipe}{planted}"


def folder() -> tempfile.TemporaryDirectory[str]:
    """Where operations are cheap."""
    return tempfile.TemporaryDirectory(prefix="kvtier-sim-", dir=MEMORY if MEMORY.is_dir() else None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many runs, from --seed on")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--recipe", default="mixed", choices=["mixed", "random", *NAMED])
    parser.add_argument("--bug", choices=list(BUGS), help="with this one planted")
    parser.add_argument("--log", action="store_true", help="what the library logs, too")
    parser.add_argument("--result", type=Path, help="how often each fault was tried, and what came of it, as JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.log else logging.CRITICAL, format="%(message)s")
    tally = Tally()
    for seed in range(args.seed, args.seed + args.seeds):
        recipe, started_s = recipe_for(args.recipe, seed), time.perf_counter()
        with folder() as place, BUGS[args.bug].plant() if args.bug else nullcontext():
            try:
                world = tally.add(Path(place), seed, args.steps, recipe)
            except Violation as fault:
                print(f"VIOLATION: {fault}\n  again: {command(seed, args.steps, recipe.name, args.bug)}")
                if args.log:
                    traceback.print_exc()
                continue
        took_s = time.perf_counter() - started_s
        print(
            f"seed {seed}, {recipe.name}: {took_s:.2f} s, {world.trace.hexdigest()[:12]}", dict(world.told), flush=True
        )
    if args.seeds > 1:
        print(*tally.told(), sep="\n")
    if args.result:
        tally.write(args.result, " ".join(["python -m tests.simulation", *sys.argv[1:]]))
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
