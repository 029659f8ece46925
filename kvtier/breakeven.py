"""From how many tokens on a load is quicker than computing them: `min_load_tokens: auto`. Pure arithmetic.

    load      fixed_s + tokens x load_s_per_token        first from calibration, then from the loads that were seen
    prefill   max(step_s, tokens x prefill_s_per_token)  from the engine's own steps

A loaded request needs a step of its own after the load, so what a hit of n tokens saves is at the least
n x prefill_s_per_token - step_s; a hit is worth it when its load takes no longer than that. Until a prefill has been
measured, hits of 256 tokens and more are taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

UNMEASURED_MIN_TOKENS = 256
NEVER = 1 << 62
"""min_tokens where storage is slower than computing, whatever the length."""

PREFILL_TOKENS_MIN = 512
"""Steps of fewer tokens are bound by reading the weights: they tell what a step takes, not what a token takes."""
STEP_TOKENS_MAX = 64
WEIGHT = 0.2
"""Of a new observation in the running mean."""
STEP_S = 0.01
"""Until a small step was seen."""
SHORT_TOKENS = 256
PRIOR_SHORT_WEIGHT, PRIOR_WEIGHT_MIN = 0.01, 0.02
"""What was calibrated speaks as two loads, an endless one and, in a low voice, a short one. Loads that are seen
outweigh both, but for what they do not show: short ones tell little of a token, long ones little of the fixed part."""
UNKNOWN_LATENCY_S, UNKNOWN_READ_BYTES_S = 0.002, 1e9
FORGET_S = 60.0
"""Half of what loads told about a slow storage is forgotten in that time: when no load is worth it any more, none is
seen, and nothing would ever say that the storage has recovered."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds: of any load, and of each token of it."""

    fixed_s: float
    token_s: float

    @classmethod
    def calibrated(cls, latency_s: float | None, read_bytes_s: float | None, token_bytes: int) -> LoadCost:
        """What could not be measured is taken for slow, until loads show it."""
        return cls(latency_s or UNKNOWN_LATENCY_S, token_bytes / (read_bytes_s or UNKNOWN_READ_BYTES_S))

    def of(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.token_s


class LoadLimit(Protocol):
    """From how many tokens on a hit is loaded."""

    @property
    def min_tokens(self) -> int: ...

    def saw_load(self, tokens: int, seconds: float) -> None:
        """One load of `tokens` tokens, from asking for it to its end."""
        ...

    def saw_step(self, tokens: int, seconds: float) -> None:
        """One step of the engine that computed `tokens` tokens in all."""
        ...

    def calibrate(self, cost: LoadCost) -> None:
        """What loads should cost on an idle machine."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLimit:
    """A configured number, whatever is seen."""

    min_tokens: int

    def saw_load(self, tokens: int, seconds: float) -> None:
        pass

    def saw_step(self, tokens: int, seconds: float) -> None:
        pass

    def calibrate(self, cost: LoadCost) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Fit:
    """Weighted sums over loads of u = 256 / tokens and y = seconds / tokens; the line y = token_s + fixed_s / tokens
    through them. In seconds a token, so that long loads do not drown short ones."""

    weight: float = 0.0
    u: float = 0.0
    uu: float = 0.0
    y: float = 0.0
    uy: float = 0.0

    @classmethod
    def of(cls, cost: LoadCost) -> _Fit:
        endless = cls(1.0, 0.0, 0.0, cost.token_s, 0.0)
        return endless.plus(_Fit.load(SHORT_TOKENS, cost.of(SHORT_TOKENS)).times(PRIOR_SHORT_WEIGHT))

    @classmethod
    def load(cls, tokens: int, seconds: float) -> _Fit:
        u, y = SHORT_TOKENS / tokens, seconds / tokens
        return cls(1.0, u, u * u, y, u * y)

    def plus(self, other: _Fit) -> _Fit:
        return _Fit(self.weight + other.weight, self.u + other.u, self.uu + other.uu, self.y + other.y,
                    self.uy + other.uy)  # fmt: skip

    def times(self, factor: float) -> _Fit:
        return _Fit(self.weight * factor, self.u * factor, self.uu * factor, self.y * factor, self.uy * factor)

    def cost(self) -> LoadCost:
        """The least squares, without negative parts."""
        spread = self.weight * self.uu - self.u * self.u
        slope = (self.weight * self.uy - self.u * self.y) / spread if spread > 0 else 0.0
        token_s = (self.y - slope * self.u) / self.weight
        if slope < 0:
            slope, token_s = 0.0, self.y / self.weight
        elif token_s < 0:
            slope, token_s = self.uy / self.uu, 0.0
        return LoadCost(slope * SHORT_TOKENS, token_s)


class BreakEven:
    """Thread-safe. calibrated: what loads should cost on an idle machine; clock: seconds."""

    def __init__(self, calibrated: LoadCost, clock: Callable[[], float] = time.monotonic) -> None:
        self._prior = _Fit.of(calibrated)
        self._clock = clock
        self._seen = _Fit()
        self._seen_s = clock()
        self._token_s: float | None = None
        self._step_s = STEP_S
        self._lock = threading.Lock()

    def calibrate(self, cost: LoadCost) -> None:
        with self._lock:
            self._prior, self._seen = _Fit.of(cost), _Fit()

    def saw_step(self, tokens: int, seconds: float) -> None:
        """One step of the engine that computed `tokens` tokens in all."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            if tokens >= PREFILL_TOKENS_MIN:
                taken = seconds / tokens
                self._token_s = taken if self._token_s is None else _mean(self._token_s, taken)
            elif tokens <= STEP_TOKENS_MAX:
                self._step_s = _mean(self._step_s, seconds)

    def saw_load(self, tokens: int, seconds: float) -> None:
        """One load of `tokens` tokens, from asking for it to its end."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            self._seen = self._remembered().times(1 - WEIGHT).plus(_Fit.load(tokens, seconds))
            self._seen_s = self._clock()

    def worth_loading(self, tokens: int) -> bool:
        return tokens >= self.min_tokens

    @property
    def min_tokens(self) -> int:
        """Hits of fewer tokens are computed instead; NEVER where no length pays."""
        with self._lock:
            if self._token_s is None:
                return UNMEASURED_MIN_TOKENS
            cost = self._cost()
            gain_s = self._token_s - cost.token_s
            if gain_s <= 0:
                return NEVER
            return max(1, math.ceil(min((cost.fixed_s + self._step_s) / gain_s, NEVER)))

    def _remembered(self) -> _Fit:
        return self._seen.times(0.5 ** (max(0.0, self._clock() - self._seen_s) / FORGET_S))

    def _cost(self) -> LoadCost:
        """What loads cost now: what was seen, and what was calibrated as far as that was not seen."""
        seen = self._remembered()
        # Seen loads weigh 1 / WEIGHT together, once there were many.
        return seen.plus(self._prior.times(max(PRIOR_WEIGHT_MIN, 1 - WEIGHT * seen.weight))).cost()


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
