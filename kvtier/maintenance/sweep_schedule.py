"""Sweep schedule: which of the engines that share a root sweeps it, and when. One sweep serves all engines."""

import math
import zlib

SWEEP_INTERVAL_S = 60.0  # interval between two sweeps, by any engine, seconds
# Largest extra wait of an engine, seconds, so that most engines find the sweep done. The engine with the shortest wait
# is always the same one, which then examines the closed sets in turn; when it is gone, the next one does.
SWEEP_SPREAD_S = 15.0
# Least time from any sweep to one that is wanted at once, seconds: many engines may find at once that there is no room.
AT_ONCE_AFTER_S = 2.0


class SweepTurns:
    """Turns of one engine. owner: its name. Times are seconds since the epoch; the first sweep is wanted at once."""

    def __init__(self, owner: str) -> None:
        self._interval_s = SWEEP_INTERVAL_S + SWEEP_SPREAD_S * zlib.crc32(owner.encode()) / 2**32
        self._wanted_since_s = math.inf
        self.due_s: float | None = None  # None: at once

    def want(self) -> None:
        """Ask for a sweep at the next `takes`. One that another engine begins after this call counts as well."""
        self.due_s = None

    def is_due(self, now_s: float) -> bool:
        return self.due_s is None or now_s >= self.due_s

    def takes(self, now_s: float, swept_s: float) -> bool:
        """Return True if this engine is to sweep now. Call it when it is due. swept_s: end of the last sweep by any
        engine."""
        if swept_s > now_s + SWEEP_INTERVAL_S:
            swept_s = 0.0  # a clock so far ahead says nothing
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
