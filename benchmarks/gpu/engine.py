"""One process with one vLLM engine: runs the steps of a job one after another and writes their results.

    python -m benchmarks.gpu.engine JOB.json RESULT.json TIMEOUT_S

Job: EngineSetup.job with "steps": [[name, arguments...], ...], functions of steps.py and of the scripts, and optionally
"watch": N, to digest one of N chunks of kvtier. processes.py starts it and sets the environment. The environment
decides whether the engine's core runs in this process (systems.environment_of) or in its own, as it does by vLLM's
default (systems.OWN_PROCESS).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.systems import prepare, stored_bytes, transfer_of
from kvtier.runtime.metrics import summed

NO_TIER = {"kvtier_load": False, "kvtier_save": False}
SETTLE_TIMEOUT_S = 120.0
QUIET_S = 2.0  # without new bytes on disk: another system has stored all
SHUTDOWN_TIMEOUT_S = 20.0
DUMP_BEFORE_END_S = 5.0  # stacks are written so long before the timeout


class MeasuredEngine:
    """vLLM with one of the systems. This thread passes requests to the engine's core, and runs the core if that is in
    this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        folder = Path(job["folder"])
        self.system: str = job["system"]
        self.data = prepare(self.system, folder)
        self.vocabulary: int = job["vocabulary"]
        transfer = transfer_of(self.system, folder, job["extra"])
        arguments = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False} | job["llm"]
        started = time.perf_counter()
        config = None if transfer is None else KVTransferConfig(**transfer)
        self.llm = LLM(model=job["model"], kv_transfer_config=config, **arguments)
        self.start_s = time.perf_counter() - started
        self.core = self.llm.llm_engine.engine_core
        if job.get("watch"):
            self.llm.collective_rpc(inside.start_watch, args=(int(job["watch"]),))

    def ask(
        self, prompts: list[list[int]], max_tokens: int, switches: dict[str, bool] | None = None, *, leads: bool = False
    ) -> list[dict[str, Any]]:
        """Run all prompts at once; return of each the generated tokens and how many prompt tokens were hits.

        leads: also, for each generated token, by how much its log probability exceeds the second best one's.
        """
        sampling = parameters(max_tokens, switches, n_best=2 if leads else None)
        outputs = self.llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        return [self.answer_of(output, leads=leads) for output in outputs]

    @staticmethod
    def answer_of(output: Any, *, leads: bool = False) -> dict[str, Any]:
        """Return what `ask` returns of one request."""
        best = output.outputs[0]
        answer = {"answer": list(best.token_ids), "hit_tokens": output.num_cached_tokens or 0}
        return answer | {"leads": [_lead(step) for step in best.logprobs]} if leads else answer

    def first_token(self, tokens: list[int], switches: dict[str, bool] | None = None) -> dict[str, Any]:
        """Run one request alone for one token. ttft_s is measured around `generate`."""
        before = self.counters()
        started = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": tokens}], parameters(1, switches), use_tqdm=False)[0]
        return {
            "ttft_s": time.perf_counter() - started,
            "tokens": len(tokens),
            "hit_tokens": output.num_cached_tokens or 0,
            "token": output.outputs[0].token_ids[0],
            "counted": grown(before, self.counters()),
        }

    def idle_steps(self, count: int = 4) -> None:
        """Run steps without requests: they do what is due after the last request has ended."""
        if not self.llm.llm_engine.has_unfinished_requests():
            for _ in range(count):
                self.in_core(inside.idle_step)

    def settle(self) -> float:
        """Wait until what was handed to the tier is stored; return the seconds. Raise TimeoutError."""
        started = time.perf_counter()
        self.idle_steps()
        if self.system == "kvtier":
            is_late = True
            while is_late:
                left_s = started + SETTLE_TIMEOUT_S - time.perf_counter()
                if left_s <= 0 or not all(self.llm.collective_rpc(inside.drain, args=(left_s,))):
                    raise TimeoutError(f"saves were not stored after {SETTLE_TIMEOUT_S:.0f} s")
                is_late = self.in_core(inside.needs_a_step)  # for chunks that were refused before
                self.idle_steps()
        elif self.system != "none":
            self._wait_until_quiet()
        self.idle_steps()
        return time.perf_counter() - started

    def forget(self) -> None:
        """Empty vLLM's own prefix cache. All requests must have ended."""
        for _ in range(100):
            self.idle_steps()
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.02)
        raise TimeoutError("vLLM's prefix cache cannot be reset: blocks are still held")

    def counters(self) -> dict[str, float]:
        """Return kvtier's counters since the start, of the scheduler's half and summed over the workers."""
        return summed([*self.llm.collective_rpc(inside.counters), self.in_core(inside.scheduler_counters)])

    def stored_chunks(self, tokens: list[int]) -> tuple[int, int]:
        """Return (chunks of the prompt that the index has, its whole chunks)."""
        found, whole = self.in_core(inside.stored_chunks, tokens)
        return found, whole

    def in_core(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of inside.extend_core with the engine's core, in its process, between two steps."""
        if hasattr(self.core, "call_utility"):
            return self.core.call_utility(function.__name__, *arguments)
        return function(self.core.engine_core, *arguments)

    def _wait_until_quiet(self) -> None:
        """Wait until nothing was written for QUIET_S, for other systems do not say when they are done."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        size, since = stored_bytes(self.data), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.system} still writes after {SETTLE_TIMEOUT_S:.0f} s")
            self.ask([[11, 12, 13]], 1)  # some systems continue only with an engine's step
            time.sleep(0.1)
            if (new_size := stored_bytes(self.data)) != size:
                size, since = new_size, time.monotonic()


def parameters(max_tokens: int, switches: dict[str, bool] | None, n_best: int | None = None) -> Any:
    """Return the parameters of a greedy request. n_best: how many log probabilities each token has."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": switches} if switches else None
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True, logprobs=n_best, extra_args=extra
    )


def _lead(step: Any) -> float:
    first, second = sorted((float(found.logprob) for found in step.values()), reverse=True)[:2]
    return round(first - second, 7)


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return by how much each counter grew, without those that did not."""
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: round(value, 6) for name, value in changes.items() if value}


def main(job_path: Path, result_path: Path, timeout_s: float) -> None:
    faulthandler.dump_traceback_later(max(10.0, timeout_s - DUMP_BEFORE_END_S), exit=False)
    from benchmarks.gpu import chaos, equality, load_mix, save_cost, steps, two_engines, under_load

    modules = (chaos, equality, load_mix, save_cost, two_engines, under_load, steps)
    known = {name: step for module in modules for name, step in vars(module).items()}
    job = json.loads(job_path.read_text())
    engine = MeasuredEngine(job)
    results: dict[str, Any] = {"start_s": round(engine.start_s, 2)}
    for name, *arguments in job["steps"]:
        started = time.monotonic()
        label = name if name not in results else f"{name} {arguments[0]}"
        results[label] = known[name](engine, *arguments)
        print(f"step {name}: {time.monotonic() - started:.1f} s", flush=True)
    if job.get("watch"):
        results["watch"] = engine.llm.collective_rpc(inside.take_watch)
    results["counters"] = engine.counters()
    results["contexts"] = engine.llm.collective_rpc(inside.contexts)
    result_path.write_text(json.dumps(results))
    # The results are safe: an engine that cannot end must not hold the machine.
    ender = threading.Timer(SHUTDOWN_TIMEOUT_S, os._exit, (0,))
    ender.daemon = True
    ender.start()
    engine.core.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ in ("__main__", "__mp_main__"):  # __mp_main__: a core's process that vLLM has spawned, not forked
    inside.extend_core()
if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
