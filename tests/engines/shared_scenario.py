"""Scenarios: requests that arrive together and share a stored prefix."""

import random
import time
from typing import Any

from engine import BLOCK_TOKENS, Engine
from vllm import SamplingParams

from kvtier.plan import LoadDone

PREFIX_TOKENS = 1024
TAIL_TOKENS = 40
SAMPLING = {"max_tokens": 4, "temperature": 0, "detokenize": False, "ignore_eos": True}


class HeldLoads:
    """Holds back the worker's answers to loads, so that a load is under way for as long as a scenario needs.

    plans: all loads that were planned, by request. fails: requests whose loads are answered as failed.
    """

    def __init__(self, engine: Engine) -> None:
        transfer = engine.worker_half._bridge._transfer
        self.plans: list[Any] = []
        self.fails: set[str] = set()
        self.is_held = False
        self._transfer, self._load, self._poll = transfer, transfer.load, transfer.poll
        self._held: list[Any] = []
        transfer.load, transfer.poll = self._loads, self._polls

    def close(self) -> None:
        self._transfer.load, self._transfer.poll = self._load, self._poll

    def _loads(self, plan: Any) -> None:
        self.plans.append(plan)
        self._load(plan)

    def _polls(self, timeout_s: float = 0.0) -> Any:
        progress = self._poll(timeout_s)
        self._held += progress.loads
        if self.is_held:
            return progress._replace(loads=[])
        held, self._held = self._held, []
        blocks = {plan.request_id: frozenset(b for c in plan.chunks for b in c.block_ids) for plan in self.plans}
        return progress._replace(
            loads=[LoadDone(d.request_id, blocks[d.request_id]) if d.request_id in self.fails else d for d in held]
        )


def shared_prefix(engine: Engine, n: int) -> dict[str, Any]:
    """`n` requests that share a stored prefix: computed, then by vLLM's own hit, then by the tier, in several ways."""
    rng = random.Random(41)
    words = lambda count: [rng.randrange(3, 500) for _ in range(count)]  # noqa: E731
    prefix = words(PREFIX_TOKENS)
    prompts = [prefix + words(TAIL_TOKENS) for _ in range(n)]
    run = lambda name, **options: _run(engine, name, prompts, **options)  # noqa: E731
    engine.forget()
    results = {"computed": run("computed"), "own": run("own")}
    engine.settle()
    held = HeldLoads(engine)
    shared = engine.scheduler_half._bridge.active_loads.shared
    wait_s = shared.wait_s
    for name, options in {
        "tier": {},
        "held": {"held": held},
        "aborted": {"held": held, "aborts": 1},
        "failed": {"held": held, "fails": 1},
        "overdue": {"held": held, "wait_s": 0.2},
        "never": {"wait_s": 0.0},
    }.items():
        engine.forget()
        held.plans.clear()
        shared.wait_s = options.pop("wait_s", wait_s)
        results[name] = run(name, **options) | {"loads": _loads(held)}
        engine.settle()
    engine.forget()
    held.plans.clear()
    shared.wait_s = wait_s
    apart = [{"prompt_token_ids": p, "cache_salt": salt} for salt in ("red", "blue") for p in prompts]
    results["salts, computed"] = _run(engine, "salts-computed", apart)
    engine.settle()
    engine.forget()
    results["salts"] = _run(engine, "salts", apart) | {"loads": _loads(held)}
    held.close()
    results["short"] = [shared.is_short(BLOCK_TOKENS), shared.is_short(10**9)]
    return results | {"left": len(engine.scheduler.requests), "counters": engine.counters()}


def _loads(held: HeldLoads) -> list[int]:
    return [len(plan.chunks) for plan in held.plans]


def _run(
    engine: Engine,
    name: str,
    prompts: list[Any],
    held: HeldLoads | None = None,
    aborts: int = 0,
    fails: int = 0,
) -> dict[str, Any]:
    """Step until all have ended. held: the first load is under way for ten steps (0.5 s at least); then its request is
    aborted, or it fails."""
    llm = engine.llm.llm_engine
    pool = engine.scheduler.kv_cache_manager.block_pool
    for number, prompt in enumerate(prompts):
        asked = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        llm.add_request(f"{name}-{number}", asked, SamplingParams(**SAMPLING))
    tokens: dict[str, list[int]] = {}
    used, steps, began_s = 0, 0, time.monotonic()
    if held is not None:
        held.is_held = True
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        used = max(used, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        steps += 1
        if held is not None and held.is_held and steps >= 10 and time.monotonic() - began_s > 0.5:
            _end_hold(llm, held, f"{name}-0", aborts, fails)
    answers = [tokens.get(f"{name}-{number}") for number in range(len(prompts))]
    return {"tokens": answers, "blocks": used, "steps": steps, "seconds": time.monotonic() - began_s}


def _end_hold(llm: Any, held: HeldLoads, first: str, aborts: int, fails: int) -> None:
    held.is_held = False
    if aborts:
        llm.abort_request([first])
    if fails:
        held.fails.add(held.plans[0].request_id)
