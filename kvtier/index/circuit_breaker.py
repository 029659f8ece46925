"""When an index that does not answer is left alone. Pure: clock and randomness are passed in (I6)."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerPlan:
    """failures: one after the other, before it opens. The pause doubles from the first to the longest; of each, a
    random part between a half and the whole is waited, so that engines do not come back all at once."""

    failures: int
    pause_first_s: float
    pause_max_s: float


class Breaker:
    """Closed: all calls pass. Open: none do. After the pause one call is let through to try; the others wait for how
    that ends. Thread-safe.

    Every call that `allows` let through is answered with `worked` or `failed`.
    """

    def __init__(self, plan: BreakerPlan, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = plan.pause_first_s
        self._failed_s = -math.inf
        self._open_until_s: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def left_s(self, now_s: float) -> float:
        """How long it stays open."""
        with self._lock:
            return 0.0 if self._open_until_s is None else max(0.0, self._open_until_s - now_s)

    def allows(self, now_s: float) -> bool:
        with self._lock:
            if self._open_until_s is None:
                return True
            if self._is_trying or now_s < self._open_until_s:
                return False
            self._is_trying = True
            return True

    def worked(self) -> bool:
        """True when this closes it."""
        with self._lock:
            was_open = self._open_until_s is not None
            self._failures, self._open_until_s, self._is_trying = 0, None, False
            self._pause_s = self._plan.pause_first_s
            return was_open

    def failed(self, began_s: float, now_s: float) -> bool:
        """True when this opens it, or begins another pause.

        began_s: of the call. Calls that were under way together fell into one silence, however many they were: only
        one that began after the last failure is another one.
        """
        with self._lock:
            is_old_news = self._open_until_s is not None and not self._is_trying
            if is_old_news or began_s < self._failed_s:
                return False
            self._failed_s = now_s
            self._failures += 1
            if self._failures < self._plan.failures:
                return False
            self._open_until_s = now_s + self._pause_s * self._rng.uniform(0.5, 1.0)
            self._pause_s = min(self._plan.pause_max_s, 2 * self._pause_s)
            self._is_trying = False
            return True
