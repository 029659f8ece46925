"""Lookup deadline: limits the wait of a request for a remote index. After it the request computes its prompt."""

import math

from kvtier.connectors.tracked_request import IndexQuestion

# Longest wait for a lookup while the index answers others, in timeouts: the lookups of a burst are answered in turn.
TURNS_MAX = 40


class LookupDeadline:
    """Deadline of all lookups. Time counts from the question, or from the last answer to any other, if that is later.

    So a burst of lookups that waits in a queue does not count as a fault of the index. Neither does a long step, in
    which the engine takes no answers.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered_s = -math.inf  # time at which the index last answered, as far as the engine knows
        self._has_answered = self._is_new_step = False

    def ask(self, now_s: float) -> None:
        """Note that a request asks. If there were answers since the last step began, the index counts as answering
        now."""
        if self._is_new_step and self._has_answered:
            self._answered_s, self._has_answered = now_s, False
        self._is_new_step = False

    def answered(self, now_s: float) -> None:
        """Note that a lookup was answered."""
        self._answered_s, self._has_answered = now_s, True

    def end_step(self) -> None:
        """Note that the engine computes, and asks again in its next step."""
        self._is_new_step = True

    def is_over(self, question: IndexQuestion, now_s: float) -> bool:
        """Return True if the question has waited too long."""
        waited_s = now_s - question.since_s
        silent_s = min(waited_s, now_s - self._answered_s)
        return max(silent_s, waited_s / TURNS_MAX) >= self._timeout_s
