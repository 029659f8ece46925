"""The whole evaluation: seeds x conditions x methods, stopped for time between conditions, kept after each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.quality import cases, keys, summary
from benchmarks.quality.cases import Plan
from benchmarks.quality.data import Corpus
from benchmarks.quality.measure import (
    REFERENCE,
    Condition,
    Reference,
    Tally,
    judge,
    of_reference,
    offset_of,
    refer,
    shifted,
)
from benchmarks.quality.methods import methods
from benchmarks.quality.model import Model
from benchmarks.quality.tasks import Source

CONDITIONS = (Condition(0), Condition(10), Condition(100))
FIRST_SEED = 100


class Evaluation:
    def __init__(self, model: Model, corpus: Corpus, plan: Plan, seconds: float) -> None:
        self.model, self.text, self.plan = model, corpus.held_out, plan
        self.methods = methods(model.shape.head_size)
        self.tally, self.keys, self.stopped = Tally(), {}, ""
        self.started = time.monotonic()
        self.deadline = self.started + seconds

    def run(self, save: Callable[[], None]) -> None:
        """Calls `save` whenever a condition of a seed is whole; begins none after the deadline."""
        for seed in range(self.plan.seeds):
            references = self.references(seed)
            for condition in CONDITIONS:
                if time.monotonic() > self.deadline:
                    self.stopped = f"stopped for time before seed {seed}, {condition.name}"
                    print(self.stopped, flush=True)
                    return
                self.measure(references, condition)
                print(f"  seed {seed}, {condition.name}: {time.monotonic() - self.started:.0f} s", flush=True)
                save()

    def references(self, seed: int) -> list[Reference]:
        source = Source(self.text, torch.Generator(self.text.device).manual_seed(FIRST_SEED + seed))
        found = [refer(self.model, case, self.plan.greedy_tokens) for case in cases.cases(source, self.plan)]
        self.keys = self.keys or keys.describe(found[0].cache)
        return found

    def measure(self, references: list[Reference], condition: Condition) -> None:
        key_offset = offset_of(references[0].cache, condition)
        for plain in references:
            reference = plain if key_offset is None else shifted(self.model, plain, key_offset)
            self.tally.add(condition.name, REFERENCE, of_reference(reference, plain))
            for method in self.methods:
                self.tally.add(condition.name, method.name, judge(self.model, reference, method, key_offset))

    def result(self) -> dict[str, Any]:
        """Everything measured so far, as JSON."""
        about = {x.name: {"vector_bytes": x.vector_bytes, "is_control": x.is_control} for x in self.methods}
        rows = summary.rows(self.tally, self.plan)
        return {
            "plan": self.plan.as_json(),
            "keys": self.keys,
            "stopped": self.stopped,
            "reference": [row for row in rows if row["method"] == REFERENCE],
            "rows": [row | about[row["method"]] for row in rows if row["method"] != REFERENCE],
            "power": summary.power(rows),
            "evaluation_s": time.monotonic() - self.started,
        }
