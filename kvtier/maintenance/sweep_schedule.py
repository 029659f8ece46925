"""Sweep schedule: decides when an engine sweeps a root. One sweep serves all engines that share the root."""

import math
import zlib

SWEEP_INTERVAL_S = 60.0  # interval between two sweeps, by any engine, seconds
# Largest extra wait of an engine, seconds. Each engine's wait is constant, so the one with the shortest wait makes all
# sweeps, and examines the closed sets in turn; after its end the engine with the next longer wait does.
SWEEP_SPREAD_S = 15.0
# Least time between any sweep and one that was requested by `want`, seconds: many engines may run out of room together.
AT_ONCE_AFTER_S = 2.0


class SweepTurns:
    """Turns of one engine. owner: its name. Times are seconds since the epoch; the first sweep is wanted at once."""

    def __init__(self, owner: str) -> None:
        self._interval_s = SWEEP_INTERVAL_S + SWEEP_SPREAD_S * zlib.crc32(owner.encode()) / 2**32
        self._wanted_since_s = math.inf
        self.due_s: float | None = None  # None: at once

    def want(self) -> None:
        """Request a sweep at the next `takes`. A sweep that another engine begins after this call will do as well."""
        self.due_s = None

    def is_due(self, now_s: float) -> bool:
        return self.due_s is None or now_s >= self.due_s

    def takes(self, now_s: float, swept_s: float) -> bool:
        """Return True if this engine is to sweep now. Call it when it is due. swept_s: end of the last sweep by any
        engine."""
        if swept_s > now_s + SWEEP_INTERVAL_S:
            swept_s = 0.0  # by a clock that is wrong
        ago_s = max(0.0, now_s - swept_s)
        if self.due_s is None:
            self._wanted_since_s = min(now_s, self._wanted_since_s)
            if swept_s < self._wanted_since_s and ago_s < AT_ONCE_AFTER_S:
                return False
            is_done = swept_s >= self._wanted_since_s
        else:
            is_done = ago_s < SWEEP_INTERVAL_S
        self._wanted_since_s = math.inf
        self.due_s = now_s + self._interval_s - (ago_s if is_done else 0.0)
        return not is_done
