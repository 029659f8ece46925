"""For all tests: no deadlines of hypothesis and one thread of torch, because they share their processors. And none
leaves a store at work, which would go on in the next tests of its process."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("kvtier", deadline=None, derandomize="CI" in os.environ)  # new examples are for elsewhere
settings.load_profile("kvtier")

# Set before torch is imported. Two threads each in two workers mostly wait for each other, their tensors being small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

STRIPES = "KVTIER_IO__STRIPES"
os.environ.setdefault(STRIPES, "1")

END_TIMEOUT_S = 30.0
# Folders and files that take half a minute or more: with `--no-loadscope-reorder` xdist begins with them, and no worker
# is left with one while the others have ended. Those of eviction mostly wait, and so go beside those that compute.
FIRST = ("simulation", "eviction", "engines", "test_wheel.py", "benchmarks", "worker", "crash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((n for n, name in enumerate(FIRST) if name in item.path.parts), len(FIRST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Many tests name "the" file of a set, and so have one stripe. Real engines have the default."""
    if "engines" in item.path.parts:
        os.environ.pop(STRIPES, None)
    else:
        os.environ.setdefault(STRIPES, "1")


@pytest.fixture(autouse=True, scope="module")
def nothing_goes_on() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := [thread.name for thread in threading.enumerate() if _is_ours(thread) and thread not in before]:
        assert time.monotonic() < deadline, f"still at work: {', '.join(sorted(left))}"
        time.sleep(0.01)


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("kvtier-")
