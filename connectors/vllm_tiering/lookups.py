"""StepLookups: lookups of a scheduler that must not wait, collected key by key in a step and sent in one batch at its
end.

A key is unknown (None) until an answer arrives, then present or absent for as long as a request holds it. All state
belongs to the scheduler's thread; answers arrive through a queue.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier.runtime.threads import ThreadJobs

# Answers for all keys at once, as a job that may wait. It must not raise: a lookup that fails is a miss.
Exists = Callable[[Sequence[bytes]], list[bool]]


@dataclass(slots=True)
class _KeyLookup:
    """is_there: None while unanswered. requests: ids of those that hold the key."""

    since_s: float
    is_there: bool | None = None
    requests: set[str] = field(default_factory=set)


class StepLookups:
    """Key lookups by step. Called from the scheduler's thread only."""

    def __init__(
        self, exists: Exists, jobs: ThreadJobs, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the lookup function. timeout_s: a key without an answer by then is a miss (I10)."""
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
        """Return True if the key is present; None: unknown, ask again in a later step."""
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
        """Send the new keys in one batch; if the queue is full, at the end of a later step."""
        self._is_new_step = True
        keys, self._unsent = [key for key in self._unsent if key in self._questions], []
        if keys and not self._jobs.submit(partial(self._answer, keys)):
            self._unsent = keys

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        """Mark keys as absent or corrupt: requests that hold them do not load them again (I11)."""
        for key in keys:
            if key in self._questions:
                self._questions[key].is_there = False

    def mark_all_missing(self) -> None:
        self.mark_missing(self._questions)

    def forget(self, request_id: str) -> None:
        """Drop an ended request."""
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
