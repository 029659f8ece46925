"""Which policy evicts best: lru or s3fifo?

    python -m benchmarks.eviction_policies [--quick | --tune]

Four engines share a root: the real Store, Keeper and Evictor of each, over one index, on a clock that jumps from one
request of a generated trace to the next. Nothing is copied and no file is made: a save is published at once. So sets
are filled, closed, booked and evicted by the same code as in production, watermarks included. Measured is the share of
the chunks looked up that were there, after a warm-up.

s3fifo has two parameters. `--tune` tries several of each on traces of their own (TRAINING_SEEDS); what is reported, and
decides which policy is the default, are traces that nothing was chosen on (SEEDS).

The ceilings, on the same trace: an infinite cache, and Belady's choice with single chunks instead of sets (which knows
the future, evicts just what is needed no more, and need not keep what it will not use). No policy over sets gets there.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.eviction_traces import TRACES, Request, trace
from benchmarks.lookup import machine
from kvtier.config_capacity import CapacitySettings
from kvtier.eviction.base import Policy
from kvtier.eviction.limits import Rules
from kvtier.eviction.s3fifo import S3Fifo
from kvtier.evictor import Evictor
from kvtier.geometry import Extent, Geometry
from kvtier.housekeeping import Housekeeper
from kvtier.identity import CodecId, Namespace
from kvtier.index.base import Index, Location, NewRecord
from kvtier.index.memory import MemoryIndex
from kvtier.io.filesystem import FreeSpace
from kvtier.keeper import Keeper, KeeperPlan
from kvtier.lookups import InPlace
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.policies import POLICIES
from kvtier.store import Store, WantedChunk

ENGINES = 4
SLOTS = 31
SET_BYTES = 1 << 30
"""As with Llama-3.1-8B in bf16: a chunk of 256 tokens takes 32 MiB, and a segment 1 GiB."""
CAPACITIES = (32, 64, 128)
TRAINING_SEEDS = (1, 2, 3)
SEEDS = (11, 12, 13, 14, 15)
SMALL_FRACTIONS, PROMOTED_USES = (0.1, 0.2, 0.4, 0.6), (1, 2)
REQUESTS = 900
WARM_UP = 0.33
WHOLE = Extent(0, 1, 0, 1)
RESULTS = Path(__file__).parent / "results" / "eviction_policies.json"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


class FilelessHousekeeper(Housekeeper):
    """A root in which every segment takes what it was made for, and no writer dies."""

    def close_set(self, set_id: int) -> None:
        self._index.close_set(set_id, SET_BYTES)

    def free_space(self) -> FreeSpace:
        return FreeSpace(1 << 60)

    def sweep(self) -> None:
        """Nothing is ever left behind."""


class Engine:
    """The deciding half of one engine, and a worker whose writes take no time."""

    def __init__(
        self, number: int, folder: Path, policy: Policy, capacity_bytes: int, shared: tuple[Index, Clock]
    ) -> None:
        self._index, clock = shared
        owner = f"engine-{number}"
        shape = Geometry(1, 1, 64, 64, "bfloat16", 2, "heads", 256)
        namespace = Namespace("simulated", "", shape, "bfloat16", "", "", "", CodecId("raw", 1, 0), "", "0")
        plan = KeeperPlan(owner, SLOTS, SET_BYTES, capacity_bytes, 1e9, 5.0, lambda space: None)
        rules = Rules.of(CapacitySettings())
        evictor = Evictor(self._index, folder, owner, rules, policy, clock)
        housekeeper = FilelessHousekeeper(self._index, folder, owner, clock)
        self.keeper = Keeper(namespace, plan, self._index, housekeeper, evictor, random.Random(number))
        self._store = Store(namespace.id, 256, 1, InPlace(self._index), self.keeper, clock)

    def serve(self, request: Request) -> int:
        """How many of the prompt's chunks were there."""
        keys = [key.to_bytes(16, "big") for key in request.keys]
        asked = keys[: len(keys) - request.n_new]
        entries = self._store.lookup(asked) or []
        if entries:
            self._store.plan_load("", asked[: len(entries)], entries, [0] * len(entries), 0)
        self.keeper.tick()
        wanted = [WantedChunk(key, bytes(16), (0,)) for key in keys[len(entries) :]]
        for first in range(0, len(wanted), SLOTS):  # as in steps of an engine, between which the keeper wakes up
            self._save(wanted[first : first + SLOTS])
        return len(entries)

    def _save(self, wanted: Sequence[WantedChunk]) -> None:
        plan = self._store.plan_save(wanted)
        if plan is not None:
            done, records = [], []
            for chunk in plan.chunks:
                is_present = bool(self._index.resolve([chunk.key]))  # behind a chunk that was evicted
                outcome = SaveOutcome.PRESENT if is_present else SaveOutcome.SAVED
                done.append(SaveDone(chunk.key, chunk.set_id, chunk.slot, outcome))
                if not is_present:
                    location = Location(chunk.set_id, 0, chunk.slot, 4096, WHOLE, (0,))
                    records.append(NewRecord(chunk.key, location, WHOLE))
            assert self._index.publish(records) == len(records), "requests follow one another: nobody else saved them"
            self._store.saved(done)
        self.keeper.tick()


class Run(NamedTuple):
    """parameters: of s3fifo; None: its own."""

    trace: str
    policy: str
    sets: int
    seed: int
    requests: int
    parameters: tuple[float, int] | None = None

    def make_policy(self) -> Policy:
        return POLICIES[self.policy]() if self.parameters is None else S3Fifo(*self.parameters)


def hit_ratio(run: Run) -> float:
    """Of the chunks asked for after the warm-up. `sets` 0: an infinite cache; policy "belady": the ceiling."""
    requests = trace(run.trace, run.seed, run.requests)
    if run.policy in ("belady", "infinite"):
        hits = belady(requests, run.sets * SLOTS if run.policy == "belady" else 1 << 60)
    else:
        hits = simulate(run, requests)
    measured = range(int(len(requests) * WARM_UP), len(requests))
    asked = sum(len(requests[n].keys) - requests[n].n_new for n in measured)
    return sum(hits[n] for n in measured) / asked


def simulate(run: Run, requests: Sequence[Request]) -> list[int]:
    rng = random.Random(run.seed)
    with tempfile.TemporaryDirectory() as folder:
        shared = (MemoryIndex(), Clock())
        shared[0].rebuilt(shared[0].loss())
        engines = [Engine(n, Path(folder), run.make_policy(), run.sets * SET_BYTES, shared) for n in range(ENGINES)]
        hits = []
        for request in requests:
            shared[1].now_s = 1e9 + request.at_s
            hits.append(engines[rng.randrange(ENGINES)].serve(request))
            assert shared[0].counts().n_bytes <= run.sets * SET_BYTES, "over the budget"
        return hits


def belady(requests: Sequence[Request], capacity_chunks: int) -> list[int]:
    """Hits of each request when of all chunks those stay that are asked for soonest."""
    uses: dict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        for key in request.keys[: len(request.keys) - request.n_new]:
            uses[key].append(number)
    for numbers in uses.values():
        numbers.reverse()
    stored: dict[int, int] = {}  # key -> the request that asks for it next
    latest: list[tuple[int, int]] = []  # (minus that request, key), some out of date
    hits = []
    for request in requests:
        found = 0
        for position, key in enumerate(request.keys):
            if position < len(request.keys) - request.n_new:
                uses[key].pop()
                found += stored.pop(key, None) is not None
            if uses[key]:
                stored[key] = uses[key][-1]
                heapq.heappush(latest, (-stored[key], key))
        while len(stored) > capacity_chunks:
            next_use, key = heapq.heappop(latest)
            if stored.get(key) == -next_use:
                del stored[key]
        hits.append(found)
    return hits


def runs(seeds: Sequence[int], n_requests: int) -> list[Run]:
    found = []
    for name in TRACES:
        for seed in seeds:
            found.append(Run(name, "infinite", 0, seed, n_requests))
            for sets in CAPACITIES:
                found += [Run(name, policy, sets, seed, n_requests) for policy in (*POLICIES, "belady")]
    return found


def training_runs() -> list[Run]:
    """s3fifo with each pair of parameters, and lru beside it."""
    choices = [("lru", None)] + [("s3fifo", pair) for pair in itertools.product(SMALL_FRACTIONS, PROMOTED_USES)]
    return [
        Run(name, policy, sets, seed, REQUESTS, parameters)
        for policy, parameters in choices for name in TRACES for seed in TRAINING_SEEDS for sets in CAPACITIES
    ]  # fmt: skip


def tuned(all_runs: Sequence[Run], ratios: Sequence[float]) -> list[dict[str, object]]:
    """The mean of each choice over all traces, capacities and seeds, the best first."""
    means: dict[tuple[str, tuple[float, int] | None], list[float]] = defaultdict(list)
    for run, ratio in zip(all_runs, ratios, strict=True):
        means[run.policy, run.parameters].append(ratio)
    found = [
        {"policy": policy, "small_fraction": parameters and parameters[0],
         "promoted_uses": parameters and parameters[1], "mean": statistics.mean(values)}
        for (policy, parameters), values in means.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: -float(str(row["mean"])))


def summary(all_runs: Sequence[Run], ratios: Sequence[float]) -> list[dict[str, object]]:
    """A cell for each trace, policy and capacity: median, lowest and highest over the seeds."""
    cells: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run, ratio in zip(all_runs, ratios, strict=True):
        cells[run.trace, run.policy, run.sets].append(ratio)
    return [
        {"trace": name, "policy": policy, "sets": sets, "hit_ratio": statistics.median(values), "lowest": min(values),
         "highest": max(values), "mean": statistics.mean(values), "of_seeds": values}
        for (name, policy, sets), values in cells.items()
    ]  # fmt: skip


def means_of(all_runs: Sequence[Run], ratios: Sequence[float]) -> dict[str, list[float]]:
    """Each policy's mean over all traces and capacities, a number for each seed."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run, ratio in zip(all_runs, ratios, strict=True):
        found[run.policy, run.seed].append(ratio)
    return {
        policy: [statistics.mean(values) for (name, _), values in sorted(found.items()) if name == policy]
        for policy in POLICIES
    }


def verdict(means: dict[str, list[float]]) -> dict[str, object]:
    """s3fifo is better, or worse, when its lead over lru is more than what that lead varies by from seed to seed; else
    they are equals, and the simpler one is the default."""
    leads = [new - old for new, old in zip(means["s3fifo"], means["lru"], strict=True)]
    lead, spread = statistics.mean(leads), max(leads) - min(leads)
    return {"lead": lead, "spread": spread, "leads": leads, "is_tie": abs(lead) <= spread,
            "default": "s3fifo" if lead > spread else "lru"}  # fmt: skip


def measure(all_runs: Sequence[Run]) -> list[float]:
    with multiprocessing.get_context("fork").Pool(min(8, multiprocessing.cpu_count())) as pool:
        return pool.map(hit_ratio, all_runs, chunksize=4)


def keep(found: dict[str, object]) -> None:
    """Writes it into the result beside what the other kind of run wrote there."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | found, indent=2) + "\n")


def tune() -> None:
    all_runs = training_runs()
    rows = tuned(all_runs, measure(all_runs))
    for row in rows:
        print(row)
    keep({"training": {"seeds": TRAINING_SEEDS, "choices": rows}})


def report(is_quick: bool) -> None:
    all_runs = runs(SEEDS[:1], REQUESTS // 3) if is_quick else runs(SEEDS, REQUESTS)
    ratios = measure(all_runs)
    cells, means = summary(all_runs, ratios), means_of(all_runs, ratios)
    for cell in cells:
        print(f"{cell['trace']:<16}{cell['policy']:<10}{cell['sets']:>5} sets {cell['hit_ratio']:>8.1%}"
              f"  ({cell['lowest']:.1%}-{cell['highest']:.1%})")  # fmt: skip
    found = verdict(means)
    print(", ".join(f"{policy} {statistics.mean(of_seeds):.2%}" for policy, of_seeds in means.items()),
          f"over all; lead of s3fifo {found['lead']:+.2%}, varying by {found['spread']:.2%}")  # fmt: skip
    if not is_quick:
        keep({
            "question": "which eviction policy keeps more of what is asked for", "engines": ENGINES, "slots": SLOTS,
            "set_bytes": SET_BYTES, "requests": REQUESTS, "seeds": SEEDS, "warm_up": WARM_UP, "cells": cells,
            "means": means, "verdict": found, "date": time.strftime("%Y-%m-%d"), "machine": machine(),
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="one seed and a third of each trace; writes no result")
    which.add_argument("--tune", action="store_true", help="parameters of s3fifo, on traces of their own; minutes")
    arguments = parser.parse_args()
    logging.getLogger("kvtier").setLevel(logging.ERROR)
    began_s = time.monotonic()
    if arguments.tune:
        tune()
    else:
        report(arguments.quick)
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
