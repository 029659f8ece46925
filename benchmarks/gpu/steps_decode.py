"""Step of save_cost.py: the rate of a batch that decodes while a long prompt is computed and saved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, parameters
from benchmarks.gpu.models import prompt

PROMPT_TOKENS = 256
TOKENS_MAX = 6000  # of each answer
SETTLED_TOKENS = 4  # of each answer, before the long prompt comes
POLL_S = 0.25  # between two questions whether the long prompt is durable
LONGER = 1.5  # windows last so much longer than saving took in the trial: a disk's rate varies


@dataclass(frozen=True)
class DecodeLoad:
    """batch: requests that decode; long_tokens: of the prompt that comes; limit_s: no window is longer."""

    batch: int
    long_tokens: int
    limit_s: float


def decode_windows(engine: MeasuredEngine, batch: int, long_tokens: int, pairs: int, limit_s: float) -> dict[str, Any]:
    """Measure tokens a second of a batch while a long prompt is computed and until it is durable, saved and not saved
    in turn. A trial that is not counted sets the windows' length. Each pair goes in the other order."""
    load = DecodeLoad(batch, long_tokens, limit_s)
    trial = _Window(engine, load, "trial", True).run(None)
    length_s = min(limit_s, LONGER * trial["elapsed_s"])
    counted = []
    for number in range(pairs):
        kinds = ("on", "off") if number % 2 == 0 else ("off", "on")
        counted.append({kind: _Window(engine, load, f"{number}-{kind}", kind == "on").run(length_s) for kind in kinds})
    return {"trial": trial, "window_s": length_s, "pairs": counted}


class _Window:
    """One window, from the arrival of the long prompt; all its requests are saved, or none."""

    def __init__(self, engine: MeasuredEngine, load: DecodeLoad, name: str, is_saved: bool) -> None:
        self._engine, self._load, self._name, self._is_saved = engine, load, name, is_saved
        self._llm = engine.llm.llm_engine
        self._ids = [self._add(f"decode-{n}", PROMPT_TOKENS, TOKENS_MAX)[0] for n in range(load.batch)]
        self._counts = dict.fromkeys(self._ids, 0)

    def run(self, length_s: float | None) -> dict[str, Any]:
        """Run for so long; None: until the long prompt is durable, at most the load's limit. End all requests."""
        while min(self._counts.values()) < SETTLED_TOKENS:
            self._step()
        long_id, long_tokens = self._add("long", self._load.long_tokens, 1)
        started, first = time.perf_counter(), sum(self._counts.values())
        while long_id not in self._step():
            pass
        prefilled = time.perf_counter()
        end = started + (self._load.limit_s if length_s is None else length_s)
        next_poll = prefilled if length_s is None else end
        while time.perf_counter() < end:
            self._step()
            if time.perf_counter() >= next_poll:
                stored, wanted = self._engine.stored_chunks(long_tokens)
                if stored == wanted:
                    break
                next_poll += POLL_S
        elapsed_s, total = time.perf_counter() - started, sum(self._counts.values()) - first
        chunks = self._engine.stored_chunks(long_tokens) if self._is_saved else None
        self._llm.abort_request(self._ids)
        while self._llm.has_unfinished_requests():
            self._step()
        found = {"elapsed_s": elapsed_s, "long_ttft_s": prefilled - started, "tokens": total}
        found |= {"tokens_s": total / elapsed_s, "stored_chunks": chunks, "settle_s": self._engine.settle()}
        self._engine.forget()
        return found

    def _add(self, name: str, n_tokens: int, max_tokens: int) -> tuple[str, list[int]]:
        full = f"{self._name}-{name}"
        tokens = prompt(full, n_tokens, self._engine.vocabulary)
        switches = {"kvtier_load": False} if self._is_saved else NO_TIER
        self._llm.add_request(full, {"prompt_token_ids": tokens}, parameters(max_tokens, switches))
        return full, tokens

    def _step(self) -> set[str]:
        """Run a step and return the ids of the requests that ended in it."""
        ended = set()
        for output in self._llm.step():
            if output.request_id in self._counts:
                self._counts[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                ended.add(output.request_id)
        return ended
