"""Log lines that repeat: the first of a kind is written, later ones are counted and written at growing intervals.

Storage or an index that is away makes every request fail in the same way: a line for each would hide all others."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("kvtier")

INTERVAL_FIRST_S, INTERVAL_MAX_S = 10.0, 600.0  # between two lines of one kind, seconds; it doubles from line to line
KINDS_MAX = 256  # kinds remembered by one object; the longest unused is forgotten first


@dataclass(slots=True)
class _Kind:
    logged_s: float
    seen_s: float
    interval_s: float
    n_hidden: int = 0


class RepeatedLog:
    """Thread-safe. A kind that was quiet for INTERVAL_MAX_S is logged like a new one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()

    def warning(self, kind: str, message: str, *args: object) -> bool:
        """Log the line, with the number of those hidden since the last one, or count it. Return True when logged."""
        return self.line(logging.WARNING, kind, message, *args)

    def line(self, level: int, kind: str, message: str, *args: object, fault: BaseException | None = None) -> bool:
        """Do as `warning` at any level. fault: logged with its traceback."""
        with self._lock:
            now = self._clock()
            known = self._kinds.pop(kind, None)
            waited_s = 0.0 if known is None else now - known.logged_s
            if known is not None and 0 <= waited_s < known.interval_s:
                known.n_hidden += 1
                known.seen_s = now
                self._kinds[kind] = known
                return False
            if known is None or not 0 <= now - known.seen_s < INTERVAL_MAX_S:
                interval_s = INTERVAL_FIRST_S
            else:
                interval_s = min(INTERVAL_MAX_S, 2 * known.interval_s)
            self._kinds[kind] = _Kind(now, now, interval_s)
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        if known is not None and known.n_hidden:
            message, args = message + " (%d more in the last %.0f s)", (*args, known.n_hidden, waited_s)
        log.log(level, message, *args, exc_info=fault)
        return True


def cause_of(fault: BaseException) -> str:
    """Return the end of the fault's text, without file and slot, as the kind of its log lines."""
    return str(fault).rsplit(": ", 1)[-1]
