"""Generated traces of requests for benchmarks/eviction_policies.py: which chunks each request begins with, and when.

Sizes are in chunks of 256 tokens. Everything follows from the seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

DAY_S = 86_400.0


class Request(NamedTuple):
    """keys: of all whole chunks of the prompt and of the answer to it, in order; the last `n_new` are the answer's,
    which no lookup asks for."""

    at_s: float
    keys: tuple[int, ...]
    n_new: int


class _Keys:
    """A number for each chunk that is unlike every other."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self, n_chunks: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, n_chunks))


def zipf(rng: random.Random, n: int, exponent: float) -> Callable[[], int]:
    """Draws 0..n-1, the lower the likelier."""
    weights = list(itertools.accumulate(1 / (rank + 1) ** exponent for rank in range(n)))
    return lambda: rng.choices(range(n), cum_weights=weights)[0]


def chat(rng: random.Random, keys: _Keys, n: int) -> Iterator[Request]:
    """Conversations: each turn begins with all turns before it. Pauses are minutes, now and then hours."""
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    names = itertools.count()
    next_s = 0.0
    for _ in range(n):
        if not waiting or next_s <= waiting[0][0]:
            at_s, known = next_s, keys.take(rng.randint(1, 4))
            next_s += rng.expovariate(1 / 25.0)
        else:
            at_s, _, known = heapq.heappop(waiting)
        asked = known + keys.take(rng.randint(0, 2))
        answered = asked + keys.take(rng.randint(1, 3))
        yield Request(at_s, answered, len(answered) - len(asked))
        if rng.random() < 0.85:
            pause_s = rng.lognormvariate(4.5, 1.0) if rng.random() < 0.9 else rng.uniform(1800, 4 * 3600)
            heapq.heappush(waiting, (at_s + pause_s, next(names), answered))


def shared_prompts(rng: random.Random, keys: _Keys, n: int) -> Iterator[Request]:
    """Applications of several tenants: long system prompts of unlike popularity, each with one short question. Every
    few hours some of the prompts are replaced by new versions."""
    prompts = [keys.take(rng.randint(8, 40)) for _ in range(120)]
    draw = zipf(rng, len(prompts), 0.9)
    at_s = 0.0
    for number in range(n):
        at_s += rng.expovariate(1 / 12.0)
        if number % 400 == 399:
            for _ in range(8):
                prompts[rng.randrange(len(prompts))] = keys.take(rng.randint(8, 40))
        yield Request(at_s, prompts[draw()] + keys.take(rng.randint(1, 4)), 1)


def scans(rng: random.Random, keys: _Keys, n: int) -> Iterator[Request]:
    """Documents: most are read once and never again; a few are asked about over and over."""
    popular = [keys.take(rng.randint(10, 50)) for _ in range(60)]
    draw = zipf(rng, len(popular), 0.8)
    at_s = 0.0
    for _ in range(n):
        at_s += rng.expovariate(1 / 20.0)
        document = popular[draw()] if rng.random() < 0.4 else keys.take(rng.randint(10, 50))
        yield Request(at_s, document + keys.take(1), 1)


def mixed(rng: random.Random, keys: _Keys, n: int) -> Iterator[Request]:
    """All three at once on the same engines."""
    parts = [(chat, n // 2), (shared_prompts, n // 3), (scans, n - n // 2 - n // 3)]
    found = heapq.merge(*(part(rng, keys, count) for part, count in parts), key=lambda request: request.at_s)
    return iter(list(found))


TRACES = {"multi-turn chat": chat, "shared prompts": shared_prompts, "scan-heavy": scans, "mixed": mixed}


def trace(name: str, seed: int, n: int) -> list[Request]:
    return sorted(TRACES[name](random.Random(f"{name} {seed}"), _Keys(), n), key=lambda request: request.at_s)
