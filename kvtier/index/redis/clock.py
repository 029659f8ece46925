"""Time by the Redis server's clock, which leases, notes and the times of sets use: the clocks of the nodes that share
an index may differ by more than a lease is long."""

import logging
import time
from collections.abc import Callable

from redis.exceptions import ResponseError

from kvtier.index.redis.wire import Request, Wire

log = logging.getLogger("kvtier")

ASKED_EVERY_S = 10.0  # interval between two readings of the server's clock, seconds
TOLERATED_S = 1.0  # difference of a synchronised clock that is ignored, seconds; a reading takes less

Clock = Callable[[], float]


class ServerClock:
    """Converts times of this node's clock to the server's and back. key: any key of the shard whose clock counts.

    wall, steady: this node's clock, seconds since the epoch, and a monotonic one: the former may be set at any time.
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
        """Return a past `at_s` of this node by the server's clock; the server's present where `at_s` is in the future,
        because this node's clock was set back since."""
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
        """Read the server's clock. This node's clock is used where the user has no right to TIME."""
        began_s = self._steady()
        (answer,) = self._wire.run([Request(self._key, ("TIME",))])
        self._asked_s = self._steady()
        if isinstance(answer, ResponseError):
            if self._ahead_s is None:
                log.debug("times are by this node's own clock: Redis refuses TIME: %s", answer)
            return
        seconds, microseconds = answer
        self._ahead_s = int(seconds) + int(microseconds) / 1e6 - (began_s + self._asked_s) / 2
