"""Loads in a storm: whatever is done to several engines on one root, no block is claimed as loaded that does not hold
what was saved, every load is answered in time, and every slot, claim and descriptor comes back (I2, I3, I9, I10).

    python -m tests.worker.test_storm SEED SECONDS        one storm, with what came of it
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvtier.runtime import metrics as names
from tests.support.storm import Storm, totals

HAPPENS = ("loaded", "failed", "saved", "flipped in memory", names.ARENA_HIT_CHUNKS, names.CHECKSUM_FAILURES)


def weather(root: Path, seed: int, seconds: float, times: int = 0) -> Storm:
    """A storm that is over, in which each of HAPPENS did so many times, unless it took too long. No thread of the
    library may have ended by an exception."""
    died: list[str] = []
    hook, threading.excepthook = threading.excepthook, lambda args: died.append(repr(args))
    try:
        storm = Storm(root, seed)
        try:
            storm.run(seconds, lambda storm: rarest(storm) >= times)
        finally:
            storm.close()
    finally:
        threading.excepthook = hook
    assert died == []
    print(f"seed {seed}: {dict(storm.told)}, {dict(totals(storm))}")
    return storm


def rarest(storm: Storm) -> int:
    happened = storm.told + totals(storm)
    return min(happened[name] for name in HAPPENS)


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_claimed_that_does_not_hold_what_was_saved(tmp_path: Path, seed: int) -> None:
    storm = weather(tmp_path, seed, 4.0, times=10)
    assert rarest(storm) >= 10, f"too calm: {storm.told + totals(storm)}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_storms(tmp_path: Path, seed: int) -> None:
    weather(tmp_path, seed, 30.0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        weather(Path(folder), int(sys.argv[1]), float(sys.argv[2]))
