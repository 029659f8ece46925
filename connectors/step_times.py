"""How long the engine's steps take, from when they are planned. Pure: the clock is passed in.

An engine that schedules ahead plans step k+1 before step k has ended, so the time between two plans belongs to one
step or to the one before it. It is counted only within a run of steps that have a request in common (so the engine was
busy throughout) and are alike (so it does not matter which of them the time belongs to).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

ALIKE = 0.8
"""Two steps are alike when the smaller has that much of the larger one's tokens, or both are of few tokens."""
FEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Planned:
    at_s: float
    n_tokens: int
    requests: frozenset[str]


class StepTimes:
    """`report` is called with (tokens, seconds) of each step that could be timed."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report
        self._last: tuple[_Planned, ...] = ()

    def planned(self, requests: AbstractSet[str], n_tokens: int, now_s: float) -> None:
        """A step is planned that computes `n_tokens` tokens of these requests."""
        step = _Planned(now_s, n_tokens, frozenset(requests))
        if len(self._last) == 2:
            one, two = self._last
            if one.requests & two.requests & step.requests and _is_alike(one.n_tokens, two.n_tokens):
                self._report(min(one.n_tokens, two.n_tokens), step.at_s - two.at_s)
        self._last = (*self._last[-1:], step)


def _is_alike(one: int, two: int) -> bool:
    return max(one, two) <= FEW_TOKENS or min(one, two) >= ALIKE * max(one, two)
