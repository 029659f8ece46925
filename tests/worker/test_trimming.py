"""What an engine that ends gives back of its segments, whatever order its save jobs came in: never a record."""

import itertools
import logging
import threading
from pathlib import Path

import pytest

from kvtier.runtime.threads import Job
from kvtier.worker import transfer
from tests.support.rig import Engine
from tests.waiting import wait_until

CHUNKS_A_JOB = 2
RECORD_BYTES = 4096 + 4 * 64 * 4 * 32 * 2 * 4  # header page, and 4 heads x 64 tokens x 4 layers x K and V of 32 floats
TARGET = list(range(100, 124))


def engine_of(root: Path, slots: int, **changes: object) -> Engine:
    segment = 4096 + slots * RECORD_BYTES
    return Engine(root, changes={"segment_bytes": segment, "capacity_bytes": 4 * segment, **changes})


@pytest.mark.parametrize("slots", [6, 8], ids=["full set", "set with room"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_no_record_is_cut_off_whichever_was_written_last(tmp_path: Path, slots: int, order: tuple[int, ...]) -> None:
    """Jobs run side by side: the last slots of a set may be written before the first ones."""
    writer = engine_of(tmp_path, slots)
    tokens = list(range(64 * 6))
    blocks = list(range(6 * writer.chunk_blocks))
    writer.wait_for_set()
    writer.prefill(tokens, blocks)
    plans = [writer.plan(tokens[: 64 * end], blocks) for end in range(CHUNKS_A_JOB, 7, CHUNKS_A_JOB)]
    assert [len(plan.chunks) for plan in plans] == [CHUNKS_A_JOB] * 3
    for number in order:
        writer.run_save(plans[number])
    writer.close()
    reader = engine_of(tmp_path, slots)
    found, done = reader.load(tokens, TARGET)
    assert found == 6
    assert not any(load.failed_blocks for load in done)
    used = next(tmp_path.glob("v2/*/*.kvseg")).stat().st_size
    reader.close()
    assert used == 4096 + 6 * RECORD_BYTES, "and no more than the records stays"


def test_files_are_trimmed_though_a_thread_has_yet_to_end_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CLOSE_TIMEOUT_S", 40.0)
    engine = engine_of(tmp_path, 8)
    jobs, goes_on = engine.transfers[0]._jobs.save, threading.Event()
    submit = jobs.submit

    def submit_slow(job: Job) -> bool:
        def run() -> None:
            job()
            goes_on.wait(20)

        return submit(run)

    monkeypatch.setattr(jobs, "submit", submit_slow)
    engine.save(range(64), range(engine.chunk_blocks))
    threading.Timer(0.3, goes_on.set).start()
    engine.close()
    assert next(tmp_path.glob("v2/*/*.kvseg")).stat().st_size == 4096 + RECORD_BYTES


def test_saves_that_a_reset_overtakes_log_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each update of a trainer's weights resets the tier while requests run: the second one erases a namespace."""
    writer = engine_of(tmp_path, 8)
    tokens, blocks = list(range(64 * 4)), list(range(4 * writer.chunk_blocks))
    writer.store.reset()
    writer.prefill(tokens, blocks)
    writer.wait_for_set()
    writer.save(tokens[: 64 * 2], blocks)
    (left,) = tmp_path.glob("v2/*/*.kvseg")
    plan = writer.plan(tokens, blocks)
    writer.store.reset()
    wait_until(lambda: not left.parent.exists(), "the end of a segment that no lookup can name again", 20)
    writer.run_save(plan)
    writer.close()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not left.parent.exists(), "records that were written late stay"
