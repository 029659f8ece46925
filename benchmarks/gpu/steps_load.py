"""The steps of load_mix.py: many requests at once."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.engine import Engine, grown
from benchmarks.gpu.prompts import prompt
from benchmarks.gpu.stored import stored_chunks
from benchmarks.gpu.systems import stored_bytes

SAMPLE_S = 0.05
SEGMENTS = ".kvseg"
SHARED_PASSES = 12
ROOM_S = 0.25
"""Between offers: until eviction has made room."""


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


def shared_prompts(shape: dict[str, int], vocabulary: int) -> list[list[int]]:
    """Requests on the shared prefix that no round has."""
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    return [shared + prompt(f"only-shared-{n}", shape["tail"] + n, vocabulary) for n in range(shape["requests"] // 2)]


def store_mix(engine: Engine, shape: dict[str, int]) -> dict[str, Any]:
    """The prefixes that later rounds hit, older ones first, the shared one last and whole.

    A tier that is full has no room for it at once: what is skipped meanwhile is offered again, from vLLM's own cache.
    """
    watch = DiskWatch(engine)
    for number in range(shape["others"]):
        engine.ask([prompt(f"mix-other-{number}", shape["other"], engine.vocabulary)], 1)
        engine.settle()
    shared = prompt("mix-shared", shape["shared"], engine.vocabulary)
    stored, wanted, passes = 0, 1, 0
    while stored < wanted and passes < SHARED_PASSES:
        engine.ask([shared], 1, {"kvtier_load": False})
        engine.settle()
        time.sleep(ROOM_S)
        stored, wanted = stored_chunks(engine, shared)
        passes += 1
    return {"most_on_disk": watch.close(), "shared_chunks": [stored, wanted], "passes": passes}


def shared_prefix(engine: Engine, shape: dict[str, int], answer: int) -> dict[str, Any]:
    """Nothing but requests on the shared prefix, all at once, in a process that has none of it."""
    before = engine.counters()
    answers = engine.ask(shared_prompts(shape, engine.vocabulary), answer, {"kvtier_save": False}, leads=True)
    counted = grown(before, engine.counters())
    engine.forget()
    return {"answers": answers, "counted": counted}


def mixed_rounds(engine: Engine, shape: dict[str, int], rounds: int, answer: int) -> dict[str, Any]:
    """Rounds of concurrent requests, vLLM's own prefix cache emptied between them; saves of one round still go on
    while the next one loads. Answers come with their leads (Engine.ask)."""
    watch = DiskWatch(engine)
    engine.llm.collective_rpc(inside.watch_memory)
    before = engine.counters()
    answered = []
    for number in range(rounds):
        started = time.perf_counter()
        counted = engine.counters()
        prompts = mix_prompts(number, shape, engine.vocabulary)
        answers = engine.ask(prompts, answer, leads=True)
        elapsed_s = time.perf_counter() - started
        counted = grown(counted, engine.counters())
        answered.append({"answers": answers, "elapsed_s": elapsed_s, "counted": counted})
        engine.forget()
    engine.settle()
    return {
        "rounds": answered,
        "counted": grown(before, engine.counters()),
        "most_on_disk": watch.close(),
        "memory": engine.llm.collective_rpc(inside.memory),
        "arenas": engine.llm.collective_rpc(inside.arenas),
    }


def other_order(engine: Engine, shape: dict[str, int], answer: int, rounds: int) -> list[list[dict[str, Any]]]:
    """The shared prefix alone and each round once more, the last request first: batched otherwise, and so summed."""
    answered = []
    for prompts in _parts(engine, shape, rounds):
        answered.append(engine.ask(prompts[::-1], answer, leads=True)[::-1])
        engine.forget()
    return answered


def own_hits(engine: Engine, shape: dict[str, int], answer: int, hits: list[list[int]]) -> list[list[dict[str, Any]]]:
    """The same parts once more, with hits in vLLM's own prefix cache: each request's first `hits` tokens (a list for
    each part), computed alone before, as the process that stored them did."""
    answered = []
    for prompts, n_hit in zip(_parts(engine, shape, len(hits) - 1), hits, strict=True):
        for prefix in longest([tokens[:n] for tokens, n in zip(prompts, n_hit, strict=True)]):
            engine.ask([prefix], 1)
        answered.append(engine.ask(prompts, answer, leads=True))
        engine.forget()
    return answered


def _parts(engine: Engine, shape: dict[str, int], rounds: int) -> list[list[list[int]]]:
    mixed = (mix_prompts(number, shape, engine.vocabulary) for number in range(rounds))
    return [shared_prompts(shape, engine.vocabulary), *mixed]


def longest(prefixes: list[list[int]]) -> list[list[int]]:
    """Those that are not the beginning of another one, each once; none that is empty."""
    kept: list[list[int]] = []
    for prefix in sorted(filter(None, prefixes), key=len, reverse=True):
        if all(other[: len(prefix)] != prefix for other in kept):
            kept.append(prefix)
    return kept
