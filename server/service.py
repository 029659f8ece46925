"""State of the service: the opened root, the verify jobs, snapshots and history. Never in the data path.

The index may be down when the service starts, and go down and come back while it runs: it is opened by the first
request that needs it, and only the requests that need it fail.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from kvtier.admin.answers import Snapshot
from kvtier.admin.opened import Opened
from kvtier.admin.stats import snapshot
from kvtier.admin.verifying import Verifying
from kvtier.config.settings import Settings
from kvtier.errors import IndexUnavailable, KVTierError
from kvtier.server.auth import Tokens
from kvtier.server.schemas import HistoryPoint

log = logging.getLogger("kvtier")

FRESH_S = 1.0  # age up to which a snapshot serves all readers, seconds: many dashboards load the index like one
HISTORY_POINTS_MAX = 720
REOPEN_PAUSE_S = 1.0
# Longest wait of a request for another one that opens the root, seconds: a mount that hangs must not block all threads.
OPENING_WAIT_S = 2.0


class Service:
    """Thread-safe. open_root: may raise IndexUnavailable, and is tried again later."""

    def __init__(self, settings: Settings, tokens: Callable[[], Tokens], open_root: Callable[[], Opened]) -> None:
        self.settings = settings
        self.tokens = tokens
        self.periodic: list[Callable[[], object]] = []  # called periodically, on the thread of the event loop
        self._open_root = open_root
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held while the root is opened, and nothing else waits for it
        self._is_closed = False
        self._opened: Opened | None = None
        self._verifying: Verifying | None = None
        self._failed: tuple[float, str] | None = None
        self._snapshot: tuple[float, Snapshot] | None = None
        self._changes = 0
        self._history: deque[HistoryPoint] = deque(maxlen=HISTORY_POINTS_MAX)

    @property
    def opened(self) -> Opened:
        """Return the opened root. Raises IndexUnavailable; ConfigError if the root now belongs to another
        deployment."""
        if self._opened is not None:
            return self._opened
        if not self._opening.acquire(timeout=OPENING_WAIT_S):
            raise IndexUnavailable("the root is being opened, and its storage or its index takes long to answer")
        try:
            return self._opened or self._open()
        finally:
            self._opening.release()

    def _open(self) -> Opened:
        now = time.monotonic()
        if self._failed is not None and now - self._failed[0] < REOPEN_PAUSE_S:
            raise IndexUnavailable(self._failed[1])
        try:
            opened = self._open_root()
        except IndexUnavailable as fault:
            self._failed = (now, str(fault))
            raise
        with self._lock:
            if not self._is_closed:
                self._verifying, self._opened = Verifying(opened), opened
                return opened
        opened.close()
        raise IndexUnavailable("the service has ended")

    @property
    def verifying(self) -> Verifying:
        """Return the verify jobs. Raises IndexUnavailable."""
        assert self.opened is not None and self._verifying is not None
        return self._verifying

    def snapshot(self) -> Snapshot:
        """Return a snapshot at most FRESH_S old. Raises IndexUnavailable."""
        with self._lock:
            kept, changes = self._snapshot, self._changes
        if kept is not None and time.monotonic() - kept[0] < FRESH_S:
            return kept[1]
        made = snapshot(self.opened)
        with self._lock:
            if changes == self._changes:  # else it may be of before the change
                self._snapshot = (time.monotonic(), made)
        return made

    def changed(self) -> None:
        """Discard the snapshot, and the one that is being read."""
        with self._lock:
            self._snapshot = None
            self._changes += 1

    def history(self) -> list[HistoryPoint]:
        with self._lock:
            return list(self._history)

    def add_point(self) -> None:
        """Add a point to the history; without an answer there is a gap."""
        try:
            seen = self.snapshot()
        except (KVTierError, OSError) as fault:
            log.debug("the history gets no sample: %s", fault)
            return
        point = HistoryPoint(
            at_s=seen.at_s,
            used_bytes=seen.capacity.used_bytes,
            workers=len(seen.workers),
            hit_ratio=seen.rates.hit_ratio,
            load_bytes_s=seen.rates.load_bytes_s,
            save_bytes_s=seen.rates.save_bytes_s,
            evicted_bytes_s=seen.rates.evicted_bytes_s,
            ttft_saved_s_per_s=seen.rates.ttft_saved_s_per_s,
        )
        with self._lock:
            self._history.append(point)

    async def watch(self) -> None:
        """Run the periodic tasks and add history points, for ever."""
        while True:
            for task in self.periodic:
                task()
            await run_in_threadpool(self.add_point)
            await asyncio.sleep(self.settings.server.history_s)

    def close(self) -> None:
        """Close the root. One that is being opened is closed by the opening thread."""
        with self._lock:
            self._is_closed = True
        if self._verifying is not None:
            self._verifying.close()
        if self._opened is not None:
            self._opened.close()
