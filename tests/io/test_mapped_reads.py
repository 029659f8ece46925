"""Reads from mapped files in processes of their own: SIGBUS is one for all of a process, and ends it when nobody minds.

What the mappings themselves do is in native_mapped_test.cpp."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.geometry import PAGE_BYTES
from kvtier.io.native import reads_issued
from kvtier.io.ring import AlignedBuffer, InMemory, Ring

from records import PIECE_BYTES, Record, finished, written

HERE = Path(__file__).parent

PRELUDE = """
import ctypes, errno, faulthandler, logging, mmap, os, signal, sys
sys.path.insert(0, HERE)
from records import PIECE_BYTES, Record, finished, written
from kvtier.io.native import reads_issued
from kvtier.io.ring import InMemory, Ring, AlignedBuffer
logging.basicConfig(stream=sys.stdout, format="%(message)s")

record = Record(1, 20 * 4096, 6)
target = AlignedBuffer(record.n_bytes)
fd = os.open(FOLDER + "/segment", os.O_RDWR | os.O_CREAT)

def opened():
    ring = Ring(2, PIECE_BYTES, in_memory=InMemory(map_reads=True))
    return ring, written(ring, fd, [record])[0].checksums

def read(ring, sums):
    before = reads_issued()
    (result,) = finished(ring.submit([record.read_op(fd, target, sums)]))
    return result.error, result.bad_slabs, reads_issued() > before

def crash():
    path = FOLDER + "/other"
    with open(path, "wb+") as other:
        other.truncate(8192)
        mapped = mmap.mmap(other.fileno(), 8192)
        other.truncate(0)
        ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + 4096, 1)
"""


def run(folder: Path | None, script: str, *before: str) -> subprocess.CompletedProcess[str]:
    if folder is None:
        pytest.skip("no file system in memory here")
    names = f"HERE, FOLDER = {str(HERE)!r}, {str(folder)!r}\n"
    command = [*before, sys.executable, "-c", names + PRELUDE + script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def out(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_records_are_read_without_asking_the_kernel(tmpfs: Path | None) -> None:
    assert out(run(tmpfs, "ring, sums = opened()\nprint(read(ring, sums), read(ring, sums))")) == [
        f"{(0, (), False)} {(0, (), False)}"
    ]


def test_a_segment_that_is_cut_is_a_short_one(tmpfs: Path | None) -> None:
    script = """
ring, sums = opened()
print(read(ring, sums))
os.ftruncate(fd, 4096 + 50 * 4096)
print(read(ring, sums)[0] == errno.ENODATA)
"""
    assert out(run(tmpfs, script)) == [f"{(0, (), False)}", "True"]


@pytest.mark.parametrize("how", ["crash()", "os.kill(os.getpid(), signal.SIGBUS)"])
@pytest.mark.parametrize("enabled", ["", "faulthandler.enable()\n"])
def test_a_bus_error_of_others_ends_the_process_as_before(tmpfs: Path | None, how: str, enabled: str) -> None:
    """With the trace that faulthandler was asked for, if it was."""
    done = run(tmpfs, f"{enabled}ring, sums = opened()\nassert read(ring, sums) == (0, (), False)\n{how}\nprint('on')")
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")
    assert done.stderr.startswith("Fatal Python error: Bus error") if enabled else done.stderr == ""


def test_a_handler_that_was_there_before_gets_what_is_not_ours(tmpfs: Path | None) -> None:
    """From then on the signal is its alone, and files are read in the ordinary way; the log says so once."""
    script = """
signal.signal(signal.SIGBUS, lambda *_: print("handled"))
ring, sums = opened()
print(read(ring, sums))
os.kill(os.getpid(), signal.SIGBUS)
print(read(ring, sums), read(ring, sums))
os.kill(os.getpid(), signal.SIGBUS)
"""
    lines = out(run(tmpfs, script))
    assert lines[:2] == [f"{(0, (), False)}", "handled"] and lines[-1] == "handled"
    assert lines[-2] == f"{(0, (), True)} {(0, (), True)}"
    assert sum("SIGBUS" in line for line in lines) <= 1


def test_an_ignored_signal_stays_ignored_and_a_crash_does_not(tmpfs: Path | None) -> None:
    script = """
signal.signal(signal.SIGBUS, signal.SIG_IGN)
ring, sums = opened()
os.kill(os.getpid(), signal.SIGBUS)
print("on", flush=True)
crash()
"""
    done = run(tmpfs, script)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "on\n")


@pytest.mark.parametrize("replace", ["faulthandler.enable()", "signal.signal(signal.SIGBUS, lambda *_: None)"])
def test_where_the_handler_was_replaced_nothing_is_mapped(tmpfs: Path | None, replace: str) -> None:
    script = f"""
ring, sums = opened()
print(read(ring, sums))
{replace}
print(read(ring, sums))
os.ftruncate(fd, 4096 + 50 * 4096)
print(read(ring, sums)[0] == errno.ENODATA)
later = Ring(1, PIECE_BYTES, in_memory=InMemory(map_reads=True))
print(read(later, sums)[0] == errno.ENODATA)
"""
    lines = out(run(tmpfs, script))
    said = [line for line in lines if "SIGBUS" in line]
    assert [line for line in lines if line not in said] == [f"{(0, (), False)}", f"{(0, (), True)}", "True", "True"]
    assert len(said) == 2  # of each ring once


def test_a_child_keeps_no_mapping(tmpfs: Path | None) -> None:
    """It would keep the memory of files that were evicted."""
    script = """
ring, sums = opened()
read(ring, sums)
mapped = lambda: FOLDER + "/segment" in open("/proc/self/maps").read()
here = mapped()
child = os.fork()
if child == 0:
    os._exit(mapped())
print(here, os.waitpid(child, 0)[1])
"""
    assert out(run(tmpfs, script)) == ["True 0"]


def test_a_hole_in_a_full_file_system_is_read_as_zeros(tmp_path: Path) -> None:
    """To touch it would be to ask for memory that is not there. Needs a mount of its own: skipped where that is not
    allowed."""
    unshare = shutil.which("unshare")
    mounts = [unshare or "", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=2m none {tmp_path} && "
    if (
        not unshare
        or subprocess.run([*mounts, "sh", "-c", mount + "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no mounts of one's own here")
    script = """
ring, sums = opened()
assert read(ring, sums) == (0, (), False)
size = os.fstat(fd).st_size
os.ftruncate(fd, 4096 + 30 * 4096)
os.ftruncate(fd, size)
ballast = open(FOLDER + "/ballast", "wb", buffering=0)
try:
    while ballast.write(bytes(4096)):
        pass
except OSError as fault:
    print(errno.errorcode[fault.errno])
print(read(ring, sums), os.statvfs(FOLDER).f_bavail)
"""
    done = run(tmp_path, script, *mounts, "sh", "-c", mount + 'exec "$@"', "sh")
    assert out(done) == ["ENOSPC", f"{(0, (1, 2, 3, 4, 5), True)} 0"]


def test_what_is_forgotten_gives_its_memory_back(tmpfs: Path | None) -> None:
    script = """
import time
ring, sums = opened()
read(ring, sums)
os.unlink(FOLDER + "/segment")
ring.forget(fd)
os.close(fd)
deadline = time.monotonic() + 10
while "/segment" in open("/proc/self/maps").read() and time.monotonic() < deadline:
    time.sleep(0.01)
print("/segment" in open("/proc/self/maps").read())
ring.close()
ring.forget(fd)
"""
    assert out(run(tmpfs, script)) == ["False"]


def test_neighbours_are_copied_out_of_one_mapping(tmpfs: Path | None) -> None:
    if tmpfs is None:
        pytest.skip("no file system in memory here")
    records = [Record(i, PAGE_BYTES, 3, i * 4 * PAGE_BYTES) for i in range(20)]
    fd = os.open(tmpfs / "segment", os.O_RDWR | os.O_CREAT)
    with Ring(2, PIECE_BYTES, in_memory=InMemory(map_reads=True)) as ring:
        results = written(ring, fd, records)
        targets = [AlignedBuffer(record.n_bytes) for record in records]
        ops = [r.read_op(fd, t, result.checksums) for r, t, result in zip(records, targets, results, strict=True)]
        for cut in (0, 2):
            os.ftruncate(fd, (80 - cut) * PAGE_BYTES)
            before = reads_issued()
            found = finished(ring.submit(ops))
            assert [result.error for result in found] == [0] * 19 + [errno.ENODATA if cut else 0]
            assert (reads_issued() > before) == bool(cut)
            for record, target, result in zip(records, targets, found, strict=True):
                assert result.error or target.view[: len(record.slabs)] == record.slabs
    os.close(fd)
