"""What a codec cannot keep is counted, and told now and then.

A tier that stores nothing must not look like one that was not asked. All of it is refused where KV is near nothing, as
that of vLLM's dummy weights can be."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("kvtier")

EVERY = 10
"""Told of with the first one, and whenever they are so many times as many."""


class Refusals:
    """Of one worker. Thread-safe."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._count = 0
        self._told_at = 1

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count
            if count == 0 or self._count < self._told_at:
                return
            while self._told_at <= self._count:
                self._told_at *= EVERY
            total = self._count
        log.warning(
            "codec %s cannot keep the KV of %d chunks so far, and they are not saved: it holds what is no number, is "
            "infinite, or is too small or too large for the codec's scales; with codec: raw they are",
            self._codec, total,
        )  # fmt: skip
