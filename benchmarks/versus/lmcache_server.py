"""LMCache's own server (`lmcache server`), with files below its host memory.

Each engine gets a new one, because a server that runs on would answer a reload from its memory. Of its two adapters for
file systems this is the native one, the faster, with the threads that its documents advise for shared file systems;
host memory is pinned at the start and not step by step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.systems import environment_of
from benchmarks.processes import free_port, launch, stop

HOST = "127.0.0.1"
MEMORY_GB = 28.0  # holds all prompts of a piece (26.8 GB), on machines whose memory grows as it is used
FILE_THREADS = 32
WAIT_S = 100.0  # engines wait so long for an answer, the server's start included; the default is 300


def arguments(files: Path, is_direct: bool) -> list[str]:
    """Return the server's arguments without its ports. is_direct: past the page cache."""
    adapter = {"type": "fs_native", "base_path": str(files), "num_workers": FILE_THREADS, "use_odirect": is_direct}
    words = f"--host {HOST} --http-host {HOST} --chunk-size 256 --l1-size-gb {MEMORY_GB} --no-l1-use-lazy"
    return [*f"{words} --eviction-policy LRU --disable-metrics --l2-adapter".split(), json.dumps(adapter)]


class LMCacheServer:
    """A started server. It is up after some seconds; connectors wait for it."""

    def __init__(self, words: Sequence[str], log_path: Path) -> None:
        self.port, http_port = free_port(), free_port()
        command = [sys.executable, "-m", "lmcache.cli.main", "server", *words]
        command += ["--port", str(self.port), "--http-port", str(http_port)]
        self._others_pools = pools()
        self._process = launch(command, log_path, os.environ | environment_of("lmcache-mp", log_path.parent))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the connector in the engine."""
        return {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": self.port, "lmcache.mp.mq_timeout": WAIT_S}

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kill the server and remove its host memory, which it leaves in shared memory: on a machine whose tmpfs is
        measured, what is stored next would not fit."""
        stop(self._process)
        for pool in pools() - self._others_pools:
            pool.unlink(missing_ok=True)


def pools(folder: Path = Path("/dev/shm")) -> set[Path]:
    """Return the files of host memory of LMCache's servers, including those that ended."""
    return set(folder.glob("lmcache_l1_pool_*"))
