"""How long the engine's steps take, from when they are planned. Pure: the clock is passed in.

An engine that plans `ahead` steps before the oldest one ended plans step k + 1 + ahead as soon as step k ends, as long
as it has something to compute. That is so where steps k to k + 1 + ahead have a request in common. Step k began when
step k + ahead was planned: at once after its own plan where the engine was idle, else when the step before it ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Planned:
    at_s: float
    n_tokens: int
    requests: frozenset[str]


class StepTimes:
    """`report` is called with (tokens, seconds) of each step that could be timed. ahead: 0 where a step is planned once
    the one before it ended."""

    def __init__(self, report: Callable[[int, float], None], ahead: int = 0) -> None:
        self._report = report
        self._ahead = ahead
        self._steps: deque[_Planned] = deque(maxlen=ahead + 2)

    def planned(self, requests: AbstractSet[str], n_tokens: int, now_s: float) -> None:
        """A step is planned that computes `n_tokens` tokens of these requests."""
        self._steps.append(_Planned(now_s, n_tokens, frozenset(requests)))
        if len(self._steps) < self._ahead + 2:
            return
        oldest, newest = self._steps[0], self._steps[-1]
        if frozenset.intersection(*(step.requests for step in self._steps)):
            self._report(oldest.n_tokens, newest.at_s - self._steps[-2].at_s)

    def ended(self, request_id: str, now_s: float) -> None:
        """A request ended. Where nothing is planned ahead, so did the step that was planned last, if it was in it."""
        if not self._ahead and self._steps and request_id in self._steps[-1].requests:
            step = self._steps[-1]
            self._steps.clear()  # others may have ended with it
            self._report(step.n_tokens, now_s - step.at_s)
