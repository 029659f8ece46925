"""The time by the server's clock. Leases, notes and the times of segment sets go by it, because the clocks of the nodes
that share an index may differ by more than a lease is long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import ResponseError

from kvtier.index.redis.wire import Request, Wire

log = logging.getLogger("kvtier")

ASKED_EVERY_S = 10.0
TOLERATED_S = 1.0
"""An answer is known to have taken less; and a clock that is kept together with the server's is left as it is."""

Clock = Callable[[], float]


class ServerClock:
    """Turns times of this node's clock into the server's and back. key: on the shard whose clock is meant.

    wall, steady: this node's clock, seconds since the epoch, and one that nobody sets. The former may jump between two
    answers of the server.
    """

    def __init__(self, wire: Wire, key: bytes, wall: Clock = time.time, steady: Clock = time.monotonic) -> None:
        self._wire = wire
        self._key = key
        self._wall = wall
        self._steady = steady
        self._ahead_s: float | None = None  # the server's clock, of the steady one
        self._asked_s = -ASKED_EVERY_S

    def of(self, now_s: float) -> float:
        """Return `now_s` of this node by the server's clock. Raises IndexUnavailable when it does not answer."""
        return now_s + self._behind_s()

    def past(self, at_s: float) -> float:
        """Return `at_s` of this node by the server's clock, and its present for what would be in its future: of a clock
        that was set in between nothing else is known."""
        behind_s = self._behind_s()
        return min(at_s, self._wall()) + behind_s

    def local(self, at_s: float) -> float:
        """Return `at_s` of the server by this node's clock. Raises IndexUnavailable when it does not answer."""
        return at_s - self._behind_s()

    def _behind_s(self) -> float:
        """Return by how much this node's clock is behind the server's."""
        if self._steady() - self._asked_s >= ASKED_EVERY_S:
            self._ask()
        if self._ahead_s is None:
            return 0.0
        behind_s = self._steady() + self._ahead_s - self._wall()
        return 0.0 if abs(behind_s) < TOLERATED_S else behind_s

    def _ask(self) -> None:
        """Where this user may not ask, the node's own clock must do."""
        began_s = self._steady()
        (answer,) = self._wire.run([Request(self._key, ("TIME",))])
        self._asked_s = self._steady()
        if isinstance(answer, ResponseError):
            if self._ahead_s is None:
                log.debug("times go by this node's own clock, for Redis does not tell its time: %s", answer)
            return
        seconds, microseconds = answer
        self._ahead_s = int(seconds) + int(microseconds) / 1e6 - (began_s + self._asked_s) / 2
