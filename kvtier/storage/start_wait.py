"""Start wait: limits the time for which the start of an engine waits for a root's storage, and logs a long wait.

A call that hangs in the kernel cannot be cancelled: it is left behind on a thread of its own."""

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

SAID_AFTER_S = 5.0  # time after which a waiting start logs what it waits for, seconds
TIMEOUT_S = 60.0  # time after which a waiting start fails, seconds

T = TypeVar("T")


def in_time(root: Path, what: str, work: Callable[[], T]) -> T:
    """Call `work` and return its result, or raise its exception. Raises ConfigError after TIMEOUT_S.

    what: name of the work in messages."""
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
