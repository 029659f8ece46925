"""Systems under comparison, with their settings, as jobs of `benchmarks.gpu.engine`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import WARM_UP_TOKENS, EngineSetup
from benchmarks.gpu.systems import NATIVE_CPU_BYTES, lmcache_settings, transfer_of
from benchmarks.versus import lmcache_server
from benchmarks.versus.turns import Member


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
    "native": Contestant("vLLM's own tiering", "native"),
    # A forward that is one whole CUDA graph, as that of a hit with one token to compute, is run by vLLM 0.25.1 without
    # attention metadata in its context, and then this connector loads nothing: the answer is wrong.
    "lmcache": Contestant("LMCache, GDS in the engine's process", "lmcache", graphs="PIECEWISE"),
    "lmcache-mp": Contestant("LMCache, its server and files", "lmcache-mp"),
}


@dataclass(frozen=True)
class VersusFolder:
    """Folder in which each contestant stores below a folder of its own. storage: "tmpfs" or "disk"."""

    storage: str
    setup: EngineSetup

    def data(self, name: str) -> Path:
        return self.setup.folder / "versus" / name

    def forget(self, name: str) -> None:
        shutil.rmtree(self.data(name), ignore_errors=True)

    def settings(self, name: str) -> dict[str, Any]:
        """Return what is printed and written: vLLM's arguments, and the settings that a system has beside them."""
        contestant = CONTESTANTS[name]
        transfer = transfer_of(contestant.system, self.data(name), self._extra(name))
        found: dict[str, Any] = {"kv_transfer_config": transfer} | self._graphs(name)
        if name == "lmcache":
            found["lmcache.yaml"] = lmcache_settings(self.data(name) / name)
        if name == "lmcache-mp":
            found["lmcache server"] = self._server(name)
        return found

    def member(self, name: str, label: str, steps: list[list[Any]], warm_tokens: int) -> Member:
        """Return a process of this contestant that warms up, waits for its turn and does the steps."""
        self.data(name).mkdir(parents=True, exist_ok=True)
        job = self.setup.job(CONTESTANTS[name].system, self.data(name), self._extra(name))
        job["llm"] = job["llm"] | self._graphs(name)
        before = [["warm_up", min(WARM_UP_TOKENS, warm_tokens)]]
        return Member(f"{self.storage}-{name}-{label}", job, before, steps, self._server(name))

    def _graphs(self, name: str) -> dict[str, Any]:
        """Return engine arguments; nothing where engines run eagerly."""
        mode, compilation = CONTESTANTS[name].graphs, self.setup.llm.get("compilation_config")
        return {"compilation_config": compilation | {"cudagraph_mode": mode}} if mode and compilation else {}

    def _server(self, name: str) -> list[str] | None:
        if name != "lmcache-mp":
            return None
        return lmcache_server.arguments(self.data(name) / name, is_direct=self.storage != "tmpfs")

    def _extra(self, name: str) -> dict[str, Any]:
        contestant = CONTESTANTS[name]
        if contestant.system == "native":
            longest_bytes = self.setup.token_bytes * self.setup.llm["max_model_len"]
            return {"cpu_bytes_to_use": max(NATIVE_CPU_BYTES, longest_bytes * 3 // 2)}
        return (self.setup.extra if contestant.system == "kvtier" else {}) | contestant.extra
