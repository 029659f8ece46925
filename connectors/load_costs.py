"""From how many tokens on an engine loads a hit: what it learns that from, what is kept of it for the next engine, and
saying so where next to nothing is loaded, for a tier that is never asked looks like one that is not there."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from kvtier.breakeven import NEVER, PREFILL_TOKENS_MIN, LoadCost, LoadLimit
from kvtier.kept_costs import KeptCosts

log = logging.getLogger("kvtier")

LONG_TOKENS = 4096
"""A hit that most machines would load."""
LOG_INTERVAL_S = 3600.0


class LoadCosts:
    """Called from the engine's scheduler thread only."""

    def __init__(self, limit: LoadLimit, kept: KeptCosts | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._kept = kept
        self._clock = clock
        self._told_s = -math.inf
        if kept is not None and kept.expected is not None:
            limit.expect(kept.expected)
            self._tell()

    def saw_step(self, tokens: int, seconds: float) -> None:
        """One step of the engine that computed `tokens` tokens in all."""
        self.limit.saw_step(tokens, seconds)
        if tokens >= PREFILL_TOKENS_MIN:
            self._changed()

    def saw_load(self, tokens: int, seconds: float) -> None:
        """One rank's part of a load, from asking for it to its end."""
        self.limit.saw_load(tokens, seconds)

    def calibrate(self, cost: LoadCost) -> None:
        """What loads should cost on an idle machine, as the workers have measured."""
        self.limit.calibrate(cost)
        self._changed()

    def _changed(self) -> None:
        if self._kept is not None:
            self._kept.latest = self.limit.costs()
        self._tell()

    def _tell(self) -> None:
        shortest, now = self.limit.min_tokens, self._clock()
        if not self.limit.is_measured or shortest <= LONG_TOKENS or now < self._told_s + LOG_INTERVAL_S:
            return
        self._told_s = now
        which = "hits" if shortest >= NEVER else f"hits of fewer than {shortest:,} tokens"
        log.warning("%s are computed and not loaded, for that is quicker here as far as was measured; to load them all "
                    "the same, set min_load_tokens", which)  # fmt: skip
