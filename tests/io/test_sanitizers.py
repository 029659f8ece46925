"""The native code under the address, undefined-behaviour and thread sanitizers: `native_*test.cpp`, built and run, with
a double of CUDA's driver that is built the same way."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "kvtier" / "io" / "native"
SOURCES = [
    "batch.cpp",
    "checksum.cpp",
    "cuda_driver.cpp",
    "device_stage.cpp",
    "engine.cpp",
    "neighbours.cpp",
    "pinned.cpp",
    "range_job.cpp",
    "range_plan.cpp",
    "transfer.cpp",
]
TESTS = [
    "native_test.cpp",
    "native_neighbours_test.cpp",
    "native_device_test.cpp",
    "native_ranges_test.cpp",
]
HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _has_sanitizer(compiler: str, sanitizer: str, folder: Path) -> bool:
    """A compiler without the sanitizer's runtime library cannot link even an empty program."""
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    command = [compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(folder / "empty")]
    built = subprocess.run(command, capture_output=True, check=False)
    if built.returncode != 0:
        return False
    return subprocess.run([folder / "empty"], capture_output=True, check=False).returncode == 0


def _build(command: list[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_code_is_clean(sanitizer: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    if not _has_sanitizer(COMPILER, sanitizer, tmp_path):
        pytest.skip(f"{COMPILER} has no runtime for -fsanitize={sanitizer} here")
    program, double = tmp_path / "native_test", tmp_path / "fake_cuda.so"
    command = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-g1",  # lines of reports, without the variables that a debugger shows
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-maybe-uninitialized",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
    ]
    sources = [*(str(HERE / test) for test in TESTS), *(str(NATIVE / source) for source in SOURCES)]
    _build([*command, f"-I{NATIVE}", *sources, "-ldl", "-o", str(program)])
    _build([*command, "-fPIC", "-shared", str(HERE / "fake_cuda.cpp"), "-o", str(double)])
    # The thread sanitizer takes it for a race when glibc frees the thread-local memory of a thread that has ended.
    silenced = tmp_path / "silenced"
    silenced.write_text("race:dl_deallocate_tls\n")
    environment = {
        **os.environ,
        "TSAN_OPTIONS": f"halt_on_error=1:suppressions={silenced}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [str(program), str(tmp_path), str(double)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert run.returncode == 0 and run.stdout == "passed\n", run.stderr[-5000:]
