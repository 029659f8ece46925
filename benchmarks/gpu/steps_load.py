"""The steps of load_mix.py and save_cost.py: many requests at once."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.engine import Engine, grown, parameters
from benchmarks.gpu.prompts import prompt
from benchmarks.gpu.systems import stored_bytes

NO_TIER = {"kvtier_load": False, "kvtier_save": False}
SAMPLE_S = 0.05
SEGMENTS = ".kvseg"
DECODE_PROMPT_TOKENS = 256
DECODE_TOKENS_MAX = 6000


class DiskWatch:
    """The most that the segments of a root took, looked at every SAMPLE_S."""

    def __init__(self, engine: Engine) -> None:
        self.most = 0
        self._folder = engine.data
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.most, stored_bytes(self._folder, SEGMENTS))

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.most = max(self.most, stored_bytes(self._folder, SEGMENTS))


def mix_prompts(round_number: int, shape: dict[str, int], vocabulary: int) -> list[list[int]]:
    """One round's requests: half on one prefix; the rest whole and partial hits of earlier ones, and new prompts.

    shape: requests; shared, other: tokens of the prefixes; others: how many prefixes were stored before; tail.
    """
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    requests = []
    for number in range(shape["requests"]):
        own = f"mix-{round_number}-{number}"
        tail = prompt(own, shape["tail"] + number, vocabulary)
        if number % 2 == 0:
            requests.append(shared + tail)
            continue
        old = prompt(f"mix-other-{(number // 2 + round_number) % shape['others']}", shape["other"], vocabulary)
        kind = number // 2 % 4
        if kind in (0, 1):
            requests.append(old + tail)
        elif kind == 2:
            requests.append(old[: shape["other"] // 2] + tail)
        else:
            requests.append(prompt(f"{own}-new", shape["other"], vocabulary))
    return requests


def store_mix(engine: Engine, shape: dict[str, int]) -> dict[str, Any]:
    """The prefixes that later rounds hit, older ones first, the shared one last."""
    watch = DiskWatch(engine)
    for number in range(shape["others"]):
        engine.ask([prompt(f"mix-other-{number}", shape["other"], engine.vocabulary)], 1)
        engine.settle()
    engine.ask([prompt("mix-shared", shape["shared"], engine.vocabulary)], 1)
    engine.settle()
    return {"most_on_disk": watch.close()}


def shared_prefix(engine: Engine, shape: dict[str, int], answer: int) -> dict[str, Any]:
    """Nothing but requests on the shared prefix, all at once, in a process that has none of it."""
    shared = prompt("mix-shared", shape["shared"], engine.vocabulary)
    requests = [shared + prompt(f"only-shared-{n}", shape["tail"] + n, engine.vocabulary)
                for n in range(shape["requests"] // 2)]  # fmt: skip
    before = engine.counters()
    answers = engine.ask(requests, answer, {"kvtier_save": False})
    counted = grown(before, engine.counters())
    engine.forget()
    return {"answers": answers, "counted": counted, "memory": engine.llm.collective_rpc(inside.memory)}


def mixed_rounds(engine: Engine, shape: dict[str, int], rounds: int, answer: int) -> dict[str, Any]:
    """Rounds of concurrent requests, vLLM's own prefix cache emptied between them; saves of one round still go on
    while the next one loads."""
    watch = DiskWatch(engine)
    before = engine.counters()
    answered = []
    for number in range(rounds):
        started = time.perf_counter()
        answers = engine.ask(mix_prompts(number, shape, engine.vocabulary), answer)
        answered.append({"answers": answers, "elapsed_s": time.perf_counter() - started})
        engine.forget()
    engine.settle()
    return {"rounds": answered, "counted": grown(before, engine.counters()), "most_on_disk": watch.close(),
            "memory": engine.llm.collective_rpc(inside.memory)}  # fmt: skip


def decode_windows(engine: Engine, batch: int, long_tokens: int, pairs: int, tail_s: float) -> list[dict[str, Any]]:
    """A batch that decodes while a long prompt is computed, which is saved or not in turn."""
    rows = []
    for number in range(pairs):
        order = (True, False) if number % 2 == 0 else (False, True)
        for is_saved in order:
            window = _DecodeWindow(engine, f"{number}-{is_saved}", is_saved, batch)
            rows.append({"saving": is_saved} | window.run(long_tokens, tail_s))
            rows[-1]["settle_s"] = engine.settle()
            engine.forget()
    return rows


class _DecodeWindow:
    """One window: from the arrival of the long prompt to `tail_s` after its first token."""

    def __init__(self, engine: Engine, name: str, is_saved: bool, batch: int) -> None:
        self._engine = engine
        self._name = name
        self._switches = {"kvtier_load": False} if is_saved else NO_TIER
        self._ids = [self._add(f"decode-{n}", DECODE_PROMPT_TOKENS, DECODE_TOKENS_MAX) for n in range(batch)]
        self._counts = dict.fromkeys(self._ids, 0)

    def run(self, long_tokens: int, tail_s: float) -> dict[str, Any]:
        while min(self._counts.values()) < 4:
            self._step()
        long_id = self._add("long", long_tokens, 1)
        started, first = time.perf_counter(), sum(self._counts.values())
        while long_id not in self._step():
            pass
        prefilled = time.perf_counter()
        during = sum(self._counts.values()) - first
        while time.perf_counter() < prefilled + tail_s:
            self._step()
        ended, total = time.perf_counter(), sum(self._counts.values()) - first
        self._engine.llm.llm_engine.abort_request(self._ids)
        while self._engine.llm.llm_engine.has_unfinished_requests():
            self._step()
        return {
            "long_ttft_s": prefilled - started, "tokens_s": total / (ended - started),
            "tokens_s_during": during / (prefilled - started), "tokens_s_after": (total - during) / (ended - prefilled),
        }  # fmt: skip

    def _add(self, name: str, n_tokens: int, max_tokens: int) -> str:
        full = f"{self._name}-{name}"
        tokens = prompt(full, n_tokens, self._engine.vocabulary)
        parameters_ = parameters(max_tokens, self._switches)
        self._engine.llm.llm_engine.add_request(full, {"prompt_token_ids": tokens}, parameters_)
        return full

    def _step(self) -> set[str]:
        """Runs a step; the requests that ended in it."""
        ended = set()
        for output in self._engine.llm.llm_engine.step():
            if output.request_id in self._counts:
                self._counts[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                ended.add(output.request_id)
        return ended
