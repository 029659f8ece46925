"""Storms over several engines on one root. Loads (I2, I3, I9, I10): whatever is done to the engines, no block is said
to be loaded that does not hold what was saved, every load is answered in time, and every slot, claim and descriptor
comes back. Saves: what all ranks answered "saved" is there for any engine, until it is evicted.

    python -m tests.worker.test_storms SEED SECONDS [CODEC]        one storm of loads, or of saves with CODEC
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception

import pytest
import torch

from kvtier.runtime import metrics as names
from tests.support.saving_storm import SavingStorm
from tests.support.storm import Storm, totals

HAPPENS = ("loaded", "failed", "saved", "flipped in memory", names.ARENA_HIT_CHUNKS, names.CHECKSUM_FAILURES)


@contextmanager
def no_thread_dies() -> Iterator[None]:
    """Fail if a thread of the library ended by an exception."""
    died: list[str] = []
    hook = threading.excepthook
    threading.excepthook = lambda args: died.append("".join(format_exception(args.exc_value)))
    try:
        yield
    finally:
        threading.excepthook = hook
    assert died == [], died


def storm_of_loads(root: Path, seed: int, seconds: float, times: int = 0) -> Storm:
    """Return a storm that is over, in which each of HAPPENS did so many times, unless it took too long."""
    with no_thread_dies():
        storm = Storm(root, seed)
        try:
            storm.run(seconds, lambda storm: rarest(storm) >= times)
        finally:
            storm.close()
    print(f"seed {seed}: {dict(storm.told)}, {dict(totals(storm))}")
    return storm


def rarest(storm: Storm) -> int:
    happened = storm.told + totals(storm)
    return min(happened[name] for name in HAPPENS)


def storm_of_saves(root: Path, seed: int, seconds: float, codec: str) -> SavingStorm:
    """Return a storm that is over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the codec's many small steps: on busy cores, threads only wait for each other
    try:
        with no_thread_dies():
            storm = SavingStorm(root, seed, codec, sets_max=[30, 1000][seed % 2])
            try:
                storm.run(seconds, saved_min=200, claims_min=20)  # 10 and what is evicted at the end
            finally:
                print(f"seed {seed}: {dict(storm.told)}")
                storm.close()
    finally:
        torch.set_num_threads(threads)
    return storm


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_claimed_that_does_not_hold_what_was_saved(tmp_path: Path, seed: int) -> None:
    storm = storm_of_loads(tmp_path, seed, 4.0, times=10)
    assert rarest(storm) >= 10, f"too calm: {storm.told + totals(storm)}"


@pytest.mark.parametrize(("seed", "codec"), [(0, "raw"), (1, "raw"), (2, "k4v4")])
def test_what_was_answered_saved_is_there(tmp_path: Path, seed: int, codec: str) -> None:
    storm = storm_of_saves(tmp_path, seed, 5.0, codec)
    for name in ("saved", "present", "claims loaded", "found again"):
        assert storm.told[name] >= 10, f"too calm: {storm.told}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_storms(tmp_path: Path, seed: int) -> None:
    storm_of_loads(tmp_path / "loads", seed, 30.0)
    storm_of_saves(tmp_path / "saves", seed, 30.0, "k4v4" if seed % 4 == 0 else "raw")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        seed, seconds, *codec = sys.argv[1:]
        if codec:
            storm_of_saves(Path(folder), int(seed), float(seconds), codec[0])
        else:
            storm_of_loads(Path(folder), int(seed), float(seconds))
