"""Calibration: what is picked from which rates, what it leaves, and that no fault of the storage stops a start."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.io import calibrate as measuring
from kvtier.io import calibration as kept
from kvtier.io.base import Reads
from kvtier.io.calibrate import LEFT_OVER_S, PREFIX, Makers, calibrate, sweep
from kvtier.io.calibration import Ask, Calibration, calibrated
from kvtier.io.engines import EngineChoice, Target
from kvtier.io.ring import AlignedBuffer, FlushOp, OpResult, ReadOp, WriteOp
from kvtier.storage.filesystem import FileSystem

from cuda_double import CudaDouble

MIB = 1 << 20
DEVICE = Target(1 << 40, 64 * MIB, 0)
BIG_CACHE = 300 * MIB
USUAL = EngineChoice("ring", 12, 4 * MIB, 2)
"""What is used into DEVICE where nothing is measured, with the threads that the tests give it."""


class Machine:
    """A storage with a clock of its own: engines take the time that their rates say."""

    def __init__(self, rate_of: Callable[[EngineChoice], float] = lambda choice: 1e9) -> None:
        self.now_s = 100.0
        self.rate_of = rate_of
        self.opened: list[EngineChoice] = []
        self.closed = 0
        self.write_error_after = 1 << 30
        self.hangs = False
        self.read_fault: int | Exception | None = None  # of each engine's third read
        self.flush_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def makers(self) -> Makers:
        return Makers(self.reader, lambda: FakeEngine(self, 2e9))

    def reader(self, choice: EngineChoice) -> FakeEngine:
        self.opened.append(choice)
        return FakeEngine(self, self.rate_of(choice))


class FakeEngine:
    def __init__(self, machine: Machine, rate: float) -> None:
        self.machine = machine
        self.rate = rate
        self.written = self.read = 0
        self.flying: list[FakeReads] = []

    def submit(self, ops: Sequence[ReadOp | WriteOp | FlushOp]) -> Reads:
        if isinstance(ops[0], FlushOp):
            self.flying.append(flush := FakeReads(self, int(self.machine.flush_s * self.rate), 0))
            return flush
        if self.rate <= 0:
            raise TierUnavailable("CUDA_ERROR_OUT_OF_MEMORY")
        error = 0
        if isinstance(ops[0], WriteOp):
            self.written += 1
            error = errno.ENOSPC if self.written > self.machine.write_error_after else 0
        elif ops[0].on_device:
            self.read += 1
            fault = self.machine.read_fault if self.read == 3 else None
            if isinstance(fault, Exception):
                raise fault
            error = fault or 0
        reads = FakeReads(self, sum(op.n_slabs * op.slab_bytes for op in ops), error)
        self.flying.append(reads)
        return reads

    def close(self, timeout_s: float = 1.0) -> bool:
        self.machine.closed += 1
        assert not self.flying or self.machine.hangs, "closed over reads that are on their way"
        return not self.flying


class FakeReads:
    def __init__(self, engine: FakeEngine, n_bytes: int, error: int) -> None:
        self.engine = engine
        self.n_bytes = n_bytes
        self.error = error

    def wait(self, timeout_s: float) -> bool:
        if self.engine.machine.hangs:
            return False
        self.engine.machine.now_s += self.n_bytes / self.engine.rate
        self.engine.flying.remove(self)
        return True

    def cancel(self) -> None: ...

    def results(self) -> list[OpResult]:
        return [OpResult(self.error, (), (0,))]


@pytest.fixture(autouse=True)
def _same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "last_level_cache_bytes", lambda: BIG_CACHE)
    monkeypatch.setattr(kept, "device_threads", lambda ranks: USUAL.threads)


def ask_of(folder: Path, **changes: object) -> Ask:
    return replace(Ask(folder, DEVICE, False, True, ("ring", "kvikio"), "NVIDIA H200"), **changes)  # type: ignore[arg-type]


def run(machine: Machine, ask: Ask) -> Calibration:
    return calibrate(ask, machine.makers(), machine.clock)


def test_a_client_that_writes_behind_is_measured_with_its_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct write there returns at the pace of the client's memory."""
    machine = Machine()
    machine.flush_s = 1.0
    plain = run(machine, ask_of(tmp_path, direct=True, in_memory=False)).write_bytes_s
    gluster = FileSystem("fuse.glusterfs", True, "/")
    monkeypatch.setattr(measuring, "file_system_of", lambda _: gluster)
    flushed = run(machine, ask_of(tmp_path, direct=True, in_memory=False)).write_bytes_s
    assert plain == pytest.approx(2e9, rel=0.01) and flushed is not None
    assert flushed < measuring.BUFFERED_BYTES_MAX / machine.flush_s


# --- which is picked ---


def test_the_fastest_is_picked(tmp_path: Path) -> None:
    rates = {("ring", 12): 48e9, ("ring", 16): 53.5e9, ("kvikio", 16): 46e9}
    machine = Machine(lambda choice: rates.get(choice[:2], 30e9) - choice.piece_bytes)
    found = run(machine, ask_of(tmp_path, in_memory=False, direct=True))
    assert found.choice == EngineChoice("ring", 16, MIB, 4)
    assert found.read_bytes_s == pytest.approx(53.5e9, rel=0.01)
    assert found.write_bytes_s == pytest.approx(2e9, rel=0.01) and found.latency_s and found.latency_s < 0.01
    assert "the fastest" in found.describe() and "53.50 GB/s" in found.describe()
    assert any("kvikio" in reason and "46.0" in reason for reason in found.reasons)
    assert machine.closed == len(machine.opened) + 1 and not list(tmp_path.iterdir())


def test_the_usual_is_kept_when_it_is_about_as_fast(tmp_path: Path) -> None:
    found = run(Machine(lambda choice: 48e9 if choice == USUAL else 50e9), ask_of(tmp_path))
    assert found.choice == USUAL and found.read_bytes_s == pytest.approx(48e9, rel=0.01)
    assert " is preferred to the fastest of " in found.reasons[-1]


def test_the_best_and_the_usual_are_measured_again(tmp_path: Path) -> None:
    """What was tried first met a cold machine."""
    tries: Counter[EngineChoice] = Counter()

    def rate_of(choice: EngineChoice) -> float:
        tries[choice] += 1
        if choice == USUAL:
            return 20e9 if tries[choice] == 1 else 50e9
        return 1e9 if choice.engine == "kvikio" else 30e9 + choice.threads * 1e8

    found = run(Machine(rate_of), ask_of(tmp_path, in_memory=False, direct=True))
    assert found.choice == USUAL and found.read_bytes_s == pytest.approx(50e9, rel=0.01)
    assert tries[USUAL] == 2 and len(tries) > 4
    assert {choice for choice, n in tries.items() if n == 2 and choice != USUAL} == {
        EngineChoice("ring", threads, 2 * MIB, 2) for threads in (16, 24, 32)
    }


def test_a_second_try_that_was_slower_counts_for_nothing(tmp_path: Path) -> None:
    tries: Counter[EngineChoice] = Counter()

    def rate_of(choice: EngineChoice) -> float:
        tries[choice] += 1
        return (50e9 if choice == USUAL else 30e9) / tries[choice]

    found = run(Machine(rate_of), ask_of(tmp_path))
    assert tries[USUAL] == 2 and found.read_bytes_s == pytest.approx(50e9, rel=0.01)


def test_an_engine_that_does_not_start_is_left_out(tmp_path: Path) -> None:
    machine = Machine(lambda choice: 0 if choice.engine == "ring" else 1e10)
    found = run(machine, ask_of(tmp_path))
    assert found.choice.engine == "kvikio"
    assert any("left out: CUDA_ERROR_OUT_OF_MEMORY" in reason for reason in found.reasons)


def test_what_the_settings_fix_is_kept(tmp_path: Path) -> None:
    machine = Machine()
    run(machine, ask_of(tmp_path, threads=7, piece_bytes=8192))
    assert {(choice.threads, choice.piece_bytes) for choice in machine.opened} == {(7, 8192)}


def test_a_slow_storage_is_not_measured_for_long(tmp_path: Path) -> None:
    machine = Machine(lambda choice: 5e7)
    found = run(machine, ask_of(tmp_path))
    assert found.read_bytes_s == pytest.approx(5e7, rel=0.01)
    assert any("not tried" in reason for reason in found.reasons) and len(machine.opened) < 4


# --- faults ---


def test_a_storage_that_hangs(tmp_path: Path) -> None:
    machine = Machine()
    machine.hangs = True
    found = run(machine, ask_of(tmp_path))
    assert found.is_target_busy and found.read_bytes_s is None and found.choice.engine == "ring"
    assert "no answer" in found.describe() and not list(tmp_path.iterdir())
    assert measuring._left_behind.pop()


@pytest.mark.parametrize("fault", [errno.EIO, TierUnavailable("I/O queue")])
def test_a_read_that_fails(fault: int | Exception, tmp_path: Path) -> None:
    """An engine is closed only after all that it was given has landed (FakeEngine.close asserts it)."""
    machine = Machine()
    machine.read_fault = fault
    found = run(machine, ask_of(tmp_path))
    assert found.read_bytes_s is None and not found.is_target_busy and machine.closed == len(machine.opened) + 1
    assert all("left out" in reason for reason in found.reasons[:-1])


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RECORD_BYTES", 1 << 60)
    found = run(Machine(), ask_of(tmp_path))
    assert "No space left" in found.describe() and found.read_bytes_s is None and not found.is_target_busy


def test_a_disk_that_fills_while_it_is_written(tmp_path: Path) -> None:
    machine = Machine()
    machine.write_error_after = 2
    assert run(machine, ask_of(tmp_path)).read_bytes_s
    machine.write_error_after = 0
    found = run(machine, ask_of(tmp_path))
    assert "No space left" in found.describe() and found.read_bytes_s is None


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    found = run(Machine(), ask_of(tmp_path / "absent"))
    assert "No such file" in found.describe() and found.choice == USUAL


def test_what_was_killed_is_swept(tmp_path: Path) -> None:
    for name, age_s in ((PREFIX + "old", LEFT_OVER_S + 10), (PREFIX + "new", 10), ("other", 1e6)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [PREFIX + "new", "other"]


# --- kept for a day ---


def counted(machine: Machine) -> Callable[[Ask], Calibration]:
    return lambda ask: calibrate(ask, machine.makers(), machine.clock)


def test_measured_once_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine, ask = Machine(), ask_of(tmp_path)
    with caplog.at_level(logging.INFO, "kvtier"):
        first = calibrated(tmp_path, ask, counted(machine), 1000.0)
        opened = len(machine.opened)
        assert calibrated(tmp_path, ask, counted(machine), 1000.0 + 86399) == first
    assert len(machine.opened) == opened > 0
    assert len(caplog.messages) == 2 and "reads 1.00 GB/s" in caplog.text and str(first.choice) in caplog.text
    calibrated(tmp_path, ask, counted(machine), 1000.0 + 86401)
    assert len(machine.opened) == 2 * opened
    calibrated(tmp_path, replace(ask, device="NVIDIA B200"), counted(machine), 1000.0 + 86402)
    assert len(machine.opened) == 3 * opened
    calibrated(tmp_path, replace(ask, device="NVIDIA B200"), counted(machine), 10.0)  # the clock was set back
    assert len(machine.opened) == 4 * opened
    assert len(list(tmp_path.glob("calibration-*.json"))) == len(list(tmp_path.iterdir())) == 1


def test_a_pod_of_another_name_uses_what_its_machine_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, ask = Machine(), ask_of(tmp_path)
    calibrated(tmp_path, ask, counted(machine), 1000.0)
    opened = len(machine.opened)
    monkeypatch.setattr("socket.gethostname", lambda: "pod-7f9c")
    calibrated(tmp_path, ask, counted(machine), 1001.0)
    assert len(machine.opened) == opened and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', "damaged"])
def test_a_damaged_file_is_replaced(text: str, tmp_path: Path) -> None:
    machine, ask = Machine(), ask_of(tmp_path)
    calibrated(tmp_path, ask, counted(machine), 1000.0)
    path = next(tmp_path.iterdir())
    values = json.loads(path.read_text())
    values["calibration"]["choice"]["threads"] = 0
    path.write_text(json.dumps(values) if text == "damaged" else text)
    opened = len(machine.opened)
    assert calibrated(tmp_path, ask, counted(machine), 1001.0).read_bytes_s
    assert len(machine.opened) == 2 * opened
    calibrated(tmp_path, ask, counted(machine), 1002.0)
    assert len(machine.opened) == 2 * opened


def test_what_was_not_measured_is_not_kept(tmp_path: Path) -> None:
    machine = Machine()
    machine.hangs = True
    assert calibrated(tmp_path, ask_of(tmp_path), counted(machine), 0.0).is_target_busy
    assert not list(tmp_path.iterdir())
    measuring._left_behind.clear()


def test_read_only_root_is_measured_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(kept, "replace_small", refuse)
    assert calibrated(tmp_path, ask_of(tmp_path), counted(Machine()), 0.0).read_bytes_s


# --- over a double of CUDA's driver ---


def test_reads_into_device_memory(cuda: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)  # not installed
    monkeypatch.setattr(measuring, "FILE_BYTES_MAX", 32 * MIB)
    monkeypatch.setattr(measuring, "READ_S", 0.02)
    buffer = AlignedBuffer(16 * MIB)
    ask = Ask(tmp_path, Target(buffer.address, buffer.n_bytes, 0), True, False, ("ring", "kvikio"))
    found = calibrate(ask)
    assert found.read_bytes_s and found.choice.engine == "ring" and found.choice.slots > 1, found.reasons
    assert cuda.copies() > 0 and bytes(buffer.view[:4096]).count(0) < 200
    assert any("kvikio" in reason and "left out" in reason for reason in found.reasons)


def test_a_device_that_hangs(cuda: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is never done: the target is not the caller's yet."""
    monkeypatch.setattr(measuring, "FILE_BYTES_MAX", 32 * MIB)
    monkeypatch.setattr(measuring, "HANGS_S", 0.5)
    buffer = AlignedBuffer(16 * MIB)
    cuda.close_gate()
    found = calibrate(Ask(tmp_path, Target(buffer.address, buffer.n_bytes, 0), True, False))
    assert found.is_target_busy and found.read_bytes_s is None
    assert cuda.copying() > 0 and not list(tmp_path.iterdir())
    cuda.open_gate()
    reads, (_, flying) = measuring._left_behind.pop()  # type: ignore[misc]
    assert all(late.wait(10.0) for late in (reads, *(others for _, others in flying)))
    assert bytes(buffer.view[:4096]).count(0) < 200  # so late it landed


# --- the real thing ---


@pytest.mark.parametrize("direct", [True, False])
def test_this_machine(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FILE_BYTES_MAX", 64 * MIB)
    monkeypatch.setattr(measuring, "READ_S", 0.02)
    buffer = AlignedBuffer(32 * MIB)
    ask = Ask(tmp_path, Target(buffer.address, buffer.n_bytes), direct, False)
    found = calibrate(ask)
    assert found.read_bytes_s and found.write_bytes_s and found.latency_s, found.reasons
    assert bytes(buffer.view[:4096]).count(0) < 200  # something was read into it
    assert not list(tmp_path.iterdir()) and found.choice.engine == "ring" and not found.is_target_busy
