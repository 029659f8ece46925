"""What a run asks the machine that another run is answered differently, or that Python answers by chance.

It is seen where Python calls C functions: it does not matter under which name, or since when, the caller has them.
"""

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.simulation.runtime import Process, Runtime

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
FORBIDDEN = frozenset(
    [
        *(getattr(time, name + suffix) for name in CLOCKS for suffix in ("", "_ns")),
        time.sleep,
        time.localtime,
        os.urandom,
        os.getrandom,
        os.getpid,
        os.getppid,
        os.times,
        os.getloadavg,
        os.statvfs,
        os.listdir,
        os.scandir,
        socket.gethostname,
    ]
)
ALLOWED = frozenset(
    {
        ("tests.simulation.disk", "listdir"),  # sorted, and then shuffled by the seed
        ("tests.simulation.disk", "scandir"),  # folders to sort, files to sum
        ("kvtier.storage.root", "scandir"),  # removes drafts, in whichever order
        ("kvtier.storage.root", "listdir"),  # sorts them
        ("kvtier.maintenance.sweeper", "listdir"),  # asks whether there is any
    }
)
"""Who may call what. Not looked at: the state of files that the
tier does not write (`stat`), ids of threads, which say only whose a call is, and where things lie in memory (`id`,
`hash`), for which test_replay has processes of their own."""


UNREAD = ("logging", "hypothesis")
"""Nobody reads their lines; and Hypothesis, once it was used in a process, times each garbage collection."""


@contextmanager
def watching_calls() -> Iterator[set[tuple[str, str]]]:
    """Yields (module of ours that asked, what it asked for), of all that is forbidden and was asked for on the calling
    thread; global generators of random numbers are there when they moved."""
    found: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and _is_forbidden(called):
            asked = (_asker(frame), called.__name__)
            if asked[0] not in UNREAD and asked not in ALLOWED:
                found.add(asked)

    plain_spawn, before, generators = Runtime.spawn, sys.getprofile(), _generators()

    def spawn(
        runtime: Runtime, process: Process, name: str, work: Callable[[], None], *, is_engine: bool = False
    ) -> None:
        def watched() -> None:  # each greenlet begins without a profiler
            sys.setprofile(look)
            work()

        plain_spawn(runtime, process, name, watched, is_engine=is_engine)

    with patch.object(Runtime, "spawn", spawn):
        sys.setprofile(look)
        try:
            yield found
        finally:
            sys.setprofile(before)
    found.update(("", name) for name, state in _generators().items() if state != generators[name])


def _is_forbidden(called: Any) -> bool:
    try:
        return called in FORBIDDEN
    except TypeError:  # a method of something that has no hash
        return False


def _asker(frame: FrameType | None) -> str:
    """The nearest of our own modules, or one of UNREAD."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        root = name.partition(".")[0]
        if root in UNREAD:
            return root
        if root in ("kvtier", "tests"):
            return name
        frame = frame.f_back
    return ""


def _generators() -> dict[str, object]:
    """State of what is random for a whole process."""
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "random": random.getstate(),
        "numpy.random": repr(numpy_state),
        "torch.random": torch.get_rng_state().numpy().tobytes(),
    }
