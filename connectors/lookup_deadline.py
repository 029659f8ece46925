"""Deadline of lookups in a remote index: when a request stops waiting for its answer and computes its prompt."""

import math

from kvtier.connectors.tracked_request import IndexQuestion

# Longest wait for a lookup while the index answers others, in time-outs: a burst of requests waits for its turn.
TURNS_MAX = 40


class LookupDeadline:
    """Time counts from the question, or from when the index last answered any other, if that is later.

    A burst of lookups stands in a queue, which is no fault of the index. Nor is it one that the engine takes no answer
    in a step of seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered_s = -math.inf  # until when the index is known to answer
        self._has_answered = self._is_new_step = False

    def ask(self, now_s: float) -> None:
        """Note that a request asks. The first one of a step that follows answers sees an index that answers."""
        if self._is_new_step and self._has_answered:
            self._answered_s, self._has_answered = now_s, False
        self._is_new_step = False

    def answered(self, now_s: float) -> None:
        """Note that a lookup was answered."""
        self._answered_s, self._has_answered = now_s, True

    def end_step(self) -> None:
        """Note that the engine computes now, and asks again in its next step."""
        self._is_new_step = True

    def is_over(self, question: IndexQuestion, now_s: float) -> bool:
        """Return whether the question waited too long."""
        waited_s = now_s - question.since_s
        silent_s = min(waited_s, now_s - self._answered_s)
        return max(silent_s, waited_s / TURNS_MAX) >= self._timeout_s
