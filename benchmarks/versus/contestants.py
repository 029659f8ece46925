"""Who is compared, with which settings, as jobs of `benchmarks.gpu.engine`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.systems import LMCACHE_BUFFER_MIB, LMCACHE_IO_THREADS, transfer_of
from benchmarks.gpu.ttft import WARM_UP_TOKENS, Setup
from benchmarks.versus import lmcache_server
from benchmarks.versus.turns import Member

NATIVE_CPU_BYTES = 24 << 30
"""Holds the largest prompt (13.1 GB) nearly twice. With more, what is stored by three systems beside each other, all in
memory, would not fit into the machine."""


@dataclass(frozen=True)
class Contestant:
    """system: as benchmarks.gpu.systems has it. extra: its settings. graphs: the mode of CUDA graphs that it needs."""

    title: str
    system: str
    extra: dict[str, Any] = field(default_factory=dict)
    graphs: str | None = None


CONTESTANTS = {
    "none": Contestant("no tier", "none"),
    "kvtier": Contestant("kvtier", "kvtier"),
    "kvtier-k4v4": Contestant("kvtier, k4v4", "kvtier", {"codec": "k4v4"}),
    "native": Contestant("vLLM's own tiering", "native", {"cpu_bytes_to_use": NATIVE_CPU_BYTES}),
    # A forward that is one whole CUDA graph, as that of a hit with one token to compute, is run by vLLM 0.25.1 without
    # attention metadata in its context, and then this connector loads nothing: the answer is wrong.
    "lmcache": Contestant("LMCache, GDS in the engine's process", "lmcache", graphs="PIECEWISE"),
    "lmcache-mp": Contestant("LMCache, its server and files", "lmcache-mp"),
}


@dataclass(frozen=True)
class Place:
    """Where contestants store: each in a folder of its own below setup.folder. setup: what all engines have in common.

    start_s, turn_s: what a process may take until it is ready, and from its turn to its end.
    """

    name: str
    setup: Setup
    start_s: float
    turn_s: float

    def data(self, name: str) -> Path:
        return self.setup.folder / "versus" / name

    def forget(self, name: str) -> None:
        shutil.rmtree(self.data(name), ignore_errors=True)

    def settings(self, name: str) -> dict[str, Any]:
        """As they are printed and written down: what vLLM is given, and what the system has beside it."""
        found: dict[str, Any] = {"kv_transfer_config": transfer_of(self._system(name), self.data(name), self._of(name))}
        if name == "lmcache":
            found["lmcache.yaml"] = {
                "chunk_size": 256,
                "local_cpu": False,
                "gds_buffer_size": LMCACHE_BUFFER_MIB,
                "extra_config": {"disk_io_threads": LMCACHE_IO_THREADS},
            }
        if name == "lmcache-mp":
            found["lmcache server"] = self._server(name)
        return found | self._graphs(name)

    def member(self, name: str, label: str, steps: list[list[Any]], warm_tokens: int) -> Member:
        """A process of this contestant that warms up, waits for its turn and does the steps."""
        self.data(name).mkdir(parents=True, exist_ok=True)
        job = self.setup.job(self._system(name), self.data(name), self._of(name))
        job["llm"] = job["llm"] | self._graphs(name)
        before = [["warm_up", min(WARM_UP_TOKENS, warm_tokens)]]
        return Member(f"{self.name}-{name}-{label}", job, before, steps, self._server(name))

    def _graphs(self, name: str) -> dict[str, Any]:
        """Of the engine's arguments; nothing where engines run eagerly."""
        mode, compilation = CONTESTANTS[name].graphs, self.setup.llm.get("compilation_config")
        return {"compilation_config": compilation | {"cudagraph_mode": mode}} if mode and compilation else {}

    def _server(self, name: str) -> list[str] | None:
        if name != "lmcache-mp":
            return None
        return lmcache_server.arguments(self.data(name) / name, is_direct=self.name != "tmpfs")

    def _system(self, name: str) -> str:
        return CONTESTANTS[name].system

    def _of(self, name: str) -> dict[str, Any]:
        if self._system(name) == "kvtier":
            return self.setup.extra | CONTESTANTS[name].extra
        return CONTESTANTS[name].extra
