"""Python's switch interval of this process: how long a thread keeps the interpreter lock while another waits."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# While requests arrive, vLLM hashes their tokens on a thread of its own. A lookup and the threads that begin a load
# release the lock now and then, and each time they then waited 5 ms. With 0.1 ms at all times the first load of 16
# began 47 ms sooner, and the last of them ended 12 % sooner (a busy H100, means of four in turns;
# results/gpu/switch_interval.json). But then a tiny model on two cores decoded 6 % slower, because vLLM's own threads
# contend too. So it is short only where it is needed.

_lock = threading.Lock()
_short_s = 0.005
_before_s = 0.0
_holders = 0


def use(interval_s: float) -> None:
    """Name the interval that `hold` sets, seconds."""
    global _short_s
    _short_s = interval_s


def hold() -> None:
    """Shorten the interval until `release` was called as often. A shorter one of the process stays."""
    global _holders, _before_s
    with _lock:
        if not _holders:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, _short_s))
        _holders += 1


def release() -> None:
    """Undo one `hold`."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            sys.setswitchinterval(_before_s)


@contextmanager
def held() -> Iterator[None]:
    """Hold the shorter interval in a block."""
    hold()
    try:
        yield
    finally:
        release()
