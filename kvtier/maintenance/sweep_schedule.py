"""When one of the engines that share a root sweeps it: a sweep reads the whole root, so one does it for all."""

from __future__ import annotations

import math
import zlib

SWEEP_INTERVAL_S = 60.0
"""So long after a sweep by anybody the next engine sweeps."""
SWEEP_SPREAD_S = 15.0
"""By so much at most an engine waits longer than another, so that most find that it was done. Who waits the shortest is
always the same one, which then looks into the closed sets in turn; if that one is gone, it is the next."""
AT_ONCE_AFTER_S = 2.0
"""When it is wanted at once, so long after one by anybody, for many engines may find at once that there is no room."""


class SweepTurns:
    """Those of one engine. owner: its name. Times are seconds since the epoch; the first turn is wanted at once."""

    def __init__(self, owner: str) -> None:
        self._interval_s = SWEEP_INTERVAL_S + SWEEP_SPREAD_S * zlib.crc32(owner.encode()) / 2**32
        self._wanted_since_s = math.inf
        self.due_s: float | None = None
        """None: at once."""

    def want(self) -> None:
        """At the next `takes`; a sweep that others begin after that does as well."""
        self.due_s = None

    def is_due(self, now_s: float) -> bool:
        return self.due_s is None or now_s >= self.due_s

    def takes(self, now_s: float, swept_s: float) -> bool:
        """When it is due: whether this engine sweeps now. swept_s: when anybody did last, by that one's clock."""
        if swept_s > now_s + SWEEP_INTERVAL_S:
            swept_s = 0.0  # by a clock that is that far ahead nothing can be told
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
