"""A double of CUDA's driver for the tests of this folder: `fake_cuda.cpp`, compiled, loaded in the driver's place."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.io.native import library
from tests.waiting import wait_until

from records import TIMEOUT_S

_OUT_OF_MEMORY = 2


def compiler() -> list[str]:
    """As setup.py finds it; without one the test is skipped."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no C++ compiler on this machine")
    return [sys.executable, "-m", "ziglang", "c++"]


def build(folder: Path) -> Path:
    """The library, in `folder`."""
    target = folder / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    command = [*compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", str(source), "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return target


class CudaDouble:
    """The driver as long as it is in use (`with`). Device memory is host memory, which copies reach late.

    left_behind: objects that a test leaves on purpose.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_behind = 0
        self._lib = ctypes.CDLL(str(path))
        for name in (
            "outstanding",
            "faults",
            "failures_left",
            "copies",
            "copying",
            "events_reached",
            "contexts_of_thread",
            "capture_mode_of_thread",
        ):
            getattr(self._lib, f"fake_{name}").restype = ctypes.c_int64
        self._lib.fake_delay.argtypes = [ctypes.c_int64]
        self._lib.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]

    def __enter__(self) -> CudaDouble:
        library.kvtier_cuda_load(str(self.path).encode())
        self._objects_before, self._faults_before = self.outstanding(), self._lib.fake_faults()
        return self

    def __exit__(self, *_: object) -> None:
        self.open_gate()
        self.capture(False)
        self.delay(0.0)
        self.fail(times=0)
        library.kvtier_cuda_load(None)
        deadline_s = time.monotonic() + TIMEOUT_S
        # A thread that a test left behind ends when its copy has.
        while self.outstanding() > self._objects_before + self.left_behind and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert self.outstanding() == self._objects_before + self.left_behind
        assert self._lib.fake_faults() == self._faults_before

    def outstanding(self) -> int:
        """Contexts, streams, events and registered ranges."""
        return int(self._lib.fake_outstanding())

    def copies(self) -> int:
        """Ended so far."""
        return int(self._lib.fake_copies())

    def events_reached(self) -> int:
        """Return the number of recorded events that their streams have reached."""
        return int(self._lib.fake_events_reached())

    def contexts_of_thread(self) -> int:
        return int(self._lib.fake_contexts_of_thread())

    def enter(self) -> None:
        """Makes some context current, as torch.cuda.set_device does."""
        assert self._lib.cuCtxSetCurrent(ctypes.c_void_p(1)) == 0

    def capture_mode_of_thread(self) -> int:
        """As CUDA counts; 0, the most strict one, is what a thread begins with."""
        return int(self._lib.fake_capture_mode_of_thread())

    def capture(self, capturing: bool) -> None:
        """As if the engine were recording a CUDA graph: unsafe calls of threads that are not relaxed are faults."""
        self._lib.fake_capture(int(capturing))

    def delay(self, seconds: float) -> None:
        """Before each copy."""
        self._lib.fake_delay(int(seconds * 1e6))

    def close_gate(self) -> None:
        """No copy begins before it is open again."""
        self._lib.fake_gate(1)

    def open_gate(self) -> None:
        self._lib.fake_gate(0)

    def copying(self) -> int:
        """Asked for and not ended."""
        return int(self._lib.fake_copying())

    def wait_until_copying(self, n_copies: int) -> None:
        wait_until(lambda: self.copying() == n_copies, f"{n_copies} copies under way")

    def failures_left(self) -> int:
        """Return how many failures that `fail` asked for are left."""
        return int(self._lib.fake_failures_left())

    def fail(self, *calls: str, after: int = 0, times: int = 1) -> None:
        """These calls, after some that work, so many times in all, with CUDA_ERROR_OUT_OF_MEMORY."""
        self._lib.fake_fail(" ".join(calls).encode(), after, times, _OUT_OF_MEMORY)
