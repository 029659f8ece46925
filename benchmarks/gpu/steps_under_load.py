"""Steps of under_load.py: bursts of saves and of loads, and decoding beside them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, grown, parameters
from benchmarks.gpu.models import prompt
from benchmarks.gpu.sampler import GrowthWatch
from benchmarks.gpu.systems import stored_bytes

DECODER_TOKENS = 256  # of each decoder's prompt
ANSWER_TOKENS_MAX = 6000  # of each decoder
ALONE_S = 2.0  # of decoding before others come
SAVED, LOADED = {"kvtier_load": False}, {"kvtier_save": False}

Found = dict[str, Any]


def save_burst(engine: MeasuredEngine, kind: str, count: int, n_tokens: int) -> Found:
    """Compute `count` prompts at once with saving on and wait until what was taken is durable.

    `durable_bytes_s` is the mean over the time in which the durable bytes of any rank grew.
    """
    is_ours, before = engine.system == "kvtier", engine.counters()
    if is_ours:
        engine.llm.collective_rpc(inside.start_growth)
    else:
        watch = GrowthWatch(lambda: stored_bytes(engine.data))
    started = time.perf_counter()
    _ask_at_once(engine, kind, count, n_tokens, SAVED)
    computed_s = time.perf_counter() - started
    engine.settle()
    ranks = engine.llm.collective_rpc(inside.take_growth) if is_ours else [watch.close()]
    growth = [samples[1:] for samples in ranks if len(samples) > 1]
    grew_s = max(one[-1][0] for one in growth) - min(one[0][0] for one in growth) if growth else 0.0
    found: Found = {
        "computed_s": computed_s,
        "durable_after_s": max(samples[-1][0] for samples in ranks) - started,
        "saved_bytes": sum(samples[-1][1] - samples[0][1] for samples in ranks),
        "durable_bytes_s": sum(one[-1][1] - one[0][1] for one in growth) / grew_s if grew_s else 0.0,
        "counted": grown(before, engine.counters()),
    }
    if is_ours:
        prompts = [_tokens(engine, kind, number, n_tokens) for number in range(count)]
        found["stored_chunks"] = [sum(pair) for pair in zip(*map(engine.stored_chunks, prompts), strict=True)]
    engine.forget()
    return found


def load_burst(engine: MeasuredEngine, kind: str, count: int, n_tokens: int) -> Found:
    """Ask `count` stored prompts at once, for one token each, and again while vLLM's own cache has them.

    `resident`: that second time, which is what the engine itself needs.
    """
    before = engine.counters()
    found = _ask_at_once(engine, kind, count, n_tokens, LOADED)
    found |= {"tokens": count * n_tokens, "counted": grown(before, engine.counters())}
    found["resident"] = _ask_at_once(engine, kind, count, n_tokens, NO_TIER)
    engine.forget()
    return found


def shared_burst(engine: MeasuredEngine, count: int, n_tokens: int, tail: int) -> Found:
    """Ask `count` requests at once that have one stored prefix of `n_tokens` in common."""
    prefix = _tokens(engine, "shared", 0, n_tokens)
    prompts = [prefix + prompt(f"tail-{number}", tail, engine.vocabulary) for number in range(count)]
    before = engine.counters()
    found = _run(engine, {f"shared-{n}": tokens for n, tokens in enumerate(prompts)}, LOADED)
    found["counted"] = grown(before, engine.counters())
    engine.forget()
    return found


def decode_beside(engine: MeasuredEngine, decoders: int, kind: str, count: int, n_tokens: int) -> Found:
    """Measure `decoders` requests that decode, alone and while `count` stored prompts are asked for at once.

    `resident`: the same while vLLM's own cache has those prompts, which no tier can do better than.
    """
    llm = engine.llm.llm_engine
    times: dict[str, list[float]] = {f"decoder-{number}": [] for number in range(decoders)}
    for name in times:
        tokens = prompt(name, DECODER_TOKENS, engine.vocabulary)
        llm.add_request(name, {"prompt_token_ids": tokens}, parameters(ANSWER_TOKENS_MAX, NO_TIER))
    until = None
    while until is None or time.perf_counter() < until:
        _note_tokens(llm.step(), times)
        if until is None and all(len(noted) > 3 for noted in times.values()):
            until = time.perf_counter() + ALONE_S
    alone = _pace(times, until - ALONE_S, until)
    before = engine.counters()
    found = {"alone": alone} | _ask_at_once(engine, kind, count, n_tokens, LOADED, times)
    found["counted"] = grown(before, engine.counters())
    found["resident"] = _ask_at_once(engine, kind, count, n_tokens, NO_TIER, times)
    llm.abort_request(list(times))
    while llm.has_unfinished_requests():
        llm.step()
    engine.forget()
    return found


def _tokens(engine: MeasuredEngine, kind: str, number: int, n_tokens: int) -> list[int]:
    return prompt(f"{kind}-{number}", n_tokens, engine.vocabulary)


def _ask_at_once(
    engine: MeasuredEngine,
    kind: str,
    count: int,
    n_tokens: int,
    switches: dict[str, bool],
    others: dict[str, list[float]] | None = None,
) -> Found:
    wanted = {f"{kind}-{number}": _tokens(engine, kind, number, n_tokens) for number in range(count)}
    return _run(engine, wanted, switches, others)


def _run(
    engine: MeasuredEngine,
    wanted: dict[str, list[int]],
    switches: dict[str, bool],
    others: dict[str, list[float]] | None = None,
) -> Found:
    """Ask all prompts at once for one token each; return when the tokens came, and the hit tokens.

    `added_s`: time in which vLLM took the requests, before its first step. others: requests under way, whose pace
    in this time is `beside`.
    """
    llm, first_token_s, n_hits = engine.llm.llm_engine, {}, 0
    started = time.perf_counter()
    for name, tokens in wanted.items():
        llm.add_request(name, {"prompt_token_ids": tokens}, parameters(1, switches))
    added_s, steps_s = time.perf_counter() - started, list[float]()
    while len(first_token_s) < len(wanted):
        began = time.perf_counter()
        outputs = llm.step()
        steps_s.append(round(time.perf_counter() - began, 5))
        _note_tokens(outputs, others or {})
        for output in outputs:
            if output.request_id in wanted and output.finished:
                first_token_s[output.request_id] = time.perf_counter() - started
                n_hits += output.num_cached_tokens or 0
    found = {
        "added_s": added_s,
        "median_first_token_s": median(first_token_s.values()),
        "last_first_token_s": max(first_token_s.values()),
        "hit_tokens": n_hits,
        "longest_steps_s": sorted(steps_s)[-20:],
        "steps": len(steps_s),
    }
    return found | ({"beside": _pace(others, started, time.perf_counter())} if others else {})


def _note_tokens(outputs: list[Any], times: dict[str, list[float]]) -> None:
    now = time.perf_counter()
    for output in outputs:
        noted = times.get(output.request_id)
        if noted is not None:
            noted.extend([now] * (len(output.outputs[0].token_ids) - len(noted)))


def _pace(times: dict[str, list[float]], start: float, end: float) -> Found:
    """Return how the decoders went between two times: tokens of each a second, and the gaps between tokens."""
    within = [[noted for noted in one if start <= noted <= end] for one in times.values()]
    gaps = sorted(later - earlier for one in within for earlier, later in zip([start, *one], [*one, end], strict=True))
    return {
        "seconds": end - start,
        "tokens_each": sum(map(len, within)) / len(within),
        "tokens_each_s": sum(map(len, within)) / len(within) / (end - start),
        "median_gap_s": median(gaps),
        "longest_gaps_s": gaps[-20:],
    }
