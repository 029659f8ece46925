"""Waiting for a root's storage while an engine starts: it says so when that takes long, and ends by a deadline.

A call that hangs in the kernel cannot be taken back: it is left behind on a thread of its own."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.runtime.threads import begin
from kvtier.storage.filesystem import mounted_at

log = logging.getLogger("kvtier")

SAID_AFTER_S = 5.0  # a start that waits so long says what it waits for, seconds
TIMEOUT_S = 60.0  # a start that waits so long ends

T = TypeVar("T")


def in_time(root: Path, what: str, work: Callable[[], T]) -> T:
    """Return or raise what `work` does, within TIMEOUT_S. Raises ConfigError after that."""
    result = begin("start", work)
    mount = mounted_at(os.path.abspath(root))
    if not wait([result], SAID_AFTER_S).done:
        text = "the start waits for the storage of root %s (%s) for %.0f s already: %s; it fails after %.0f s"
        log.warning(text, root, mount, SAID_AFTER_S, what, TIMEOUT_S)
    if not wait([result], max(0.0, TIMEOUT_S - SAID_AFTER_S)).done:
        fix = (
            f"its storage does not answer ({mount}): {what} took more than {TIMEOUT_S:.0f} s; mend or mount the file "
            "system anew, then start this again, or choose another root"
        )
        raise ConfigError("root", str(root), fix)
    return result.result()
