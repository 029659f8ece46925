"""The native code under the address, undefined-behaviour and thread sanitizers: `native_test.cpp`, built and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "kvtier" / "io" / "native"
SOURCES = ["batch.cpp", "checksum.cpp", "crc32.cpp", "engine.cpp", "transfer.cpp"]
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


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_code_is_clean(sanitizer: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    if not _has_sanitizer(COMPILER, sanitizer, tmp_path):
        pytest.skip(f"{COMPILER} has no runtime for -fsanitize={sanitizer} here")
    program = tmp_path / "native_test"
    command = [
        COMPILER, "-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized",
        f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{NATIVE}",
        str(Path(__file__).with_name("native_test.cpp")), *(str(NATIVE / source) for source in SOURCES),
        "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = subprocess.run(
        [program, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert run.returncode == 0 and run.stdout == "passed\n", run.stderr[-5000:]
