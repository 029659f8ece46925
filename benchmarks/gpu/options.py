"""Options that the scripts which run engines have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu.models import DIMENSIONS


def of_scripts(parser: argparse.ArgumentParser) -> None:
    """Where logs and models lie, and whether the script is only tried."""
    add = parser.add_argument
    add("--logs", type=Path, default=Path("/tmp/bench/logs"))
    add("--models", type=Path, default=Path("/tmp/bench/models"))
    add("--tiny", action="store_true", help="a tiny model on the CPU, to try this script")


def of_runs(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Those, and of a script that runs one engine after another: its folder, its result, and an engine's time."""
    of_scripts(parser)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where the systems store; its file system counts")
    add("--out", type=Path, required=True, help="the JSON file to write")
    add("--timeout", type=float, default=timeout_s, help="seconds for one engine's process")


def of_kvtier(parser: argparse.ArgumentParser, usual: str = "{}") -> None:
    parser.add_argument("--extra", default=usual, help="more settings of kvtier, as JSON")


def of_timed_engines(
    parser: argparse.ArgumentParser, gpu_memory: float, model: str = "8b", tensor_parallel_size: int = 1
) -> None:
    """A model whose output means nothing, how it lies on the GPUs, and how its forwards are launched."""
    add = parser.add_argument
    add("--model", choices=sorted(DIMENSIONS), default=model)
    add("--gpu-memory", type=float, default=gpu_memory, help="share of each GPU's memory")
    add("--tp", type=int, default=tensor_parallel_size, help="tensor parallel size")
    add("--eager", action="store_true", help="without vLLM's default of compiling and CUDA graphs")
