"""Waiting for what comes soon: never longer than it takes, and never for ever."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

TIMEOUT_S = 120.0  # on a machine that runs more than it can


def wait_until(is_so: Callable[[], object], what: str = "what was waited for", timeout_s: float = TIMEOUT_S) -> None:
    """Raises AssertionError, naming `what`, when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)


def threads_named(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def for_so_long(seconds: float, is_enough: Callable[[], bool]) -> Iterator[None]:
    """Turns for so many seconds; on a busy machine for up to six times as long, until that is enough."""
    began = time.monotonic()
    while (gone_s := time.monotonic() - began) < seconds or (gone_s < 6 * seconds and not is_enough()):
        yield


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child. Return the child's exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")
