"""Fault containment at the engines' hooks: an exception in tier work is counted and logged and becomes a miss (I9).

The project's only two `except Exception` stand here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvtier.runtime.repeated_log import RepeatedLog


class Faults:
    """Counter and log of contained exceptions. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, without: str = "the tier for it") -> None:
        """without: what the process goes on without after a fault, as the log names it."""
        self._lock = threading.Lock()
        self._count = 0
        self._without, self._log = without, RepeatedLog(clock)

    def note(self, doing: str, fault: Exception) -> None:
        """Count a fault, and log it with what was being done; repetitions are logged at growing intervals."""
        with self._lock:
            self._count += 1
        kind = f"{doing} {type(fault).__name__}"
        self._log.line(logging.ERROR, kind, "%s failed; going on without %s", doing, self._without, fault=fault)

    @contextmanager
    def contained(self, doing: str) -> Iterator[None]:
        """Count and log an Exception of the body, and suppress it."""
        try:
            yield
        except Exception as fault:
            self.note(doing, fault)

    def take(self) -> int:
        """Return the number of faults since the last `take`."""
        with self._lock:
            count, self._count = self._count, 0
            return count


class _HasFaults(Protocol):
    _faults: Faults


S = TypeVar("S", bound=_HasFaults)
P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[S, P], T]


def catch_faults(doing: str, default: Any = None) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Decorate a method: an Exception in it is noted in the object's `_faults`, and `default` is returned.

    default: the neutral answer, or a function that makes it from the method's arguments.
    """

    def decorate(method: Method[S, P, T]) -> Method[S, P, T]:
        @wraps(method)
        def contained(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as fault:
                self._faults.note(doing, fault)
            answer: T = default(self, *args, **kwargs) if callable(default) else default
            return answer

        return contained

    return decorate
