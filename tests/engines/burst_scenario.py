"""Scenario: a burst of prompts in front of workers that take few chunks in each step."""

import random
from dataclasses import replace
from typing import Any

from engine import CHUNK_TOKENS, Engine

from kvtier.plan import SaveDone, SaveOutcome

N_PROMPTS = 8
PROMPT_CHUNKS = 10
TAKEN_IN_A_STEP = 3


class NarrowQueue:
    """A worker that takes a few chunks of each plan and refuses the rest as if its queue were full."""

    def __init__(self, engine: Engine) -> None:
        self.refused = 0
        transfer = engine.worker_half._bridge._transfer
        self._transfer, self._save, self._poll = transfer, transfer.save, transfer.poll
        self._answers: list[SaveDone] = []
        transfer.save, transfer.poll = self._saves, self._polls

    def close(self) -> None:
        self._transfer.save, self._transfer.poll = self._save, self._poll

    def _saves(self, plan: Any) -> None:
        taken, rest = plan.chunks[:TAKEN_IN_A_STEP], plan.chunks[TAKEN_IN_A_STEP:]
        self.refused += len(rest)
        self._answers += [SaveDone(c.key, c.set_id, c.slot, SaveOutcome.QUEUE_FULL) for c in rest]
        self._save(replace(plan, chunks=taken))

    def _polls(self, timeout_s: float = 0.0) -> Any:
        progress = self._poll(timeout_s)
        answers, self._answers = self._answers, []
        return progress._replace(saves=progress.saves + answers)


def burst(engine: Engine) -> dict[str, Any]:
    """All prompts at once, with answers long enough for later steps; then the tier is asked for each prompt."""
    rng = random.Random(42)
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_CHUNKS * CHUNK_TOKENS)] for _ in range(N_PROMPTS)]
    engine.wait_for_set()
    queue = NarrowQueue(engine)
    cold = engine.ask(prompts, max_tokens=60)
    engine.settle()
    queue.close()
    engine.forget()
    warm = engine.ask(prompts, max_tokens=60)
    engine.settle()
    return {
        "refused": queue.refused,
        "same_tokens": [a.tokens == b.tokens for a, b in zip(cold, warm, strict=True)],
        "cached": [answer.cached for answer in warm],
        "whole": PROMPT_CHUNKS * CHUNK_TOKENS,
        "counters": engine.counters(),  # by now the last answers of the first round are in
    }
