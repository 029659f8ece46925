"""One process, one vLLM engine: does the steps of a job one after another and writes down what came.

    python -m benchmarks.gpu.engine JOB.json RESULT.json [TIMEOUT_S]

Job: {"model": folder, "vocabulary", "system", "folder", "extra": the system's own settings, "llm": engine arguments,
"watch": whether blocks are digested (kvtier), "steps": [[name, arguments...], ...]}. Steps are the functions of
steps*.py. Started by processes.py, which sets the environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.systems import prepare, stored_bytes, transfer_of
from kvtier.runtime.metrics import summed

SETTLE_TIMEOUT_S = 120.0
QUIET_S = 2.0
SHUTDOWN_TIMEOUT_S = 20.0
DUMP_BEFORE_END_S = 5.0


class Engine:
    """vLLM with one of the systems in it; requests are run from this thread, the engine in this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.folder = Path(job["folder"])
        self.system: str = job["system"]
        self.data = prepare(self.system, self.folder)
        self.vocabulary: int = job["vocabulary"]
        transfer = transfer_of(self.system, self.folder, job.get("extra", {}))
        arguments = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False} | job["llm"]
        started = time.perf_counter()
        self.llm = LLM(
            model=job["model"],
            kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
            **arguments,
        )
        self.start_s = time.perf_counter() - started
        self.core = self.llm.llm_engine.engine_core
        if job.get("watch"):
            self.llm.collective_rpc(inside.start_watch)

    def ask(
        self, prompts: list[list[int]], max_tokens: int, switches: dict[str, bool] | None = None, *, leads: bool = False
    ) -> list[dict[str, Any]]:
        """Runs all prompts at once; of each the generated tokens and how many of its own were not computed.

        leads: of each generated token too, by how much its log probability exceeds the second best one's.
        """
        asked = parameters(max_tokens, switches, n_best=2 if leads else None)
        outputs = self.llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], asked, use_tqdm=False)
        answers = []
        for output in outputs:
            best = output.outputs[0]
            answers.append({"answer": list(best.token_ids), "hit_tokens": output.num_cached_tokens or 0})
            if leads:
                answers[-1]["leads"] = [_lead(step) for step in best.logprobs]
        return answers

    def first_token(self, tokens: list[int], switches: dict[str, bool] | None = None) -> dict[str, Any]:
        """One request alone, one token. ttft_s: around `generate`; engine_s: vLLM's own measure, where it gives one."""
        before = self.counters()
        started = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": tokens}], parameters(1, switches), use_tqdm=False)[0]
        seconds = time.perf_counter() - started
        own = getattr(output.metrics, "first_token_latency", None)
        return {
            "tokens": len(tokens),
            "hit_tokens": output.num_cached_tokens or 0,
            "ttft_s": seconds,
            "engine_s": own,
            "token": output.outputs[0].token_ids[0],
            "counted": grown(before, self.counters()),
        }

    def idle_steps(self, count: int = 4) -> None:
        """Steps of an engine without requests: they take along what is due after the last request ended."""
        if not self.llm.llm_engine.has_unfinished_requests():
            for _ in range(count):
                self.core.get_output()

    def settle(self) -> float:
        """Waits until what was handed to the tier is stored; the seconds that took. Raises when it takes too long."""
        started = time.perf_counter()
        self.idle_steps()
        if self.system == "kvtier":
            if not all(self.llm.collective_rpc(inside.drain, args=(SETTLE_TIMEOUT_S,))):
                raise TimeoutError(f"saves were not stored after {SETTLE_TIMEOUT_S:.0f} s")
        elif self.system != "none":
            self._wait_until_quiet()
        self.idle_steps()
        return time.perf_counter() - started

    def forget(self) -> None:
        """Empties vLLM's own prefix cache. All requests must have ended."""
        for _ in range(100):
            self.idle_steps()
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.02)
        raise TimeoutError("vLLM's prefix cache cannot be reset: blocks are still held")

    def counters(self) -> dict[str, float]:
        """kvtier's counters since the start, of the scheduler's half and summed over the workers."""
        return summed([*self.llm.collective_rpc(inside.counters), self._scheduler_counters()])

    def close(self) -> None:
        self.core.shutdown()

    def store(self) -> Any:
        """kvtier's Store in the scheduler, None with another system."""
        half = getattr(self.core.engine_core.scheduler.connector, "_scheduler_half", None)
        return None if half is None else half._store

    def _scheduler_counters(self) -> dict[str, float]:
        store = self.store()
        return {} if store is None else store.metrics.total()

    def _wait_until_quiet(self) -> None:
        """Other systems do not say when they are done: until nothing was written for a while, requests going on."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        size, since = stored_bytes(self.data), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.system} still writes after {SETTLE_TIMEOUT_S:.0f} s")
            self.ask([[11, 12, 13]], 1)  # some systems move on only with an engine's step
            time.sleep(0.1)
            new_size = stored_bytes(self.data)
            if new_size != size:
                size, since = new_size, time.monotonic()


def parameters(max_tokens: int, switches: dict[str, bool] | None, n_best: int | None = None) -> Any:
    """Of a greedy request. n_best: so many log probabilities come with each token."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": switches} if switches else None
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True, logprobs=n_best, extra_args=extra
    )


def _lead(step: Any) -> float:
    first, second = sorted((float(found.logprob) for found in step.values()), reverse=True)[:2]
    return round(first - second, 7)


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How much each counter grew; those that did not are left out."""
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: round(value, 6) for name, value in changes.items() if value}


def main(job_path: Path, result_path: Path, timeout_s: float) -> None:
    faulthandler.dump_traceback_later(max(10.0, timeout_s - DUMP_BEFORE_END_S), exit=False)
    from benchmarks.gpu import steps, steps_decode, steps_equality, steps_load

    modules = (steps, steps_decode, steps_equality, steps_load)
    known = {name: step for module in modules for name, step in vars(module).items()}
    job = json.loads(job_path.read_text())
    engine = Engine(job)
    results: dict[str, Any] = {"start_s": round(engine.start_s, 2)}
    for name, *arguments in job["steps"]:
        started = time.monotonic()
        results[name] = known[name](engine, *arguments)
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
    engine.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 600.0)
