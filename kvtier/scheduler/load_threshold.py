"""Break-even length of loads (`min_load_tokens: auto`): shortest hit that is loaded sooner than computed. Pure.

    load      fixed_s + tokens x load_s_per_token        first from calibration, then from measured loads
    prefill   max(step_s, tokens x prefill_s_per_token)  from the engine's own steps

A loaded request needs a step of its own after the load, so a hit of n tokens saves at least
n x prefill_s_per_token - step_s. It is loaded when the load takes no longer. Until a prefill has been measured, the
costs of an earlier engine of the same kind apply (`cost_history`); without them, hits of 256 tokens or more are loaded.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from statistics import median_low

UNMEASURED_MIN_TOKENS = 256
NEVER = 1 << 62  # min_tokens where storage is slower than computing at any length

# Steps of fewer tokens are bound by reading the weights. They measure the time of a step, not that of a token.
PREFILL_TOKENS_MIN = 512
STEP_TOKENS_MAX = 64  # largest step whose time counts as that of a step without prefill, tokens
EMA_ALPHA = 0.2  # weight of a new observation in the running fit of loads
RECENT_STEPS = 9  # steps whose median counts as the time of a step
STEP_S = 0.01  # time of a step until one was measured, seconds
# Expected errors of the calibrated costs, seconds and seconds per token: calibration does not see a load's way through
# the engine. They attribute the delay of a load to one cost or the other until short and long loads were measured.
FIXED_SPREAD_S, TOKEN_SPREAD_S = 0.005, 1e-6
# Weight of the calibration, in measured loads: four at first, a fiftieth of one in the end.
PRIOR_WEIGHT, PRIOR_WEIGHT_MIN = 4.0, 0.02
# Half-life of measured loads, seconds. Once no load is worth it, none is measured, and without forgetting a recovery of
# the storage would never be noticed.
FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Cost of a load: fixed_s for any load and token_s for each of its tokens, seconds."""

    fixed_s: float
    token_s: float

    def of(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.token_s


UNCALIBRATED = LoadCost(0.002, 0.0)  # cost until the storage was calibrated or a load was measured


@dataclass(frozen=True, slots=True)
class Costs:
    """Prefill time of a token in seconds, and cost of a load on an idle machine."""

    prefill_token_s: float
    load: LoadCost


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least-squares fit of the corrections x of `fixed_s` and z of `token_s`, in units of the spreads: weighted sums.

    A load of n tokens is an equation u x + v z = t. u and v are the shares of both costs in it, and t is the time that
    it took beyond the calibrated cost. Equations are scaled to seconds a token, or long loads would outweigh others.
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
        """Return (x, z): near 0 until enough loads were measured (ridge regression)."""
        # The weights of many loads add up to 1 / EMA_ALPHA.
        held = max(PRIOR_WEIGHT_MIN, PRIOR_WEIGHT * (1 - EMA_ALPHA * self.weight))
        uu, vv = self.uu + held, self.vv + held
        scale = uu * vv - self.uv * self.uv
        return (self.ut * vv - self.vt * self.uv) / scale, (self.vt * uu - self.ut * self.uv) / scale


class RecentMedian:
    """Median of the last observations.

    A step that compiles a kernel, as the first one with log probabilities does, takes seconds. In a running mean it
    counted for dozens of steps, in which hits were loaded that are quicker to compute.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, observed: float) -> float:
        """Add an observation and return the median; of two, the lower one."""
        self._recent.append(observed)
        return median_low(self._recent)


class LoadThreshold:
    """Shortest hit that is loaded, by the costs of loads and prefills. Thread-safe.

    calibrated: cost of loads on an idle machine; clock: seconds.
    """

    is_measured = True  # False where the limit was configured

    def __init__(self, calibrated: LoadCost = UNCALIBRATED, clock: Callable[[], float] = time.monotonic) -> None:
        self._prior = calibrated
        self._clock = clock
        self._seen = _Fit()
        self._seen_s = clock()
        self._token_s: float | None = None
        self._step_s = STEP_S
        self._prefills, self._steps = RecentMedian(), RecentMedian()
        self._expected_token_s: float | None = None
        self._is_calibrated = False
        self._lock = threading.Lock()

    def calibrate(self, cost: LoadCost) -> None:
        """Set the calibrated cost of loads, that of an idle machine."""
        with self._lock:
            self._prior, self._seen, self._is_calibrated = cost, _Fit(), True

    def expect(self, costs: Costs) -> None:
        """Set the costs of an earlier engine of the same kind. They apply until this one has measured its own."""
        with self._lock:
            self._expected_token_s = costs.prefill_token_s
            if not self._is_calibrated:
                self._prior = costs.load

    def costs(self) -> Costs | None:
        """Return the measured costs, for the next engine of this kind; None before both were measured."""
        with self._lock:
            if self._token_s is None or not self._is_calibrated:
                return None
            return Costs(self._token_s, self._prior)

    def saw_step(self, tokens: int, seconds: float) -> float | None:
        """Record a step of the engine that computed `tokens` tokens over all requests. Return the time to compute a
        token by the last prefills, in seconds; None where this step was none."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return None
        with self._lock:
            if tokens >= PREFILL_TOKENS_MIN:
                self._token_s = self._prefills.add(seconds / tokens)
                return self._token_s
            if tokens <= STEP_TOKENS_MAX:
                self._step_s = self._steps.add(seconds)
            return None

    def saw_load(self, tokens: int, seconds: float) -> None:
        """Record a load of `tokens` tokens; seconds: from the request to its end."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            fixed, token = self._spreads()
            unit = fixed / tokens + token
            more = (seconds - self._prior.of(tokens)) / tokens
            seen = self._seen.times((1 - EMA_ALPHA) * self._kept())
            self._seen = seen.plus(fixed / tokens / unit, token / unit, more / unit)
            self._seen_s = self._clock()

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
        """Return the remaining weight of the measured loads, 0 to 1."""
        return float(0.5 ** (max(0.0, self._clock() - self._seen_s) / FORGET_S))

    def _cost(self) -> LoadCost:
        """Return the current cost of loads: the calibration, corrected by measured loads."""
        (fixed, token), (x, z), kept = self._spreads(), self._seen.solve(), self._kept()
        prior = self._prior
        return LoadCost(max(0.0, prior.fixed_s + kept * x * fixed), max(0.0, prior.token_s + kept * z * token))


class FixedThreshold(LoadThreshold):
    """Configured number of tokens; measured costs do not change it."""

    is_measured = False

    def __init__(self, min_tokens: int) -> None:
        super().__init__(clock=lambda: 0.0)  # no decision depends on the machine's clock (I6)
        self._min_tokens = min_tokens

    @property
    def min_tokens(self) -> int:
        return self._min_tokens

    def costs(self) -> Costs | None:
        return None
