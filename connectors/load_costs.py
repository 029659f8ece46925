"""Load costs: times of the engine's steps and of loads, which set the number of tokens from which on a hit is loaded.

Times of steps follow from the times at which steps are planned. An engine that plans `ahead` steps in advance plans
step k + 1 + ahead as soon as step k ends, if all steps from k to k + 1 + ahead have a request in common: then it is not
idle in between. Step k began when step k + ahead was planned, because the step before it ended then. But if the engine
was idle, step k began when it was planned itself: an idle engine plans step k + ahead only after the launch of step k,
which may take as long as the step. (Counted from there, the first prefill of an engine on an H100 seemed to take no
time, and hits were computed.)
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.scheduler.cost_history import CostHistory
from kvtier.scheduler.load_threshold import NEVER, LoadCost, LoadThreshold

log = logging.getLogger("kvtier")

LONG_TOKENS = 4096  # a hit that most machines would load, tokens
LOG_INTERVAL_S = 3600.0  # interval between two warnings, seconds


class LoadCosts:
    """Running costs of one engine. Called from the engine's scheduler thread only."""

    def __init__(
        self, limit: LoadThreshold, kept: CostHistory | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._kept = kept
        self._clock = clock
        self._logged_s = -math.inf
        if kept is not None and kept.expected is not None:
            limit.expect(kept.expected)
            self._log()

    def saw_step(self, tokens: int, seconds: float) -> float | None:
        """Record one step of the engine that computed `tokens` tokens. See LoadThreshold.saw_step."""
        token_s = self.limit.saw_step(tokens, seconds)
        if token_s is not None:
            self._changed()
        return token_s

    def saw_load(self, tokens: int, seconds: float) -> None:
        """Record one rank's part of a load, from its submission to its end."""
        self.limit.saw_load(tokens, seconds)

    def calibrate(self, cost: LoadCost) -> None:
        """Take the cost of loads on an idle machine, as the workers measured it."""
        self.limit.calibrate(cost)
        self._changed()

    def _changed(self) -> None:
        if self._kept is not None:
            self._kept.latest = self.limit.costs()
        self._log()

    def _log(self) -> None:
        shortest, now = self.limit.min_tokens, self._clock()
        if not self.limit.is_measured or shortest <= LONG_TOKENS or now < self._logged_s + LOG_INTERVAL_S:
            return
        self._logged_s = now
        which = "hits" if shortest >= NEVER else f"hits of fewer than {shortest:,} tokens"
        log.warning(
            "%s are computed and not loaded, because computing was measured to be quicker here; to load them "
            "nevertheless, set min_load_tokens",
            which,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    at_s: float
    n_tokens: int
    requests: frozenset[str]
    was_idle: bool


class StepTimer:
    """Step timer: calls `report` with (tokens, seconds) of each step that could be timed. ahead: 0 if a step is planned
    once the one before it ended."""

    def __init__(self, report: Callable[[int, float], None], ahead: int = 0) -> None:
        self._report = report
        self._ahead = ahead
        self._steps: deque[_Planned] = deque(maxlen=ahead + 2)
        self._running: set[str] = set()

    def planned(self, requests: AbstractSet[str], n_tokens: int, now_s: float) -> None:
        """Note a planned step that computes `n_tokens` tokens of these requests."""
        self._steps.append(_Planned(now_s, n_tokens, frozenset(requests), not self._running))
        self._running |= requests
        if len(self._steps) < self._ahead + 2:
            return
        oldest, newest = self._steps[0], self._steps[-1]
        if frozenset.intersection(*(step.requests for step in self._steps)):
            began_s = oldest.at_s if oldest.was_idle else self._steps[-2].at_s
            self._report(oldest.n_tokens, newest.at_s - began_s)

    def ended(self, request_id: str, now_s: float) -> None:
        """Note the end of a request. If nothing is planned ahead, the last planned step ended too, if it had the
        request."""
        self._running.discard(request_id)
        if not self._ahead and self._steps and request_id in self._steps[-1].requests:
            step = self._steps[-1]
            self._steps.clear()  # others may have ended with it
            self._report(step.n_tokens, now_s - step.at_s)
