"""Task pool: tasks that are queued behind one that raises run all the same."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.errors import TierUnavailable
from kvtier.runtime.threads import ThreadJobs
from kvtier.worker.task_pool import TaskPool


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_task_that_raises_holds_up_none_behind_it() -> None:
    told: list[object] = []
    may_raise, has_run = threading.Event(), threading.Event()
    jobs = ThreadJobs("pool", 1, 4)
    pool = TaskPool(jobs, time.monotonic, 10.0, lambda then, result: told.append(result))

    def fail() -> None:
        may_raise.wait(10)
        raise RuntimeError("a bug")

    pool.add(fail, lambda result: None)
    pool.add(has_run.set)
    may_raise.set()
    assert has_run.wait(10)
    assert jobs.drain(10) and not pool.is_busy
    assert [type(result) for result in told] == [TierUnavailable]
    jobs.close()
