"""Files that somebody on this machine has a kernel lease on: a server of NFS does for each delegation that it gave to
another node, and gives it back when the kernel says that it is wanted."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.storage import safe_open
from kvtier.storage.atomic_files import read_small
from tests.support.rig import Engine, saved_by_another

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
GIVES_BACK_S = 0.1
HOLDER = """
import fcntl, os, signal, sys, time
path, access, kind, after_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
file = os.open(path, access)
def give_back(*_):
    time.sleep(after_s)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
signal.signal(signal.SIGIO, give_back)
fcntl.fcntl(file, fcntl.F_SETLEASE, kind)
print("held", flush=True)
while True:
    signal.pause()
"""
READ, WRITE = (os.O_RDONLY, 0), (os.O_RDWR, 1)
"""How the file is opened, and the lease on it: F_RDLCK, which ends when others open it to write, F_WRLCK, with any."""

Hold = Callable[[Path, tuple[int, int], float], None]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Has another process hold a lease until the given time after it is asked to give it back."""
    holders: list[subprocess.Popen[str]] = []

    def begin(path: Path, lease: tuple[int, int], after_s: float) -> None:
        arguments = [sys.executable, "-c", HOLDER, str(path), *map(str, lease), str(after_s)]
        holders.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        stdout = holders[-1].stdout
        assert stdout is not None
        if stdout.readline() != "held\n":
            pytest.skip("this file system knows no leases")

    yield begin
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_small_files_are_read_when_they_are_given_back(tmp_path: Path, hold: Hold) -> None:
    (tmp_path / "small").write_bytes(b"x")
    hold(tmp_path / "small", WRITE, GIVES_BACK_S)
    assert read_small(tmp_path / "small") == b"x"


def test_segments_are_loaded_when_they_are_given_back(tmp_path: Path, hold: Hold) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path)
    for segment in tmp_path.glob("v2/*/*.kvseg"):
        hold(segment, READ, GIVES_BACK_S)
    assert [done.failed_blocks for done in reader.load(TOKENS, TARGET)[1]] == [frozenset()]


def test_who_never_gives_one_back_is_not_waited_for_long(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    (segment,) = [path for path in tmp_path.glob("v2/*/*.kvseg") if path.stat().st_size]
    files = engine.transfers[0]._worker.files(engine.namespace.id)
    files.close()
    monkeypatch.setattr(safe_open, "LEASE_BREAK_S", 0.05)
    hold(segment, READ, 60.0)
    set_id, rank = files.ids()[0]
    with pytest.raises(TierUnavailable, match="temporarily unavailable"):
        files.lease(set_id, rank)
