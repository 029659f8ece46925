"""Runs real vLLM in this process: one engine, some scenarios, results as JSON. Started by the tests as a script.

    python engine.py SPEC.json OUT.json

SPEC: {"model", "root", "extra": connector config, "llm": engine arguments, "scenarios": [name or [name, argument]]};
with "config", that settings file instead of "extra". With ENGINE_SECOND_RUNNER in the environment the engine has vLLM's
second model runner (second_runner.py).
Scenarios are the functions of scenarios.py; each gets an Engine and returns what goes into OUT under its name.
"""

import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",  # what proposes n-grams would set the threads of OpenMP, which spin
)

if os.environ.get("ENGINE_SECOND_RUNNER"):
    import second_runner

    second_runner.choose()

import torch
from blake3 import blake3
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig, PoolerConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.executor import multiproc_executor

from kvtier.connectors.vllm import platform

CHUNK_TOKENS = 64
BLOCK_TOKENS = 32
PATIENCE_S = 300.0  # for anything, on a machine that runs more than it can

LLM_ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "block_size": BLOCK_TOKENS,
    "seed": 0,
    "disable_log_stats": False,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 2048,  # more are not used, and all are written at the start
}
"""Of every engine here, where its spec says nothing else."""


def extra_config(root: str, **changes: Any) -> dict[str, Any]:
    """The connector's settings in these tests: small chunks and segments, so that a few prompts fill several."""
    small = {"chunk_tokens": CHUNK_TOKENS, "min_load_tokens": CHUNK_TOKENS, "segment_bytes": "16MiB"}
    return {
        "root": root,
        "capacity_bytes": "1GiB",
        "host": {"arena_bytes": "64MiB"},
        **small,
        **changes,
    }


@dataclass
class Answer:
    """tokens: generated. cached: prompt tokens that the engine did not compute. kv: (layers, K|V, tokens, ...)."""

    tokens: list[int]
    cached: int
    kv: torch.Tensor


@dataclass
class Watch:
    """Looks at the engine's blocks: what is saved, what was loaded, and what a request ends with.

    saved, loaded: chunk key (hex) -> digests of the engine's blocks at that moment, as lists of distinct ones.
    at_end: request -> KV of its tokens, read from the engine's blocks when it finished.
    log: gets a line "saved|loaded KEY DIGEST" for each of them when it is seen, for the process may be killed.
    """

    saved: dict[str, list[str]] = field(default_factory=dict)
    loaded: dict[str, list[str]] = field(default_factory=dict)
    at_end: dict[str, torch.Tensor] = field(default_factory=dict)
    failed_loads: int = 0
    log: TextIO | None = None

    def attach(self, scheduler_half: Any, worker_half: Any) -> None:
        transfer, pages = worker_half._bridge._transfer, worker_half._pages.pages
        save, load, poll, finished = transfer.save, transfer.load, transfer.poll, scheduler_half.finished
        plans: dict[str, Any] = {}

        def watched_save(plan: Any) -> None:
            for chunk in plan.chunks:
                self._note("saved", chunk.key, _digest(pages, chunk.block_ids))
            save(plan)

        def watched_load(plan: Any) -> None:
            plans[plan.request_id] = plan
            load(plan)

        def watched_poll(timeout_s: float = 0.0) -> Any:
            progress = poll(timeout_s)
            for done in progress.loads:
                self.failed_loads += bool(done.failed_blocks)
                for chunk in plans.pop(done.request_id).chunks:
                    if done.failed_blocks.isdisjoint(chunk.block_ids):
                        self._note("loaded", chunk.key, _digest(pages, chunk.block_ids))
            return progress

        def watched_finished(request: Any, block_ids: Any) -> None:
            # Whole blocks only: on the CPU, K of a block is packed over all its tokens.
            tokens = min(request.num_computed_tokens, request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            ratio = worker_half._pages.ratio
            ids = [block * ratio + piece for block in block_ids for piece in range(ratio)]
            self.at_end[request.request_id] = _read(pages, ids)[:, :tokens]
            finished(request, block_ids)

        transfer.save, transfer.load, transfer.poll = watched_save, watched_load, watched_poll
        scheduler_half.finished = watched_finished

    def _note(self, what: str, key: bytes, digest: str) -> None:
        known = getattr(self, what).setdefault(key.hex(), [])
        if digest not in known:
            known.append(digest)
            if self.log is not None:
                self.log.write(f"{what} {key.hex()} {digest}\n")
                self.log.flush()


class Engine:
    """vLLM with the connector in it, and a watch on its blocks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        arguments = LLM_ARGUMENTS | spec.get("llm", {})
        if "pooler_config" in arguments:
            arguments["pooler_config"] = PoolerConfig(**arguments["pooler_config"])
        transfer = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | spec.get("transfer", {})
        extra = extra_config(spec["root"], **spec.get("extra", {}))
        if "config" in spec:
            extra = {"config": spec["config"]}
        if arguments.get("tensor_parallel_size", 1) > 1:  # on a CPU vLLM has each rank import everything anew
            multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        self.root = Path(spec["root"])
        if spec.get("even_if_it_cannot_continue"):
            platform.check_continuation = lambda vllm_config: None
        self.llm = LLM(
            model=spec["model"],
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.connectors.vllm",
                kv_connector_extra_config=extra,
                **transfer,
            ),
            **arguments,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.scheduler_half = self.scheduler.connector._scheduler_half
        self.watch = Watch()
        # With several ranks the workers are processes of their own, whose blocks cannot be looked at from here.
        self.worker_half: Any = get_kv_transfer_group()._worker_half if has_kv_transfer_group() else None
        if self.worker_half is not None:
            self.watch.attach(self.scheduler_half, self.worker_half)
        self._number = 0

    def ask(
        self, prompts: list[list[int]], max_tokens: int = 8, switches: dict[str, bool] | None = None
    ) -> list[Answer]:
        """Generates for all prompts at once."""
        parameters = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": switches} if switches else None,
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        ended = {name.split("-")[0]: kv for name, kv in self.watch.at_end.items()}
        return [
            Answer(list(o.outputs[0].token_ids), o.num_cached_tokens or 0, ended[o.request_id.split("-")[0]])
            for o in outputs
        ]

    def recompute(self, prompts: list[list[int]], max_tokens: int = 8) -> list[Answer]:
        """The same without the tier and without vLLM's own prefix cache: what any answer must equal."""
        self.forget()
        answers = self.ask(prompts, max_tokens, {"kvtier_load": False, "kvtier_save": False})
        self.forget()
        return answers

    def forget(self) -> None:
        """Empties vLLM's own prefix cache. All requests must have ended."""
        if self.scheduler.cache_config.enable_prefix_caching:
            for _ in range(4):  # steps that only free what an asynchronous step still held
                if not self.llm.llm_engine.has_unfinished_requests():
                    self.llm.llm_engine.step()
            assert self.llm.reset_prefix_cache()

    def wait_for_set(self) -> None:
        """Until what is computed next has a place in a segment."""
        deadline = time.monotonic() + PATIENCE_S
        while self.scheduler_half._store._keeper.allocators.common.wants_set():
            assert time.monotonic() < deadline, "no segment set was made"
            time.sleep(0.02)

    def settle(self) -> None:
        """Takes gathers that are due to the worker, then waits until all that was saved is stored."""
        if self.worker_half is None:  # in other processes: until the index has all that was planned
            store = self.scheduler_half._store
            ranks = self.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
            deadline = time.monotonic() + PATIENCE_S  # each rank writes a record of each chunk
            while store._keeper._index.counts().records < ranks * len(store._known):
                assert time.monotonic() < deadline, "not all that was planned is stored"
                time.sleep(0.05)
            return
        self.llm.llm_engine.step()  # not the core's get_output: what it says of the tier would be in no metric
        assert self.worker_half._bridge._transfer.drain(PATIENCE_S)
        self.llm.llm_engine.step()

    def counters(self) -> dict[str, float]:
        """The tier's counters since the start."""
        scheduler = self.scheduler_half._store.metrics.total()
        worker = self.worker_half._bridge._transfer.metrics.total() if self.worker_half is not None else {}
        names = set(scheduler) | set(worker)
        return {name: scheduler.get(name, 0) + worker.get(name, 0) for name in names}

    def prometheus(self) -> dict[str, float]:
        return {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics() if "kvtier" in m.name}


def _read(pages: Any, block_ids: Any) -> torch.Tensor:
    """(layers, tokens, heads, K + V sizes) of these blocks, copied."""
    ids = torch.as_tensor(list(block_ids), dtype=torch.long)
    layers = [torch.cat([plane[ids].flatten(0, 1) for plane in layer.planes], dim=-1) for layer in pages.layers]
    return torch.stack(layers)


def _digest(pages: Any, block_ids: Any) -> str:
    """Of all bytes of these blocks, whatever the layers' types."""
    ids = torch.as_tensor(list(block_ids), dtype=torch.long)
    digest = blake3()
    for layer in pages.layers:
        for plane in layer.planes:
            digest.update(plane[ids].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(length=8)


def main() -> None:
    import scenarios

    spec = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(spec)
    results: dict[str, Any] = {}
    for scenario in spec["scenarios"]:
        name, *arguments = [scenario] if isinstance(scenario, str) else scenario
        started = time.monotonic()
        results[name] = getattr(scenarios, name)(engine, *arguments)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    engine.settle()
    results["saved"], results["loaded"] = engine.watch.saved, engine.watch.loaded
    results["second_runner"] = getattr(engine.llm.llm_engine.vllm_config, "use_v2_model_runner", False)
    results["scheduler"] = type(engine.scheduler).__name__
    results["counters"], results["prometheus"] = engine.counters(), engine.prometheus()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
