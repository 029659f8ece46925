"""Saves in a storm: what all ranks answered "saved" is there for any engine, until it is evicted.

python -m tests.worker.test_saving_storm SEED SECONDS [CODEC]        one storm, with what came of it
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from traceback import format_exception

import pytest
import torch

from tests.support.saving_storm import SavingStorm


def weather(root: Path, seed: int, seconds: float, codec: str = "raw") -> SavingStorm:
    """A storm that is over. No thread of the library may have ended by an exception."""
    died: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the codec's many small steps: on busy cores, threads only wait for each other
    hook, threading.excepthook = (
        threading.excepthook,
        lambda args: died.append("".join(format_exception(args.exc_value))),
    )
    try:
        storm = SavingStorm(root, seed, codec, sets_max=[30, 1000][seed % 2])
        try:
            storm.run(seconds, saved_min=200, claims_min=20)  # 10 and what is evicted at the end
        finally:
            print(f"seed {seed}: {dict(storm.told)}")
            storm.close()
    finally:
        threading.excepthook = hook
        torch.set_num_threads(threads)
    assert died == [], died
    return storm


@pytest.mark.parametrize(("seed", "codec"), [(0, "raw"), (1, "raw"), (2, "k4v4")])
def test_what_was_answered_saved_is_there(tmp_path: Path, seed: int, codec: str) -> None:
    storm = weather(tmp_path, seed, 5.0, codec)
    for name in ("saved", "present", "claims loaded", "found again"):
        assert storm.told[name] >= 10, f"too calm: {storm.told}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_storms_over_saves(tmp_path: Path, seed: int) -> None:
    weather(tmp_path, seed, 30.0, "k4v4" if seed % 4 == 0 else "raw")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        weather(Path(folder), int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
