"""The step of where_time_goes.py: when what began and ended between a request's arrival and its first token."""

from __future__ import annotations

import functools
import gc
import importlib
import threading
import time
from contextlib import suppress
from pathlib import Path
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

SHOWN_MS = 0.2


class Timeline:
    """Every call of what is watched: name, thread, begin and end in seconds. Methods are replaced for good."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float, float]] = []
        for module, kind, methods in WATCHED:
            owner = getattr(importlib.import_module(module), kind)
            for method in methods:
                if hasattr(owner, method):
                    setattr(owner, method, self._watched(getattr(owner, method), f"{kind}.{method}"))
        self._collecting_s = 0.0
        gc.callbacks.append(self._collects)

    def _watched(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.calls.append((name, threading.current_thread().name, began, time.perf_counter()))

        return call

    def _collects(self, phase: str, about: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collecting_s = now
        else:
            name = f"garbage of generation {about['generation']}"
            self.calls.append((name, threading.current_thread().name, self._collecting_s, now))


def thread_times() -> dict[int, tuple[str, int]]:
    """Of each thread of this process: its name, and the nanoseconds for which it has run (Linux, schedstat)."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            number, ran_ns = int(folder.name), int((folder / "schedstat").read_text().split()[0])
            found[number] = (names.get(number) or (folder / "comm").read_text().strip(), ran_ns)
    return found


def busy_ms(before: dict[int, tuple[str, int]], after: dict[int, tuple[str, int]]) -> dict[str, float]:
    """Milliseconds for which the threads of each name ran in between; those that hardly did are left out."""
    grown: dict[str, float] = {}
    for number, (name, ran_ns) in after.items():
        grown[name] = grown.get(name, 0.0) + 1e-6 * (ran_ns - before.get(number, ("", 0))[1])
    return {name: round(ran_ms, 1) for name, ran_ms in grown.items() if ran_ms >= SHOWN_MS}


def timelines(engine: Engine, lengths: list[int], count: int, again: int) -> list[dict[str, Any]]:
    """Each prompt as it comes from storage, and `again` times from vLLM's own prefix cache."""
    timeline = Timeline()
    rows = []
    for n_tokens in lengths:
        for number in range(count):
            tokens = timed_prompt(n_tokens, number, engine.vocabulary)
            for kind in ("reloaded", *["own hit"] * again):
                timeline.calls.clear()
                before = thread_times()
                asked = time.perf_counter()
                row = engine.first_token(tokens)
                busy = busy_ms(before, thread_times())
                calls = [(name, thread, began - asked, ended - asked) for name, thread, began, ended in timeline.calls]
                rows.append(
                    row
                    | {
                        "kind": kind,
                        "number": number,
                        "busy_ms": busy,
                        "calls": sorted(calls, key=lambda call: call[2]),
                    }
                )
    return rows
