"""A bar of one line on a terminal; where there is none, one line when the work is done."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class Bar:
    """what: of which `total` are counted. With estimated seconds to the end, by the mean so far."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._start_s = time.monotonic()
        self.show(0)

    def show(self, done: int) -> None:
        seconds = time.monotonic() - self._start_s
        if not sys.stderr.isatty():
            if done == self._total:
                print(f"{self._what}: {done} in {seconds:.1f} s", file=sys.stderr, flush=True)
            return
        full = WIDTH * done // self._total if self._total else WIDTH
        left = f", {seconds / done * (self._total - done):.0f} s left" if 0 < done < self._total else ""
        line = f"{self._what} [{'#' * full}{'.' * (WIDTH - full)}] {done}/{self._total}, {seconds:.0f} s{left}"
        print(f"\r\033[K{line}", end="\n" if done == self._total else "", file=sys.stderr, flush=True)
