"""Stuck files: segments of which an open or a read does not return. Other loads of such a segment fail at once.

Slow storage goes on answering, storage that hangs does not. In a striped file system one target may hang while the
others answer, so at first only the file counts as stuck."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

Name = tuple[int, int]  # (set id, part) of a segment

HUNG_FILES_MIN = 2  # stuck files from which on the whole storage counts as hung


class StuckFiles:
    """Register of stuck segments. Thread-safe. `timeout_s`: of a load; an open or read that takes half of it hangs."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._opening: dict[object, tuple[Name, float]] = {}
        self._stuck_until_s: dict[Name, float] = {}
        self._silent_until_s = 0.0
        self._answered_s = -timeout_s

    @contextmanager
    def opening(self, name: Name) -> Iterator[None]:
        """Note that the segment is being opened, as long as the context lasts."""
        token = object()
        with self._lock:
            self._opening[token] = name, self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._opening[token]

    def answered(self) -> None:
        """Note that a read has ended, so the storage as a whole does not hang."""
        self._answered_s = self._clock()

    def note_read(self, names: Collection[Name], begun_s: float) -> None:
        """Note that a read of these segments, which began at `begun_s`, did not end in time. Ignore a read that had
        less than half of the timeout, because its load had waited for its turn."""
        now = self._clock()
        if now - begun_s < self._timeout_s / 2:
            return
        with self._lock:
            self._note(names, now)

    @property
    def has_any(self) -> bool:
        """Return False if no segment can be stuck. Cheap: read before each load, in place of `why_not`."""
        return bool(self._opening or self._stuck_until_s)

    def why_not(self, names: Collection[Name]) -> str:
        """Return why these segments must not be read now; "" if they may be read."""
        now = self._clock()
        with self._lock:
            hung = {name for name, since_s in self._opening.values() if now - since_s >= self._timeout_s / 2}
            if hung:
                self._note(hung, now)
            for name in [name for name, until_s in self._stuck_until_s.items() if now >= until_s]:
                del self._stuck_until_s[name]
            if now < self._silent_until_s:
                return "the storage did not answer lately"
            stuck = [name for name in names if name in self._stuck_until_s]
        return "" if not stuck else f"segment {stuck[0][0]:016x}-{stuck[0][1]:04d} did not answer lately"

    def _note(self, names: Collection[Name], now: float) -> None:
        self._stuck_until_s.update(dict.fromkeys(names, now + self._timeout_s))
        is_silent = now - self._answered_s >= self._timeout_s / 2
        if is_silent and len(self._stuck_until_s) >= HUNG_FILES_MIN:
            self._silent_until_s = now + self._timeout_s
