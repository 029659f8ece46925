"""Circuit breaker for a remote index. Clock and randomness are passed in (I6)."""

import math
import random
import threading

from kvtier.config.index import BreakerSettings


class Breaker:
    """Circuit breaker. Closed: all calls pass. Open: none do; after the pause, one call is allowed as a probe. A pause
    is shortened by up to half at random, so that engines do not return all at once.

    The caller reports the end of each allowed call with `worked` or `failed`. Thread-safe.
    """

    def __init__(self, settings: BreakerSettings, rng: random.Random) -> None:
        self._settings = settings
        self._pause_first_s, self._pause_max_s = settings.pause_first_ms / 1000, settings.pause_max_ms / 1000
        self._rng = rng
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = self._pause_first_s
        self._failed_s = -math.inf
        self._open_until_s: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def left_s(self, now_s: float) -> float:
        """Return how long the breaker stays open, seconds."""
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
        """Record a success. Return True when it closes the breaker."""
        with self._lock:
            was_open = self._open_until_s is not None
            self._failures, self._open_until_s, self._is_trying = 0, None, False
            self._pause_s = self._pause_first_s
            return was_open

    def failed(self, began_s: float, now_s: float) -> bool:
        """Record a failure of a call that began at `began_s`. Return True when it opens the breaker or begins another
        pause."""
        with self._lock:
            # Calls that ran at the same time count as one failure: only one that began after the last failure is new.
            was_counted = self._open_until_s is not None and not self._is_trying
            if was_counted or began_s < self._failed_s:
                return False
            self._failed_s = now_s
            self._failures += 1
            if self._failures < self._settings.failures:
                return False
            self._open_until_s = now_s + self._pause_s * self._rng.uniform(0.5, 1.0)
            self._pause_s = min(self._pause_max_s, 2 * self._pause_s)
            self._is_trying = False
            return True
