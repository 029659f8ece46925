"""On which GPUs each process has a CUDA context: a stray one on GPU 0 is a classic fault of multi-GPU code.

Two ways that share nothing: nvidia-smi's list of compute processes, sampled while engines run, and the driver's own
word on primary contexts, asked in each worker (inside.contexts).
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

SAMPLE_S = 2.0
SMI_TIMEOUT_S = 20.0
QUERY = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]


class ContextWatch:
    """Samples nvidia-smi from `with` to its end; processes that ran before are left out."""

    def __init__(self) -> None:
        self.samples = 0
        self._gpus: dict[int, set[str]] = {}
        self._before: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ContextWatch:
        self._before = {pid for pid, _ in processes()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def seen(self) -> dict[str, list[str]]:
        """Process id -> GPUs on which it was seen; call it after the end."""
        return {str(pid): sorted(gpus) for pid, gpus in sorted(self._gpus.items())}

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.samples += 1
            for pid, gpu in processes():
                if pid not in self._before and pid != os.getpid():
                    self._gpus.setdefault(pid, set()).add(gpu)


def processes() -> list[tuple[int, str]]:
    """(process id, GPU) of each compute process that nvidia-smi lists; none where it does not run."""
    try:
        ran = subprocess.run(QUERY, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in ran.stdout.splitlines() if line.count(",") == 1]
    return [(int(pid), gpu.strip()) for pid, gpu in rows if pid.strip().isdigit()]


def judge(listed: dict[str, list[str]], by_rank: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Whether every process keeps to one GPU.

    listed: of nvidia-smi. by_rank: of each engine, for each rank, the ordinals with an active primary context.
    Either way may have seen nothing (is_shown false): then it says nothing.
    """
    ranks = [list(rank) for engine in by_rank for rank in engine]
    placed = [[gpu for rank in engine for gpu in rank] for engine in by_rank]
    return {
        "listed": listed,
        "by_rank": [[list(rank) for rank in engine] for engine in by_rank],
        "listed_is_shown": bool(listed),
        "listed_is_good": all(len(gpus) == 1 for gpus in listed.values()),
        "ranks_are_shown": bool(ranks) and all(ranks),
        "ranks_are_good": all(len(rank) == 1 for rank in ranks) and all(len(set(p)) == len(p) for p in placed),
    }


def is_good(found: dict[str, Any]) -> bool:
    """At least one of the two ways has seen the processes, and neither has seen one on two GPUs."""
    if not (found["listed_is_shown"] or found["ranks_are_shown"]):
        return False
    listed = found["listed_is_good"] or not found["listed_is_shown"]
    return bool(listed and (found["ranks_are_good"] or not found["ranks_are_shown"]))
