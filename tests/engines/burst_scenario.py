"""Scenario: a burst of prompts in front of workers that take few chunks in each step."""

import random
import time
from dataclasses import replace
from typing import Any

from engine import CHUNK_TOKENS, PATIENCE_S, Engine

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


def burst(engine: Engine, max_tokens: int = 60) -> dict[str, Any]:
    """All prompts at once; then the tier is asked for each prompt. Long answers leave time for later steps; with one
    token the requests end with the step that computes their last chunks."""
    rng = random.Random(max_tokens)
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_CHUNKS * CHUNK_TOKENS)] for _ in range(N_PROMPTS)]
    engine.wait_for_set()
    queue = NarrowQueue(engine)
    cold = engine.ask(prompts, max_tokens)
    deadline = time.monotonic() + PATIENCE_S
    while engine.scheduler_half.needs_a_step() and time.monotonic() < deadline:
        engine.llm.llm_engine.step()
    engine.settle()
    queue.close()
    engine.forget()
    warm = engine.ask(prompts, max_tokens)
    engine.settle()
    return {
        "refused": queue.refused,
        "same_tokens": [a.tokens == b.tokens for a, b in zip(cold, warm, strict=True)],
        "cached": [answer.cached for answer in warm],
        "whole": PROMPT_CHUNKS * CHUNK_TOKENS,
        "counters": engine.counters(),  # by now the last answers of the first round are in
    }


def short_burst(engine: Engine) -> dict[str, Any]:
    return burst(engine, max_tokens=1)
