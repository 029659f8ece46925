"""Options that the scripts which run engines share, and what all engines of one run have in common."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import DIMENSIONS, make_model
from benchmarks.gpu.systems import environment_of
from benchmarks.processes import EngineProcess

Steps = list[list[Any]]
WARM_UP_TOKENS = 2048
# vLLM's default, compiling and CUDA graphs, with fewer sizes than it captures itself: starts are quicker. What is left
# to compute of one hit (16 to 160 tokens here), or of two at once, fits into the larger ones.
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512]
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES}}
# A tiny model on a CPU, to try the scripts before they take a GPU's time.
TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.1,
    "enforce_eager": True,
    "max_model_len": 2048,
}
TINY_CHUNK = 64  # tokens
TINY_TIER: dict[str, Any] = {
    "chunk_tokens": TINY_CHUNK,
    "min_load_tokens": TINY_CHUNK,
    "segment_bytes": "16MiB",
    "capacity_bytes": "1GiB",
    "host": {"arena_bytes": "64MiB"},
}
TINY_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def parser(module: str, about: str | None, timeout_s: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--folder", type=Path, default=Path("/dev/shm/kv"), help="where the systems store")
    add("--out", type=Path, required=True, help="the JSON file to write")
    add("--timeout", type=float, default=timeout_s, help="seconds for one engine's process")
    add("--logs", type=Path, default=Path("/tmp/bench/logs"))
    add("--models", type=Path, default=Path("/tmp/bench/models"))
    add("--tiny", action="store_true", help="a tiny model on the CPU, to try this script")
    return made


def add_timed_engine(made: argparse.ArgumentParser, gpu_memory: float) -> None:
    """Add options of a model whose output means nothing, its place on the GPUs, and the tier's settings."""
    add = made.add_argument
    add("--model", choices=sorted(DIMENSIONS), default="8b")
    add("--gpu-memory", type=float, default=gpu_memory, help="share of each GPU's memory")
    add("--tp", type=int, default=1, help="tensor parallel size")
    add("--eager", action="store_true", help="without vLLM's default of compiling and CUDA graphs")
    add("--extra", default="{}", help="more settings of kvtier, as JSON")


@dataclass(frozen=True)
class EngineSetup:
    """Common settings of all engines of one run. llm: engine arguments. extra: kvtier's settings.
    environment: variables that replace the system's."""

    kind: str
    folder: Path
    models: Path
    logs: Path
    timeout_s: float
    llm: dict[str, Any]
    extra: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: argparse.Namespace, kind: str, llm: dict[str, Any], extra: dict[str, Any]) -> EngineSetup:
        """Build the setup from a script's options; of `llm` and `extra` nothing is used with --tiny."""
        if options.tiny:
            kind, llm, extra = "tiny", dict(TINY_ENGINE), dict(TINY_TIER)
        return cls(kind, options.folder, options.models, options.logs, options.timeout, llm, extra)

    @classmethod
    def timed(cls, options: argparse.Namespace) -> EngineSetup:
        """Build the setup of an engine whose times are taken (add_timed_engine)."""
        size = DIMENSIONS[options.model]
        llm: dict[str, Any] = {"enforce_eager": True} if options.eager else dict(GRAPHS)
        llm |= {"max_model_len": size.context_tokens, "gpu_memory_utilization": options.gpu_memory}
        # Every timed hit is loaded, also where the engine found that computing is quicker.
        extra: dict[str, Any] = {"capacity_bytes": "400GiB", "min_load_tokens": 256}
        if not size.is_saved:
            llm |= {"load_format": "dummy", "dtype": "bfloat16"}
            extra["model_tag"] = f"llama-{options.model}-dummy"
        found = cls.of(options, options.model, llm, extra)
        found.llm["tensor_parallel_size"] = options.tp
        found.extra.update(json.loads(options.extra))
        return found

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's raw KV, all layers and heads."""
        return DIMENSIONS[self.kind].token_bytes(4 if self.llm.get("dtype") == "float32" else 2)

    def job(self, system: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the job of an engine, without its steps."""
        tiny = TINY_ENVIRONMENT if self.kind == "tiny" else {}
        return {
            "model": str(make_model(self.kind, self.models)),
            "vocabulary": DIMENSIONS[self.kind].vocabulary,
            "system": system,
            "folder": str(folder),
            "extra": extra,
            "llm": self.llm,
            "environment": environment_of(system, folder) | tiny | self.environment,
        }

    def run(self, name: str, system: str, steps: Steps, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one engine and return {step: its result}. extra: more settings of the system. Raise EngineFailed."""
        job = self.job(system, self.folder, (self.extra if system == "kvtier" else {}) | (extra or {}))
        return self.run_job(name, job | {"steps": steps})

    def run_watched(self, name: str, steps: Steps, llm: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run kvtier with digests of all blocks (watch.py). llm: more engine arguments. Raise EngineFailed."""
        job = self.job("kvtier", self.folder, self.extra)
        return self.run_job(name, job | {"steps": steps, "watch": 1, "llm": self.llm | (llm or {})})

    def run_job(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        return EngineProcess(name, job, self.logs, self.timeout_s).results(self.timeout_s)

    def clear(self, system: str = "kvtier") -> None:
        """Make the folder, and remove what the system stored in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / system, ignore_errors=True)


def check_room(folder: Path, n_bytes: int) -> None:
    """Raise SystemExit if so many bytes do not fit: half a run takes as long as a whole one."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise SystemExit(f"{folder}: {n_bytes / 1e9:.1f} GB will be stored, {free / 1e9:.1f} are free; lower --count")
