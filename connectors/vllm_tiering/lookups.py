"""Lookups of a scheduler that must not wait: asked key by key within a step, sent as one question at its end.

Who asks hears None until an answer has come, then whether the key is there, for as long as a request holds the key.
Everything here is the scheduler's thread's, but for the question itself, whose answer comes through a queue.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.runtime.threads import Jobs

Exists = Callable[[Sequence[bytes]], list[bool]]
"""Answers for all keys at once; runs as a job, and may wait. A lookup that fails is a miss, so it must not raise."""


@dataclass(slots=True)
class _KeyLookup:
    """is_there: None while nothing has answered. requests: who holds it."""

    since_s: float
    is_there: bool | None = None
    requests: set[str] = field(default_factory=set)


class StepLookups:
    def __init__(
        self, exists: Exists, jobs: Jobs, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout_s: a key that has no answer by then is a miss (I10)."""
        self._exists = exists
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._clock = clock
        self._questions: dict[bytes, _KeyLookup] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._unsent: list[bytes] = []
        self._answers: queue.SimpleQueue[tuple[list[bytes], list[bool]]] = queue.SimpleQueue()
        self._is_new_step = True

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Whether the key is there; None: not known yet, ask again in a later step."""
        if self._is_new_step:  # within a step answers do not change
            self._take_answers()
            self._is_new_step = False
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = _KeyLookup(self._clock())
            self._unsent.append(key)
        question.requests.add(request_id)
        self._of_request.setdefault(request_id, set()).add(key)
        if question.is_there is None and self._clock() - question.since_s > self._timeout_s:
            question.is_there = False
        return question.is_there

    def end_step(self) -> None:
        """Sends what is new, in one question; what finds no room in the queue, at the end of a later step."""
        self._is_new_step = True
        keys, self._unsent = [key for key in self._unsent if key in self._questions], []
        if keys and not self._jobs.submit(partial(self._answer, keys)):
            self._unsent = keys

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        """They are not there, or not good: requests that hold them are not sent there again (I11)."""
        for key in keys:
            if key in self._questions:
                self._questions[key].is_there = False

    def mark_all_missing(self) -> None:
        self.mark_missing(self._questions)

    def forget(self, request_id: str) -> None:
        """It has ended."""
        for key in self._of_request.pop(request_id, ()):
            question = self._questions[key]
            question.requests.discard(request_id)
            if not question.requests:
                del self._questions[key]

    def _take_answers(self) -> None:
        while not self._answers.empty():
            for key, is_there in zip(*self._answers.get(), strict=True):
                question = self._questions.get(key)
                if question is not None and question.is_there is None:
                    question.is_there = is_there

    def _answer(self, keys: list[bytes]) -> None:
        self._answers.put((keys, self._exists(keys)))
