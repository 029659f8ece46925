"""What the engine tests let real vLLM do. Each scenario gets an Engine and returns facts; the tests judge them."""

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from adapters_scenario import adapters, adapters_in_use  # noqa: F401
from burst_scenario import burst, short_burst  # noqa: F401
from engine import BLOCK_TOKENS, CHUNK_TOKENS, PATIENCE_S, Answer, Engine
from events_log import EventsLog
from failed_forward_scenario import failed_forward  # noqa: F401
from shared_scenario import shared_prefix  # noqa: F401
from vllm import PoolingParams, SamplingParams

VOCABULARY = range(3, 512)
MIXED_LENGTHS = (640, 65, 128, 200, 64, 512, 896, 63, 1, 30, 129, 777)
"""Exact multiples of a chunk, one token beside them, shorter than a chunk, and longer than a step."""
ABORTED_AFTER = (*range(8), 20, 45, 70)  # steps: waiting, loading, in the middle of a prefill, decoding


def prompts_of(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(VOCABULARY) for _ in range(n)] for n in lengths]


def whole_chunks(n_tokens: int) -> int:
    return n_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def compared(answers: list[Answer], reference: list[Answer]) -> dict[str, Any]:
    """How answers stand to recomputed ones. kv_diff: largest difference of any element of any token's KV."""
    diffs = []
    for answer, expected in zip(answers, reference, strict=True):
        n = min(answer.kv.shape[1], expected.kv.shape[1])
        diffs.append(float((answer.kv[:, :n] - expected.kv[:, :n]).abs().max()) if n else 0.0)
    return {
        "same_tokens": [a.tokens == r.tokens for a, r in zip(answers, reference, strict=True)],
        "recomputed": [r.tokens for r in reference],
        "cached": [a.cached for a in answers],
        "kv_diff": max(diffs),
    }


def cold_and_warm(engine: Engine, seed: int = 1, n: int = len(MIXED_LENGTHS)) -> dict[str, Any]:
    """`n` prompts of all kinds of lengths: computed, hit in vLLM's own prefix cache, loaded from the tier."""
    prompts = prompts_of(seed, MIXED_LENGTHS[:n])
    reference = engine.recompute(prompts)
    cold = engine.ask(prompts)
    engine.settle()
    own = engine.ask(prompts)
    engine.forget()
    warm = engine.ask(prompts)
    return {
        "cold": compared(cold, reference),
        "own": compared(own, reference),
        "warm": compared(warm, reference),
        "warm_as_own": [a.tokens == b.tokens for a, b in zip(warm, own, strict=True)],
        "expected": [whole_chunks(len(prompt)) for prompt in prompts],
    }


def fill(engine: Engine, seed: int = 1) -> None:
    """Prompts of all kinds of lengths, computed and saved."""
    engine.ask(prompts_of(seed, MIXED_LENGTHS))
    engine.settle()


def reload(engine: Engine, *which: Sequence[int]) -> list[dict[str, Any]]:
    """The same prompts, or others (seed, and how many of them if not all), in a process that has never seen them."""
    found = []
    for seed, *n in which or ((1,),):
        prompts = prompts_of(seed, MIXED_LENGTHS[slice(*n)] if n else MIXED_LENGTHS)
        again = compared(engine.ask(prompts), engine.recompute(prompts))
        found.append(again | {"expected": [whole_chunks(len(prompt)) for prompt in prompts]})
    return found


def tokens_alone(engine: Engine, seed: int, n: int) -> dict[str, Any]:
    """Return the tokens of `n` prompts, asked twice, and how many came from the tier: for engines whose blocks cannot
    be looked at."""
    lengths = MIXED_LENGTHS[:n]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(seed, lengths)]
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    results: dict[str, Any] = {"expected": list(map(whole_chunks, lengths))}
    for name in ("first", "again"):
        outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
        engine.settle()
        engine.forget()
        results[name] = [list(output.outputs[0].token_ids) for output in outputs]
        results[f"{name}_cached"] = [output.num_cached_tokens or 0 for output in outputs]
    return results


def partial_hits(engine: Engine, seed: int = 2) -> dict[str, Any]:
    """A prompt that shares three chunks and a bit; then one whose local hit ends inside a chunk."""
    first, tail = prompts_of(seed, (400, 150))
    engine.ask([first])
    engine.settle()
    engine.forget()
    branch = first[:200] + tail
    results = {"branch": compared(engine.ask([branch]), engine.recompute([branch]))}
    engine.ask([first[: 3 * BLOCK_TOKENS]], 1, {"kvtier_load": False})  # leaves three blocks, a chunk and a half
    within = engine.ask([first])
    results["within_a_chunk"] = compared(within, engine.recompute([first]))
    return results


def second_turn(engine: Engine, seed: int = 3, n_tokens: int = 100) -> dict[str, Any]:
    """What was generated is saved as well: the next turn of a conversation hits beyond the first prompt."""
    prompt, more = prompts_of(seed, (300, 50))
    answer = engine.ask([prompt], n_tokens)[0]
    engine.settle()
    engine.forget()
    turn = prompt + answer.tokens + more
    return compared(engine.ask([turn]), engine.recompute([turn])) | {"expected": whole_chunks(len(turn) - 51)}


def lossy(engine: Engine) -> dict[str, Any]:
    """With a codec: how far the KV that comes back is from what was computed, of K and of V."""
    prompts = prompts_of(6, (400, 700))
    reference = engine.recompute(prompts)
    engine.ask(prompts)
    engine.settle()
    engine.forget()
    answers = engine.ask(prompts)
    lost, energy = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for answer, expected in zip(answers, reference, strict=True):
        wanted, found = (x.kv[:, : answer.cached].double().unflatten(-1, (2, -1)) for x in (expected, answer))
        lost += (found - wanted).square().sum((0, 1, 2, 4))
        energy += wanted.square().sum((0, 1, 2, 4))
    return {"cached": [a.cached for a in answers], "nmse": (lost / energy).tolist()}


def switches(engine: Engine) -> dict[str, Any]:
    """What one request may turn off, and what keeps tenants apart."""
    quiet, loud = prompts_of(4, (200, 200))
    engine.ask([quiet], switches={"kvtier_save": False})
    engine.ask([loud])
    engine.settle()
    engine.forget()
    results = {"not_saved": engine.ask([quiet], switches={"kvtier_save": False})[0].cached}
    engine.forget()
    results["not_loaded"] = engine.ask([loud], switches={"kvtier_load": False})[0].cached
    engine.forget()
    results["loaded"] = engine.ask([loud])[0].cached
    engine.forget()
    results["skip_reading"] = _cached(engine, loud, skip_reading_prefix_cache=True)
    engine.forget()
    results["other_tenant"] = _cached(engine, loud, salt="tenant")
    engine.settle()
    engine.forget()
    results["same_tenant"] = _cached(engine, loud, salt="tenant")
    engine.forget()
    return results


def _cached(engine: Engine, prompt: list[int], salt: str | None = None, **parameters: Any) -> int:
    request: dict[str, Any] = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    sampling = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True, **parameters)
    return engine.llm.generate([request], sampling, use_tqdm=False)[0].num_cached_tokens or 0


def aborts(engine: Engine, *after: int) -> dict[str, Any]:
    """Requests are aborted after so many steps, or ABORTED_AFTER."""
    stored, fresh = prompts_of(5, (640, 600))
    engine.ask([stored])
    engine.settle()
    llm_engine = engine.llm.llm_engine
    parameters = SamplingParams(max_tokens=80, temperature=0, detokenize=False, ignore_eos=True)
    free_blocks = []
    for steps in after or ABORTED_AFTER:
        engine.forget()
        for number, prompt in enumerate((stored, fresh[:-steps] if steps else fresh)):
            llm_engine.add_request(f"{900 + number}{steps}", {"prompt_token_ids": prompt}, parameters)
        for _ in range(steps):
            llm_engine.step()
        llm_engine.abort_request([f"900{steps}", f"901{steps}"])
        deadline = time.monotonic() + PATIENCE_S
        while engine.scheduler.requests and time.monotonic() < deadline:
            engine.llm.llm_engine.engine_core.get_output()
        engine.settle()
        free_blocks.append(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    results = {"left": len(engine.scheduler.requests), "free_blocks": free_blocks}
    engine.forget()
    after = engine.ask([stored, fresh])
    return results | compared(after, engine.recompute([stored, fresh]))


def preemption(engine: Engine, n_tokens: int = 120) -> dict[str, Any]:
    """More tokens than the cache holds: requests are preempted, resumed, and their blocks handed on."""
    prompts = prompts_of(6, (150, 160, 170, 180))
    before = engine.counters()
    crowded = engine.ask(prompts, n_tokens)
    engine.settle()
    preempted = {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}["vllm:num_preemptions"]
    alone = [engine.recompute([prompt], n_tokens)[0] for prompt in prompts]
    results = {"preempted": preempted, "crowded": compared(crowded, alone)}
    turns = [prompt + answer.tokens for prompt, answer in zip(prompts, crowded, strict=True)]
    loaded = []
    for turn in turns:
        engine.forget()
        loaded += engine.ask([turn], 4)
    results["turns"] = compared(loaded, [engine.recompute([turn], 4)[0] for turn in turns])
    results["loads"] = engine.counters().get("load_requests", 0) - before.get("load_requests", 0)
    return results


def drafts(engine: Engine) -> dict[str, Any]:
    """Speculative decoding: chunks are saved only with tokens that were accepted."""
    rng = random.Random(7)
    phrase = [rng.choice(VOCABULARY) for _ in range(12)]
    prompts = [phrase * 12, (phrase + phrase[::-1]) * 8, prompts_of(7, (200,))[0]]
    reference = engine.recompute(prompts, 150)
    answers = engine.ask(prompts, 150)
    engine.settle()
    results = {"first": compared(answers, reference)}
    turns = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    loaded = []
    for turn in turns:
        engine.forget()
        loaded += engine.ask([turn], 4)
    results["turns"] = compared(loaded, [engine.recompute([turn], 4)[0] for turn in turns])
    results["expected"] = [whole_chunks(len(turn) - 1) for turn in turns]
    values = {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}
    return results | {
        name: values.get(f"vllm:spec_decode_num_{name}", 0) for name in ("accepted_tokens", "draft_tokens")
    }


def tier_faults(engine: Engine) -> dict[str, Any]:
    """Whatever raises inside the tier is a miss (I9)."""
    prompt = prompts_of(8, (500,))[0]
    longer = prompt + prompts_of(13, (150,))[0]  # has chunks to save
    reference, longer_reference = engine.recompute([prompt]), engine.recompute([longer])
    engine.ask([prompt])
    engine.settle()
    store, transfer = engine.scheduler_half._store, engine.worker_half._bridge._transfer
    results = {}
    for owner, method in ((store, "lookup"), (store, "plan_load"), (transfer, "load"), (store, "select_saves")):
        engine.forget()
        healthy = getattr(owner, method)
        setattr(owner, method, _explode)
        if method == "select_saves":
            results[method] = compared(engine.ask([longer]), longer_reference)
        else:
            results[method] = compared(engine.ask([prompt]), reference)
        setattr(owner, method, healthy)
    engine.forget()
    results["healthy"] = compared(engine.ask([prompt]), reference)
    return results


def _explode(*arguments: Any) -> None:
    raise RuntimeError("the tier is on fire")


def stats(engine: Engine) -> dict[str, Any]:
    """What vLLM's own metrics say of one save and one load, and in its log line."""
    prompt = prompts_of(13, (256,))[0]
    before = engine.prometheus()
    engine.ask([prompt])
    engine.settle()
    engine.forget()
    engine.ask([prompt])
    engine.settle()
    after = engine.prometheus()
    store = engine.scheduler_half._store
    report = store.reporter.report(time.time(), store.namespace_id)
    return {name: after[name] - before[name] for name in after} | {"report": report.model_dump(mode="json")}


def corruption(engine: Engine) -> dict[str, Any]:
    """Segments are damaged behind the tier's back, each way with a prompt of its own."""
    from damage import WAYS

    results = {}
    for number, (name, damage) in enumerate(WAYS.items()):
        prompt = prompts_of(20 + number, (640,))[0]
        reference = engine.recompute([prompt])
        engine.ask([prompt])
        engine.settle()
        engine.forget()
        before = engine.counters()
        mended = damage(engine.root)
        damaged = compared(engine.ask([prompt]), reference)
        after = engine.counters()
        mended()
        troubles = ("load_failures", "checksum_failures", "gone_chunks")
        grown = {name: after.get(name, 0) - before.get(name, 0) for name in troubles}
        results[name] = damaged | grown
        engine.settle()
    return results


def reset(engine: Engine) -> dict[str, Any]:
    """reset_cache moves the engine to an epoch of its own: what was stored is no longer found, new things are."""
    prompt = prompts_of(9, (300,))[0]
    engine.ask([prompt])
    engine.settle()
    engine.forget()
    found = engine.ask([prompt])[0].cached
    engine.forget()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    gone = engine.ask([prompt])[0].cached
    engine.wait_for_set()  # of the new epoch
    engine.forget()
    engine.ask([prompt])
    engine.settle()
    engine.forget()
    return {"found": found, "gone": gone, "found_again": engine.ask([prompt])[0].cached}


def reset_ahead(engine: Engine) -> dict[str, Any]:
    """A request ends while a step with it is planned already, and at once vLLM is told of other weights: it can't empty
    its own cache then, and what it finds there must not be saved in the new epoch."""
    prompt, more = prompts_of(41, (200, 100))
    stop = engine.ask([prompt], 2)[0].tokens[1]
    engine.forget()
    sampling = SamplingParams(max_tokens=50, temperature=0, detokenize=False, ignore_eos=True, stop_token_ids=[stop])
    engine.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    was_reset = engine.llm.reset_prefix_cache(reset_connector=True)
    engine.wait_for_set()  # of the new epoch
    before = len(engine.watch.saved)
    found = engine.ask([prompt + more])[0].cached
    engine.settle()
    return {"was_reset": was_reset, "found": found, "saved": len(engine.watch.saved) - before}


def blocks_of_full_hits(engine: Engine) -> dict[str, Any]:
    """Only the loaded KV is judged, not what the engine goes on to compute from it."""
    prompts = prompts_of(10, (64, 128, 200, 300, 512))
    reference = engine.recompute(prompts)
    engine.ask(prompts)
    engine.settle()
    engine.forget()
    answers = engine.ask(prompts)
    diffs = []
    for answer, expected, prompt in zip(answers, reference, prompts, strict=True):
        n = min(whole_chunks(len(prompt)), len(prompt) - 1)
        diffs.append(float((answer.kv[:, :n] - expected.kv[:, :n]).abs().max()))
    return {"cached": [answer.cached for answer in answers], "kv_diff": max(diffs), "shape": list(answers[0].kv.shape)}


def meet(engine: Engine, name: str, others: int) -> None:
    """Waits until `others` more engines are as far."""
    (engine.root.parent / f"{engine.root.name}-{name}-{os.getpid()}").touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(list(engine.root.parent.glob(f"{engine.root.name}-{name}-*"))) <= others:
        assert time.monotonic() < deadline, "the other engine did not come"
        time.sleep(0.01)


def write_the_same(engine: Engine, others: int) -> dict[str, Any]:
    """Several engines compute and save the same prompts at the same time, then load them."""
    prompts = prompts_of(12, MIXED_LENGTHS)
    reference = engine.recompute(prompts)
    meet(engine, "write", others)
    first = engine.ask(prompts)
    engine.settle()
    meet(engine, "read", others)
    engine.forget()
    second = engine.ask(prompts)
    results = {"first": compared(first, reference), "second": compared(second, reference)}
    return results | {"expected": [whole_chunks(n) for n in MIXED_LENGTHS]}


def wide_prompts(engine: Engine, seed: int) -> dict[str, Any]:
    """A branch of its own behind prefixes that other processes ask for too."""
    shared = prompts_of(11, (500, 400))
    own = prompts_of(seed, (100, 260))
    prompts = shared + [a + b for a, b in zip(shared, own, strict=True)]
    answers = engine.ask(prompts)
    return compared(answers, engine.recompute(prompts))


ENDLESS_LENGTHS = (700, 400, 650, 300)


def endless(engine: Engine, number: int) -> None:
    """Prefills and saves until it is killed: some prompts of all such engines, then ever new ones."""
    engine.ask(prompts_of(30, ENDLESS_LENGTHS), 4)
    for seed in range(1000):
        engine.ask(prompts_of(1000 * (number + 1) + seed, ENDLESS_LENGTHS), 4)


def after_kills(engine: Engine, kills: int) -> dict[str, Any]:
    """What killed engines were saving: asked for, and compared with a recompute."""
    seeds = [30, *(1000 * (number + 1) + seed for number in range(kills) for seed in range(3))]
    prompts = [prompt for seed in seeds for prompt in prompts_of(seed, ENDLESS_LENGTHS)]
    return compared(engine.ask(prompts, 4), engine.recompute(prompts, 4))


def kv_events(engine: Engine, is_last: bool) -> dict[str, Any]:
    """What the publisher sends: of prompts as they come, once more as they come again, and when sets are evicted."""
    log = EventsLog(engine.llm.llm_engine.vllm_config.kv_events_config.replay_endpoint)
    lengths = (300, 200, 640)
    plain = prompts_of(40, lengths)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in plain]
    prompts[1]["cache_salt"] = "tenant-1"
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    results: dict[str, Any] = {}

    def until(is_enough: Any, phase: str) -> None:
        """What is saved in the background is answered in a later step, and an idle engine makes none."""
        events: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE_S
        while not is_enough(events) and time.monotonic() < deadline:
            engine.settle()
            engine.ask([[5, 6, 7]], 1)
            time.sleep(0.2)  # the publisher sends on a thread of its own
            events += log.take()
        results[phase] = events

    def n_blocks(events: list[dict[str, Any]], kind: str) -> int:
        mine = [event for event in events if (event["type"], event["medium"]) == (kind, "STORAGE")]
        return sum(len(event["block_hashes"]) for event in mine)

    whole_tokens = sum(map(whole_chunks, lengths))
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    until(lambda events: n_blocks(events, "BlockStored") == whole_tokens // BLOCK_TOKENS, "computed")
    engine.forget()
    engine.llm.generate(prompts, sampling, use_tqdm=False)
    until(lambda events: any(event["medium"] == "GPU" for event in events if "medium" in event), "again")
    if is_last:
        index = engine.scheduler_half._store.index
        for info in index.sets():
            index.remove_set(info.set_id)
        until(lambda events: n_blocks(events, "BlockRemoved") == whole_tokens // BLOCK_TOKENS, "evicted")
    return results | {
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
        "whole_tokens": whole_tokens,
        "whole_blocks": whole_tokens // BLOCK_TOKENS,
    }


def embeddings(engine: Engine) -> list[list[float]]:
    """The same prompt of several chunks twice, by an engine that pools."""
    prompt = prompts_of(5, (700,))[0]
    found = []
    for number in range(2):
        engine.llm.llm_engine.add_request(f"p{number}", {"prompt_token_ids": prompt}, PoolingParams(task="embed"))
        while engine.llm.llm_engine.has_unfinished_requests():
            found += [list(map(float, output.outputs.data)) for output in engine.llm.llm_engine.step()]
        engine.settle()
    return found
