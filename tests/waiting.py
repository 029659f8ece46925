"""Waiting for what comes soon: never longer than it takes, and never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 30.0
"""On a machine that runs more than it can."""


def wait_until(is_so: Callable[[], object], what: str = "what was waited for", timeout_s: float = TIMEOUT_S) -> None:
    """Raises AssertionError, naming `what`, when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
