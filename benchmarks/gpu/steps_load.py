"""Steps of load_mix.py: many requests at once."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.engine import MeasuredEngine, grown
from benchmarks.gpu.models import prompt
from benchmarks.gpu.sampler import Sampler
from benchmarks.gpu.systems import stored_bytes

SAMPLE_S = 0.05
SEGMENTS = ".kvseg"
SHARED_PASSES = 12  # at most, until the shared prefix is stored whole
ROOM_S = 0.25  # between offers, until eviction has made room

Prompts = list[list[int]]
Shape = dict[str, int]  # requests; shared, other: tokens of the prefixes; others: how many; tail: tokens behind them


class UsageWatch:
    """Maxima of what a root's segments take on disk and of this process's memory, sampled every SAMPLE_S.

    Memory is sampled apart, because segments on tmpfs that kvtier pins count as resident too.
    """

    def __init__(self, engine: MeasuredEngine) -> None:
        self._folder = engine.data
        self._maxima = {"disk": 0, "own": 0, "mapped": 0}
        self._sampler = Sampler(self._sample, SAMPLE_S)

    def close(self) -> dict[str, int]:
        self._sampler.close()
        return self._maxima

    def _sample(self) -> None:
        now = (stored_bytes(self._folder, SEGMENTS), *inside.resident())
        for name, value in zip(self._maxima, now, strict=True):
            self._maxima[name] = max(self._maxima[name], value)


def mix_prompts(round_number: int, shape: Shape, vocabulary: int) -> Prompts:
    """Return one round's requests: half on one prefix; the rest whole and partial hits of earlier ones, and new."""
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    requests = []
    for number in range(shape["requests"]):
        own = f"mix-{round_number}-{number}"
        tail = prompt(own, shape["tail"] + number, vocabulary)
        old = prompt(f"mix-other-{(number // 2 + round_number) % shape['others']}", shape["other"], vocabulary)
        if number % 2 == 0:
            requests.append(shared + tail)
        elif (kind := number // 2 % 4) < 2:
            requests.append(old + tail)
        elif kind == 2:
            requests.append(old[: shape["other"] // 2] + tail)
        else:
            requests.append(prompt(f"{own}-new", shape["other"], vocabulary))
    return requests


def shared_prompts(shape: Shape, vocabulary: int) -> Prompts:
    """Return requests on the shared prefix that no round has."""
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    return [shared + prompt(f"only-shared-{n}", shape["tail"] + n, vocabulary) for n in range(shape["requests"] // 2)]


def store_mix(engine: MeasuredEngine, shape: Shape) -> dict[str, Any]:
    """Store the prefixes that later rounds hit, the shared one last and whole.

    A full tier has no room for it at once: what is skipped is offered again, from vLLM's own cache.
    """
    watch = UsageWatch(engine)
    for number in range(shape["others"]):
        engine.ask([prompt(f"mix-other-{number}", shape["other"], engine.vocabulary)], 1)
        engine.settle()
    shared = prompt("mix-shared", shape["shared"], engine.vocabulary)
    stored, wanted, passes = 0, 1, 0
    while stored < wanted and passes < SHARED_PASSES:
        engine.ask([shared], 1, {"kvtier_load": False})
        engine.settle()
        time.sleep(ROOM_S)
        stored, wanted = engine.stored_chunks(shared)
        passes += 1
    return {"most_on_disk": watch.close()["disk"], "shared_chunks": [stored, wanted], "passes": passes}


def shared_prefix(engine: MeasuredEngine, shape: Shape, answer: int) -> dict[str, Any]:
    """Ask only requests on the shared prefix, all at once, in a process that has none of it."""
    before = engine.counters()
    answers = engine.ask(shared_prompts(shape, engine.vocabulary), answer, {"kvtier_save": False}, leads=True)
    counted = grown(before, engine.counters())
    engine.forget()
    return {"answers": answers, "counted": counted}


def mixed_rounds(engine: MeasuredEngine, shape: Shape, rounds: int, answer: int) -> dict[str, Any]:
    """Ask rounds of concurrent requests, with vLLM's own prefix cache emptied between them.

    Saves of one round continue while the next one loads. Answers come with their leads (MeasuredEngine.ask).
    """
    watch, before, answered = UsageWatch(engine), engine.counters(), []
    for number in range(rounds):
        started, counted = time.perf_counter(), engine.counters()
        answers = engine.ask(mix_prompts(number, shape, engine.vocabulary), answer, leads=True)
        elapsed_s = time.perf_counter() - started
        answered.append({"answers": answers, "elapsed_s": elapsed_s, "counted": grown(counted, engine.counters())})
        engine.forget()
    engine.settle()
    maxima = watch.close()
    device_used = sum(engine.llm.collective_rpc(inside.device_used))
    return {
        "rounds": answered,
        "counted": grown(before, engine.counters()),
        "most_on_disk": maxima["disk"],
        "memory": {"device_used": device_used, "own_max": maxima["own"], "mapped_max": maxima["mapped"]},
        "arenas": engine.llm.collective_rpc(inside.arenas)[0],
    }


def other_order(engine: MeasuredEngine, shape: Shape, answer: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Ask the shared prefix alone and each round again, the last request first: batched and so summed differently."""
    answered = []
    mixed = [mix_prompts(number, shape, engine.vocabulary) for number in range(rounds)]
    for prompts in (shared_prompts(shape, engine.vocabulary), *mixed):
        answered.append(engine.ask(prompts[::-1], answer, leads=True)[::-1])
        engine.forget()
    return answered
