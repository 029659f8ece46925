"""From how many tokens on a load is quicker than computing them: `min_load_tokens: auto`. Pure arithmetic.

    load      fixed_s + tokens x load_s_per_token        first from calibration, then from the loads that were seen
    prefill   max(step_s, tokens x prefill_s_per_token)  from the engine's own steps

A loaded request needs a step of its own after the load, so what a hit of n tokens saves is at the least
n x prefill_s_per_token - step_s; a hit is worth it when its load takes no longer than that. Until a prefill has been
measured, what an engine like this one saw before counts (`kept_costs`); without that, hits of 256 tokens and more are
taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
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
FIXED_SPREAD_S, TOKEN_SPREAD_S = 0.005, 1e-6
"""How far off what was calibrated may well be, where it is less than that: it knows nothing of a load's way through the
engine. Decides to which part of its cost a load's delay is put down, until both short and long ones were seen."""
PRIOR_WEIGHT, PRIOR_WEIGHT_MIN = 4.0, 0.02
"""Of what was calibrated against loads that were seen: at first four of them, in the end a fiftieth of one."""
FORGET_S = 60.0
"""Half of what loads told about a slow storage is forgotten in that time: when no load is worth it any more, none is
seen, and nothing would ever say that the storage has recovered."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds: of any load, and of each token of it."""

    fixed_s: float
    token_s: float

    def of(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.token_s


UNCALIBRATED = LoadCost(0.002, 0.0)
"""Until the storage was measured, or loads were seen."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that computing a token takes, and what a load should cost on an idle machine."""

    prefill_token_s: float
    load: LoadCost


class LoadLimit(Protocol):
    """From how many tokens on a hit is loaded."""

    @property
    def min_tokens(self) -> int: ...

    @property
    def is_measured(self) -> bool:
        """Whether it comes of what was seen; else somebody has set it."""
        ...

    def saw_load(self, tokens: int, seconds: float) -> None:
        """One load of `tokens` tokens, from asking for it to its end."""
        ...

    def saw_step(self, tokens: int, seconds: float) -> None:
        """One step of the engine that computed `tokens` tokens in all."""
        ...

    def calibrate(self, cost: LoadCost) -> None:
        """What loads should cost on an idle machine."""
        ...

    def expect(self, costs: Costs) -> None:
        """What an engine like this one saw: it counts until this one has measured."""
        ...

    def costs(self) -> Costs | None:
        """What the next engine like this one may expect; None before both were measured."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLimit:
    """A configured number, whatever is seen."""

    min_tokens: int

    @property
    def is_measured(self) -> bool:
        return False

    def saw_load(self, tokens: int, seconds: float) -> None:
        pass

    def saw_step(self, tokens: int, seconds: float) -> None:
        pass

    def calibrate(self, cost: LoadCost) -> None:
        pass

    def expect(self, costs: Costs) -> None:
        pass

    def costs(self) -> Costs | None:
        return None


@dataclass(frozen=True, slots=True)
class _Fit:
    """Weighted sums over loads, of how their cost depends on both parts of `LoadCost`: a least-squares fit.

    A load of n tokens is a row u x + v z = t, in units of the spreads: u and v are the parts' shares, and t is what it
    took more than was calibrated. Rows are seconds a token, so that long loads do not drown short ones.
    """

    weight: float = 0.0
    uu: float = 0.0
    uv: float = 0.0
    vv: float = 0.0
    ut: float = 0.0
    vt: float = 0.0

    def plus(self, u: float, v: float, t: float) -> _Fit:
        return _Fit(
            self.weight + 1, self.uu + u * u, self.uv + u * v, self.vv + v * v, self.ut + u * t, self.vt + v * t
        )

    def times(self, factor: float) -> _Fit:
        return _Fit(*(factor * value for value in astuple(self)))

    def solve(self) -> tuple[float, float]:
        """(x, z), held near 0 as far as the loads do not tell."""
        # Loads weigh 1 / WEIGHT together, once there were many.
        held = max(PRIOR_WEIGHT_MIN, PRIOR_WEIGHT * (1 - WEIGHT * self.weight))
        uu, vv = self.uu + held, self.vv + held
        scale = uu * vv - self.uv * self.uv
        return (self.ut * vv - self.vt * self.uv) / scale, (self.vt * uu - self.ut * self.uv) / scale


class BreakEven:
    """Thread-safe. calibrated: what loads should cost on an idle machine; clock: seconds."""

    def __init__(self, calibrated: LoadCost = UNCALIBRATED, clock: Callable[[], float] = time.monotonic) -> None:
        self._prior = calibrated
        self._clock = clock
        self._seen = _Fit()
        self._seen_s = clock()
        self._token_s: float | None = None
        self._step_s = STEP_S
        self._expected_token_s: float | None = None
        self._is_calibrated = False
        self._lock = threading.Lock()

    def calibrate(self, cost: LoadCost) -> None:
        with self._lock:
            self._prior, self._seen, self._is_calibrated = cost, _Fit(), True

    def expect(self, costs: Costs) -> None:
        with self._lock:
            self._expected_token_s = costs.prefill_token_s
            if not self._is_calibrated:
                self._prior = costs.load

    def costs(self) -> Costs | None:
        with self._lock:
            if self._token_s is None or not self._is_calibrated:
                return None
            return Costs(self._token_s, self._prior)

    def saw_step(self, tokens: int, seconds: float) -> None:
        """One step of the engine that computed `tokens` tokens in all."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            if tokens >= PREFILL_TOKENS_MIN:
                self._token_s = running_mean(self._token_s, seconds / tokens)
            elif tokens <= STEP_TOKENS_MAX:
                self._step_s = running_mean(self._step_s, seconds)

    def saw_load(self, tokens: int, seconds: float) -> None:
        """One load of `tokens` tokens, from asking for it to its end."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            fixed, token = self._spreads()
            unit = fixed / tokens + token
            more = (seconds - self._prior.of(tokens)) / tokens
            seen = self._seen.times((1 - WEIGHT) * self._kept())
            self._seen = seen.plus(fixed / tokens / unit, token / unit, more / unit)
            self._seen_s = self._clock()

    @property
    def is_measured(self) -> bool:
        return True

    @property
    def min_tokens(self) -> int:
        """Hits of fewer tokens are computed instead; NEVER where no length pays."""
        with self._lock:
            token_s = self._expected_token_s if self._token_s is None else self._token_s
            if token_s is None:
                return UNMEASURED_MIN_TOKENS
            cost = self._cost()
            gain_s = token_s - cost.token_s
            if gain_s <= 0:
                return NEVER
            return max(1, math.ceil(min((cost.fixed_s + self._step_s) / gain_s, NEVER)))

    def _spreads(self) -> tuple[float, float]:
        return max(self._prior.fixed_s, FIXED_SPREAD_S), max(self._prior.token_s, TOKEN_SPREAD_S)

    def _kept(self) -> float:
        """How much of what was seen still counts."""
        return float(0.5 ** (max(0.0, self._clock() - self._seen_s) / FORGET_S))

    def _cost(self) -> LoadCost:
        """What loads cost now: what was calibrated, moved by what was seen."""
        (fixed, token), (x, z), kept = self._spreads(), self._seen.solve(), self._kept()
        prior = self._prior
        return LoadCost(max(0.0, prior.fixed_s + kept * x * fixed), max(0.0, prior.token_s + kept * z * token))


def running_mean(old: float | None, new: float) -> float:
    """None: nothing was seen before."""
    return new if old is None else old + WEIGHT * (new - old)
