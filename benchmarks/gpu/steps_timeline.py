"""The step of where_time_goes.py: when what began and ended between a request's arrival and its first token."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.prompts import timed_prompt

WATCHED = (
    ("vllm.v1.engine.llm_engine", "LLMEngine", ("add_request", "step")),
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("schedule", "update_from_output")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("execute_model", "sample_tokens")),
    ("kvtier.connectors.vllm", "KVTierConnector", (
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv",
        "wait_for_save", "get_finished",
    )),
    ("kvtier.loads", "Loader", ("load", "_run", "take_done")),
    ("kvtier.load_walk", "LoadWalk", ("_read_ahead", "_complete", "_scatter", "land")),
    ("kvtier.fetch", "Fetcher", ("check",)),
)  # fmt: skip


class Timeline:
    """Every call of what is watched: name, thread, begin and end in seconds. Methods are replaced for good."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float, float]] = []
        for module, kind, methods in WATCHED:
            owner = getattr(importlib.import_module(module), kind)
            for method in methods:
                if hasattr(owner, method):
                    setattr(owner, method, self._watched(getattr(owner, method), f"{kind}.{method}"))

    def _watched(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.calls.append((name, threading.current_thread().name, began, time.perf_counter()))

        return call


def timelines(engine: Engine, lengths: list[int], count: int, again: int) -> list[dict[str, Any]]:
    """Each prompt as it comes from storage, and `again` times from vLLM's own prefix cache."""
    timeline = Timeline()
    rows = []
    for n_tokens in lengths:
        for number in range(count):
            tokens = timed_prompt(n_tokens, number, engine.vocabulary)
            for kind in ("reloaded", *["own hit"] * again):
                timeline.calls.clear()
                asked = time.perf_counter()
                row = engine.first_token(tokens)
                calls = [(name, thread, began - asked, ended - asked) for name, thread, began, ended in timeline.calls]
                rows.append(row | {"kind": kind, "number": number, "calls": sorted(calls, key=lambda call: call[2])})
    return rows
