"""Lookups of the scheduler: in place where the index is on this machine, else on threads beside the scheduler's.

A remote index answers within milliseconds, or within its timeouts. The scheduler's thread waits for the former, a
moment at most, and asks again in its next step otherwise. Once an answer took longer, it waits for none until one comes
quickly again: an index that is slow costs every new request its deadline, but no running one anything.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from kvtier.errors import IndexUnavailable
from kvtier.index.base import Index
from kvtier.runtime.threads import Jobs

WAIT_S = 0.002
"""A step of an engine takes ten times as long; a lookup over a network a fraction of it."""
QUESTIONS_MAX = 1024
ANSWER_KEPT_S = 30.0
"""A request comes back for its answer when the engine gets to it: after a step of seconds, or after others' prefills.
Who asks later than this is another request of that name."""

Clock = Callable[[], float]


class Found(NamedTuple):
    """The entries of the longest stored prefix. is_answer: the index said so; else it does not answer."""

    entries: list[bytes]
    took_s: float
    is_answer: bool = True


class Lookups(Protocol):
    def resolve(self, keys: Sequence[bytes], asker: str = "") -> Found | None:
        """None: ask again in a moment, with the same keys. asker: the request, for what others were told when they
        asked the same may be old: they gave up, or ended, before it came."""
        ...

    def close(self) -> None: ...


class InPlace:
    """On the thread that asks."""

    def __init__(self, index: Index, clock: Clock = time.perf_counter) -> None:
        self._index = index
        self._clock = clock

    def resolve(self, keys: Sequence[bytes], asker: str = "") -> Found:
        started_s = self._clock()
        try:
            return Found(self._index.resolve(keys), self._clock() - started_s)
        except IndexUnavailable:
            return Found([], self._clock() - started_s, is_answer=False)

    def close(self) -> None:
        self._index.close()


@dataclass(slots=True, eq=False)
class _Question:
    keys: tuple[bytes, ...]
    asked_s: float
    found: Found | None = None
    answered_s: float = 0.0
    is_answered: threading.Event = field(default_factory=threading.Event)


class InBackground:
    """On the threads of `jobs`. `resolve` is called from one thread; it waits for WAIT_S at most."""

    def __init__(self, index: Index, jobs: Jobs, clock: Clock = time.perf_counter) -> None:
        self._index = index
        self._in_place = InPlace(index, clock)
        self._jobs = jobs
        self._clock = clock
        self._questions: OrderedDict[tuple[str, bytes, bytes], _Question] = OrderedDict()
        self._is_quick = True

    def resolve(self, keys: Sequence[bytes], asker: str = "") -> Found | None:
        name = (asker, keys[0], keys[-1])  # keys are chained: the last one stands for all before it
        question = self._questions.get(name)
        if question is None or self._is_old(question):
            question = _Question(tuple(keys), self._clock())
            if not self._jobs.submit(partial(self._answer, question)):
                return None  # a full queue is no answer of the index: the request asks again
            self._questions[name] = question
            self._questions.move_to_end(name)
            self._forget_some()
            if self._is_quick and not question.is_answered.wait(WAIT_S):
                self._is_quick = False
        found = question.found  # once: it may come between two looks, and would be given twice
        if found is not None:
            self._questions.pop(name, None)
        return found

    def _forget_some(self) -> None:
        """Of those that nobody came back for: their requests ended, or gave up."""
        while len(self._questions) > QUESTIONS_MAX or self._is_old(next(iter(self._questions.values()))):
            self._questions.popitem(last=False)

    def _is_old(self, question: _Question) -> bool:
        return question.is_answered.is_set() and self._clock() - question.answered_s > ANSWER_KEPT_S

    def _answer(self, question: _Question) -> None:
        try:
            found = self._in_place.resolve(question.keys)
        except BaseException:
            question.answered_s = self._clock()
            question.found = Found([], self._clock() - question.asked_s, is_answer=False)
            question.is_answered.set()
            raise
        question.answered_s = self._clock()
        question.found = found._replace(took_s=question.answered_s - question.asked_s)
        self._is_quick = question.found.took_s <= WAIT_S
        question.is_answered.set()

    def close(self) -> None:
        self._jobs.close()
        self._index.close()
