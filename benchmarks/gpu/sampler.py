"""Observers of a process while an engine works in it: threads that sample a value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SAMPLE_S = 0.02  # interval between samples, seconds


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


class GrowthWatch:
    """Samples a growing number every SAMPLE_S seconds on a thread, and keeps (seconds, value) of each growth.

    Seconds are those of `time.perf_counter`, which all processes of a Linux machine share.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure
        self._samples = [(time.perf_counter(), measure())]
        self._sampler = Sampler(self._sample, SAMPLE_S)

    def close(self) -> list[tuple[float, float]]:
        self._sampler.close()
        return self._samples

    def _sample(self) -> None:
        value = self._measure()
        if value != self._samples[-1][1]:
            self._samples.append((time.perf_counter(), value))
