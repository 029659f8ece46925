"""Sampler: a thread that looks at a growing value while an engine works."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Sampler:
    """Calls `look` every `every_s` seconds on a thread of its own until `close`, and once more then."""

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._look()
