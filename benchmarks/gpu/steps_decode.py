"""The step of save_cost.py that asks what saving takes from a batch that decodes meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.engine import Engine, parameters
from benchmarks.gpu.prompts import prompt
from benchmarks.gpu.stored import stored_chunks

NO_TIER = {"kvtier_load": False, "kvtier_save": False}
PROMPT_TOKENS = 256
TOKENS_MAX = 6000
SETTLED_TOKENS = 4
"""The batch decodes once each of its requests has so many tokens of answer."""
LOOK_S = 0.25
LONGER = 1.5
"""Windows last so much longer than saving went on in the trial: a disk's rate is not the same each time."""


@dataclass(frozen=True)
class Load:
    """batch: requests that decode; long_tokens: of the prompt that comes; limit_s: no window is longer."""

    batch: int
    long_tokens: int
    limit_s: float


def decode_windows(engine: Engine, batch: int, long_tokens: int, pairs: int, limit_s: float) -> dict[str, Any]:
    """Tokens a second of a batch while a long prompt is computed and until it is durable, saved or not in turn.

    A trial that is not counted finds out how long saving goes on; all windows are then half as long again.
    Each pair goes in the other order.
    """
    load = Load(batch, long_tokens, limit_s)
    trial = _Window(engine, load, "trial", True).run(None)
    length_s = min(limit_s, LONGER * trial["elapsed_s"])
    counted = []
    for number in range(pairs):
        pair: dict[str, Any] = {}
        for kind in ("on", "off") if number % 2 == 0 else ("off", "on"):
            pair[kind] = _Window(engine, load, f"{number}-{kind}", kind == "on").run(length_s)
        counted.append(pair)
    return {"trial": trial, "window_s": length_s, "pairs": counted}


class _Window:
    """One window, from the arrival of the long prompt on; all requests are of the same kind, saved or not."""

    def __init__(self, engine: Engine, load: Load, name: str, is_saved: bool) -> None:
        self._engine = engine
        self._load = load
        self._name = name
        self._switches = {"kvtier_load": False} if is_saved else NO_TIER
        self._is_saved = is_saved
        self._ids = [self._add(f"decode-{n}", PROMPT_TOKENS, TOKENS_MAX)[0] for n in range(load.batch)]
        self._counts = dict.fromkeys(self._ids, 0)

    def run(self, length_s: float | None) -> dict[str, Any]:
        """Without a length: until the long prompt is durable, at most the load's limit. Ends all requests."""
        while min(self._counts.values()) < SETTLED_TOKENS:
            self._step()
        long_id, long_tokens = self._add("long", self._load.long_tokens, 1)
        started, first = time.perf_counter(), self._generated()
        while long_id not in self._step():
            pass
        prefilled, during = time.perf_counter(), self._generated() - first
        end = started + (self._load.limit_s if length_s is None else length_s)
        next_look = prefilled if length_s is None else end
        while time.perf_counter() < end:
            self._step()
            if time.perf_counter() >= next_look:
                if self._is_durable(long_tokens):
                    break
                next_look += LOOK_S
        ended, total = time.perf_counter(), self._generated() - first
        stored = stored_chunks(self._engine, long_tokens) if self._is_saved else None
        self._engine.llm.llm_engine.abort_request(self._ids)
        while self._engine.llm.llm_engine.has_unfinished_requests():
            self._step()
        found = {
            "elapsed_s": ended - started,
            "long_ttft_s": prefilled - started,
            "tokens": total,
            "tokens_s": total / (ended - started),
            "tokens_during": during,
            "stored_chunks": stored,
            "tokens_s_after": (total - during) / (ended - prefilled) if ended > prefilled else None,
        }
        found["settle_s"] = self._engine.settle()
        self._engine.forget()
        return found

    def _is_durable(self, tokens: list[int]) -> bool:
        stored, wanted = stored_chunks(self._engine, tokens)
        return stored == wanted

    def _generated(self) -> int:
        return sum(self._counts.values())

    def _add(self, name: str, n_tokens: int, max_tokens: int) -> tuple[str, list[int]]:
        full = f"{self._name}-{name}"
        tokens = prompt(full, n_tokens, self._engine.vocabulary)
        parameters_ = parameters(max_tokens, self._switches)
        self._engine.llm.llm_engine.add_request(full, {"prompt_token_ids": tokens}, parameters_)
        return full, tokens

    def _step(self) -> set[str]:
        """Runs a step; the requests that ended in it."""
        ended = set()
        for output in self._engine.llm.llm_engine.step():
            if output.request_id in self._counts:
                self._counts[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                ended.add(output.request_id)
        return ended
